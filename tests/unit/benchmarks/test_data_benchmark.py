"""The data benchmark: rows are judged from the runs it keeps."""

from __future__ import annotations

import pytest
from megatron.benchmarks import data


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
