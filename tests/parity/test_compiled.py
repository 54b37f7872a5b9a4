"""Compiled layers in layouts of every kind against one process that compiles nothing, by the gates
of the table of parity.
"""

import pytest
from parity.compare import faults_of
from parity.layouts import Row
from parity.worker import run_case

# Traced and differentiated by torch.compile; the operators of its graphs are run one by one.
TRACED = (
    Row("tp2 sp", "gpt"),
    Row("dp2 zero3", "dropout"),
    Row("tp2 dp2", "documents-rope"),
    Row("pp2 zero-bubble tp2 sp", "gqa2-qknorm"),
    Row("pp2 1f1b dp2 zero3", "recompute"),
    Row("tp4 sp", "gqa2-qknorm", "bf16"),
)
# Whole: the code that it generates writes one tensor over another as soon as that has been read.
COMPILED = (
    Row("pp2 zero-bubble", "gqa2-qknorm"),
    Row("tp2 sp", "gqa2-qknorm", "bf16"),
)


@pytest.mark.parametrize(
    "row, patches",
    [*((row, ("traced",)) for row in TRACED), *((row, ()) for row in COMPILED)],
    ids=lambda value: "-".join(value) or "compiled" if isinstance(value, tuple) else str(value),
)
def test_the_compiled_layout_is_the_same_run(gloo_world, row, patches):
    flags = (*row.flags(layout=True), "--torch-compile")
    outcomes = gloo_world(row.world).run(run_case, flags, (*row.patches, *patches))
    assert not faults_of(row, outcomes)
