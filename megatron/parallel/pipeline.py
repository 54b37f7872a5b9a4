"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone. It walks the layers of its stage: weights are acquired, the
pass is made, weights are released. A schedule knows nothing of how weights are sharded, and a layer
nothing of either. s sequence, b batch, h hidden. Called from training/passes.py and, on tensors
without memory, from tools/_plan/engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.distributed.groups import Groups
from megatron.distributed.ranges import named
from megatron.model.block import Layer, MicroBatch
from megatron.model.gpt import GPTModel
from megatron.parallel.layer_passes import Call, LayerPasses
from megatron.parallel.messages import StageMessages
from megatron.parallel.pairs import run_pair
from megatron.parallel.recording import Recording
from megatron.parallel.schedule import (
    COMPUTATIONS,
    WORDS,
    Action,
    Kind,
    Message,
    Schedule,
    acknowledgements,
)


class Weights(Protocol):
    """How weights and gradients are kept between passes: parallel/zero.py."""

    def begin_step(self, calls: Sequence[Call]) -> None:
        """These passes will come now, in this order."""

    def acquire(self, layer: Layer, kind: Kind, micro: int) -> None:
        """Before a pass of a layer on a micro-batch: make its weights whole, and make room for its
        gradients.
        """

    def release(self, layer: Layer, kind: Kind, micro: int) -> None:
        """After the pass."""


class StepSums(NamedTuple):
    """Sums over the forward passes of a step on this rank."""

    # micro-batch -> [objective sum, reported loss sum], on the rank with the head
    losses: dict[int, Tensor]
    # auxiliary outputs of layers by name, summed over micro-batches (float64)
    scalars: dict[str, Tensor]


class RankSchedule(NamedTuple):
    """A schedule as one rank runs it."""

    schedule: Schedule
    # actions, and pairs of them, each with the words that name it in a trace
    units: list[tuple[tuple[Action, ...], list[object]]]
    acknowledgements: dict[Message, tuple[int, int]]
    calls: list[Call]
    passes: list[tuple[Layer, Kind, int]]  # the calls with their micro-batches
    last_uses: frozenset[Action]  # of each micro-batch


