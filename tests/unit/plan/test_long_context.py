"""The recorded table of long sequences is what the planner computes."""

from __future__ import annotations

import json

import pytest
from measured import TESTS
from megatron.benchmarks.long_context import LAYOUTS, VARIANTS, flags_of, planned

RESULTS = TESTS.parent / "docs/results"
ROWS = json.loads((RESULTS / "long_context.json").read_text())["rows"]


@pytest.mark.parametrize(
    "row",
    [ROWS[0], pytest.param(ROWS[-1], marks=pytest.mark.full)],
    ids=lambda row: f"{row['gpus']} GPUs, {row['length']}",
)
def test_a_row_is_what_the_planner_says(row):
    layout = LAYOUTS[row["gpus"], row["kept"]]
    for name, variant in VARIANTS.items():
        if variant is None:
            assert row[name] is None
            continue
        words = flags_of(row["gpus"], row["length"], layout, variant)
        assert planned(row["gpus"], words) == row[name]
