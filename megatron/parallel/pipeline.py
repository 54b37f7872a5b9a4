"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone. It walks the layers of its stage: weights are acquired, the
pass is made, weights are released. A schedule knows nothing of how weights are sharded, and a layer
nothing of either. s sequence, b batch, h hidden. Called from training/passes.py and, on tensors
without memory, from tools/_plan/engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.distributed.groups import Groups
from megatron.distributed.ranges import trace_range
from megatron.model.gpt import GPTModel
from megatron.model.layer import Layer, MicroBatch
from megatron.parallel.layer_passes import Call, LayerPasses, Pass
from megatron.parallel.messages import StageMessages
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

# What each layer of a stage keeps for its next pass: a Graph; Inputs, where it is recomputed; a
# CapturedLayer, with CUDA graphs; the weight gradients that the first half of a split backward pass
# leaves; or None. Forward passes append, backward passes pop from the right.
Saved = deque[Any]


class Weights(Protocol):
    """How weights and gradients are kept between passes: parallel/zero.py."""

    def plan(self, turns: Sequence[Sequence[Pass]]) -> Any:
        """What is to be done around passes that come in this order; those of a turn run at the same
        time. `plan.passes` has a pair for each pass: what is done before it and after it, None for
        nothing.
        """

    def begin_step(self, plan: Any) -> None:
        """The passes of this plan will come now."""

    def acquire(self, todo: Any) -> None:
        """Before a pass: make the layer's weights whole, and make room for its gradients."""

    def release(self, todo: Any) -> None:
        """After the pass."""


class StepSums(NamedTuple):
    """Sums over the forward passes of a step on this rank."""

    # micro-batch -> [objective sum, reported loss sum], on the rank with the head
    losses: dict[int, Tensor]
    # auxiliary outputs of layers by name, summed over micro-batches (float64)
    scalars: dict[str, Tensor]


class LayerPass(NamedTuple):
    """A pass of a layer, and what is done with its weights before and after it."""

    layer: Layer
    kind: Kind
    label: str  # in a trace
    before: Any
    after: Any


class Unit(NamedTuple):
    """An action of this rank, or two computations that run at the same time."""

    actions: tuple[Action, ...]
    label: str = ""  # in a trace
    passes: tuple[LayerPass, ...] = ()
    begins: tuple[int, ...] = ()  # micro-batches that this rank has not seen before
    ends: tuple[int, ...] = ()  # and those that it has no more use for


class RankSchedule(NamedTuple):
    """A schedule as one rank runs it."""

    schedule: Schedule
    units: list[Unit]
    acknowledgements: dict[Message, tuple[int, int]]
    passes: list[Pass]
    weights: Any  # what Weights.plan has made of the passes


class StepState:
    """What is alive during one run of a schedule. Gradients are those of `loss_scale` x loss and
    `aux_scale` x auxiliary losses.
    """

    def __init__(self, messages: StageMessages, loss_scale: float, aux_scale: float):
        self.messages, self.loss_scale, self.aux_scale = messages, loss_scale, aux_scale
        self.last_stage = len(messages.placement) - 1
        self.in_trace = trace_range()
        self.micro_batches: dict[int, MicroBatch] = {}  # in flight
        # by stage and micro-batch: what a backward pass, or its second half, needs of each layer
        self.saved: dict[tuple[int, int], Saved] = {}
        self.losses: dict[int, Tensor] = {}  # by micro-batch: the head's sums
        self.scalars: dict[str, Tensor] = {}  # auxiliary outputs of layers

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
        if stage == self.last_stage:
            return loss_gradient(self.losses[micro], self.loss_scale)
        return self.messages.wait_for(Message(Kind.BACKWARD, stage, micro), action)

    def store_outputs(self, action: Action, y: Tensor, saved: Saved) -> None:
        """Keep what the backward pass needs, and hand the output to the next stage."""
        _, stage, micro = action
        # In evaluation no backward pass will come.
        if torch.is_grad_enabled():
            self.saved[stage, micro] = saved
        if stage == self.last_stage:
            self.losses[micro] = y
        else:
            self.messages.put(Message(Kind.FORWARD, stage + 1, micro), y)


