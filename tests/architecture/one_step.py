"""Through how much code one training step goes: functions, files, depth and calls of a run in one
process with 2 layers and 2 micro-batches.

    python tests/architecture/one_step.py [-v]

Counted is the third of four steps, from its `train_step` to the next one's. Depth: the most frames
of ours on the stack, from the training loop on.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
OURS = (f"{ROOT}/megatron/", f"{ROOT}/kernels/")
COUNTED = 3
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --eval-iters 0 "
    "--log-interval 100 --attention-dropout 0 --hidden-dropout 0 --train-iters 4"
).split()


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is a function of ours; comprehensions and lambdas are parts of others."""
    code = frame.f_code
    return code.co_filename.startswith(OURS) and not code.co_name.startswith("<")


class Counter:
    """Calls and depth by function, while `active`."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.depth = 0
        self.step = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        if frame.f_code.co_name == "train_step":
            self.step += 1
        if self.step != COUNTED:
            return
        name = frame.f_code.co_filename[len(str(ROOT)) + 1 :]
        self.calls[f"{name}:{frame.f_code.co_qualname}"] += 1
        level, at = 1, frame.f_back
        while at is not None and at.f_code.co_name != "train":
            level += is_ours(at)
            at = at.f_back
        if at is not None:
            self.depth = max(self.depth, level)


def measure() -> Counter:
    """Run the program. Autograd runs backward passes in this thread on a CPU."""
    sys.path.insert(0, str(ROOT))
    import pretrain_gpt
    from megatron.observe import events
    from megatron.training import pretrain

    counter, train = Counter(), pretrain.train

    def watched(run: Any) -> Any:
        sys.setprofile(counter)
        try:
            return train(run)
        finally:
            sys.setprofile(None)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.dict("os.environ", WANDB_MODE="disabled"),
        mock.patch.object(pretrain, "train", watched),
        mock.patch.object(events, "STEPS_EVERY_S", math.inf),  # however long a step takes
    ):
        code = pretrain_gpt.main(FLAGS)
    assert code == 0 and counter.step == COUNTED + 1
    return counter


def totals(counter: Counter) -> tuple[int, int, int, int]:
    """Functions, files, depth and calls."""
    files = {name.split(":")[0] for name in counter.calls}
    return len(counter.calls), len(files), counter.depth, counter.calls.total()


def measured_totals() -> tuple[int, int, int, int]:
    return totals(measure())


def main() -> None:
    """Print functions, files, depth and calls."""
    counter = measure()
    print(*totals(counter))
    if "-v" in sys.argv:
        for name, count in sorted(counter.calls.items()):
            print(f"  {count:4d} {name}")


if __name__ == "__main__":
    main()
