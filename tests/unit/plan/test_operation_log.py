"""What the log of a pass makes of the operators that are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.tools._plan.layer_run import META, LiveBytes, MeasuredGroup
from megatron.tools._plan.operation_log import OperationLog
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.work import Core, Exchange, Product
from step_models import resolved

from megatron.distributed.collectives import start_all_gather
from megatron.distributed.groups import Axis
from megatron.model.recompute import NO_RECOMPUTE

HIDDEN = torch.Size((8, 2, 16))
LAUNCHES = Path(__file__).resolve().parents[3] / "docs/results/launches.json"


def logged(*functions) -> OperationLog:
    """The log of calls of functions, each of the log's mode."""
    log = OperationLog(HIDDEN, length=8, compute=torch.bfloat16)
    with LiveBytes((), log) as live:
        for function in functions:
            function(live)
    return log


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def test_gemms_by_their_dimensions():
    a, b, bias = bf16(6, 4), bf16(4, 5), bf16(5)
    main_grad, wide = torch.empty(6, 5, device=META), torch.empty(6, 4, device=META)
    log = logged(
        lambda _: a @ b,
        lambda _: a @ b,
        lambda _: torch.addmm(bias, a, b),
        lambda _: torch.bmm(bf16(3, 6, 4), bf16(3, 4, 5)),
        lambda _: wide @ torch.empty(4, 5, device=META),
    )
    product = Product(6, 5, 4)
    more = [Product(6, 5, 4, 3), Product(6, 5, 4, wide=True)]
    assert log.products == [product, product, product, *more] and not log.streams
    # a weight gradient is added to what there is: read and written
    log = logged(lambda _: main_grad.addmm_(wide, torch.empty(4, 5, device=META)))
    assert log.streams == [2 * main_grad.nbytes] and log.launches == [1]


def test_an_unknown_operator_reads_and_writes_its_tensors_once():
    x, y, row = bf16(6, 4), bf16(6, 4), bf16(4)
    log = logged(
        lambda _: torch.atan2(x, y),
        lambda _: x.add_(row.expand(6, 4)),
        lambda _: x.view(4, 6).t()[1:],  # nothing to do for a device
        lambda _: y.copy_(x),
        lambda _: torch.empty_like(x),
        lambda _: torch.zeros_like(x),  # reads nothing
    )
    assert sum(log.streams) == 3 * x.nbytes + (2 * x.nbytes + row.nbytes) + 3 * x.nbytes
    assert log.launches == [1, 1, 1, 1]


def test_rows_of_a_table_are_not_the_table():
    table, ids = torch.empty(1000, 4, device=META), torch.empty(6, dtype=torch.int64, device=META)
    rows = torch.empty(6, 4, device=META)
    log = logged(lambda _: table[ids], lambda _: table.index_put_((ids,), rows, accumulate=True))
    assert sum(log.streams) == (ids.nbytes + 2 * rows.nbytes) + (ids.nbytes + 3 * rows.nbytes)


def test_what_runs_alongside_an_exchange_may_hide_it():
    x, a = bf16(6, 4), bf16(4, 4)

    def exchange(*alongside):
        def run(live):
            group = MeasuredGroup(gloo=False)
            group.live = live
            started = start_all_gather(x, Axis("tp", 0, (0, 1, 2), group))
            for each in alongside:
                each()
            started.wait()

        return run

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    core = lambda: attention(*[bf16(2, 3, 8, 4)] * 3, 0.0, True)  # noqa: E731
    log = logged(exchange(), exchange(lambda: a @ a), exchange(core))
    gathered = 3 * x.nbytes
    assert log.exchanges == [
        Exchange("all-gather", "tp", gathered, hidden_by) for hidden_by in ("", "products", "cores")
    ]
    assert log.cores == [Core(2 * 8 * 6 * 8 * 4, 8, 6, 4)]


def test_launches_are_those_that_were_counted():
    """Of a forward pass of a layer of docs/results/launches.json."""
    case = json.loads(LAUNCHES.read_text())["cases"]["Llama"]
    flags = (
        "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --mock-data "
        "--micro-batch-size 1 --lr 1 --train-iters 1 --tokenizer-type NullTokenizer "
        f"--vocab-size 99 {case['flags']} --attention-backend triton"
    )
    layer = Operations(resolved(flags, 1, 100), 100).layer(1, NO_RECOMPUTE)
    assert layer.forward.launches == case["launches"]["forward"]["layer and micro-batch"]


@pytest.mark.parametrize("window", [None, 2])
def test_pairs_that_a_window_hides_are_not_counted(window):
    from megatron.kernels.attention import flash_attention
    from megatron.kernels.attention_masks import AttentionMask

    qkv = [bf16(8, 2, 3, 4) for _ in range(3)]
    mask = AttentionMask(window=window)
    log = logged(lambda _: flash_attention(*qkv, scale=1.0, mask=mask))
    visible = 4 if window is None else min(8 / 2, window)
    assert [each.flops for each in log.cores] == [2 * 8 * 2 * 3 * 8 * visible]
