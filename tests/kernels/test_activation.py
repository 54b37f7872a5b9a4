"""The MLP's activations against their definition in float64."""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels import activation as ops

pytestmark = pytest.mark.table

FORMS = [(kind, bias) for kind in ops.KINDS for bias in (False, True)]


def operands(kind, bias, rows, width, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = width * (2 if kind in ops.GATED else 1)
    x, dy, shift = (
        torch.randn(size, generator=generator).to(device, dtype)
        for size in ((*rows, columns), (*rows, width), (columns,))
    )
    return dy, x * 2, shift if bias else None


def by_autograd(dy, x, bias, kind, dtype):
    dy, x, bias = (None if each is None else each.to(dtype, copy=True) for each in (dy, x, bias))
    leaves = [each.requires_grad_() for each in (x, bias) if each is not None]
    y = ops.activation_reference(x, bias, kind)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def by_kernels(dy, x, bias, kind):
    dx, dbias = ops.activation_backward(dy, x, bias, kind)
    return [ops.activation(x, bias, kind), dx] + ([] if bias is None else [dbias])


def check(dy, x, bias, kind):
    with canaries():
        actual = by_kernels(dy, x, bias, kind)
    expected = (by_autograd(dy, x, bias, kind, dtype) for dtype in (torch.float64, x.dtype))
    for mine, exact, torchs in zip(actual, *expected, strict=True):
        assert_as_good(mine, exact, torchs, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind, bias", FORMS)
def test_against_the_definition(kind, bias, dtype, device):
    check(*operands(kind, bias, (3, 2), 300, dtype, device), kind)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_more_columns_than_a_program_takes_and_views(kind, device):
    dy, x, bias = operands(kind, True, (2, 3), 2050, torch.bfloat16, device)
    check(dy.transpose(0, 1), x.transpose(0, 1), bias, kind)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_programs_share_rows(kind, device, monkeypatch):
    """Each adds up several rows of the bias's gradient."""
    monkeypatch.setattr(
        ops, "configuration", lambda *_: ops.KernelLaunch(None, 32, 4, programs=3, prefetch=3)
    )
    check(*operands(kind, True, (10,), 40, torch.float32, device), kind)


@pytest.mark.parametrize("kind", ops.KINDS)
def test_far_from_zero_and_not_finite(kind, device):
    """Tails are right to their last digits but a few, where erf would leave none; NaN stays NaN,
    and in its place.
    """
    ends = [-60, -30, -12, -9, -5, -3, -1e-3, -1e-30, 0, 1e-30, 1e-3, 3, 5, 12, 60]
    values = torch.tensor([*ends, torch.inf, torch.nan], device=device)
    up = [torch.ones_like(values)] if kind in ops.GATED else []
    x, dy = torch.cat([values, *up])[None], torch.ones_like(values)[None]
    y, dx = by_kernels(dy, x, None, kind)
    wide = values.double()
    right = {
        "squared-relu": lambda: wide.clamp_min(0).square(),
        "swiglu": lambda: wide * torch.sigmoid(wide),
        "gelu-tanh": lambda: (
            wide * torch.sigmoid((8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
        ),
    }.get(kind, lambda: wide * torch.erfc(-wide / 2**0.5) / 2)()
    torch.testing.assert_close(y[0], right.float(), rtol=2e-4, atol=1e-37, equal_nan=True)
    if not up:
        slope = by_autograd(dy[:, :15], x[:, :15], None, kind, torch.float64)[1]
        torch.testing.assert_close(dx[:, :15], slope.float(), rtol=2e-5, atol=3e-7)
    assert y[0, -1].isnan() and dx[0, 16].isnan() and not dx[0, :15].isnan().any()


@pytest.mark.parametrize("kind", ops.KINDS)
def test_definition_has_this_gradient(kind):
    dy, x, bias = operands(kind, True, (3,), 4, torch.float64, "cpu")
    assert torch.autograd.gradcheck(
        lambda x, bias: ops.activation_reference(x, bias, kind),
        [x.requires_grad_(), bias.requires_grad_()],
    )


def test_operators_are_well_formed(device):
    for kind, bias in (("swiglu", False), ("gelu", True)):
        dy, x, bias = operands(kind, bias, (2, 2), 8, torch.float32, device)
        torch.library.opcheck(ops.activation.overload, (x, bias, kind))
        torch.library.opcheck(ops.activation_backward.overload, (dy, x, bias, kind))
    dx, dbias = ops.activation_backward(dy[:0], x[:0], bias, kind)
    assert dx.shape == (0, 2, 8) and torch.equal(dbias, torch.zeros(8, device=device))
    assert ops.activation(x[:0], bias, kind).shape == (0, 2, 8)
