"""Linear layers whose weight gradients are left for later: the same bits, the least kept, the
order of the work, and the collectives of each part.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity.ledger import Ledger
from torch import nn
from unit.model.made import linear

from megatron.distributed.groups import Layout, build_groups
from megatron.model import linear as linear_module
from megatron.model.linear import ColumnLinear, RowLinear, add_weight_grads, deferring_weight_grads
from megatron.model.model_parallel import NO_TP, TensorParallel

S, B, H, F = 8, 2, 12, 24
SHARED = ((2, False, True), (2, True, True), (2, True, False), (4, True, True))


def mode(size, sequence):
    if size == 1:
        return NO_TP
    tp = build_groups(Layout(tp=size), dist.get_rank(), dist.new_group).tp
    return TensorParallel(tp, sequence=sequence)


def pair(tp, dtype=torch.float64):
    """h -> f -> h, with random parameters and gradients."""
    layers = (
        nn.Sequential(linear(H, F, True, tp, ColumnLinear), linear(F, H, True, tp, RowLinear))
        .to_empty(device="cpu")
        .to(dtype)
    )
    draw = torch.Generator().manual_seed(1)
    for parameter in layers.parameters():
        parameter.data.normal_(generator=draw)
        parameter.main_grad = torch.randn(
            parameter.shape, dtype=torch.promote_types(dtype, torch.float32), generator=draw
        )
    return layers


def backward(layers, tp, dtype=torch.float64):
    """A backward pass through the layers; dx."""
    draw = torch.Generator().manual_seed(2)
    x, dy = (
        torch.randn(S // (tp.size if tp.sequence else 1), B, H, generator=draw).to(dtype)
        for _ in range(2)
    )
    x.requires_grad_()
    layers(x).backward(dy)
    return x.grad


def gradients(layers):
    return [parameter.main_grad.clone() for parameter in layers.parameters()]


def check_parts(size, sequence, is_cut):
    with mock.patch.object(linear_module, "worth_cutting", lambda *_: is_cut):
        compare_parts(mode(size, sequence))


def compare_parts(tp):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        expected, layers = pair(tp, dtype), pair(tp, dtype)
        dx = backward(expected, tp, dtype)
        before = gradients(layers)
        with deferring_weight_grads(layers) as left:
            assert torch.equal(backward(layers, tp, dtype), dx)
        # biases have theirs
        assert [torch.equal(a, b) for a, b in zip(gradients(layers), before)] == [
            True,
            False,
            True,
            False,
        ]
        outside, inside = (S // (tp.size if tp.sequence else 1), B, H), (S, B, F // tp.size)
        assert [(each.dy.shape, each.x.shape) for each in left] == [
            (outside, inside),
            (inside, outside),
        ]
        assert all(
            t.dtype == dtype and t.untyped_storage().nbytes() == math.prod(t.shape) * dtype.itemsize
            for each in left
            for t in each[1:3]
        )
        add_weight_grads(left)
        assert left == [] and all(
            torch.equal(a, b) for a, b in zip(gradients(layers), gradients(expected))
        )


@pytest.mark.parametrize("size, sequence, is_cut", [(1, False, True), *SHARED])
def test_two_parts_are_the_whole(gloo_world, size, sequence, is_cut):
    gloo_world(size).run(check_parts, size, sequence, is_cut)


def order_of_work():
    tp, events = mode(2, True), []
    layers = pair(tp)
    with deferring_weight_grads(layers) as left:
        backward(layers, tp), backward(layers, tp)
    start, wgrad_gemm = linear_module.start_all_gather, linear_module.wgrad_gemm
    with (
        mock.patch.object(
            linear_module,
            "start_all_gather",
            lambda x, axis: (axis.size > 1 and events.append("gather")) or start(x, axis),
        ),
        mock.patch.object(
            linear_module, "wgrad_gemm", lambda *args: events.append("gemm") or wgrad_gemm(*args)
        ),
    ):
        add_weight_grads(left)
    return events


def test_a_gather_overlaps_the_gemm_before(gloo_world):
    """Never more than one ahead, since what is gathered is size times what was kept."""
    expected = ["gather", *["gather", "gemm"] * 3, "gemm"]
    assert gloo_world(2).run(order_of_work) == [expected] * 2


def collectives_of_parts():
    tp, ledger = mode(2, True), Ledger()
    layers = pair(tp)
    with ledger.open():
        with deferring_weight_grads(layers) as left:
            backward(layers, tp)
        add_weight_grads(left)
    calls = [(call.kind, call.caller) for call in ledger.calls]
    return [call for call in calls if not call[1].endswith(".forward")]


def test_only_the_second_part_gathers_for_weight_gradients(gloo_world):
    assert (
        gloo_world(2).run(collectives_of_parts)
        == [
            [
                ("all-gather", "_RowLinear.backward"),
                ("reduce-scatter", "_ColumnLinear.backward"),
                *[("all-gather", "WeightGrad.start")] * 2,
            ]
        ]
        * 2
    )


def test_a_failed_backward_leaves_no_list_behind(monkeypatch):
    layers = pair(NO_TP)
    with (
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match="broken"),
        deferring_weight_grads(layers),
    ):
        patch.setattr(linear_module, "WeightGrad", mock.Mock(side_effect=RuntimeError("broken")))
        backward(layers, NO_TP)
    before = gradients(layers)
    backward(layers, NO_TP)
    assert not any(torch.equal(a, b) for a, b in zip(gradients(layers), before))
