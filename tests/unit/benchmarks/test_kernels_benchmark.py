"""The measurement of kernels, in small shapes: every row of ours has a time, and a wrong result is
a fault.
"""

import json
import sys

import pytest
import torch
from megatron.benchmarks import kernels as tool

pytestmark = pytest.mark.full


def test_every_case_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["tool", "--out", str(tmp_path), "--tiny", "--parts", "limits", "experts", "memory"],
    )
    assert tool.main() == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "kernels.json").read_text())
    ours = [row for row in found["rows"] if row["implementation"].startswith("ours")]
    assert len(ours) >= 14 and all(
        row["milliseconds"] > 0 and row["predicted_ms"] > 0 and row["fault"] is None for row in ours
    )
    assert found["limits"].keys() == {"FLOP", "byte"} and found["torch"] == torch.__version__
    assert found["finished"]
    table = (tmp_path / "kernels.md").read_text()
    assert table.count("\n| memory |") + table.count("\n| experts |") == len(found["rows"]) - 2


def test_faults_are_rows():
    bench = tool.Bench(torch.device("cpu"), True, deadline=float("inf"))

    def broken():
        raise RuntimeError("no such kernel\nand more")

    bench.measure("part", "case", {"ours": broken, "peer": lambda: None}, 100.0, "byte")
    with bench.checking("case", "ours"):
        bench.check(torch.ones(4) * 1.01, torch.ones(4))
    assert [row.fault for row in bench.rows] == [
        "RuntimeError: no such kernel",
        None,
        "AssertionError: its result is off by 0.01 of the norm",
    ]
    with bench.checking("case", "ours"):
        bench.check(torch.ones(4) * (1 + 1e-6), torch.ones(4))
    assert len(bench.rows) == 3 and bench.rate(bench.rows[1]) == pytest.approx(
        1e5 / bench.rows[1].milliseconds
    )
