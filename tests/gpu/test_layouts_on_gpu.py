"""Rows of the table of parity with several ranks on one GPU, over Gloo with CUDA tensors: streams, events and staging through the host."""

import pytest

from parity.compare import faults_of
from parity.layouts import SCHEDULES, Row
from parity.worker import run_case

pytestmark = pytest.mark.gpu

LAYOUTS = ("tp2", "tp2 serial", "tp2 sp", "tp2 sp serial", "dp2", "dp2 serial", "tp2 dp2", "tp2 sp dp2", "tp2 sp dp2 serial", "tp4 sp", "dp4")
PIPELINES = (*(f"pp2 {schedule}" for schedule in SCHEDULES), "pp2 zero-bubble tp2 sp", "pp4 interleaved v2", "pp4 zero-bubble-v", "pp2 1f1b dp2")
ROWS = [
    *(Row(layout, feature) for feature in ("gpt", "m3") for layout in PIPELINES),
    *(Row(layout, "gpt", "bf16") for layout in ("pp2 1f1b", "pp2 zero-bubble")),
    *(Row(layout, feature) for feature in ("gpt", "gqa2-qknorm") for layout in LAYOUTS),
    *(Row("tp2 sp dp2", feature) for feature in ("dropout", "documents", "padding", "uneven", "recompute")),
    *(Row(layout, "gpt", precision) for precision in ("fp32", "bf16", "fp16") for layout in ("tp2 sp", "tp2 dp2", "tp2 sp dp2 serial")),
    Row("dp2", "gpt", "wire"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    flags = (*row.flags(layout=True), "--distributed-backend", "gloo")
    assert not faults_of(row, gloo_world(row.world).run(run_case, flags, row.patches, "cuda"), "cuda")
