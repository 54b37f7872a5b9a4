"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone. It walks the layers of its stage: ZeRO makes weights whole,
the runner makes the pass, ZeRO frees weights and reduces gradients. A schedule knows nothing of how
weights are sharded, and a layer nothing of either. s sequence, b batch, h hidden.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.distributed.collectives import profiler_range
from megatron.distributed.groups import Groups
from megatron.model.gpt import GPTModel
from megatron.model.layer import OBJECTIVE_SUM, Layer, MicroBatch
from megatron.parallel.layer_runner import LayerRunner, Pass, Saved
from megatron.parallel.messages import StageMessages
from megatron.parallel.schedule import (
    COMPUTATIONS,
    WORDS,
    Action,
    Kind,
    Message,
    Schedule,
    acknowledgements,
    message_made,
)
from megatron.parallel.timeline import Recording
from megatron.parallel.zero import Zero
from megatron.parallel.zero_plan import BACKWARDS, Calls, ZeroPlan


class StepSums(NamedTuple):
    """Sums over the forward passes of a step on this rank."""

    # micro-batch -> [objective sum, reported loss sum], on the rank with the head
    losses: dict[int, Tensor]
    # scalars of layers by name, summed over micro-batches (float64)
    scalars: dict[str, Tensor]


class LayerPass(NamedTuple):
    """A pass of a layer, and what ZeRO does before it and after it."""

    layer: Layer
    kind: Kind
    micro: int
    label: str  # in a trace
    before: Calls
    after: Calls


class Task(NamedTuple):
    """A computation of this rank, or a pair of them that run at the same time."""

    actions: tuple[Action, ...]
    label: str  # in a trace
    passes: tuple[LayerPass, ...]
    receives: list[Message]  # posted before it
    sends: list[Message]  # of its results
    finished_micro_batches: list[int]  # that this rank has no more use for


class RankSchedule(NamedTuple):
    """A schedule as one rank runs it."""

    tasks: list[Task]
    acknowledgements: dict[Message, tuple[int, int]]
    zero_plan: ZeroPlan
    trains: bool  # it has backward passes, else it is an evaluation

    def passes(self) -> list[Pass]:
        """The passes of layers in their order."""
        return [each[:3] for task in self.tasks for each in task.passes]


