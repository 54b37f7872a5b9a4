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
        ("tp2 sp dp2 zero3", ["tp2", "sp", "dp2", "zero3"]),
        ("pp2dp2zero2", ["pp2", "dp2", "zero2"]),
        ("pp2 zero-bubble-v dp4 shard2", ["pp2", "zero-bubble-v", "dp4", "shard2"]),
        ("cp4 a2a2+p2p", ["cp4", "a2a2+p2p"]),
        ("--optimizer sgd", []),
        ("gpt", []),
    ],
)
def test_layouts_are_recognised(text, words):
    assert words_of(text) == words


def test_only_axes_count_where_layouts_alone_are_covered():
    shown = [each_axis({"layout": text, "flags": text}) for text in ("tp2", "tp4", "dp2")]
    assert shown[0] == shown[1] != shown[2]


@pytest.fixture(scope="module")
def chosen():
    """The default rows of the table of parity."""
    rows = ci_rows()
    indices = default_rows([{"row": row} for row in rows], list(map(str, rows)), always=ALWAYS)
    return [rows[index] for index in indices]


def test_the_default_rows_of_parity_are_fewer_and_show_each_feature_and_axis(chosen):
    small = [row for row in ci_rows() if row.world <= MOST_RANKS]
    assert len(chosen) < 0.25 * len(ci_rows()) and {row.world for row in chosen} <= {1, 2, 3, 4}
    for rows in (chosen, small):
        shown = {axis for row in rows for axis in axes(row.layout)}
        assert shown == AXES
    assert {row.feature for row in chosen} >= {
        name for name in FEATURES if not FEATURES[name].is_slow
    }


def test_nine_of_ten_mutants_name_a_default_row(chosen):
    assert sum(row_of(mutant) in chosen for mutant in MUTANTS) >= 0.9 * len(MUTANTS)
