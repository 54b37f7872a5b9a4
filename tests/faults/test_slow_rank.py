"""A rank of four that is stopped again and again, and one whose batches come late, are named in the
console and in metrics.jsonl, and while nothing is wrong none is.

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
from megatron.data.loader import Source
from megatron.observe.stragglers import SECTIONS
from megatron.training import pretrain

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-3 --eval-iters 0
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --log-interval 16""".split()
STOPPED, LATE = 3, 1  # ranks
STOP, RUN = 0.06, 0.04  # seconds: clear even where four ranks share two busy cores
ENOUGH = 40  # log intervals after which a rank counts as not named


def train(flags: list[str], folder: str) -> int:
    """A run on this rank; the exit code. Rank LATE waits for its batches while there is a file
    `late`.
    """
    batch, late = Source.batch, Path(folder, "late")

    def late_batch(source: Source, first: int, count: int):
        if dist.get_rank() == LATE and late.exists():
            time.sleep(0.1)
        return batch(source, first, count)

    parsed = parse_arguments([*FLAGS, *flags])
    with (
        mock.patch.object(pretrain, "disconnect", lambda: None),  # the world lives on
        mock.patch.object(Source, "batch", late_batch),
        open(Path(folder, f"log{dist.get_rank()}"), "w") as log,
        contextlib.redirect_stdout(log),
    ):
        return pretrain.pretrain(parsed.config, parsed.notes)


class Watched:
    """What a run logs, line by line."""

    def __init__(self, path: Path, running: threading.Thread):
        self.path, self.running = path, running

    def rows(self) -> list[dict[str, float]]:
        assert self.running.is_alive(), "the run has ended"
        return read_metrics(self.path) if self.path.exists() else []

    def until(self, lines: int, rank: int | None = None) -> list[dict[str, float]]:
        """The rows from now on, when there are `count` or a rank is named."""
        begun = len(self.rows())
        while len(rows := self.rows()[begun:]) < lines:
            if rank is not None and rows and rows[-1].get("slowest-rank") == rank:
                return rows
            time.sleep(0.02)
        return rows


def stop_now_and_then(process: int, over: threading.Event) -> None:
    while not over.is_set():
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOP)
        os.kill(process, signal.SIGCONT)
        time.sleep(RUN)


@pytest.mark.full
def test_slow_ranks_are_named(gloo_world, tmp_path):
    world, results = gloo_world(4), []
    metrics = tmp_path / "metrics.jsonl"
    world.run(dist.get_rank)  # the processes are there
    pids = [process.pid for process in world.processes]
    running = threading.Thread(
        target=lambda: results.append(
            world.run(train, ["--metrics-file", str(metrics)], str(tmp_path), timeout=1500.0)
        )
    )
    running.start()
    watched = Watched(metrics, running)
    try:
        clean = watched.until(6)
        over = threading.Event()
        stopping = threading.Thread(target=stop_now_and_then, args=(pids[STOPPED], over))
        stopping.start()
        stopped = watched.until(ENOUGH, STOPPED)
        over.set()
        stopping.join()
        (tmp_path / "late").touch()
        late = watched.until(ENOUGH, LATE)
    finally:
        os.kill(pids[0], signal.SIGUSR1)
        running.join()
    assert results == [[85] * 4]
    assert not any("slowest-rank" in row for row in clean)
    assert all(row["rank-time-min"] <= row["rank-time-median"] for row in clean)
    assert stopped[-1].get("slowest-rank") == STOPPED
    assert late[-1].get("slowest-rank") == LATE
    assert SECTIONS[late[-1]["slowest-rank-section"]] == "data"
    assert len(late) <= 3  # two whole intervals, and that in which it became slow
    log = (tmp_path / "log0").read_text()
    assert f"| slowest rank {STOPPED} (" in log and f"| slowest rank {LATE} (" in log


def test_switched_off(gloo_world, tmp_path):
    """Nothing is sent, measured or logged."""
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--metrics-file", str(metrics), "--no-log-straggler", "--train-iters", "2"]
    assert gloo_world(2).run(train, flags, str(tmp_path)) == [0, 0]
    (row,) = read_metrics(metrics)
    assert not any(name.startswith(("rank-time", "slowest-rank")) for name in row)
