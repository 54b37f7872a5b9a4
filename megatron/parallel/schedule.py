"""Pipeline schedules as data: for each rank the list of what it computes, sends and receives, in order.

A model is cut into stages, numbered along the forward pass; `placement` says which rank holds each (several per rank: virtual stages). A schedule
is a pure function of (ranks, virtual stages, micro-batches). It knows nothing of the data-parallel side: gathers and reductions follow
from the order of the computations, through the block wrapper.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """What an action does with one stage and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients
    BACKWARD_INPUT = "I"  # input gradients (with those of norms and biases, and all of embedding and head)
    BACKWARD_WEIGHT = "W"  # the weight gradients that BACKWARD_INPUT left out
    SEND_FORWARD = "SF"  # the stage's output, to the next stage
    RECEIVE_FORWARD = "RF"  # the stage's input, from the stage before; posted, not awaited
    SEND_BACKWARD = "SB"  # the gradient of the stage's input, to the stage before
    RECEIVE_BACKWARD = "RB"  # the gradient of the stage's output, from the next stage; posted, not awaited


COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


class Action(NamedTuple):
    """One entry of a rank's list. `stage` is the stage that computes, or whose input or output travels."""

    kind: Kind
    stage: int
    micro: int


class Message(NamedTuple):
    """What travels between two ranks: `kind` FORWARD is the input of `stage`, BACKWARD the gradient of its output."""

    kind: Kind
    stage: int  # that receives
    micro: int


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step."""

    name: str
    placement: tuple[int, ...]  # stage -> rank
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]  # by rank

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)


def needs(action: Action, placement: Sequence[int]) -> Message | None:
    """The message that a computation waits for; None when its input is made on the same rank, or there is none."""
    kind, stage, micro = action
    if kind is Kind.FORWARD and stage > 0 and placement[stage - 1] != placement[stage]:
        return Message(Kind.FORWARD, stage, micro)
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage + 1 < len(placement) and placement[stage + 1] != placement[stage]:
        return Message(Kind.BACKWARD, stage, micro)
    return None


def makes(action: Action, placement: Sequence[int]) -> Message | None:
    """The message that a computation leaves to be sent; None when its result stays on the rank."""
    kind, stage, micro = action
    if kind is Kind.FORWARD and stage + 1 < len(placement) and placement[stage + 1] != placement[stage]:
        return Message(Kind.FORWARD, stage + 1, micro)
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0 and placement[stage - 1] != placement[stage]:
        return Message(Kind.BACKWARD, stage - 1, micro)
    return None


def communicate(orders: Sequence[Sequence[Action]], placement: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Add sends and receives to each rank's computations.

    A send follows its computation. A receive is posted one computation before the one that waits for it, so that it travels beside that one;
    earlier where the sender sends it before what is needed sooner: messages from one rank to another are received in the order in which they are sent.
    """
    produced: dict[tuple[int, int], list[Message]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if (message := makes(action, placement)) is not None:
                produced.setdefault((rank, placement[message.stage]), []).append(message)
    consumed = [{needs(action, placement): index for index, action in enumerate(order)} for order in orders]
    posts: list[dict[int, list[Action]]] = [{} for _ in orders]
    for (_, receiver), messages in produced.items():
        latest = len(orders[receiver])
        timed = []
        for message in reversed(messages):
            latest = min(latest, max(consumed[receiver][message] - 1, 0))
            kind = Kind.RECEIVE_FORWARD if message.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
            timed.append((latest, Action(kind, message.stage, message.micro)))
        for index, action in reversed(timed):
            posts[receiver].setdefault(index, []).append(action)
    lists = []
    for order, posted in zip(orders, posts):
        actions: list[Action] = []
        for index, action in enumerate(order):
            actions += posted.get(index, ())
            actions.append(action)
            if makes(action, placement) is not None:
                kind = Kind.SEND_FORWARD if action.kind is Kind.FORWARD else Kind.SEND_BACKWARD
                actions.append(Action(kind, action.stage, action.micro))
        lists.append(tuple(actions))
    return tuple(lists)


def _gpipe(ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    return [[*(Action(Kind.FORWARD, rank, i) for i in range(micro_batches)), *(Action(Kind.BACKWARD, rank, i) for i in range(micro_batches))]
            for rank in range(ranks)]


def _one_forward_one_backward(ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds at most ranks - r micro-batches (PipeDream-flush, Narayanan et al. 2021)."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        order = [Action(Kind.FORWARD, rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                order.append(Action(Kind.FORWARD, rank, ahead + i))
            order.append(Action(Kind.BACKWARD, rank, i))
        orders.append(order)
    return orders


BUILDERS = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}


def place(name: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage -> rank: round and round, or down and up again for the V schedule."""
    if name == "zero-bubble-v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * virtual))


@functools.lru_cache(maxsize=64)
def build_schedule(name: str, ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """The schedule of one training step. Each stage accumulates its gradients in the order of the micro-batches, in every schedule."""
    placement = place(name, ranks, virtual)
    return Schedule(name, placement, micro_batches, communicate(BUILDERS[name](ranks, virtual, micro_batches), placement))


@functools.lru_cache(maxsize=64)
def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation: the forward passes alone, on the stages as they are placed."""
    ranks = max(placement) + 1
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for micro in range(micro_batches):
        for stage, rank in enumerate(placement):
            orders[rank].append(Action(Kind.FORWARD, stage, micro))
    return Schedule("forward-only", placement, micro_batches, communicate(orders, placement))
