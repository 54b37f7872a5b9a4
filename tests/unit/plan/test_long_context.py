"""What is written down about long sequences: the planner's table as it would be made today, and
real steps within the plan's bounds.
"""

from __future__ import annotations

import json

import pytest
from long_steps import CASES
from measured import TESTS
from megatron.benchmarks.long_context import LAYOUTS, LENGTHS, VARIANTS, flags_of, planned
from test_measured import TOLERANCE

RESULTS = TESTS.parent / "docs/results"
ROWS = json.loads((RESULTS / "long_context.json").read_text())["rows"]


def test_the_table_has_every_layout_and_length():
    expected = {(*layout, length) for layout in LAYOUTS for length in LENGTHS}
    assert {(row["gpus"], row["kept"], row["length"]) for row in ROWS} == expected


@pytest.mark.parametrize("row", [ROWS[3], ROWS[-1]], ids=lambda row: f"{row['gpus']} GPUs")
def test_the_longest_is_what_the_planner_says(row):
    layout = LAYOUTS[row["gpus"], row["kept"]]
    for name, variant in VARIANTS.items():
        if variant is None:
            assert row[name] is None
            continue
        words = flags_of(row["gpus"], row["length"], layout, variant)
        assert planned(row["gpus"], words) == row[name]


def test_the_mlp_and_the_head_must_both_be_in_pieces():
    """At the greatest length either alone leaves the other's tensors, or most of them."""
    for row in ROWS:
        if row["length"] == max(LENGTHS):
            sizes = {
                name: row[name]["sizes"]["total"]
                for name, variant in VARIANTS.items()
                if variant is not None
            }
            assert sizes["both"] < 0.8 * min(sizes["tiled_mlp"], sizes["fused_head"])


def test_real_steps_are_within_the_bounds():
    rows = json.loads((RESULTS / "long_steps.json").read_text())["rows"]
    assert {row["case"]: row["flags"] for row in rows} == {
        name: flags for name, (_, _, flags) in CASES.items()
    }
    assert all(row["ratio"] == pytest.approx(1.0, abs=TOLERANCE) for row in rows)
    measured = {row["case"]: row["measured"] for row in rows}
    whole, pieces, shared_whole, shared_pieces = (measured[name] for name in CASES)
    assert pieces < 0.5 * whole and shared_pieces < shared_whole
