"""Each shared layer against the whole one in float64: outputs, input gradients, and weight
gradients put together.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from unit.model.made import linear, table

from megatron.distributed.groups import Layout, build_groups
from megatron.model import linear as layers
from megatron.model.linear import ColumnLinear, RowLinear
from megatron.model.loss import cross_entropy, own_columns
from megatron.model.tensor_parallel import NO_TP, TensorParallel

S, B, I, O = 8, 2, 12, 24
MODES = pytest.mark.parametrize(
    "size, sequence, overlap",
    [(2, False, True), (2, True, True), (4, True, True), (4, False, False), (4, True, False)],
)


def draw(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


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


def check_linear(kind, *which):
    tp = mode(*which)
    cut = lambda x, dim: x.chunk(tp.size, dim)[tp.axis.rank].contiguous()  # noqa: E731
    x, dy, weight, bias = draw(S, B, I), draw(S, B, O, seed=2), draw(O, I, seed=3), draw(O, seed=4)
    whole = filled(
        linear(I, O, True, kind=ColumnLinear if kind == "column" else RowLinear),
        {"weight": weight, "bias": bias},
    )
    y, dx = run(whole, x, dy)
    along = (lambda z: cut(z, 0)) if tp.sequence else (lambda z: z)
    if kind == "column":
        part = filled(
            linear(I, O, True, tp, ColumnLinear), {"weight": cut(weight, 0), "bias": cut(bias, 0)}
        )
        got_y, got_dx = run(part, along(x), cut(dy, -1))
        near(got_y, cut(y, -1)), near(got_dx, along(dx))
        (
            near(part.weight.main_grad, cut(whole.weight.main_grad, 0)),
            near(part.bias.main_grad, cut(whole.bias.main_grad, 0)),
        )
    else:
        part = filled(linear(I, O, True, tp, RowLinear), {"weight": cut(weight, 1), "bias": bias})
        got_y, got_dx = run(part, cut(x, -1), along(dy))
        (
            near(got_y, along(y)),
            near(got_dx, cut(dx, -1)),
            near(part.weight.main_grad, cut(whole.weight.main_grad, 1)),
        )
        if tp.sequence:  # a part of the sum
            near(part.bias.main_grad, along(dy).sum((0, 1)))
            dist.all_reduce(part.bias.main_grad)
        near(part.bias.main_grad, whole.bias.main_grad)


@MODES
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear(gloo_world, kind, size, sequence, overlap):
    gloo_world(size).run(check_linear, kind, size, sequence, overlap)


@pytest.mark.parametrize(
    "tokens, outputs, cut",
    [
        (128 * 12, 256 * 11, True),  # 132 tiles
        (128 * 12 - 127, 256 * 11 - 255, True),  # as many, some of them nearly empty
        (128 * 11, 256 * 11, False),
        (128 * 132, 1, True),
        (1, 256 * 131, False),
    ],
)
def test_a_product_is_cut_where_a_piece_fills_a_gpu(monkeypatch, tokens, outputs, cut):
    monkeypatch.setattr(layers, "multiprocessors", lambda device: {"a GPU": 132}[device])
    on_gpu = SimpleNamespace(shape=torch.Size((tokens, 1, I)), is_cuda=True, device="a GPU")
    assert layers.worth_cutting(on_gpu, outputs) is cut
    assert layers.worth_cutting(torch.empty(1, 1, I), 1)  # on a CPU always


def check_uncut(kind):
    """A product that is not worth cutting is made whole, and is the same."""
    with mock.patch.object(layers, "worth_cutting", lambda *_: False):
        with mock.patch.object(layers, "gather_parts", None):
            check_linear(kind, 2, True, True)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_small_products_are_not_cut(gloo_world, kind):
    gloo_world(2).run(check_uncut, kind)


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


def check_embedding(*which):
    tp = mode(*which)
    cut = lambda x: x.chunk(tp.size)[tp.axis.rank].contiguous()  # noqa: E731
    ids = torch.randint(0, 31, (S, B), generator=torch.Generator().manual_seed(5))
    rows, dy = draw(32, I), draw(S, B, I, seed=2)
    whole = filled(table(32, I), {"weight": rows})
    y = whole(ids)
    y.backward(dy)
    part = filled(table(32, I, tp), {"weight": cut(rows)})
    got = part(ids)
    got.backward(cut(dy) if tp.sequence else dy)
    assert torch.equal(got, cut(y) if tp.sequence else y)  # one rank's row and zeros
    near(part.weight.main_grad, cut(whole.weight.main_grad))


@MODES
def test_vocabulary_embedding(gloo_world, size, sequence, overlap):
    gloo_world(size).run(check_embedding, size, sequence, overlap)


def check_loss(size, vocabulary, softcap):
    tp = mode(size, False, True)
    padded = 16 * size
    logits = 5 * draw(S, B, padded)
    logits[..., vocabulary:] = 1e6  # whatever padding holds
    labels = torch.randint(0, vocabulary, (S, B), generator=torch.Generator().manual_seed(5))
    labels[0, 0], labels[0, 1] = 0, vocabulary - 1
    weights, square = draw(S, B, seed=2), draw(S, B, seed=3)
    results = []
    for each, own in ((NO_TP, logits), (tp, logits.chunk(size, -1)[tp.axis.rank])):
        z = own.clone().requires_grad_()
        columns = own_columns(own.shape[-1], vocabulary, softcap, each)
        loss, lse = cross_entropy(z * 1, labels, columns)
        (loss * weights + lse.square() * square).sum().backward()
        results.append((loss.detach(), lse.detach(), z.grad))
    (loss, lse, dz), (got_loss, got_lse, got_dz) = results
    near(got_loss, loss), near(got_lse, lse), near(got_dz, dz.chunk(size, -1)[tp.axis.rank])
    everyone = [torch.empty_like(got_loss) for _ in range(size)]
    dist.all_gather(everyone, got_loss)
    assert all(torch.equal(each, got_loss) for each in everyone)  # replicas must not drift apart


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocabulary", [64, 49, 17], ids=["full", "odd", "a-rank-of-padding-alone"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy(gloo_world, size, vocabulary, softcap):
    gloo_world(size).run(check_loss, size, min(vocabulary, 16 * size), softcap)


def check_one_collective(size):
    tp, calls = mode(size, False, True), []
    real = dist.isend
    dist.isend = lambda x, *args, **kwargs: (
        calls.append(x.numel() * x.element_size()) or real(x, *args, **kwargs)
    )
    try:
        logits = draw(S, B, 16).requires_grad_()
        columns = own_columns(16, 16 * size, None, tp)
        loss, _ = cross_entropy(logits * 1, torch.zeros(S, B, dtype=torch.long), columns)
        forward = list(calls)
        loss.sum().backward()
    finally:
        dist.isend = real
    return forward, calls[len(forward) :]


def test_the_loss_sends_three_numbers_a_token_once(gloo_world):
    """One all-gather: a message of 3 x tokens x 8 bytes to each other rank; nothing in the backward
    pass.
    """
    assert gloo_world(4).run(check_one_collective, 4) == [([3 * S * B * 8] * 3, [])] * 4
