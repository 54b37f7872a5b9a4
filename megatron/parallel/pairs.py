"""A backward pass of one micro-batch and a forward pass of a later one, layer by layer at the same
time: the all-to-alls of one travel while the other computes (--overlap-moe-expert-parallel-comm).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from megatron.distributed.collectives import profiler_range
from megatron.parallel.layer_runner import Saved
from megatron.parallel.pipeline import LayerPass, Pipeline, StepState, Task
from megatron.parallel.schedule import Kind, Message


class PairedPipeline(Pipeline):
    """A pipeline that also runs pairs. `run_overlapped` runs the two passes of two layers."""

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

        def run(each: LayerPass) -> None:
            """One layer of one of the two."""
            nonlocal x, dy
            with profiler_range(each.label):
                if each.kind is Kind.FORWARD:
                    x, saved_by_layer = self.runner.forward(
                        each.layer, x, micro_batch, step.scalars
                    )
                    saved_forward.append(saved_by_layer)
                elif each.kind is Kind.REBUILD:
                    self.rebuild(backward.stage, each.layer, saved)
                else:
                    # a pair is never split: the weight gradients belong to this pass
                    dy, _ = self.runner.backward(
                        each.kind, each.layer, dy, saved.pop(), step.aux_scale
                    )

        self._run_turns(task.passes, run)

        # Both results are handed over when both passes are over, in the order of the schedule.
        if backward.stage > 0:
            step.messages.put(Message(Kind.BACKWARD, backward.stage - 1, backward.micro), dy)
        step.store_outputs(forward, x, saved_forward)

    def _run_turns(self, passes: Sequence[LayerPass], run: Callable[[LayerPass], None]) -> None:
        """Two layers at a time, until one of the two stages is over: they may have different
        numbers of layers.
        """
        forwards = [each for each in passes if each.kind is Kind.FORWARD]
        backwards = [each for each in passes if each.kind is not Kind.FORWARD]
        for both in zip_longest(backwards, forwards):
            turn = [each for each in both if each is not None]
            for each in turn:
                for call in each.before:
                    call()
            if len(turn) == 2:
                self.run_overlapped(*(partial(run, each) for each in turn))
            else:
                run(turn[0])
            for each in turn:
                for call in each.after:
                    call()
