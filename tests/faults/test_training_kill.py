"""kill -9 a training process again and again: what is on disk always loads, and the run ends with
the bits of an undisturbed one.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import torch
from programs import Program

from megatron.checkpoint.manifest import list_iterations
from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.observe.tracking import read_metrics

ITERATIONS = 100
FLAGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS}
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --log-interval 1
--eval-interval 40 --eval-iters 1 --save-interval 5""".split()


def start(folder: Path) -> Program:
    flags = [*FLAGS, "--save", str(folder), "--load", str(folder)]
    return Program(flags, folder.with_suffix(".log"))


def outcome(folder: Path) -> tuple[dict, list]:
    """(final tensors, losses and gradient norms by iteration)."""
    with Checkpoint(find_checkpoint(folder)) as checkpoint:
        assert checkpoint.state["iteration"] == ITERATIONS
        checkpoint.verify()
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
    rows = read_metrics(folder / "metrics.jsonl")
    return tensors, [(row["iteration"], row["lm loss"], row["grad-norm"]) for row in rows]


def test_killed_runs_end_as_the_undisturbed_one(tmp_path):
    undisturbed = start(tmp_path / "a")
    assert undisturbed.end() == 0, undisturbed.output
    generator = random.Random(3)
    newest = 0
    for _ in range(2):
        process = start(tmp_path / "b")
        # kill only after progress, so that the test ends
        while (now := max(list_iterations(tmp_path / "b"), default=0)) <= newest:
            assert process.is_alive(), "the run ended before it could be killed twice"
            time.sleep(0.01)
        newest = now
        time.sleep(generator.uniform(0, 0.2))
        process.kill(signal.SIGKILL)
        assert process.end() == -signal.SIGKILL, process.output
    last = start(tmp_path / "b")
    assert last.end() == 0, last.output
    tensors, rows = outcome(tmp_path / "a")
    killed_tensors, killed_rows = outcome(tmp_path / "b")
    assert rows == killed_rows and len(rows) == ITERATIONS
    assert all(torch.equal(tensors[name], killed_tensors[name]) for name in tensors)
