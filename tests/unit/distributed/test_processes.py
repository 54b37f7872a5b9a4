"""Real processes: torchrun, tasks with srun's variables, and what they print when a launch goes
wrong.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.distributed.launchers import SRUN_PORTS

ROOT = Path(__file__).resolve().parents[3]
RANK = str(Path(__file__).with_name("rank_process.py"))
CORES = len(os.sched_getaffinity(0))
LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def environment(**values: object) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI"))
    }
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        **{name: str(value) for name, value in values.items()},
    }


def torchrun(
    ranks: int, what: str, *flags: str, **values: object
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        *flags,
        RANK,
        what,
        "0.5",
    ]
    return subprocess.run(
        command, env=environment(**values), capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def srun(tmp_path):
    """`srun(ranks, count, what, minutes)` starts these tasks of a step of `count`. All are killed
    at the end.
    """
    processes: list[subprocess.Popen] = []
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", SRUN_PORTS[job % len(SRUN_PORTS)])):
                break

    def start(
        ranks: list[int], count: int, what: str, minutes: float
    ) -> list[subprocess.Popen[str]]:
        command = [sys.executable, RANK, what, str(minutes), str(tmp_path), str(len(ranks))]
        for rank in ranks:
            variables = environment(
                SLURM_PROCID=rank,
                SLURM_STEP_NUM_TASKS=count,
                SLURM_LOCALID=rank,
                SLURM_NODEID=0,
                SLURM_STEP_TASKS_PER_NODE=count,
                SLURM_JOB_ID=job,
                SLURM_STEP_ID=0,
                SLURM_STEP_NODELIST="localhost",
            )
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=variables,
                )
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def lines(output: str) -> dict[int, dict]:
    """What the ranks printed, by rank."""
    return {shown["rank"]: shown for shown in map(json.loads, output.splitlines())}


def test_torchrun_starts_connects_and_leaves_quietly():
    ended = torchrun(2, "work")
    assert ended.returncode == 0, ended.stderr
    threads = max(1, CORES // 2)
    same = {
        "launcher": "torchrun",
        "sum": 3.0,
        "threads": threads,
        "restarts": "0",
        "timeouts": [30.0, 30.0],
    }
    assert lines(ended.stdout) == {rank: {"rank": rank, **same} for rank in range(2)}
    assert not [
        line
        for line in ended.stderr.splitlines()
        if "OMP_NUM_THREADS" not in line and line.strip("*")
    ], ended.stderr


@pytest.mark.full
def test_a_restart_by_torchrun_meets_again():
    """Rank 1 ends after the first rendezvous; the second one happens in the same store."""
    ended = torchrun(2, "restart", "--max-restarts=1", OMP_NUM_THREADS=1)
    assert ended.returncode == 0, ended.stderr
    shown = lines(ended.stdout)
    assert [
        (shown[rank]["restarts"], shown[rank]["sum"], shown[rank]["threads"]) for rank in (0, 1)
    ] == [("1", 3.0, 1)] * 2


@pytest.mark.full
def test_a_flag_that_differs_is_one_message():
    """Of rank 0; torchrun ends the others before they print, and counts them as failed neither."""
    ended = torchrun(3, "flags")
    message = (
        "the ranks were started differently: --lr: 0.1 on rank 0, 0.2 on rank 1. Give every "
        "rank the same flags and software"
    )
    assert ended.returncode and ended.stderr.count(message) == 1, ended.stderr
    assert "exitcode  : 2" in ended.stderr and "NO_OTHER_FAILURES" in ended.stderr, ended.stderr
    assert 'File "' not in ended.stderr.partition(message)[0], ended.stderr


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
    assert not any(
        word in ended.stderr for word in ("Traceback", "rank 1", "rank 2", "SIGTERM", "exit code")
    ), ended.stderr


@pytest.mark.full
def test_a_fault_of_the_program_keeps_its_traceback_rank_and_code():
    """On one rank of two: an exception that is no message to the user, whatever its class."""
    ended = torchrun(2, "bug")
    assert (
        ended.returncode == 1
        and "exitcode  : 1" in ended.stderr
        and "local_rank: 1" in ended.stderr
    ), ended.stderr
    assert (
        "ValueError: a fault of ours" in ended.stderr
        and "[raised on rank 1]" in ended.stderr
        and "rank_process.py" in ended.stderr
    )


@pytest.mark.full
def test_srun_starts_too_and_a_collective_that_hangs_ends_in_time(srun):
    tasks = srun([0, 1], 2, "hang", 0.1)
    shown = lines("".join(task.communicate(timeout=300)[0] for task in tasks))
    assert (
        [shown[rank]["sum"] for rank in range(2)] == [3.0, 3.0]
        and shown[0]["launcher"] == "srun"
        and shown[0]["timeouts"] == [6.0, 6.0]
    )
    assert 5 < shown[1]["waited"] < 200 and shown[1]["threads"] == max(1, CORES // 2)
