"""A backward pass of one micro-batch and a forward pass of a later one, layer by layer at the same
time: the all-to-alls of one travel while the other computes
(--overlap-moe-expert-parallel-comm).

Called from parallel/pipeline.py for the pairs of a schedule.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.distributed.ranges import named
from megatron.model.block import Layer
from megatron.parallel.schedule import WORDS, Action, Kind

if TYPE_CHECKING:
    from megatron.parallel.pipeline import Pipeline, StepState


class _BackwardPass:
    """The backward pass of a stage, one layer at a time."""

    def __init__(self, pipeline: Pipeline, step: StepState, action: Action):
        self.pipeline, self.step, self.action = pipeline, step, action
        self.calls = pipeline.calls[action.kind, action.stage]
        self.dy: Tensor | None = step.input_of(action)
        self.saved = step.saved.pop((action.stage, action.micro))

    def run(self, layer: Layer, kind: Kind) -> None:
        """One layer."""
        with _named(self.pipeline, kind, layer, self.action.micro):
            if kind is Kind.REBUILD:
                self.pipeline.rebuild(self.action.stage, layer, self.saved)
                return
            aux_scale = self.step.aux_scale
            self.dy, _ = self.pipeline.passes.backward(
                kind, layer, self.dy, self.saved.pop(), aux_scale
            )


class _ForwardPass:
    """The forward pass of a stage, one layer at a time."""

    def __init__(self, pipeline: Pipeline, step: StepState, action: Action):
        self.pipeline, self.step, self.action = pipeline, step, action
        self.calls = pipeline.calls[action.kind, action.stage]
        self.micro_batch = step.micro_batch(action.micro)
        self.x: Tensor | None = step.input_of(action)
        self.saved: deque[Any] = deque()

    def run(self, layer: Layer, kind: Kind) -> None:
        """One layer."""
        with _named(self.pipeline, kind, layer, self.action.micro):
            self.x, saved = self.pipeline.passes.forward(
                layer, self.x, self.micro_batch, self.step.scalars
            )
        self.saved.append(saved)


def _named(pipeline: Pipeline, kind: Kind, layer: Layer, micro: int) -> AbstractContextManager[Any]:
    """The range of a pass in a profiler's trace."""
    return named(WORDS[kind], pipeline.names[layer], "micro-batch", micro)


def run_pair(pipeline: Pipeline, step: StepState, backward: Action, forward: Action) -> None:
    """Run both, two layers at a time until one of them is over."""
    first, second = _BackwardPass(pipeline, step, backward), _ForwardPass(pipeline, step, forward)
    weights, run_overlapped = pipeline.weights, pipeline.run_overlapped
    assert run_overlapped is not None, "a schedule of pairs needs an Interleaver"
    for calls in zip_longest(first.calls, second.calls):
        todo: list[tuple[Any, Any]] = [
            (each, call) for each, call in zip((first, second), calls) if call is not None
        ]
        for each, (layer, kind) in todo:
            weights.acquire(layer, kind, each.action.micro)
        runs = [partial(each.run, *call) for each, call in todo]
        if len(runs) == 2:
            run_overlapped(*runs)
        else:
            runs[0]()
        for each, (layer, kind) in todo:
            weights.release(layer, kind, each.action.micro)
    step.store_gradient(backward, first.dy)
    step.store_outputs(forward, second.x, second.saved)
