"""kill -9 a training process: what is on disk loads, and the run ends with the bits of an
undisturbed one.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import torch
from programs import Program

from megatron.checkpoint.manifest import list_iterations
from megatron.checkpoint.reader import open_checkpoint
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
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.state["iteration"] == ITERATIONS
        checkpoint.verify()
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
    rows = read_metrics(folder / "metrics.jsonl")
    return tensors, [(row["iteration"], row["lm loss"], row["grad-norm"]) for row in rows]


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path):
    undisturbed = start(tmp_path / "a")
    assert undisturbed.end() == 0, undisturbed.output
    process = start(tmp_path / "b")
    # kill only after progress, so that the last run resumes
    while not list_iterations(tmp_path / "b"):
        assert process.is_alive(), "the run ended before it could be killed"
        time.sleep(0.01)
    time.sleep(0.1)
    process.kill(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL, process.output
    last = start(tmp_path / "b")
    assert last.end() == 0, last.output
    tensors, rows = outcome(tmp_path / "a")
    killed_tensors, killed_rows = outcome(tmp_path / "b")
    assert rows == killed_rows and len(rows) == ITERATIONS
    assert all(torch.equal(tensors[name], killed_tensors[name]) for name in tensors)
