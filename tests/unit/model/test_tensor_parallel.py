"""Each shared layer against the whole one in float64: outputs, input gradients, and weight
gradients put together.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from unit.model.made import linear

from megatron.distributed.groups import Layout, build_groups
from megatron.model import linear as layers
from megatron.model.linear import ColumnLinear, RowLinear
from megatron.model.spec import TensorParallel

S, B, I, O = 8, 2, 12, 24


def draw(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mode(size, sequence, overlap):
    return TensorParallel(
        build_groups(Layout(tp=size), dist.get_rank(), dist.new_group).tp,
        sequence=sequence,
        overlap=overlap,
    )


def filled(layer, values):
    """The layer on the CPU with these parameters and zero gradients."""
    for name, value in values.items():
        setattr(layer, name, torch.nn.Parameter(value.clone()))
        getattr(layer, name).main_grad = torch.zeros_like(value)
    return layer


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize(
    "tokens, outputs, cut",
    [
        (128 * 12, 256 * 11, True),  # 132 tiles
        (128 * 12 - 127, 256 * 11 - 255, True),  # as many, some of them nearly empty
        (128 * 11, 256 * 11, False),
    ],
)
def test_a_product_is_cut_where_a_piece_fills_a_gpu(monkeypatch, tokens, outputs, cut):
    monkeypatch.setattr(layers, "multiprocessors", lambda device: {"a GPU": 132}[device])
    on_gpu = SimpleNamespace(shape=torch.Size((tokens, 1, I)), is_cuda=True, device="a GPU")
    assert layers.worth_cutting(on_gpu, outputs) is cut
    assert layers.worth_cutting(torch.empty(1, 1, I), 1)  # on a CPU always


def products_of_a_pass(kind, size):
    """Rows and columns of each product of the forward pass and the input gradient, in order."""
    tp, seen = mode(size, True, True), []
    real = {name: getattr(torch, name) for name in ("mm", "addmm")}
    real_linear = layers.F.linear

    def noted(name):
        def product(*args, out):
            seen.append(tuple(out.shape))
            return real[name](*args, out=out)

        return product

    def linear_noted(x, weight, bias=None):
        y = real_linear(x, weight, bias)
        seen.append((y.shape[:-1].numel(), y.shape[-1]))
        return y

    cut = lambda x, dim: x.chunk(tp.size, dim)[tp.axis.rank].contiguous()  # noqa: E731
    dim = 0 if kind == "column" else 1
    part = filled(
        linear(I, O, True, tp, ColumnLinear if kind == "column" else RowLinear),
        {"weight": cut(draw(O, I), dim), "bias": draw(O // size if kind == "column" else O)},
    )
    x = draw(S // size, B, I) if kind == "column" else draw(S, B, I // size)
    with (
        mock.patch.object(torch, "mm", noted("mm")),
        mock.patch.object(torch, "addmm", noted("addmm")),
        mock.patch.object(layers.F, "linear", linear_noted),
    ):
        run(part, x, draw(*((S, B, O // size) if kind == "column" else (S // size, B, O))))
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_a_product_are_few(gloo_world, size):
    """Gathered rows: this rank's, those before them, those behind them. Scattered: two halves of
    the outputs.
    """

    def ranges(rank):
        own = S // size * B
        return [rows for rows in (own, rank * own, (size - 1 - rank) * own) if rows]

    for rank, found in enumerate(gloo_world(size).run(products_of_a_pass, "column", size)):
        assert found == [(rows, O // size) for rows in ranges(rank)]
    for rank, found in enumerate(gloo_world(size).run(products_of_a_pass, "row", size)):
        halves = [(S * B, O // 2)] * 2
        assert found == halves + [(rows, I // size) for rows in ranges(rank)]
