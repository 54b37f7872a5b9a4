"""Windows and rotary positions of some layers against one process, by the gates of the table of
parity.
"""

import pytest
from parity.compare import faults_in
from parity.layouts import Row

ROWS = (
    Row("tp2 sp", "layer-kinds"),
    Row("cp2", "layer-kinds"),
    Row("cp2 p2p", "layer-kinds"),
    Row("cp2 a2a", "layer-kinds"),
    Row("dp2 zero3", "layer-kinds"),
    Row("pp2 1f1b", "layer-kinds"),
    Row("pp2 zero-bubble-v", "layer-kinds"),
    Row("pp2 interleaved v2", "layer-kinds-documents"),
    Row("cp2 p2p", "layer-kinds-documents"),
    Row("tp2 sp", "layer-kinds-documents"),
    Row("pp2 1f1b", "layer-kinds-recompute"),
    Row("dp2 zero2", "layer-kinds-recompute"),
)


@pytest.mark.table
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


MUTANTS = (
    (Row("pp2 1f1b", "layer-kinds"), "windows_by_number_in_stage"),
    (Row("pp2 1f1b", "layer-kinds"), "every_layer_rotates"),
)


@pytest.mark.parametrize("row, mutant", MUTANTS, ids=str)
def test_what_may_go_wrong_is_found(gloo_world, row, mutant):
    assert faults_in(gloo_world, row, mutant)
