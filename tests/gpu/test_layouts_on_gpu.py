"""Rows of the table of parity with several ranks on one GPU, over Gloo with CUDA tensors: streams,
events and staging through the host.
"""

import pytest
from parity.compare import faults_of
from parity.layouts import BASE, read_rows
from parity.worker import run_case
from unit.optimizer.test_offload import same_bits

pytestmark = pytest.mark.gpu

ROWS = """
gpt: pp2 gpipe, pp2 zero-bubble, pp2 zero-bubble-v, pp4 interleaved v2, pp2 1f1b dp2
m3: pp2 interleaved v2, pp4 zero-bubble-v
gpt: tp2 sp, tp4 sp, tp2 sp dp2, dp2 zero1, dp2 zero2, dp2 zero3, dp2 serial zero3
gpt: tp2 sp dp2 zero3, dp4 shard2 zero3, pp2 zero-bubble dp2 zero2, pp2 zero-bubble-v dp2 zero3 kept
gpt: dp2 zero2 offload, dp2 zero3 kept offload, dp4 shard2 zero2 offload
gpt: dp2 zero3 param-offload, dp2 kept zero3 param-offload
gpt: pp2 zero-bubble-v dp2 zero3 param-offload
gqa2-qknorm: tp2 sp dp2, dp2 zero3
dropout: tp2 sp dp2, dp2 zero3
documents: tp2 sp dp2
uneven: dp2 zero3
recompute: dp2 zero3
bf16 gpt: pp2 zero-bubble, tp2 sp, dp2 zero3
fp16 gpt: tp2 sp, dp2 zero3
wire gpt: dp2 zero3
"""


@pytest.mark.parametrize("row", read_rows(ROWS), ids=str)
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
