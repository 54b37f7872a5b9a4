"""The MLP's activations against their definition in float64."""

import pytest
import torch
from checks import check_passes
from megatron.kernels import activation as ops

pytestmark = pytest.mark.table

FORMS = [(kind, bias, 300) for kind in ops.KINDS for bias in (False, True)]
FORMS += [("swiglu", True, 2050), ("gelu", True, 2050)]  # more columns than a program takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind, bias, width", FORMS)
def test_against_the_definition(kind, bias, width, dtype, device):
    settings = {"activation": kind, "bias": bias, "rows": 6, "width": width}
    check_passes("activation", settings, dtype, device)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_programs_share_rows(kind, device, monkeypatch):
    """Each adds up several rows of the bias's gradient."""
    monkeypatch.setattr(
        ops, "configuration", lambda *_: ops.KernelLaunch(None, 32, 4, programs=3, prefetch=3)
    )
    settings = {"activation": kind, "bias": True, "rows": 10, "width": 40}
    check_passes("activation", settings, torch.float32, device)


def test_views_are_read_as_they_are(device):
    x, dy = (torch.randn(3, 4, width, device=device).transpose(0, 1) for width in (16, 8))
    given = None, "swiglu"
    assert torch.equal(ops.activation(x, *given), ops.activation(x.contiguous(), *given))
    found = ops.activation_backward(dy, x, *given)
    whole = ops.activation_backward(dy.contiguous(), x.contiguous(), *given)
    assert torch.equal(found[0], whole[0])


@pytest.mark.parametrize("kind", ops.KINDS)
def test_far_from_zero_and_not_finite(kind, device):
    """Tails are right to their last digits but a few, where erf would leave none; NaN stays NaN,
    and in its place.
    """
    ends = [-60, -30, -12, -9, -5, -3, -1e-3, -1e-30, 0, 1e-30, 1e-3, 3, 5, 12, 60]
    values = torch.tensor([*ends, torch.inf, torch.nan], device=device)
    up = [torch.ones_like(values)] if kind in ops.GATED else []
    x, dy = torch.cat([values, *up])[None], torch.ones_like(values)[None]
    y, (dx, _) = ops.activation(x, None, kind), ops.activation_backward(dy, x, None, kind)
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
        leaf = wide[None, :15].clone().requires_grad_()
        (slope,) = torch.autograd.grad(ops.activation_reference(leaf, None, kind).sum(), leaf)
        torch.testing.assert_close(dx[:, :15], slope.float(), rtol=2e-5, atol=3e-7)
    assert y[0, -1].isnan() and dx[0, 16].isnan() and not dx[0, :15].isnan().any()
