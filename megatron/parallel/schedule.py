"""Pipeline schedules as data: for each rank the list of what it computes, in order.

A model is cut into stages, numbered along the forward pass; `placement` specifies which rank holds
each (several per rank: virtual stages). A schedule is a pure function of (ranks, virtual stages,
micro-batches). Messages between ranks follow from it, and so do gathers and reductions of the
data-parallel side.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron.config.schedules import SCHEDULES


class Kind(enum.Enum):
    """What an action does with one stage and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients
    # input gradients (with those of norms and biases, and all of embedding and head)
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"  # the weight gradients that BACKWARD_INPUT left out
    # Passes of layers only: a layer's forward pass once more, within BACKWARD or BACKWARD_INPUT of
    # its stage.
    REBUILD = "R"

    __hash__ = object.__hash__  # Enum's runs in Python, for each of millions of actions


WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
    Kind.REBUILD: "rebuild",
}
COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


class Action(NamedTuple):
    """A computation of one stage, an entry of its rank's list."""

    kind: Kind
    stage: int
    micro: int


class Message(NamedTuple):
    """What travels between two ranks: `kind` FORWARD is the input of `stage`, BACKWARD the gradient
    of its output.
    """

    kind: Kind
    stage: int  # that receives
    micro: int

    @property
    def source(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.kind is Kind.FORWARD else self.stage + 1


Tasks = Sequence[tuple[Action, ...]]  # of a rank: what runs at a time


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every rank does in one step. With `pairs` a backward pass and a forward pass that comes
    directly after it run at the same time.
    """

    name: str
    placement: tuple[int, ...]  # stage -> rank
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]  # by rank
    pairs: bool = False

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def tasks(self, rank: int) -> Tasks:
        """What a rank does, one after the other: one action, or with `pairs` two at a time."""
        actions, tasks, index = self.actions[rank], [], 0
        while index < len(actions):
            both = actions[index : index + 2]
            # Only this order overlaps well: the tokens that a backward pass sends travel while the
            # forward pass of a later micro-batch computes.
            kinds = [action.kind for action in both]
            is_pair = self.pairs and kinds == [Kind.BACKWARD, Kind.FORWARD]
            tasks.append(both if is_pair else both[:1])
            index += len(tasks[-1])
        return tasks

    @functools.cached_property
    def receives(self) -> list[list[list[Message]]]:
        """By rank, for each of its tasks the messages whose receive is posted before it.

        A receive is posted one task before the one that waits for it, so that it travels during
        that one; earlier where the sender sends it before what is needed sooner: messages from one
        rank to another are received in the order in which they leave. A send follows its task.
        """
        # Both ranks of a channel derive their messages from the same lists, so they match without
        # any negotiation.
        tasks = [self.tasks(rank) for rank in range(self.ranks)]
        readers = {
            message_needed(action, self.placement): index
            for own in tasks
            for index, task in enumerate(own)
            for action in task
        }
        posts: list[list[list[Message]]] = [[[] for _ in own] for own in tasks]
        for (_, receiver), messages in messages_made(self).items():
            # From the last message to the first: none is posted after one that was sent later.
            latest = len(tasks[receiver])
            posted = []
            for message in reversed(messages):
                latest = min(latest, max(readers[message] - 1, 0))
                posted.append((latest, message))
            for index, message in reversed(posted):
                posts[receiver][index].append(message)
        return posts


def message_needed(action: Action, placement: Sequence[int]) -> Message | None:
    """The message that a computation waits for; None when its input is made on the same rank, or
    there is none.
    """
    kind, stage, micro = action
    message = Message(Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD, stage, micro)
    travels = kind is not Kind.BACKWARD_WEIGHT and _are_apart(stage, message.source, placement)
    return message if travels else None


def message_made(action: Action, placement: Sequence[int]) -> Message | None:
    """The message that a computation leaves to be sent; None when its result stays on the rank."""
    kind, stage, micro = action
    is_forward = kind is Kind.FORWARD
    reader = stage + 1 if is_forward else stage - 1
    message = Message(Kind.FORWARD if is_forward else Kind.BACKWARD, reader, micro)
    travels = kind is not Kind.BACKWARD_WEIGHT and _are_apart(stage, reader, placement)
    return message if travels else None


def _are_apart(stage: int, other: int, placement: Sequence[int]) -> bool:
    """Whether the other stage exists, on another rank."""
    return 0 <= other < len(placement) and placement[stage] != placement[other]


def acknowledgements(schedule: Schedule, rank: int) -> dict[Message, tuple[int, int]]:
    """For each message that a rank receives: (its sender, how many of this rank's messages to that
    sender it proves to have arrived).

    Gloo does not report that a send is complete unless one waits for it; but who sends the result
    of a computation has received what his earlier computations needed.
    """
    placement, found = schedule.placement, {}
    made = messages_made(schedule)
    for sender in [sender for sender, receiver in made if receiver == rank]:
        mine, read, count = made.get((rank, sender), []), set(), 0
        for action in schedule.actions[sender]:
            read.add(message_needed(action, placement))
            while count < len(mine) and mine[count] in read:
                count += 1
            message = message_made(action, placement)
            if message is not None and placement[message.stage] == rank:
                found[message] = sender, count
    return found


def messages_made(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Messages by (sender, receiver), in the order in which they are made."""
    made: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            message = message_made(action, schedule.placement)
            if message is not None:
                made.setdefault((rank, schedule.placement[message.stage]), []).append(message)
    return made


def _order(letters: str, micro_batches: int, stage: int, upper_stage: int = -1) -> list[Action]:
    """Computations spelled as `Kind` values, those of `upper_stage` in small letters. A letter
    means its next micro-batch; past the last, nothing.
    """
    meaning = {kind.value: (kind, stage) for kind in COMPUTATIONS} | {
        kind.value.lower(): (kind, upper_stage) for kind in COMPUTATIONS
    }
    # Letters past the last micro-batch are dropped, so one pattern serves any number of them.
    count = dict.fromkeys(meaning, 0)
    order = []
    for letter in letters:
        if count[letter] < micro_batches:
            order.append(Action(*meaning[letter], count[letter]))
            count[letter] += 1
    return order


def _gpipe(rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    return _order("F" * micro_batches + "B" * micro_batches, micro_batches, rank)


def _one_forward_one_backward(
    rank: int, ranks: int, virtual: int, micro_batches: int, pairs: bool = False
) -> list[Action]:
    """Rank r runs ranks - r - 1 forward passes ahead, then one forward and one backward pass in
    turn, then the backward passes that remain: of 4 ranks rank 1 with 4 micro-batches FF FB FB BB.
    It so holds at most ranks - r micro-batches (PipeDream-flush, Narayanan et al. 2021).

    With `pairs` at most 2 (ranks - r): a pair ends when both of its passes have, so that each rank
    runs two forward passes ahead of the next rank instead of one.
    """
    # The warm-up: each rank runs one forward pass more than the next one before its first backward
    # pass can come; in pairs two.
    ahead = ranks - rank - 1
    if pairs:
        return _order("F" * (2 * ahead + 1) + "BF" * micro_batches, micro_batches, rank)
    # letters past the last micro-batch are dropped: "FB" ends as "B"
    return _order("F" * ahead + "FB" * micro_batches, micro_batches, rank)


def _interleaved(
    rank: int, ranks: int, virtual: int, micro_batches: int, pairs: bool = False
) -> list[Action]:
    """Rank r runs its virtual stages in turn, for one group of micro-batches after the other
    (Narayanan et al. 2021).

    Groups are as even as can be and hold at least `ranks` micro-batches (a smaller one could wait
    for itself); the larger ones come first, since they set how far forward passes run ahead. Rank r
    holds at most 2 (ranks - r - 1) + (virtual - 1) x group + 1 stages' micro-batches, with `pairs`
    one more.
    """
    # Each group of micro-batches passes through all turns of the ring before the next group starts.
    count = max(micro_batches // ranks, 1)
    groups = [group.tolist() for group in np.array_split(range(micro_batches), count)]
    down = [rank + turn * ranks for turn in range(virtual)]  # this rank's stages
    forwards, backwards = (
        [Action(kind, stage, micro) for group in groups for stage in stages for micro in group]
        for kind, stages in ((Kind.FORWARD, down), (Kind.BACKWARD, down[::-1]))
    )
    # Warm-up of `ahead` forward passes, then one of each in turn, then the rest of the backward
    # passes.
    ahead = 2 * (ranks - rank - 1) + (virtual - 1) * len(groups[0]) + pairs
    ahead = min(ahead, len(forwards))
    turns = zip(backwards, forwards[ahead:]) if pairs else zip(forwards[ahead:], backwards)
    return [*forwards[:ahead], *chain(*turns), *backwards[len(backwards) - ahead :]]


def _zero_bubble(rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023): 1F1B of input gradients; rank r is r micro-batches late with weight
    gradients, for which it has time at the end.

    Every rank holds min(ranks, micro_batches) micro-batches from forward pass to weight gradient.
    """
    letters = "F" * (ranks - rank - 1) + "FI" * rank + "FIW" * micro_batches
    return _order(letters, micro_batches, rank)


def _zero_bubble_v(rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """ZB-V (Qi et al. 2023): rank r holds stage r on the way down and stage 2 ranks - 1 - r on the
    way up, so that rank 0 ends the forward pass.

    With at least 2 ranks - 1 micro-batches and equal costs no rank waits between its first and its
    last action; fewer run what of that list is theirs. Every rank holds at most 2 ranks pairs of
    stage and micro-batch, the activations of `ranks` micro-batches on a whole rank's layers.
    """
    # The pattern is made for at least 2 ranks - 1 micro-batches; with fewer, those that do not
    # exist are left out, and the order of the others stays.
    count, other = max(micro_batches, 2 * ranks - 1), ranks - rank
    # Capital letters are the stage on the way down, small ones that on the way up. Weight gradients
    # fill the time in which a rank would wait for its neighbors.
    fill = "F" * (2 * other - 1) + "fF" * rank + "fiw" * other
    drain = "Ii" * rank + "IW" * other + "w" * rank + "W" * rank
    letters = fill + "FIWfiw" * (count - ranks) + drain
    order = _order(letters, count, rank, 2 * ranks - 1 - rank)
    return [action for action in order if action.micro < micro_batches]


# each gives a rank the order of its computations
BUILDERS: dict[str, Callable[..., list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "zero-bubble-v": _zero_bubble_v,
}


@functools.lru_cache(maxsize=64)
def build_schedule(
    name: str, ranks: int, virtual: int, micro_batches: int, pairs: bool = False
) -> Schedule:
    """The schedule of one training step. Each stage accumulates its gradients in the order of the
    micro-batches, in every schedule. `pairs`: of a backward pass and the forward pass of a later
    micro-batch, where the schedule can have them (`SCHEDULES`).
    """
    # The cache returns the same object for the same step, by whose identity the executor finds what
    # it has prepared.
    rule = SCHEDULES[name]
    assert ranks >= 1 and micro_batches >= 1, f"{ranks} ranks, {micro_batches} micro-batches"
    assert rule.virtual in (None, virtual), f"{name} with {virtual} stages a rank"
    assert rule.pairs or not pairs, f"{name} in pairs"
    sizes = ranks, virtual, micro_batches, *[True] * pairs
    actions = tuple(tuple(BUILDERS[name](rank, *sizes)) for rank in range(ranks))
    return Schedule(name, rule.place(ranks, virtual), micro_batches, actions, pairs)


@functools.lru_cache(maxsize=64)
def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation: the forward passes alone, on the stages as they are placed; at each turn a rank
    runs the last of its stages that has an input.
    """
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = [0] * len(placement)
    while done[-1] < micro_batches:
        # A stage may run when the stage before it is ahead of it.
        ready = [
            stage
            for stage, count in enumerate(done)
            if count < (done[stage - 1] if stage else micro_batches)
        ]
        # Of several ready stages of a rank the last one runs: what it reads is freed soonest.
        for stage in {placement[stage]: stage for stage in ready}.values():
            orders[placement[stage]].append(Action(Kind.FORWARD, stage, done[stage]))
            done[stage] += 1
    return Schedule("forward-only", placement, micro_batches, tuple(map(tuple, orders)))
