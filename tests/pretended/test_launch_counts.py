"""A step launches as many kernels as docs/results/launches.json lists, no more.

Where a change of the program changes a number, count anew and write the table:

    python tests/pretended/count.py --out docs/results/launches.json
    python tools/document_results.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pretended.count import CASES, PARTS, QUICK, SIZES, fit, total
from pretended.process import MARKS, found_by

RESULTS = Path(__file__).resolve().parents[2] / "docs/results/launches.json"
OFTEN = "Llama"  # in every run of the tests

pytestmark = MARKS


def counted(folder: Path, *words: str) -> dict[str, dict[str, int]]:
    """Launches of one size by case and part."""
    return found_by("count.py", folder, "--quick", *words)["cases"]


def ceilings(name: str) -> dict[str, int]:
    """Of the parts of a step of that size."""
    recorded = json.loads(RESULTS.read_text())["cases"][name]["launches"]
    return {part: total(recorded[part], *QUICK) for part in PARTS}


@pytest.fixture(scope="module")
def often(tmp_path_factory) -> dict[str, dict[str, int]]:
    """OFTEN and a fault, by one process."""
    return counted(tmp_path_factory.mktemp("counted"), OFTEN, f"{OFTEN}+fault")


def test_a_step_launches_what_is_recorded(often):
    assert often[OFTEN] == ceilings(OFTEN)


@pytest.mark.full
def test_a_step_of_every_other_case_launches_what_is_recorded(tmp_path):
    names = [name for name in CASES if name != OFTEN]
    assert counted(tmp_path, *names) == {name: ceilings(name) for name in names}


def test_one_more_operator_in_a_layer_is_found(often):
    found = often[f"{OFTEN}+fault"]
    layers, micro_batches = QUICK
    more = {"forward": layers * micro_batches}
    expected = {part: count + more.get(part, 0) for part, count in ceilings(OFTEN).items()}
    assert found == expected and found != ceilings(OFTEN)


def test_what_is_recorded_is_of_every_case_as_it_is():
    recorded = json.loads(RESULTS.read_text())["cases"]
    assert {name: case["flags"] for name, case in recorded.items()} == {
        name: case.flags for name, case in CASES.items()
    }


def test_counts_that_are_not_linear_are_refused():
    numbers = {"layer and micro-batch": 5, "micro-batch": 3, "layer and step": 2, "step": 7}
    counts = {size: total(numbers, *size) for size in SIZES}
    assert fit(counts) == numbers
    counts[SIZES[-1]] += 1
    with pytest.raises(ValueError, match="not linear"):
        fit(counts)
