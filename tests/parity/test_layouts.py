"""The table of parity, the part that CI runs: whole runs in a layout against the same run in one
process.
"""

from collections import Counter

import pytest
from parity.compare import faults_in
from parity.layouts import NARROW_FEATURES, ci_rows, full_table, traits
from parity.mutants import MUTANTS

# The default command puts nine of ten mutants within reach: it runs the rows that several of them
# name, and of the others those of few ranks. `full` runs all.
NAMED = Counter(name for mutant in MUTANTS for name in mutant.rows)
ALWAYS = [
    str(row)
    for row in ci_rows()
    if NAMED[str(row)] > 1 or (NAMED[str(row)] and row.world * (1 + (row.words.pp > 1)) <= 4)
]


@pytest.mark.table(always=ALWAYS)
@pytest.mark.parametrize("row", ci_rows(), ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


def test_these_rows_show_every_pair_of_the_full_table():
    table = full_table()
    assert set(ci_rows()) <= set(table)
    pairs = set().union(
        *(traits(row) for row in table if row.precision == "fp64" or row.feature in NARROW_FEATURES)
    )
    assert not pairs - set().union(*map(traits, ci_rows()))
