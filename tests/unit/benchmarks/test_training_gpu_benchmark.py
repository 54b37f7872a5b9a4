"""The table of training speed on one GPU: both kinds of sides run, here on a CPU, and what was
predicted is what the documents say.
"""

import re
from pathlib import Path

import pytest
from megatron.benchmarks import training_gpu as tool

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "performance.md"
TINY = tool.TINY["tiny"]


@pytest.mark.parametrize("side", ["ours", "ours, compiled", "ours, fp8 blockwise", "plain loop"])
def test_a_cell_is_measured(side):
    found = tool.measure(TINY, side)
    assert len(found["losses"]) == tool.STEPS and found["tokens_per_second"] > 0
    assert found["losses"][0] == pytest.approx(5.5, abs=0.3)  # ln 256, random tokens


def test_what_fails_is_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(tool, "TORCH", "--norm-backend nothing")
    found = tool.measure(TINY, "ours, torch's operators")
    assert "--norm-backend" in found["fault"]
    row = tool.line({"model": "m", "side": "s", "predicted": tool.predicted(TINY, "ours"), **found})
    assert found["fault"] in row


def test_the_document_holds_what_is_predicted():
    rows = re.findall(r"\| (\d+) ms, (\d+)% " * 3 + r"\|", DOCUMENT.read_text())
    expected = [
        tuple(
            f"{number:.0f}"
            for side in tool.SIDES[:3]
            for number in (
                1e3 * tool.predicted(model, side)["seconds"],
                100 * tool.predicted(model, side)["mfu"],
            )
        )
        for model in tool.MODELS.values()
    ]
    assert rows == expected
