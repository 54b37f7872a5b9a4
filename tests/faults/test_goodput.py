"""A run that is killed three times, ended by a signal once and passes over steps of fp16 ends with
the bits of an undisturbed one, and explains its wall time within 1%, from its files alone; without
one event it does not.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from megatron.tools import goodput as tool
from megatron.tools._advisor import PlanningAdvisor
from megatron.tools._report.goodput_account import CAUSES, TOLERANCE, account, goodput, read_events
from megatron.tools._report.metrics_file import read_metrics
from programs import Program

from megatron.checkpoint.reader import open_checkpoint
from megatron.observe.events import EventLog, Timers

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --global-batch-size 4 --train-iters 60
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --log-interval 5
--eval-interval 30 --eval-iters 2 --save-interval 10
--fp16 --initial-loss-scale 4294967296""".split()
ENDS = [  # behind which iteration, the signal, the exit code
    (12, signal.SIGKILL, -signal.SIGKILL),
    (22, signal.SIGKILL, -signal.SIGKILL),
    (33, signal.SIGUSR1, 85),
    (42, signal.SIGKILL, -signal.SIGKILL),
]


def start(folder: Path) -> Program:
    """One start of the run."""
    flags = [*FLAGS, "--save", str(folder), "--load", str(folder)]
    return Program(flags, folder.with_suffix(".log"))


def has_logged(folder: Path, iteration: int) -> bool:
    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() and path.stat().st_size else []
    return bool(rows) and rows[-1]["iteration"] >= iteration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run with all that can happen to it."""
    folder = tmp_path_factory.mktemp("goodput") / "run"
    for iteration, number, code in ENDS:
        program = start(folder)
        while program.is_alive() and not has_logged(folder, iteration):
            time.sleep(0.005)
        program.kill(number)
        assert program.end() == code, program.output
        time.sleep(0.3)  # the queue of a cluster
    program = start(folder)
    assert program.end() == 0, program.output
    return folder


def test_it_adds_up(folder, capsys):
    found = goodput(folder)
    assert found.starts == 5 and found.adds_up
    assert list(found.losses) == list(CAUSES)
    assert sum(seconds for _, seconds in found.rows()) == pytest.approx(found.wall)
    assert abs(found.other) <= TOLERANCE * found.wall
    # all that happened has cost something
    assert all(seconds > 0 for seconds in found.losses.values())
    assert found.losses["restart"] > 4 * 0.3
    assert found.replayed > 0
    # as many as the last row of metrics has
    assert read_metrics(folder)[-1]["skipped-train-samples"] == 4 * found.skipped >= 8
    events = read_events(folder / "events.jsonl")
    assert [row["code"] for row in events if row["event"] == "end"] == [85, 0]
    assert tool.main([str(folder)]) == 0
    assert "5 starts" in capsys.readouterr().out
    # what the run itself has logged last, a moment before its end
    share = found.productive / found.wall
    assert read_metrics(folder)[-1]["goodput"] == pytest.approx(share, abs=0.05)


def test_it_ends_as_the_undisturbed_run(folder, tmp_path):
    """The final weights and optimizer state, and every line's loss and gradient norm."""
    plain = start(tmp_path / "plain")
    assert plain.end() == 0, plain.output
    ends = []
    for each in (folder, tmp_path / "plain"):
        with open_checkpoint(each) as checkpoint:
            checkpoint.verify()
            tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
        # as text: NaN is equal to itself
        names = ("iteration", "lm loss", "grad-norm")
        rows = [row for row in read_metrics(each) if "lm loss" in row]
        ends.append((tensors, [repr([row[name] for name in names]) for row in rows]))
    (killed, killed_rows), (tensors, rows) = ends
    assert killed_rows == rows and len(rows) == 60 / 5
    assert all(torch.equal(tensors[name], killed[name]) for name in tensors)


