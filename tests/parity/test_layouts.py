"""The table of parity, the part that CI runs: whole runs in a layout against the same run in one process."""

import pytest

from parity import compare
from parity.layouts import FEATURES, ci_rows, narrow_bound
from parity.worker import reference, run_case


def check(row, gloo_world):
    """All faults of one row."""
    outcomes = gloo_world(row.world).run(run_case, row.flags(layout=True), row.patches)
    one = reference(row.flags(layout=False), row.patches)
    if row.precision == "fp64":
        return compare.fp64(one, outcomes, zero_key_bias=FEATURES[row.feature].zero_key_bias)
    exact = reference(row.flags(layout=False, exact=True), row.patches)
    if row.precision == "fp32":
        return compare.fp32(exact, one, outcomes)
    return compare.narrow(exact, one, outcomes, bound=narrow_bound(row.precision))


@pytest.mark.parametrize("row", ci_rows(), ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not check(row, gloo_world)
