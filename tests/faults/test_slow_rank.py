"""A rank of four that is stopped again and again is named in the console and in metrics.jsonl, and
while nothing is wrong none is.

`campaigns/stragglers/stragglers.py` is stricter, and takes half an hour.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.tools._report.metrics_file import read_metrics

from megatron.config.arguments import parse_arguments
from megatron.training import pretrain

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-3 --eval-iters 0
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --log-interval 16""".split()
STOPPED = 3  # rank
STOP, RUN = 0.06, 0.04  # seconds: clear even where four ranks share two busy cores
ENOUGH = 40  # log intervals after which a rank counts as not named


def train(flags: list[str], folder: str) -> int:
    """A run on this rank; the exit code."""
    parsed = parse_arguments([*FLAGS, *flags])
    with (
        mock.patch.object(pretrain, "disconnect", lambda: None),  # the world lives on
        open(Path(folder, f"log{dist.get_rank()}"), "w") as log,
        contextlib.redirect_stdout(log),
    ):
        return pretrain.pretrain(parsed.config, parsed.notes)


def rows_until(
    metrics: Path, running: threading.Thread, begun: int, named: int | None
) -> list[dict]:
    """The rows after the first `begun`: six, or up to the one that names a rank."""
    while True:
        assert running.is_alive(), "the run has ended"
        rows = read_metrics(metrics)[begun:] if metrics.exists() else []
        if len(rows) >= (6 if named is None else ENOUGH):
            return rows
        if named is not None and rows and rows[-1].get("slowest-rank") == named:
            return rows
        time.sleep(0.02)


def stop_now_and_then(process: int, over: threading.Event) -> None:
    while not over.is_set():
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOP)
        os.kill(process, signal.SIGCONT)
        time.sleep(RUN)


@pytest.mark.full
def test_a_slow_rank_is_named(gloo_world, tmp_path):
    world, results = gloo_world(4), []
    metrics = tmp_path / "metrics.jsonl"
    world.run(dist.get_rank)  # the processes are there
    pids = [process.pid for process in world.processes]
    flags = ["--metrics-file", str(metrics)]

    def run() -> None:
        results.append(world.run(train, flags, str(tmp_path), timeout=1500.0))

    running = threading.Thread(target=run)
    running.start()
    try:
        clean = rows_until(metrics, running, 0, None)
        over = threading.Event()
        stopping = threading.Thread(target=stop_now_and_then, args=(pids[STOPPED], over))
        stopping.start()
        stopped = rows_until(metrics, running, len(clean), STOPPED)
        over.set()
        stopping.join()
    finally:
        os.kill(pids[0], signal.SIGUSR1)
        running.join()
    assert results == [[85] * 4]
    assert not any("slowest-rank" in row for row in clean)
    assert all(row["rank-time-min"] <= row["rank-time-median"] for row in clean)
    assert stopped[-1].get("slowest-rank") == STOPPED
    assert f"| slowest rank {STOPPED} (" in (tmp_path / "log0").read_text()


def test_switched_off(gloo_world, tmp_path):
    """Nothing is sent, measured or logged."""
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--metrics-file", str(metrics), "--no-log-straggler", "--train-iters", "2"]
    assert gloo_world(2).run(train, flags, str(tmp_path)) == [0, 0]
    (row,) = read_metrics(metrics)
    assert not any(name.startswith(("rank-time", "slowest-rank")) for name in row)
