"""A backward pass of one micro-batch and a forward pass of a later one, layer by layer at the same
time: the all-to-alls of one travel while the other computes
(--overlap-moe-expert-parallel-comm).

Chosen in place of the ordinary pipeline when the flag is set: its schedules have pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

from megatron.distributed.collectives import named
from megatron.parallel.layer_runner import Saved
from megatron.parallel.pipeline import LayerPass, Pipeline, StepState, Task
from megatron.parallel.schedule import Kind, Message


class PairedPipeline(Pipeline):
    """A pipeline that also runs pairs. `run_overlapped` runs the two passes of two layers."""

    runs_pairs = True
    run_overlapped: Callable[[Callable[[], None], Callable[[], None]], object]

    def __init__(self, *args: Any, run_overlapped: Callable[..., object]):
        super().__init__(*args)
        self.run_overlapped = run_overlapped

    def backward(self, step: StepState, task: Task) -> None:
        """A backward pass, or a pair, which begins with one."""
        if len(task.actions) == 1:
            super().backward(step, task)
        else:
            self.run_pair(step, task)

    def run_pair(self, step: StepState, task: Task) -> None:
        """Both passes of a pair."""
        backward, forward = task.actions
        dy = step.input_of(backward)
        saved = step.saved.pop((backward.stage, backward.micro))
        x, micro_batch = step.input_of(forward), step.micro_batches[forward.micro]
        saved_forward: deque[Saved] = deque()

        def run_backward(each: LayerPass) -> None:
            """One layer of the backward pass."""
            nonlocal dy
            if each.kind is Kind.REBUILD:
                self.rebuild(backward.stage, each.layer, saved)
                return
            # A pair is never split: the weight gradients belong to this pass.
            dy, _ = self.runner.backward(each.kind, each.layer, dy, saved.pop(), step.aux_scale)

        def run_forward(each: LayerPass) -> None:
            """One layer of the forward pass."""
            nonlocal x
            x, saved_by_layer = self.runner.forward(each.layer, x, micro_batch, step.scalars)
            saved_forward.append(saved_by_layer)

        # Two layers at a time, until one of the two is over: stages may have different numbers of
        # layers.
        backwards = [(run_backward, each) for each in task.passes if each.kind is not Kind.FORWARD]
        forwards = [(run_forward, each) for each in task.passes if each.kind is Kind.FORWARD]
        for turn in zip_longest(backwards, forwards):
            self._run_turn([each for each in turn if each is not None])

        # Both results are handed over when both passes are over, in the order of the schedule.
        if backward.stage > 0:
            step.messages.put(Message(Kind.BACKWARD, backward.stage - 1, backward.micro), dy)
        step.store_outputs(forward, x, saved_forward)

    def _run_turn(self, turn: list[tuple[Callable[[LayerPass], None], LayerPass]]) -> None:
        """The passes of two layers at the same time, or of one alone."""
        for _, each in turn:
            if each.before is not None:
                self.zero.before_pass(each.before)
        runs = [partial(_run_traced, run, each) for run, each in turn]
        if len(runs) == 2:
            self.run_overlapped(*runs)
        else:
            runs[0]()
        for _, each in turn:
            if each.after is not None:
                self.zero.after_pass(each.after)


def _run_traced(run: Callable[[LayerPass], None], each: LayerPass) -> None:
    with named(each.label):
        run(each)
