"""A backward pass of one micro-batch and a forward pass of a later one, layer by layer at the same
time: the all-to-alls of one travel while the other computes
(--overlap-moe-expert-parallel-comm).

Chosen in place of the ordinary pipeline when the flag is set: its schedules have pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import Tensor

from megatron.parallel.pipeline import LayerPass, Pipeline, StepState, Unit
from megatron.parallel.schedule import Action, Kind, Message


class PairedPipeline(Pipeline):
    """A pipeline that also runs pairs. `run_overlapped` runs the two passes of two layers."""

    run_overlapped: Callable[[Callable[[], None], Callable[[], None]], object]

    def __init__(self, *args: Any, run_overlapped: Callable[..., object]):
        super().__init__(*args)
        self.run_overlapped = run_overlapped

    def backward(self, step: StepState, unit: Unit) -> None:
        """A backward pass, or a pair, which begins with one."""
        if len(unit.actions) == 1:
            super().backward(step, unit)
            return
        backward, forward = unit.actions
        first, second = _BackwardPass(self, step, backward), _ForwardPass(self, step, forward)

        # Two layers at a time, until one of the two is over.
        calls = [each for each in unit.passes if each.kind is not Kind.FORWARD]
        others = [each for each in unit.passes if each.kind is Kind.FORWARD]
        for call, other in zip_longest(calls, others):
            todo = [each for each in (call, other) if each is not None]
            for each in todo:
                if each.before is not None:
                    self.weights.acquire(each.before)
            # Alone where the other pass is over already: stages may have different numbers of
            # layers.
            if call is None:
                second.run(other)
            elif other is None:
                first.run(call)
            else:
                self.run_overlapped(_bind(first.run, call), _bind(second.run, other))
            for each in todo:
                if each.after is not None:
                    self.weights.release(each.after)

        # Both results are handed over when both passes are over, in the order of the schedule.
        if backward.stage > 0:
            step.messages.put(Message(Kind.BACKWARD, backward.stage - 1, backward.micro), first.dy)
        step.store_outputs(forward, second.x, second.saved)


def _bind(run: Callable[[LayerPass], None], call: LayerPass) -> Callable[[], None]:
    return lambda: run(call)


class _BackwardPass:
    """The backward pass of a stage, one layer at a time."""

    def __init__(self, pipeline: Pipeline, step: StepState, action: Action):
        self.pipeline, self.step, self.action = pipeline, step, action
        self.dy: Tensor | None = step.input_of(action)
        self.saved = step.saved.pop((action.stage, action.micro))

    def run(self, call: LayerPass) -> None:
        """One layer."""
        with self.step.in_trace(call.label):
            if call.kind is Kind.REBUILD:
                self.pipeline.rebuild(self.action.stage, call.layer, self.saved)
                return
            # A pair is never split: the weight gradients belong to this pass, and nothing is left
            # over.
            saved, aux_scale = self.saved.pop(), self.step.aux_scale
            self.dy, _ = self.pipeline.passes.backward(
                call.kind, call.layer, self.dy, saved, aux_scale
            )


class _ForwardPass:
    """The forward pass of a stage, one layer at a time."""

    def __init__(self, pipeline: Pipeline, step: StepState, action: Action):
        self.pipeline, self.step = pipeline, step
        self.micro_batch = step.micro_batches[action.micro]
        self.x: Tensor | None = step.input_of(action)
        self.saved: deque[Any] = deque()

    def run(self, call: LayerPass) -> None:
        """One layer."""
        with self.step.in_trace(call.label):
            self.x, saved = self.pipeline.passes.forward(
                call.layer, self.x, self.micro_batch, self.step.scalars
            )
        self.saved.append(saved)
