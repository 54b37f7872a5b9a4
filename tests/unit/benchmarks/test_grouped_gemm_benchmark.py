"""The measurement of experts' products: both backends give the same, and every row is kept."""

import json

import pytest
from megatron.benchmarks import grouped_gemm as tool


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "SHAPES", (tool.Shape(3, 4, 16, 8),))
    out = tmp_path / "found.json"
    assert tool.main(["--rounds", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["fp32", "bf16"]
    for row in rows:
        assert row["mflop"] == 2 * 4 * 16 * 16 / 1e6 and len(row["pairs"]) == 2
        ratios = [pair["torch"] / pair["grouped-mm"] for pair in row["pairs"]]
        assert row["verdict"]["median"] == pytest.approx(sum(ratios) / 2)
