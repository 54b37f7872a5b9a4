"""Real processes of torchrun, and what they print when a launch goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RANK = str(Path(__file__).with_name("rank_process.py"))
CORES = len(os.sched_getaffinity(0))
LAUNCHER = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
).split()


def environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI"))
    }
    return {**inherited, "CUDA_VISIBLE_DEVICES": ""}


def lines(output: str) -> dict[int, dict]:
    """What the ranks printed, by rank."""
    return {shown["rank"]: shown for shown in map(json.loads, output.splitlines())}


def test_torchrun_starts_connects_and_leaves_quietly():
    command = [sys.executable, *"-m torch.distributed.run --nproc-per-node=2".split(), RANK]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    same = {"launcher": "torchrun", "sum": 3.0, "timeouts": [30.0, 30.0]}
    same["threads"] = max(1, CORES // 2)
    assert lines(ended.stdout) == {rank: {"rank": rank, **same} for rank in range(2)}
    # torchrun's own note, in stars
    written = [line for line in ended.stderr.splitlines() if line.strip("*")]
    assert all("OMP_NUM_THREADS" in line for line in written), ended.stderr


def started(launcher: Path, flags: str) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py on three ranks of a launcher."""
    command = [sys.executable, launcher, "--nproc-per-node", "3", "pretrain_gpt.py", *flags.split()]
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-layer 2", "--num-layers"),
        ("--num-layers 2 --mock-data", "--hidden-size is required"),
    ],
)
@pytest.mark.default("--num-layer 2---num-layers")
def test_under_our_torchrun_a_mistake_is_its_message_and_nothing_else(flags, message):
    ended = started(ROOT / "scripts" / "torchrun.py", flags)
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count(message) == 1, (
        ended.stderr
    )
    others = ("Traceback", "rank 1", "rank 2", "SIGTERM", "exit code")
    assert not any(word in ended.stderr for word in others), ended.stderr