class Pipeline:
    """The stages of this rank and their neighbors. `placement`: stage -> pipeline rank; `shape`:
    [s, b, h] of what travels between stages.
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
    ):
        self.model, self.weights, self.passes = model, weights, passes
        self.placement, self.shape, self.groups, self.device = placement, shape, groups, device
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

    # ---- once for a schedule

    def prepare(self, schedule: Schedule) -> RankSchedule:
        """What a schedule means for this rank; computed once."""
        # A run has few schedules: one for each number of micro-batches, and one for evaluation.
        if id(schedule) in self.prepared:
            return self.prepared[id(schedule)]
        assert schedule.placement == self.placement
        units = list(schedule.units(self.rank))
        computed = [unit for unit in units if unit[0].kind in COMPUTATIONS]
        turns = [list(self._turns_of(unit)) for unit in computed]
        weights = self.weights.plan([turn for own in turns for turn in own])
        passes = [[each for turn in own for each in turn] for own in turns]

        todo = iter(weights.passes)
        life = _lives(computed)
        expanded = {}
        for unit, own in zip(computed, passes):
            steps = tuple(self._layer_pass(each, *next(todo)) for each in own)
            expanded[id(unit)] = Unit(unit, _label(unit), steps, *life[id(unit)])
        plan = RankSchedule(
            schedule,
            [expanded.get(id(unit), Unit(unit)) for unit in units],
            acknowledgements(schedule, self.rank),
            [each for own in passes for each in own],
            weights,
        )
        self.prepared[id(schedule)] = plan
        return plan

    def _turns_of(self, unit: tuple[Action, ...]) -> Iterator[list[Pass]]:
        """The passes of layers of a computation, one in each turn; of a pair one of each."""
        for calls in zip_longest(*(self.calls[action.kind, action.stage] for action in unit)):
            yield [(*call, action.micro) for action, call in zip(unit, calls) if call is not None]

    def _layer_pass(self, each: Pass, before: Any, after: Any) -> LayerPass:
        layer, kind, micro = each
        label = f"{WORDS[kind]} {self.names[layer]} micro-batch {micro}"
        return LayerPass(layer, kind, label, before, after)

    # ---- in every step

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
        # a training step ends with Zero.end_step; an evaluation has no gradients
        self.weights.begin_step(plan.weights)
        messages = StageMessages(
            self.placement,
            self.groups,
            plan.acknowledgements,
            self.shape,
            self.model.dtype,
            self.device,
        )
        step = StepState(messages, loss_scale, loss_scale if aux_scale is None else aux_scale)
        for unit in plan.units:
            action = unit.actions[0]
            if action.kind in COMPUTATIONS:
                begun = None if recording is None else recording.begin()
                with step.in_trace(unit.label):
                    for micro in unit.begins:
                        step.micro_batches[micro] = next(micro_batches)
                    if action.kind is Kind.FORWARD:
                        self.forward(step, unit)
                    else:
                        self.backward(step, unit)
                if recording is not None:
                    recording.add(unit.actions, begun)
                for micro in unit.ends:
                    del step.micro_batches[micro]
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                messages.send(action)
            else:
                messages.receive(action)
        # The last sends may still be on their way: their tensors are freed when they have arrived.
        messages.finish()
        assert not (step.saved or step.micro_batches), "the schedule left something undone"
        return StepSums(step.losses, step.scalars)

    def forward(self, step: StepState, unit: Unit) -> None:
        """The forward pass of a stage, [s, b, h] -> [s, b, h]; of the last one the loss sums."""
        (action,) = unit.actions
        micro_batch = step.micro_batches[action.micro]
        saved: Saved = deque()
        x = step.input_of(action)
        # While this stage of the pipeline computes, its neighbors compute other micro-batches and
        # receives of ours are on their way; ZeRO-3 gathers the next layer on a side stream.
        for layer, _, label, before, after in unit.passes:
            if before is not None:
                self.weights.acquire(before)
            with step.in_trace(label):
                x, kept = self.passes.forward(layer, x, micro_batch, step.scalars)
            if after is not None:
                self.weights.release(after)
            saved.append(kept)
        step.store_outputs(action, x, saved)

    def backward(self, step: StepState, unit: Unit) -> None:
        """A backward pass of a stage: whole, or one half of a split one."""
        (action,) = unit.actions
        _, stage, micro = action
        # Popped one by one: what a layer has saved is freed as soon as its backward pass is over.
        dy, saved = step.input_of(action), step.saved.pop((stage, micro))
        deferred: Saved = deque()  # for the second half
        for layer, kind, label, before, after in unit.passes:
            if before is not None:
                self.weights.acquire(before)
            with step.in_trace(label):
                if kind is Kind.REBUILD:
                    self.rebuild(stage, layer, saved)
                else:
                    dy, kept = self.passes.backward(kind, layer, dy, saved.pop(), step.aux_scale)
                    # In the order of the layers: the second half, which runs from the last layer
                    # to the first as well, pops from the right.
                    if kind is Kind.BACKWARD_INPUT:
                        deferred.appendleft(kept)
            if after is not None:
                self.weights.release(after)

        # The gradient goes to the stage before; the second half of a split pass has none.
        if action.kind is Kind.BACKWARD_INPUT:
            step.saved[stage, micro] = deferred
        if action.kind is not Kind.BACKWARD_WEIGHT and stage > 0:
            step.messages.put(Message(Kind.BACKWARD, stage - 1, micro), dy)

    def rebuild(self, stage: int, layer: Layer, saved: Saved) -> None:
        """Full recomputation: run a layer again, up to the input of the layer that follows it."""
        index = self.layers[stage].index(layer)
        saved[index], saved[index + 1] = self.passes.rebuild(layer, saved[index], saved[index + 1])


def calls_of(kind: Kind, layers: Sequence[Layer]) -> list[Call]:
    """The passes that a computation of a stage consists of. A layer that cannot split its backward
    pass does all of it in the first half. Layers that are recomputed in a group are rebuilt in
    order, up to the last, whose own backward pass does that.
    """
    if kind is Kind.FORWARD:
        return [(layer, kind) for layer in layers]
    if kind is Kind.BACKWARD_WEIGHT:
        return [(layer, kind) for layer in reversed(layers) if layer.splits_backward]
    # From the last layer to the first; a group that is recomputed together is rebuilt when its last
    # layer is reached.
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


def _lives(
    computed: Sequence[tuple[Action, ...]],
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By the identity of a computation: the micro-batches that it is the first to use, and those
    that it is the last to use. A micro-batch is read and freed there.
    """
    first = {action.micro: unit for unit in reversed(computed) for action in unit}
    last = {action.micro: unit for unit in computed for action in unit}
    return {
        id(unit): (
            tuple(action.micro for action in unit if first[action.micro] is unit),
            tuple(action.micro for action in unit if last[action.micro] is unit),
        )
        for unit in computed
    }


def _label(unit: tuple[Action, ...]) -> str:
    """The name of a computation, or of a pair, in a trace."""
    return " with ".join(
        f"{WORDS[kind]} stage {stage} micro-batch {micro}" for kind, stage, micro in unit
    )
