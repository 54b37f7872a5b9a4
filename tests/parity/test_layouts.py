"""The table of parity: whole runs in a layout against the same run in one process."""

from collections import Counter

import pytest
from parity.compare import faults_in
from parity.layouts import ci_rows
from parity.mutants import MUTANTS, row_of

# The default command puts nine of ten mutants within reach: it runs the rows that several of them
# name, and of the others those of few ranks. `full` runs all.
NAMED = Counter(map(row_of, MUTANTS))
ALWAYS = [
    str(row)
    for row, mutants in NAMED.items()
    if mutants > 1 or row.world * (1 + (row.words.pp > 1)) <= 4
]


@pytest.mark.table(always=ALWAYS)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.full] if row.of.is_slow else []) for row in ci_rows()],
    ids=str,
)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)
