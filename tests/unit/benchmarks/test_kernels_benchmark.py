"""The measurement of kernels, in small shapes: every row of ours has a time, a wrong result is a
fault, rows that were not run are marked.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.benchmarks import kernels as tool
from megatron.benchmarks.peers import kernel_cases, one_call

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


def test_no_case_of_attention_begins_after_the_deadline(monkeypatch):
    monkeypatch.setattr(kernel_cases, "_attention_calls", mock.Mock(side_effect=AssertionError))
    bench = tool.Bench(torch.device("cpu"), True, deadline=0.0)
    tool.PARTS["attention"](bench)
    assert {(row.role, row.fault) for row in bench.rows} == {("kernel", "not run: out of time")}


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


class Timeline:
    """A device that works off a queue, and the host that fills it: seconds of either."""

    def __init__(self):
        self.host = self.device = 0.0

    def launch(self, kernel: float) -> float:
        """The second at which the kernel ends."""
        self.host += 10e-6
        self.device = max(self.device, self.host) + kernel
        return self.device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.launch(0.0))
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda stop: 1e3 * (stop.at - event.at)
        return event


@pytest.mark.parametrize("launches, host, waits", [(1, 90e-6, 0), (40, 90e-6, 0), (2, 90e-6, 1)])
def test_host_time_is_not_counted_as_kernel_time(monkeypatch, launches, host, waits):
    """A call of `launches` kernels of 50 us, before each of which the host works; after the first
    of them it may wait for the device.
    """
    line = Timeline()
    monkeypatch.setattr(torch.cuda, "Event", line.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: line.launch(cycles / 1.8e9))
    once = one_call.OneCall(torch.device("cpu"), tiny=True)
    once.device = torch.device("cuda")

    def call():
        for index in range(launches):
            line.host += host
            line.launch(50e-6)
            if index < waits:
                line.synchronize()

    # behind the wait each launch costs the host's time as well
    expected = 50e-6 * launches + (host + 2 * 10e-6) * waits
    assert once.milliseconds(call) == pytest.approx(1e3 * expected, abs=0.011)