class Pipeline:
    """The stages of this rank and their neighbors. `placement`: stage -> pipeline rank; `shape`:
    [s, b, h] of what travels between stages; `run_overlapped` runs the two passes of a pair.
    """

    def __init__(
        self,
        model: GPTModel,
        weights: Weights,
        passes: LayerPasses,
        placement: tuple[int, ...],
        shape: tuple[int, int, int],
        groups: Groups,
        device: torch.device,
        run_overlapped: Callable[[Callable[[], None], Callable[[], None]], object] | None = None,
    ):
        self.model, self.weights, self.passes = model, weights, passes
        self.placement, self.shape, self.groups, self.device = placement, shape, groups, device
        self.run_overlapped = run_overlapped
        self.rank = groups.pp.rank
        own = [stage for stage, rank in enumerate(placement) if rank == self.rank]
        chunks = ([layer for _, layer in chunk] for chunk in model.chunks)
        self.layers: dict[int, list[Layer]] = dict(zip(own, chunks, strict=True))  # by stage
        self.names = {layer: name for chunk in model.chunks for name, layer in chunk}
        self.calls = {
            (kind, stage): calls_of(kind, layers)
            for kind in COMPUTATIONS
            for stage, layers in self.layers.items()
        }
        self.has_head = placement[-1] == self.rank
        self.prepared: dict[int, RankSchedule] = {}  # by identity: a schedule is long

    def prepare(self, schedule: Schedule) -> RankSchedule:
        """What a schedule means for this rank; computed once."""
        if id(schedule) not in self.prepared:
            assert schedule.placement == self.placement
            units = list(schedule.units(self.rank))
            named_units = [
                (unit, _words(unit) if unit[0].kind in COMPUTATIONS else []) for unit in units
            ]
            computations = [unit for unit in units if unit[0].kind in COMPUTATIONS]
            last_use = {action.micro: action for unit in computations for action in unit}
            passes = [each for unit in computations for each in self._passes_of(unit)]
            self.prepared[id(schedule)] = RankSchedule(
                schedule,
                named_units,
                acknowledgements(schedule, self.rank),
                [(layer, kind) for layer, kind, _ in passes],
                passes,
                frozenset(last_use.values()),
            )
        return self.prepared[id(schedule)]

    def _passes_of(self, unit: tuple[Action, ...]) -> Iterator[tuple[Layer, Kind, int]]:
        """The passes of layers of a computation; of a pair one of each in turn."""
        for calls in zip_longest(*(self.calls[action.kind, action.stage] for action in unit)):
            for action, call in zip(unit, calls):
                if call is not None:
                    yield (*call, action.micro)

    def run(
        self,
        schedule: Schedule,
        micro_batches: Iterator[MicroBatch],
        loss_scale: float = 0.0,
        recording: Recording | None = None,
        *,
        aux_scale: float | None = None,
    ) -> StepSums:
        """Carry out a schedule: add the gradients of loss_scale x objective of all micro-batches to
        main_grad, or under torch.no_grad compute the losses alone.

        `micro_batches` are taken one by one, when their first computation on this rank begins;
        `aux_scale` (default: loss_scale) multiplies the layers' part of the objective. Raises
        PeerError when a neighbor dies or hangs.
        """
        plan = self.prepare(schedule)
        self.weights.begin_step(plan.calls)
        messages = StageMessages(
            self.placement,
            self.groups,
            plan.acknowledgements,
            self.shape,
            self.model.dtype,
            self.device,
        )
        aux_scale = loss_scale if aux_scale is None else aux_scale
        step = StepState(micro_batches, messages, loss_scale, aux_scale)
        for unit, words in plan.units:
            action = unit[0]
            if action.kind in COMPUTATIONS:
                begun = None if recording is None else recording.begin()
                with named(*words):
                    self.compute(step, unit)
                if recording is not None:
                    recording.add(unit, begun)
                for last in plan.last_uses.intersection(unit):
                    self.release_micro_batch(step, last.micro)
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                messages.send(action)
            else:
                messages.receive(action)
        messages.finish()
        assert not (step.saved or step.micro_batches), "the schedule left something undone"
        return StepSums(step.losses, step.scalars)

    def compute(self, step: StepState, unit: tuple[Action, ...]) -> None:
        """Run one computation of a stage, or a pair."""
        if len(unit) == 2:
            run_pair(self, step, *unit)
        elif unit[0].kind is Kind.FORWARD:
            self.forward(step, unit[0])
        else:
            self.backward(step, unit[0])

    def forward(self, step: StepState, action: Action) -> None:
        """The forward pass of a stage, [s, b, h] -> [s, b, h]; of the last one the loss sums."""
        _, stage, micro = action
        micro_batch = step.micro_batch(micro)
        saved: deque[Any] = deque()
        x = step.input_of(action)
        for layer, kind in self.calls[Kind.FORWARD, stage]:
            self.weights.acquire(layer, kind, micro)
            with named(WORDS[kind], self.names[layer], "micro-batch", micro):
                x, kept = self.passes.forward(layer, x, micro_batch, step.scalars)
            self.weights.release(layer, kind, micro)
            saved.append(kept)
        step.store_outputs(action, x, saved)

    def backward(self, step: StepState, action: Action) -> None:
        """A backward pass of a stage: whole, or one half of a split one."""
        _, stage, micro = action
        dy, saved = step.input_of(action), step.saved.pop((stage, micro))
        deferred: deque[Any] = deque()  # for the second half
        for layer, kind in self.calls[action.kind, stage]:
            self.weights.acquire(layer, kind, micro)
            with named(WORDS[kind], self.names[layer], "micro-batch", micro):
                if kind is Kind.REBUILD:
                    self.rebuild(stage, layer, saved)
                else:
                    dy, kept = self.passes.backward(kind, layer, dy, saved.pop(), step.aux_scale)
                    if kind is Kind.BACKWARD_INPUT:
                        deferred.appendleft(kept)
            self.weights.release(layer, kind, micro)
        step.store_gradient(action, dy, deferred)

    def rebuild(self, stage: int, layer: Layer, saved: deque[Any]) -> None:
        """Full recomputation: run a layer again, up to the input of the layer that follows it."""
        index = self.layers[stage].index(layer)
        saved[index], saved[index + 1] = self.passes.rebuild(layer, saved[index], saved[index + 1])

    def release_micro_batch(self, step: StepState, micro: int) -> None:
        """A micro-batch has had its last computation on this rank."""
        del step.micro_batches[micro]


