"""RMSNorm and LayerNorm against their definition in float64, and the rows that programs share."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from checks import assert_as_good, canaries
from megatron.kernels import norm as ops

EPS = 1e-5
both = pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])


def operands(shape, dtype, centre, device, add=True):
    """x, residual, weight, bias or None, dy, dtotal."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    width = shape[-1]
    x, residual, weight, bias = draw(*shape), draw(*shape), draw(width), draw(width)
    dy, dtotal = draw(*shape), draw(*shape)
    bias = bias if centre else None
    return [x * 2 + 0.5, residual if add else None, weight + 1, bias, dy, dtotal]


def by_autograd(given, dtype):
    """y, total, dx, dweight and dbias of the definition in `dtype`."""
    x, residual, weight, bias, dy, dtotal = (
        None if each is None else each.to(dtype, copy=True) for each in given
    )
    leaves = [each.requires_grad_() for each in (x, weight, bias) if each is not None]
    if residual is None:
        y, total = ops.norm_reference(x, weight, bias, EPS), x
        return [y.detach(), total.detach(), *torch.autograd.grad(y, leaves, dy)]
    y, total = ops.add_norm_reference(x, residual, weight, bias, EPS)
    return [y.detach(), total.detach(), *torch.autograd.grad((y, total), leaves, (dy, dtotal))]


def by_kernels(x, residual, weight, bias, dy, dtotal):
    if residual is None:
        (y, statistics), total, dtotal = ops.norm(x, weight, bias, EPS), x, None
    else:
        y, total, statistics = ops.add_norm(x, residual, weight, bias, EPS)
    dx, gradients = ops.norm_backward(dy, total, weight, statistics, dtotal)
    return [y, total, dx, *gradients]


def check(given):
    dtype = given[0].dtype
    with canaries():
        actual = by_kernels(*given)
    expected = by_autograd(given, torch.float64), by_autograd(given, dtype)
    for mine, exact, torchs in zip(actual, *expected, strict=True):
        assert_as_good(mine, exact, torchs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@both
@pytest.mark.parametrize("shape, add", [((3, 2, 96), True), ((5, 1, 1000), False)])
def test_against_the_definition(shape, add, centre, dtype, device):
    check(operands(shape, dtype, centre, device, add))


@both
@pytest.mark.parametrize("add", [False, True])
def test_rows_wider_than_a_program_holds(add, centre, device, monkeypatch):
    monkeypatch.setattr(ops, "WIDEST", {"forward": 128, "backward": 128})
    find = ops.find

    def narrow(name, *_, **__):
        row = find(name, 90, kind="wide")
        return dataclasses.replace(row, numbers=row.numbers | {"block": 128})

    monkeypatch.setattr(ops, "find", narrow)
    check(operands((3, 1, 300), torch.bfloat16, centre, device, add))


def test_layers_rounding_of_rms_norm(device):
    """x rstd is rounded before the product with the weight: few results differ by a bit, as rstd
    does; without it a fourth does. The sum with a residual is rounded before it is normed.
    """
    x, residual, weight, *_ = operands((16, 256), torch.bfloat16, False, device)
    y, total, _ = ops.add_norm(x, residual, weight, None, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, ops.norm(total, weight, None, EPS)[0])
    expected, wide = ops.norm_reference(x, weight, None, EPS), x.double()
    assert (ops.norm(x, weight, None, EPS)[0] != expected).float().mean() < 0.01
    unrounded = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert (unrounded.bfloat16() != expected).float().mean() > 0.1


def test_views_of_the_fused_qkv_output(device):
    s, b, groups, queries, d = 3, 2, 3, 3, 32
    _, _, weight, bias, *_ = operands((1, d), torch.float32, True, device)
    qkv = torch.randn(s, b, groups, queries + 2, d, device=device)
    for view, copied in (
        (qkv[:, :, :, queries], False),
        (qkv[:, :, :, :queries], False),
        (qkv[:, :, 1:, :queries], True),
        (qkv[:, :, :, :queries, ::2], True),
    ):
        assert (ops._rows(view)[0].data_ptr() != view.data_ptr()) == copied
        width = view.shape[-1]
        check([view, None, weight[:width], bias[:width], torch.randn_like(view), None])


def test_definition_is_torchs():
    x, _, weight, bias, *_ = operands((5, 9), torch.float64, True, "cpu")
    for shift, torchs in (
        (bias, F.layer_norm(x, (9,), weight, bias, EPS)),
        (None, F.rms_norm(x, (9,), weight, EPS)),
    ):
        torch.testing.assert_close(ops.norm_reference(x, weight, shift, EPS), torchs)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *given: ops.norm_reference(*given, EPS), leaves)


@both
def test_programs_share_rows(centre, device, monkeypatch):
    """More tiles than programs, a last one that is not whole."""
    real = ops.configuration
    shared = {"rows": 4, "programs": 3}
    monkeypatch.setattr(
        ops, "configuration", lambda *given: dataclasses.replace(real(*given), **shared)
    )
    check(operands((21, 64), torch.bfloat16, centre, device))


@both
def test_what_is_not_finite_stays_in_its_row(centre, device):
    given = operands((6, 80), torch.float32, centre, device)
    clean = by_kernels(*given)
    given[0][1, 3], given[0][4, 79] = torch.nan, torch.inf
    y, total, dx, *gradients = by_kernels(*given)
    assert not (y[1].isfinite().any() or y[4, 79].isfinite() or dx[[1, 4]].isfinite().any())
    for mine, before in zip((y, total, dx), clean, strict=False):
        assert torch.equal(mine[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert not gradients[0][79].isfinite()


def test_large_and_constant_rows(device):
    """Offsets that cancel: the variance is taken about the mean; a constant row's is zero."""
    given = operands((4, 200), torch.float32, True, device, add=False)
    given[0] = given[0] + 1000
    given[0][2] = 3.0
    y, _, dx, *_ = by_kernels(*given)
    exact, torchs = by_autograd(given, torch.float64), by_autograd(given, torch.float32)
    for mine, right, other in ((y, exact[0], torchs[0]), (dx, exact[2], torchs[2])):
        mine, other = ((x - right)[[0, 1, 3]].abs().max() for x in (mine, other))
        assert mine <= 2 * other + 1e-6
    assert torch.equal(y[2], given[3])


def test_no_rows(device):
    x, weight = torch.empty(0, 3, 16, device=device), torch.ones(16, device=device)
    y, statistics = ops.norm(x, weight, None, EPS)
    dx, gradients = ops.norm_backward(x, x, weight, statistics, None)
    assert y.shape == dx.shape == x.shape
    assert torch.equal(gradients, torch.zeros(1, 16, device=device))


def test_operators_are_well_formed(device):
    x, residual, weight, bias, dy, dtotal = operands((2, 2, 16), torch.float32, True, device)
    _, statistics = ops.norm(x, weight, bias, EPS)
    torch.library.opcheck(ops.norm.overload, (x, weight, None, EPS))
    torch.library.opcheck(ops.add_norm.overload, (x, residual, weight, bias, EPS))
    for given in (dtotal, None):
        torch.library.opcheck(ops.norm_backward.overload, (dy, x, weight, statistics, given))
