"""The choice of the default command (tests/selection.py)."""

import pytest
from parity.layouts import FEATURES, ci_rows
from parity.mutants import MUTANTS, row_of
from parity.test_layouts import ALWAYS
from selection import AXES, MOST_RANKS, axes, cover, default_rows, each_axis, words_of


def test_a_cover_has_every_trait_and_the_cases_that_were_asked_for():
    traits = [frozenset("ab"), frozenset("b"), frozenset("c"), frozenset("abc"), frozenset("d")]
    assert cover(traits, [1, 1, 1, 1, 1]) == {3, 4}
    assert cover(traits, [1, 1, 1, 9, 1]) == {0, 2, 4}
    assert cover(traits, [1, 1, 1, 1, 1], always=[1]) == {1, 3, 4}


@pytest.mark.parametrize(
    "text, words",
    [
        ("pp2dp2zero2", "pp2 dp2 zero2"),
        ("pp2 zero-bubble-v dp4 shard2", "pp2 zero-bubble-v dp4 shard2"),
        ("cp4 a2a2+p2p", "cp4 a2a2+p2p"),
        ("--optimizer sgd", ""),
        ("gpt", ""),
    ],
)
def test_layouts_are_recognised(text, words):
    assert words_of(text) == words.split()


def test_only_axes_count_where_layouts_alone_are_covered():
    shown = [each_axis({"layout": text, "flags": text}) for text in ("tp2", "tp4", "dp2")]
    assert shown[0] == shown[1] != shown[2]


def test_the_default_rows_of_parity_show_each_feature_axis_and_most_mutants():
    rows = ci_rows()
    small = [row for row in rows if row.world <= MOST_RANKS]
    indices = default_rows([{"row": row} for row in rows], list(map(str, rows)), always=ALWAYS)
    chosen = [rows[index] for index in indices]
    assert len(chosen) < 0.25 * len(rows) and {row.world for row in chosen} <= {1, 2, 3, 4}
    for some in (chosen, small):
        assert {axis for row in some for axis in axes(row.layout)} == AXES
    quick = {name for name in FEATURES if not FEATURES[name].is_slow}
    assert {row.feature for row in chosen} >= quick
    assert sum(row_of(mutant) in chosen for mutant in MUTANTS) >= 0.9 * len(MUTANTS)
