"""pretrain_gpt.py's own run, which takes its steps as turns.py defines. Run by
benchmarks/zero.py.

    python zero_ours.py --zero-stage 2 ...     # the flags of pretrain_gpt.py, with the variables of
    torchrun
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from turns import Turns  # noqa: E402

import pretrain_gpt  # noqa: E402
from megatron.model.gpt import GPTModel  # noqa: E402
from megatron.model.layer import HeadLayer  # noqa: E402
from megatron.parallel.layer_runner import LayerRunner  # noqa: E402
from megatron.training import loop, step  # noqa: E402


class Ended(Exception):
    """No more steps are wanted."""


class Watched:
    """The functions of a run between which a turn looks at the clock and at live bytes."""

    def __init__(self) -> None:
        self.turns = Turns(self.finish)
        self.run = None
        self.forward_backward, self.update, self.finish_step = (
            step.forward_backward,
            step.update,
            loop.finish_step,
        )
        self.micro_batch, self.backward = GPTModel.micro_batch, LayerRunner.backward

    def finish(self) -> None:
        self.run.zero.wait_for_weights()

    def on_step(self, run, batch):
        self.run, self.index = run, 0
        if next(self.turns, None) is None:
            raise Ended
        return self.forward_backward(run, batch)

    def on_micro_batch(self, model, *batch, **settings):
        if self.run is not None:  # the plan makes a micro-batch before the first step
            self.turns.begin_micro_batch(self.index)
            self.index += 1
        return self.micro_batch(model, *batch, **settings)

    def on_backward(self, passes, kind, layer, *arguments):
        if self.run is not None and isinstance(layer, HeadLayer):  # the first of a micro-batch
            self.turns.begin_backward()
        return self.backward(passes, kind, layer, *arguments)

    def on_update(self, *arguments, **settings):
        self.turns.begin_update()
        return self.update(*arguments, **settings)

    def on_finish_step(self, run, interval):
        is_pending = interval.pending is not None
        self.finish_step(run, interval)
        if is_pending:
            self.turns.note(interval.last.loss)


def main() -> int:
    watched = Watched()
    with (
        mock.patch.multiple(step, forward_backward=watched.on_step, update=watched.on_update),
        mock.patch.object(loop, "finish_step", watched.on_finish_step),
        mock.patch.object(GPTModel, "micro_batch", lambda *a, **k: watched.on_micro_batch(*a, **k)),
        mock.patch.object(LayerRunner, "backward", lambda *a: watched.on_backward(*a)),
    ):
        try:
            return pretrain_gpt.main(sys.argv[1:])
        except Ended:
            return 0


if __name__ == "__main__":
    sys.exit(main())