class StepState:
    """What is alive during one run of a schedule. Gradients are those of `loss_scale` x loss and
    `aux_scale` x auxiliary losses.
    """

    def __init__(
        self,
        coming: Iterator[MicroBatch],
        messages: StageMessages,
        loss_scale: float,
        aux_scale: float,
    ):
        self.coming, self.messages = coming, messages
        self.loss_scale, self.aux_scale = loss_scale, aux_scale
        self.num_stages = len(messages.placement)
        self.micro_batches: dict[int, MicroBatch] = {}  # in flight
        # by stage and micro-batch: what a backward pass, or its second half, needs of each layer
        self.saved: dict[tuple[int, int], deque[Any]] = {}
        self.losses: dict[int, Tensor] = {}  # by micro-batch: the head's sums
        self.scalars: dict[str, Tensor] = {}  # auxiliary outputs of layers

    def micro_batch(self, micro: int) -> MicroBatch:
        """A micro-batch; the first computation on this rank takes it from the data."""
        if micro not in self.micro_batches:
            self.micro_batches[micro] = next(self.coming)
        return self.micro_batches[micro]

    def input_of(self, action: Action) -> Tensor | None:
        """The hidden states or the gradient [s, b, h] that a computation reads; None for the first
        stage and for weight gradients.
        """
        kind, stage, micro = action
        if kind is Kind.FORWARD:
            message = Message(Kind.FORWARD, stage, micro)
            return None if stage == 0 else self.messages.wait_for(message, action)
        if kind is Kind.BACKWARD_WEIGHT:
            return None
        if stage + 1 == self.num_stages:
            return loss_gradient(self.losses[micro], self.loss_scale)
        return self.messages.wait_for(Message(Kind.BACKWARD, stage, micro), action)

    def store_outputs(self, action: Action, y: Tensor, saved: deque[Any]) -> None:
        """Keep what the backward pass needs, and hand the output to the next stage."""
        _, stage, micro = action
        if torch.is_grad_enabled():
            self.saved[stage, micro] = saved
        if stage + 1 == self.num_stages:
            self.losses[micro] = y
        else:
            self.messages.put(Message(Kind.FORWARD, stage + 1, micro), y)

    def store_gradient(
        self, action: Action, dx: Tensor | None, deferred: deque[Any] | None = None
    ) -> None:
        """Keep what the second half needs, and hand the gradient to the stage before."""
        kind, stage, micro = action
        if kind is Kind.BACKWARD_INPUT:
            self.saved[stage, micro] = deferred
        if kind is not Kind.BACKWARD_WEIGHT and stage > 0:
            self.messages.put(Message(Kind.BACKWARD, stage - 1, micro), dx)


def calls_of(kind: Kind, layers: Sequence[Layer]) -> list[Call]:
    """The passes that a computation of a stage consists of. A layer that cannot split its backward
    pass does all of it in the first half. Layers that are recomputed in a group are rebuilt in
    order, up to the last, whose own backward pass does that.
    """
    if kind is Kind.FORWARD:
        return [(layer, kind) for layer in layers]
    if kind is Kind.BACKWARD_WEIGHT:
        return [(layer, kind) for layer in reversed(layers) if layer.splits_backward]
    calls: list[Call] = []
    for place, layer in reversed(list(enumerate(layers))):
        if layer.recompute.last:
            first = max(at for at in range(place + 1) if layers[at].recompute.first)
            calls += [(before, Kind.REBUILD) for before in layers[first:place]]
        calls.append((layer, kind if layer.splits_backward else Kind.BACKWARD))
    return calls


def objectives_of(model: GPTModel) -> list[str]:
    """The auxiliary outputs of layers that are differentiated along with the loss."""
    return [spec.name for spec in model.scalars if spec.in_objective]


def loss_gradient(sums: Tensor, scale: float) -> Tensor:
    """dy of a head's output [objective sum, reported loss sum], for the gradient of scale x
    objective.
    """
    # not zeros_like: on meta tensors, which the memory plan runs with, it imports sympy (2 s)
    dy = sums.new_zeros(sums.shape)
    dy[0].fill_(scale)  # a tensor of numbers would be copied from the host, which waits for the GPU
    return dy


def _words(unit: tuple[Action, ...]) -> list[object]:
    """The name of a computation, or of a pair."""
    words: list[object] = []
    for kind, stage, micro in unit:
        words += [*["with"] * bool(words), WORDS[kind], "stage", stage, "micro-batch", micro]
    return words
