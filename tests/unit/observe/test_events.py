"""events.jsonl and what is made of it at the end of a run: every save is one event, and wandb's
summary holds the goodput of the files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from megatron.tools._report.goodput_account import goodput, read_events
from megatron.tools._report.runs import load_runs
from unit.observe.wandb_files import records, values

from megatron.observe.events import EventLog, Timers
from pretrain_gpt import main

RUN = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
--micro-batch-size 2 --global-batch-size 2 --train-iters 12 --mock-data --lr 1e-2
--tokenizer-type NullTokenizer --vocab-size 49 --log-interval 1 --eval-interval 6 --eval-iters 1
--save-interval 4""".split()


def train(folder: Path, *flags: str) -> None:
    assert main([*RUN, "--save", str(folder), "--load", str(folder), *flags]) == 0


@pytest.mark.parametrize("mode", [(), ("--async-save",)])
def test_every_save_is_one_event(tmp_path: Path, mode: tuple[str, ...]):
    """At an exit, at its interval, at the end, and none of a start that has nothing to do. What is
    waited for at the end is counted apart.
    """
    train(tmp_path, "--exit-interval", "6", *mode)
    train(tmp_path, *mode)
    train(tmp_path, *mode)
    events = read_events(tmp_path / "events.jsonl")
    saved = Counter(row["iteration"] for row in events if row["event"] == "checkpoint")
    assert saved == {4: 1, 6: 1, 8: 1, 12: 1}
    waited = [row["iteration"] for row in events if row["event"] == "checkpoint-wait"]
    assert waited == ([6, 12] if mode else [])
    (run,) = load_runs([str(tmp_path)])
    marks = Counter(mark.iteration for mark in run.marks if mark.kind == "checkpoint")
    assert marks == saved
    found = goodput(tmp_path)
    held = sum(
        row["seconds"] for row in events if row["event"] in ("checkpoint", "checkpoint-wait")
    )
    steps = sum(row.get("checkpoint", 0.0) for row in events if row["event"] == "steps")
    assert found.losses["checkpoint"] == pytest.approx(held + steps)


def test_a_skip_that_is_read_one_step_late_is_in_the_next_event(tmp_path: Path):
    """As on a GPU, where a loss scale that is too large skips all of the first steps."""
    log = EventLog(tmp_path, 0, Timers())
    log.step(1)
    log.skipped = 4
    assert log.goodput(4) == {"goodput": 0.0, "goodput-since-start": 0.0}
    log.steps(4)
    log.steps(6)
    log.close()
    steps = [row for row in read_events(tmp_path / "events.jsonl") if row["event"] == "steps"]
    assert [(row["count"], row.get("skipped", 0)) for row in steps] == [(1, 0), (3, 3), (2, 1)]


def test_goodput_is_in_the_summary_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over all starts, with its losses, from the files."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for flags in (["--exit-interval", "6"], []):
        train(tmp_path, "--wandb-project", "p", *flags)
        found, summary = goodput(tmp_path), {}
        for record in records(tmp_path, "summary"):  # the last one counts
            summary |= values(record.update)
        expected = {
            "goodput/share": found.productive / found.wall,
            "goodput/starts": found.starts,
            "goodput/wall": found.wall,
            **{f"goodput/{cause}": seconds for cause, seconds in found.rows()},
        }
        shown = {name: value for name, value in summary.items() if name.startswith("goodput/")}
        assert shown == pytest.approx(expected)
    assert found.starts == 2 and found.productive > 0 < found.losses["checkpoint"]
