"""Rows of the table of parity with several ranks on one GPU, over Gloo with CUDA tensors: streams,
events and staging through the host.
"""

import pytest
from parity.compare import faults_of
from parity.layouts import BASE, SCHEDULES, Row, possible, staged
from parity.worker import run_case
from unit.optimizer.test_nvme import same_bits

pytestmark = pytest.mark.gpu

LAYOUTS = (
    "tp2",
    "tp2 serial",
    "tp2 sp",
    "tp2 sp serial",
    "dp2",
    "dp2 serial",
    "tp2 dp2",
    "tp2 sp dp2",
    "tp2 sp dp2 serial",
    "tp4 sp",
    "dp4",
)
PIPELINES = (
    *(f"pp2 {schedule}" for schedule in SCHEDULES),
    "pp2 zero-bubble tp2 sp",
    "pp4 interleaved v2",
    "pp4 zero-bubble-v",
    "pp2 1f1b dp2",
)
SHARDED = (
    *staged(
        ("dp2", "dp2 serial", "tp2 sp dp2", "dp4 shard2", "pp2 1f1b dp2", "pp2 zero-bubble dp2"),
        kept=("dp2", "pp2 zero-bubble-v dp2"),
    ),
    *(
        f"{layout} offload"
        for layout in (
            "dp2",
            *staged(("dp2",)),
            "dp2 zero3 kept",
            "pp2 1f1b dp2 zero2",
            "dp4 shard2 zero2",
        )
    ),
    *(
        f"{layout} zero3 param-offload"
        for layout in (
            "dp1",
            "dp2",
            "dp2 kept",
            "dp2 serial",
            "pp2 zero-bubble-v dp2",
            "dp4 shard2",
        )
    ),
)
ROWS = [
    *(Row(layout, feature) for feature in ("gpt", "m3") for layout in PIPELINES),
    *(Row(layout, "gpt", "bf16") for layout in ("pp2 1f1b", "pp2 zero-bubble")),
    *(Row(layout, feature) for feature in ("gpt", "gqa2-qknorm") for layout in LAYOUTS),
    *(
        Row("tp2 sp dp2", feature)
        for feature in ("dropout", "documents", "padding", "uneven", "recompute")
    ),
    *(
        Row(layout, "gpt", precision)
        for precision in ("fp32", "bf16", "fp16")
        for layout in ("tp2 sp", "tp2 dp2", "tp2 sp dp2 serial")
    ),
    Row("dp2", "gpt", "wire"),
    *(Row(layout, "gpt") for layout in SHARDED),
    *(
        Row("dp2 zero3", feature)
        for feature in ("dropout", "documents", "uneven", "recompute", "gqa2-qknorm", "sgd")
    ),
    *(
        Row(layout, "gpt", precision)
        for layout in ("dp2 zero2", "dp2 zero3")
        for precision in ("fp32", "bf16", "fp16", "wire")
    ),
]


@pytest.mark.parametrize("row", [row for row in ROWS if possible(row)], ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    flags = (*row.flags(layout=True), "--distributed-backend", "gloo")
    assert not faults_of(
        row, gloo_world(row.world).run(run_case, flags, row.patches, "cuda"), "cuda"
    )


@pytest.mark.parametrize(
    "more",
    ["--bf16", "--bf16 --zero3-keep-gathered --freeze layers.0", "--bf16 --optimizer-nvme-offload"],
)
def test_weights_on_the_host_are_those_on_the_device(gloo_world, tmp_path, more):
    """The optimizer is on the host in both runs: what a gather copies from there is what it
    otherwise finds on the device.
    """
    flags = (
        *BASE,
        *(
            "--micro-batch-size 2 --distributed-backend gloo --zero-stage 3 "
            f"--optimizer-cpu-offload {more}"
        ).split(),
    )
    flags += (str(tmp_path),) if "nvme" in more else ()
    device, host = (
        gloo_world(2).run(run_case, (*flags, *words), (), "cuda")
        for words in ((), ("--param-cpu-offload",))
    )
    for one, other in zip(device, host, strict=True):
        same_bits(one, other)
