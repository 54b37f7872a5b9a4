"""The budget of one training step: how much a reader, and the host, has to go through. Lower the
numbers when there is room; raise one only with a reason in the same commit.
"""

from concurrent.futures import ProcessPoolExecutor

from architecture.one_step import measured_totals
from distributed.pool import warm_context

FUNCTIONS, FILES, DEPTH, CALLS = 79, 22, 11, 335


def test_one_step_stays_within_its_budget():
    with ProcessPoolExecutor(1, mp_context=warm_context()) as process:
        functions, files, depth, calls = process.submit(measured_totals).result()
    assert 50 < functions <= FUNCTIONS and 10 < files <= FILES
    assert 5 < depth <= DEPTH and 200 < calls <= CALLS