@dataclass
class StepState:
    """What is alive during one run of a schedule. Gradients are those of `scale` x loss and
    `aux_scale` x auxiliary losses.
    """

    messages: StageMessages
    scale: float
    aux_scale: float
    micro_batches: dict[int, MicroBatch] = field(default_factory=dict)  # in flight
    # By stage and micro-batch: what each layer saves for its next pass. Forward passes append,
    # backward passes pop from the right.
    saved: dict[tuple[int, int], deque[Saved]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch: the head's sums
    scalars: dict[str, Tensor] = field(default_factory=dict)  # of layers

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
        if stage < self.messages.last_stage:
            return self.messages.wait_for(Message(Kind.BACKWARD, stage, micro), action)
        # The last stage: the gradient of scale x objective by [objective sum, reported loss sum].
        # Not zeros_like: on meta tensors, which the memory plan runs with, it imports sympy (2 s).
        dy = self.losses[micro].new_zeros(self.losses[micro].shape)
        # a tensor of numbers would be copied from the host, which waits for the GPU
        dy[OBJECTIVE_SUM].fill_(self.scale)
        return dy

    def store_outputs(self, action: Action, y: Tensor, saved: deque[Saved]) -> None:
        """Keep what the backward pass needs, and hand the output to the next stage."""
        _, stage, micro = action
        # In evaluation no backward pass will come.
        if torch.is_grad_enabled():
            self.saved[stage, micro] = saved
        if stage == self.messages.last_stage:
            self.losses[micro] = y
        else:
            self.messages.put(Message(Kind.FORWARD, stage + 1, micro), y)


class Pipeline:
    """The stages of this rank and their neighbors. `runner` makes the passes of layers;
    `placement`: stage -> pipeline rank; `shape`: [s, b, h] of what travels between stages.
    """

    def __init__(
        self,
        model: GPTModel,
        zero: Zero,
        runner: LayerRunner,
        placement: tuple[int, ...],
        shape: tuple[int, int, int],
        groups: Groups,
        device: torch.device,
    ):
        self.model, self.zero, self.runner = model, zero, runner
        self.placement, self.rank = placement, groups.pp.rank
        self.names = {layer: name for name, layer in chain(*model.layers_by_stage)}
        self.layers: dict[int, list[Layer]] = {}
        self.passes: dict[tuple[Kind, int], list[tuple[Layer, Kind]]] = {}
        own = [stage for stage, rank in enumerate(placement) if rank == self.rank]
        for stage, named_layers in zip(own, model.layers_by_stage, strict=True):
            self.layers[stage] = [layer for _, layer in named_layers]
            for kind in COMPUTATIONS:
                self.passes[kind, stage] = passes_of(kind, self.layers[stage])
        self.has_head = placement[-1] == self.rank
        self.messages = StageMessages(placement, groups, shape, model.dtype, device)
        # A run has few schedules: one for each number of micro-batches, and one for evaluation.
        self.prepared = functools.cache(self.prepare)

    # ---- once for a schedule

    def prepare(self, schedule: Schedule) -> RankSchedule:
        """What a schedule means for this rank."""
        assert schedule.placement == self.placement
        # 1. The passes of layers in their order, and what ZeRO does around each.
        task_actions = schedule.tasks(self.rank)
        turns_by_task = [self._turns_of(actions) for actions in task_actions]
        zero_plan = self.zero.planner.plan([*chain(*turns_by_task)])

        # 2. Each task with its passes, and those with their part of that plan, which is in the
        # same order.
        around = iter(zero_plan.passes)
        passes = [
            tuple(self._layer_pass(*each, *next(around)) for each in chain(*turns))
            for turns in turns_by_task
        ]
        tasks = self._tasks(schedule, passes)
        trains = any(action.kind in BACKWARDS for action in schedule.actions[self.rank])
        return RankSchedule(tasks, acknowledgements(schedule, self.rank), zero_plan, trains)

    def _turns_of(self, actions: tuple[Action, ...]) -> list[list[Pass]]:
        """A task's passes of layers in turns: one in each, or of a pair two, which overlap."""
        columns = []
        for kind, stage, micro in actions:
            columns.append([(*each, micro) for each in self.passes[kind, stage]])
        return [[each for each in turn if each is not None] for turn in zip_longest(*columns)]

    def _tasks(self, schedule: Schedule, passes: list[tuple[LayerPass, ...]]) -> list[Task]:
        """What this rank does, one after the other, with its messages."""
        task_actions, receives = schedule.tasks(self.rank), schedule.receives[self.rank]
        last_use = {micro: actions for actions in task_actions for _, _, micro in actions}
        tasks = []
        for actions, own, received in zip(task_actions, passes, receives, strict=True):
            label = " with ".join(
                f"{WORDS[kind]} stage {stage} micro-batch {micro}" for kind, stage, micro in actions
            )
            made = [message_made(action, self.placement) for action in actions]
            sends = [message for message in made if message is not None]
            finished = [micro for _, _, micro in actions if last_use[micro] is actions]
            tasks.append(Task(actions, label, own, received, sends, finished))
        return tasks

    def _layer_pass(
        self, layer: Layer, kind: Kind, micro: int, before: Calls, after: Calls
    ) -> LayerPass:
        label = f"{WORDS[kind]} {self.names[layer]} micro-batch {micro}"
        return LayerPass(layer, kind, micro, label, before, after)

    # ---- in every step

    def run(
        self,
        schedule: Schedule,
        micro_batches: Iterator[MicroBatch],
        scale: float = 0.0,
        recording: Recording | None = None,
        *,
        aux_scale: float | None = None,
    ) -> StepSums:
        """Carry out a schedule: add the gradients of scale x objective of all micro-batches to
        main_grad, or compute the losses alone where it has no backward passes.

        `micro_batches` are taken one by one, when their first computation on this rank begins;
        `aux_scale` (default: scale) multiplies the layers' part of the objective. Raises
        PeerError when a neighbor dies or hangs.
        """
        prepared, messages = self.prepared(schedule), self.messages
        messages.acknowledgements = prepared.acknowledgements
        assert self.zero.reducing is None
        for call in prepared.zero_plan.first:
            call()
        step = StepState(messages, scale, scale if aux_scale is None else aux_scale)
        with torch.set_grad_enabled(prepared.trains):
            for task in prepared.tasks:
                for message in task.receives:
                    messages.receive(message)
                begun = None if recording is None else recording.begin()
                with profiler_range(task.label):
                    for each in task.actions:
                        if each.micro not in step.micro_batches:
                            step.micro_batches[each.micro] = next(micro_batches)
                    if task.actions[0].kind is Kind.FORWARD:
                        self.forward(step, task)
                    else:
                        self.backward(step, task)
                if recording is not None:
                    recording.add(task.actions, begun)
                for micro in task.finished_micro_batches:
                    del step.micro_batches[micro]
                for message in task.sends:
                    messages.send(message)
        if messages.last_stage > 0:
            # The last sends may be on their way: their tensors are freed when they have arrived.
            messages.finish()
        assert not (step.saved or step.micro_batches), "the schedule left something undone"
        return StepSums(step.losses, step.scalars)

    def forward(self, step: StepState, task: Task) -> None:
        """The forward pass of a stage, [s, b, h] -> [s, b, h]; of the last one the loss sums."""
        (action,) = task.actions
        micro_batch = step.micro_batches[action.micro]
        saved: deque[Saved] = deque()
        x = step.input_of(action)
        # While this stage of the pipeline computes, its neighbors compute other micro-batches and
        # receives of ours are on their way; ZeRO-3 gathers the next layer on a side stream.
        for layer, _, _, label, before, after in task.passes:
            for call in before:
                call()
            with profiler_range(label):
                x, saved_by_layer = self.runner.forward(layer, x, micro_batch, step.scalars)
            for call in after:
                call()
            saved.append(saved_by_layer)
        step.store_outputs(action, x, saved)

    def backward(self, step: StepState, task: Task) -> None:
        """A backward pass of a stage: whole, or one half of a split one."""
        (action,) = task.actions
        _, stage, micro = action
        # Popped one by one: what a layer has saved is freed as soon as its backward pass is over.
        dy, saved = step.input_of(action), step.saved.pop((stage, micro))
        for_second_half: deque[Saved] = deque()
        for layer, kind, _, label, before, after in task.passes:
            for call in before:
                call()
            with profiler_range(label):
                if kind is Kind.REBUILD:
                    self.rebuild(stage, layer, saved)
                else:
                    dy, deferred = self.runner.backward(
                        kind, layer, dy, saved.pop(), step.aux_scale
                    )
                    # In the order of the layers: the second half, which runs from the last layer
                    # to the first as well, pops from the right.
                    if kind is Kind.BACKWARD_INPUT:
                        for_second_half.appendleft(deferred)
            for call in after:
                call()

        # The gradient goes to the stage before; the second half of a split pass has none.
        if action.kind is Kind.BACKWARD_INPUT:
            step.saved[stage, micro] = for_second_half
        if action.kind is not Kind.BACKWARD_WEIGHT and stage > 0:
            step.messages.put(Message(Kind.BACKWARD, stage - 1, micro), dy)

    def rebuild(self, stage: int, layer: Layer, saved: deque[Saved]) -> None:
        """Full recomputation: run a layer again, up to the input of the layer that follows it."""
        index = self.layers[stage].index(layer)
        saved[index], saved[index + 1] = self.runner.rebuild(layer, saved[index], saved[index + 1])


def passes_of(kind: Kind, layers: Sequence[Layer]) -> list[tuple[Layer, Kind]]:
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
    passes: list[tuple[Layer, Kind]] = []
    for place, layer in reversed(list(enumerate(layers))):
        if layer.recompute.last:
            first = max(at for at in range(place + 1) if layers[at].recompute.first)
            passes += [(before, Kind.REBUILD) for before in layers[first:place]]
        passes.append((layer, kind if layer.splits_backward else Kind.BACKWARD))
    return passes


def aux_losses_of(model: GPTModel) -> list[str]:
    """The scalars of layers that are differentiated along with the loss."""
    return [spec.name for spec in model.scalars if spec.in_objective]
