"""kill -9 a training process: what is on disk loads, and the run ends with the bits of an
undisturbed one.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import Program, without_plan

from megatron.checkpoint.manifest import list_iterations
from megatron.checkpoint.reader import open_checkpoint
from megatron.observe.tracking import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "checkpoint"))

from reshard_cases import start

pytestmark = pytest.mark.usefixtures("one_thread")

ITERATIONS = 40
FLAGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS}
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --log-interval 1
--eval-interval 20 --eval-iters 1 --save-interval 5""".split()


def outcome(folder: Path) -> tuple[dict, list]:
    """(final tensors, losses and gradient norms by iteration)."""
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.state["iteration"] == ITERATIONS
        checkpoint.verify()
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
    rows = read_metrics(folder / "metrics.jsonl")
    return tensors, [(row["iteration"], row["lm loss"], row["grad-norm"]) for row in rows]


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path):
    runs = {
        name: (*FLAGS, *("--save", str(tmp_path / name), "--load", str(tmp_path / name)))
        for name in ("undisturbed", "killed")
    }
    process = Program(runs["killed"], tmp_path / "killed.log")
    # kill only after progress, so that the last run resumes
    while not list_iterations(tmp_path / "killed"):
        assert process.is_alive(), "the run ended before it could be killed"
        time.sleep(0.01)
    time.sleep(0.1)
    process.kill(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL, process.output
    for flags in runs.values():
        with without_plan():
            shown = start(flags)
        assert shown.endswith("exit code 0"), shown
    (tensors, rows), (killed_tensors, killed_rows) = (outcome(tmp_path / name) for name in runs)
    assert rows == killed_rows and len(rows) == ITERATIONS
    assert all(torch.equal(tensors[name], killed_tensors[name]) for name in tensors)
