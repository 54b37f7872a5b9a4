"""The table of parity, the part that CI runs: whole runs in a layout against the same run in one process."""

import pytest

from parity.compare import faults_of
from parity.layouts import ci_rows
from parity.worker import run_case


@pytest.mark.parametrize("row", ci_rows(), ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_of(row, gloo_world(row.world).run(run_case, row.flags(layout=True), row.patches))
