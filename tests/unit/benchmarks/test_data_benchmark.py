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


@pytest.mark.parametrize("ratio", [5.01, 1.5, 0.5])
def test_rows_are_judged_by_their_goals(ratio):
    seconds = {"ours": 1.0, "mcore": ratio, "hfds": ratio}
    runs = [
        {"case": case, "pair": pair, "who": who, "seconds": each, "start": each, "tokens": 1}
        for pair in range(7)
        for case in data.GOALS
        for who, each in seconds.items()
    ]
    rows = data.summary(runs)
    judged = {(row["case"], row["peer"]): row["passed"] for row in rows}
    goals = {
        (case, peer): ratio >= goal
        for case, peers in data.GOALS.items()
        for peer, goal in peers.items()
    }
    assert judged == goals
