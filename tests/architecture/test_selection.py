"""The choice of the default command (tests/selection.py)."""

import pytest
from parity.layouts import FEATURES, ci_rows
from parity.mutants import MUTANTS
from selection import axes, cover, each_axis, pairs, words_of


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


def default_rows():
    rows, always = ci_rows(), {name for mutant in MUTANTS for name in mutant.rows}
    traits = [pairs({"row": row}) for row in rows]
    named = [index for index, row in enumerate(rows) if str(row) in always]
    return [rows[index] for index in cover(traits, [1.0 + row.world for row in rows], named)]


def test_the_default_rows_of_parity_are_fewer_and_show_each_feature_with_each_axis():
    rows, chosen = ci_rows(), default_rows()
    assert len(chosen) < 0.6 * len(rows)
    shown = {(row.feature, axis) for row in chosen for axis in axes(row.layout)}
    assert shown == {(row.feature, axis) for row in rows for axis in axes(row.layout)}
    assert {row.feature for row in chosen} == {name for name in FEATURES if name[:3] != "moe"}


def test_every_mutant_names_a_default_row():
    names = {str(row) for row in default_rows()}
    assert [mutant.name for mutant in MUTANTS if not names & {*mutant.rows}] == []
