"""The data benchmark: our side runs, and rows are judged from the runs it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.benchmarks import data
from megatron.benchmarks.peers.data_side import BATCHES, MICRO_BATCH


def run_child(name: str, folder: Path, scratch: Path) -> dict:
    command = [sys.executable, data.SIDE, name, folder, scratch]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_our_side_runs(tmp_path):
    data.write_lines(tmp_path / "integers.jsonl", ["7 " * 1499 + "4000"] * 1000, 1)
    assert run_child("ours/integers", tmp_path, tmp_path)["tokens"] == 1000 * 1501
    for kind in ("bin", "idx", "json"):
        (tmp_path / f"out_text_document.{kind}").rename(tmp_path / f"small_text_document.{kind}")
    loaded = run_child("ours/small", tmp_path, tmp_path)
    assert loaded["start"] > 0 and loaded["samples"] == BATCHES * MICRO_BATCH


def runs_with(ratio: float) -> list[dict]:
    cases = [
        "preprocess, integers",
        "preprocess, SentencePiece",
        "start, first time",
        "start, caches there",
        "start, 4 times the corpus",
    ]
    runs = [
        {"case": case, "pair": pair, "who": who, "seconds": seconds, "start": seconds, "tokens": 1}
        for pair in range(7)
        for case in cases
        for who, seconds in (
            ("ours", 1.0 + pair / 10),
            ("mcore", ratio * (1.0 + pair / 10)),
            ("hfds", ratio * (1.0 + pair / 10)),
        )
    ]
    shares = [("share of SentencePiece", 0.9), ("share of SentencePiece, whole run", 1.0)]
    return runs + [
        {"case": case, "pair": pair, "who": "ours", "seconds": seconds}
        for case, seconds in shares
        for pair in range(7)
    ]


@pytest.mark.parametrize("ratio, passed", [(5.01, True), (1.5, False), (0.5, False)])
def test_rows_are_judged_by_their_goals(ratio, passed):
    runs = runs_with(ratio)
    rows = data.summary(runs)
    assert {(row["case"], row["peer"]) for row in rows} == {
        (case, peer) for case, goals in data.GOALS.items() for peer in goals
    }
    for row in rows:
        assert row["median"] == pytest.approx(ratio) and row["passed"] == (
            passed or ratio >= row["goal"]
        )
    text = data.table(runs, rows)
    assert (
        text.count("LOST") == sum(not row["passed"] for row in rows)
        and "own share of our run with one worker: 90%" in text
    )
    # too few pairs
    assert not any(row["passed"] for row in data.summary([run for run in runs if run["pair"] < 6]))
