"""Our side of benchmarks/host_time.py: pretrain_gpt.py's own run, which takes its steps as turns.py
defines.

    python host_ours.py --num-layers 4 ...     # the flags of pretrain_gpt.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from turns import Turns  # noqa: E402
from zero_ours import Ended  # noqa: E402

import pretrain_gpt  # noqa: E402
from megatron.parallel.pipeline import Pipeline  # noqa: E402
from megatron.training import loop, step  # noqa: E402


def main() -> int:
    turns = Turns()
    forward_backward, finish_step = step.forward_backward, loop.finish_step
    forward = turns.timed("forward", Pipeline.forward)
    backward = turns.timed("backward", Pipeline.backward)

    def on_step(run, batch):
        if next(turns, None) is None:
            raise Ended
        return forward_backward(run, batch)

    def on_finish_step(run, interval):
        is_pending = interval.pending is not None
        finish_step(run, interval)
        if is_pending:
            turns.note(interval.last.loss)

    update = turns.timed("optimizer", step.update)
    with (
        mock.patch.multiple(step, forward_backward=on_step, update=update),
        mock.patch.object(loop, "finish_step", on_finish_step),
        mock.patch.multiple(Pipeline, forward=forward, backward=backward),
    ):
        try:
            return pretrain_gpt.main(sys.argv[1:])
        except Ended:
            return 0


if __name__ == "__main__":
    sys.exit(main())