def test_unreadable(tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 2
    (tmp_path / "events.jsonl").write_text("nothing\n[1]\n")
    assert tool.main([str(tmp_path)]) == 2
    assert "not an events file" in capsys.readouterr().err


def row(event: str, time: float, iteration: int, seconds: float = 0.0, **fields) -> dict:
    return {"event": event, "time": time, "iteration": iteration, "seconds": seconds, **fields}


def test_what_is_counted_as_what():
    """By hand: 4 steps of which 2 are made again, one skipped, one pause of each kind."""
    events = [
        row("start", 100.0, 0),
        row("ready", 110.0, 0, 10.0),
        row("steps", 115.0, 1, 5.0, count=1, first=True),
        row("steps", 118.0, 4, 3.0, count=3, data=0.3),  # kept up to 2
        row("start", 130.0, 2),  # killed; 12 s later
        row("restore", 134.0, 2, 4.0),
        row("ready", 140.0, 2, 6.0),
        row("steps", 141.0, 3, 1.0, count=1, first=True),
        row("steps", 143.0, 5, 2.0, count=2, skipped=1),
        row("evaluation", 145.0, 5, 2.0),
        row("checkpoint", 146.0, 5, 1.0),
        row("end", 146.0, 5, code=0),
    ]
    found = account(events)
    usual = (0.9 + 1.0) / 2
    assert found.wall == 46 and found.starts == 2
    assert found.replayed == pytest.approx(2) and found.skipped == 1
    assert found.losses == pytest.approx(
        {
            "restart": 12,
            "start-up": 16,
            "restore": 4,
            "warm-up": (5 - usual) + (1 - usual),
            "data": 0.1,
            "checkpoint": 1,
            "evaluation": 2,
            "lost-steps": 2 + 1,
        }
    )
    assert found.productive == pytest.approx(usual * 2 + 0.9 + 1)
    assert found.other == pytest.approx(0)
    # a kill between two events: rows of metrics are signs of life
    killed = account(events[:5], [{"iteration": 6, "timestamp": 120.0}]).losses
    assert (killed["lost-steps"], killed["restart"]) == pytest.approx((4, 10))


def two_starts() -> list[dict]:
    """A run of two starts of 46 s in all."""
    return [
        row("start", 100.0, 0),
        row("ready", 110.0, 0, 10.0),
        row("steps", 115.0, 1, 5.0, count=1, first=True),
        row("steps", 118.0, 4, 3.0, count=3),
        row("end", 118.0, 4, code=85),
        row("start", 118.0, 4),
        row("ready", 120.0, 4, 2.0),
        row("steps", 125.0, 5, 5.0, count=1, first=True),
        row("evaluation", 128.0, 5, 3.0),
        row("steps", 146.0, 10, 18.0, count=5),
        row("end", 146.0, 10, code=0),
    ]


def write_events(folder: Path, events: list[dict]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_without_an_event_it_does_not_add_up(tmp_path, capsys):
    events = two_starts()
    del events[9]
    write_events(tmp_path, events)
    assert not goodput(tmp_path).adds_up and tool.main([str(tmp_path)]) == 1
    assert "events are missing" in capsys.readouterr().out


def test_clocks_that_differ():
    """The second start on a node an hour behind, whose clock is set back twice: the same
    goodput.
    """
    events = two_starts()
    right = account(events)
    for first, seconds in ((5, 3600.0), (6, 5000.0), (10, 0.5)):
        for event in events[first:]:
            event["time"] -= seconds
    found = account(events)
    assert found.adds_up and found.wall == pytest.approx(right.wall, rel=1e-6) == 46
    assert dict(found.rows()) == pytest.approx(dict(right.rows()), abs=1e-4)


def test_a_run_behind_a_node_whose_clock_is_ahead(tmp_path, monkeypatch):
    """It logs a goodput between 0 and 1, also when its own clock is set back."""
    path = tmp_path / "events.jsonl"
    ahead = float(round(time.time()) + 3600)
    events = row("start", ahead - 10, 0), row("end", ahead, 3, code=85)
    write_events(tmp_path, events)
    log = EventLog(tmp_path, 3, Timers(), PlanningAdvisor().goodput)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    log.ready(3)
    log.step(4)
    log.end(5, 0, "over")
    assert log.wall_before == pytest.approx(10, abs=0.01)
    assert all(0 <= share <= 1 for share in log.goodput(5).values())
    log.close()
    assert len(read_events(path)) == 2 + 5
    found = goodput(tmp_path)
    assert 0 <= found.share <= 1 and all(seconds >= 0 for seconds in found.losses.values())
