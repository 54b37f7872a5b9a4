"""The measurement of checkpoints: turns are timed and sized, memory of process trees is seen, goals
are judged, and tables go where they belong.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from megatron.benchmarks import checkpoint as tool
from megatron.benchmarks import parallel_write

RANK_BYTES = 384 * 16**2 + 768  # --hidden 16: matrices and norms


@pytest.mark.full
def test_a_measurement(tmp_path):
    out, table = tmp_path / "out.json", tmp_path / "page.md"
    table.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    words = ["--peers", str(tmp_path), "--out", str(out), "--table", str(table), "--systems", *SOME]
    sizes = "--processes 2 --places tmpfs --hidden 16 --rounds 1 --patience 0 --quiet 99"
    tool.main([*words, *sizes.split()])
    [(name, measured)] = json.loads(out.read_text())["settings"].items()
    assert name == "tmpfs, 2 processes"
    for kind in ("first", "memory", "runs"):
        assert [run["system"] for run in measured[kind]] == SOME
    for run in measured["runs"]:
        assert 0 < run["stall"] <= run["total"] < 60 and run["state"] == RANK_BYTES
        assert len(run["bytes"]) == 2
        assert all(run["state"] <= size < run["state"] + 65536 for size in run["bytes"])
    text = table.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| tmpfs, 2 processes | ours, async |" in text


SOME = ["raw pwrite", "ours", "ours, async"]


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


@pytest.mark.full
def test_who_writes_what(tmp_path, monkeypatch):
    """Forked processes save; the picture is XML and the table has a line for each way."""
    monkeypatch.setattr(parallel_write, "RANKS", 4)
    out, picture = tmp_path / "out.json", tmp_path / "picture.svg"
    words = f"--hidden 32 --zero-stages 0 --rounds 1 --disk {tmp_path} --out {out}"
    parallel_write.main([*words.split(), "--picture", str(picture)])
    runs = json.loads(out.read_text())["runs"]
    sizes = {run["mode"]: run["bytes"] for run in runs}
    assert [sum(map(bool, sizes[mode])) for mode in ("owner", "balanced")] == [2, 4]
    # 2 headers more
    assert parallel_write.imbalance(sizes["owner"]) > 1.9
    assert abs(sum(sizes["owner"]) / sum(sizes["balanced"]) - 1) < 0.05
    ElementTree.parse(picture)
    assert "| 0 | owner | 2 of 4 |" in parallel_write.table(runs)
