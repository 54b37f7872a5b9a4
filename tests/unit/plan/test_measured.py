"""The plan within 3% of the bytes that live while a run trains; `measured.py` holds all cases to it
and writes them down.
"""

from __future__ import annotations

import pytest
from measured import compare

TOLERANCE = 0.03
IN_CI = [
    "stage 0, dp2",
    "stage 1, dp2, llama, bf16",
    "stage 2, dp2, recompute",
    "stage 3, dp2",
    "pp2, llama, interleaved",
    "pp2, gpipe, head in chunks",
    "pp2, bf16, soft cap",
    "pp2, windows and positions of some layers",
    "stage 3, dp2, squared relu, recompute",
    "experts, ep2, on the host",
    "tp2 sp, llama",
    "tp2 sp, head in chunks, soft cap",
    "pp2, zero-bubble, our kernels, head in chunks",
    "stage 3, dp2, fp32, kept gathered, weights on the host",
]  # all of two ranks


@pytest.mark.parametrize("name", IN_CI)
@pytest.mark.default("stage 3, dp2", "pp2, llama, interleaved", "pp2, gpipe, head in chunks")
def test_the_plan_is_what_lives(gloo_world, name):
    rows = compare(name, gloo_world)
    assert [row["ratio"] for row in rows] == pytest.approx([1.0] * len(rows), abs=TOLERANCE), rows
    assert all(
        row["measured_kinds"].get("host") == row["planned_kinds"].get("host") for row in rows
    )
