"""The measurement of checkpoints: goals are judged."""

from __future__ import annotations

import pytest
from megatron.benchmarks import checkpoint as tool


def document(ours: float, stall: float, others: float = 0.0) -> dict:
    """Seven rounds in which raw writes take 1 s, torch.save and DCP 2 s, a copy 0.5 s."""
    times = {
        tool.RAW: (1.0, 1.0),
        tool.OURS: (ours, ours),
        tool.ASYNC: (3.0, stall),
        tool.COPY: (0.5, 0.5),
        "torch.save": (2.0, 2.0),
        "DCP": (2.0, 2.0),
    }
    runs = [
        {"system": system, "round": index, "total": total, "stall": held, "others_cores": others}
        for index in range(7)
        for system, (total, held) in times.items()
    ]
    return {"tmpfs, 1 process": {"place": "tmpfs", "quiet": 0.2, "runs": runs}}


TIMES = {"torch.save's time by ours", "DCP's time by ours"}
STALL = {"stall by memcpy of the shard"}


@pytest.mark.parametrize(
    "ours, stall, others, passed",
    [
        (1.2, 0.7, 0.0, {"time by raw pwrite's"} | TIMES | STALL),
        (1.3, 0.7, 0.0, TIMES | STALL),
        (1.6, 0.8, 0.0, set()),
        (1.2, 0.7, 0.5, set()),
    ],
)
def test_goals(ours, stall, others, passed):
    rows = tool.verdicts(document(ours, stall, others))
    assert len(rows) == 4 and {row["what"] for row in rows if row.get("passed")} == passed
