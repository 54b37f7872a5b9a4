"""kill -9 a training process again and again: what is on disk always loads, and the run ends with
the bits of an undisturbed one.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.observe.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --global-batch-size 4 --train-iters 160
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --log-interval 1
--eval-interval 40 --eval-iters 1 --save-interval 5""".split()


def start(folder: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *FLAGS,
        "--save",
        str(folder),
        "--load",
        str(folder),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)


def outcome(folder: Path) -> tuple[dict, list]:
    """(final tensors, losses and gradient norms by iteration)."""
    with Checkpoint(find_checkpoint(folder)) as checkpoint:
        assert checkpoint.state["iteration"] == 160
        checkpoint.verify()
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
    return tensors, [
        (row["iteration"], row["lm loss"], row["grad-norm"])
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_killed_runs_end_as_the_undisturbed_one(tmp_path):
    undisturbed = start(tmp_path / "a")
    assert undisturbed.wait(120) == 0, undisturbed.stderr.read().decode()
    generator, kills, newest = random.Random(3), 0, -1
    while kills < 2:
        process = start(tmp_path / "b")
        while process.poll() is None and (now := iteration_on_disk(tmp_path / "b")) <= newest:
            time.sleep(0.01)  # kill only after progress, so that the test ends
        if process.poll() is not None:
            raise AssertionError("the run ended before it could be killed twice")
        newest = now
        time.sleep(generator.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, process.stderr.read().decode()
        kills += 1
    last = start(tmp_path / "b")
    assert last.wait(120) == 0, last.stderr.read().decode()
    tensors, rows = outcome(tmp_path / "a")
    killed_tensors, killed_rows = outcome(tmp_path / "b")
    assert rows == killed_rows and len(rows) == 160
    assert all(torch.equal(tensors[name], killed_tensors[name]) for name in tensors)


def iteration_on_disk(folder: Path) -> int:
    """Newest complete checkpoint by name, -1 without one."""
    return max((int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*")), default=-1)
