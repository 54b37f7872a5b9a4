"""RMSNorm and LayerNorm against their definition in float64, and the rows that programs share."""

import dataclasses

import pytest
import torch
from checks import check_case, check_passes
from megatron.kernels import norm as ops

EPS = 1e-5
both = pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@both
@pytest.mark.parametrize("rows, width, add", [(6, 96, True), (5, 1000, False)])
def test_against_the_definition(rows, width, add, centre, dtype, device):
    """Of rows that lie apart."""
    sizes = {"rows": rows, "width": width, "stride": width + 8}
    check_passes("norm", sizes | {"add": add, "centre": centre}, dtype, device)


@both
@pytest.mark.parametrize("add", [False, True])
def test_rows_wider_than_a_program_holds(add, centre, device, monkeypatch):
    """The backward pass."""
    monkeypatch.setattr(ops, "WIDEST_BACKWARD", 128)
    row = ops.find("norm backward", 90, kind="wide")
    narrow = dataclasses.replace(row, numbers=row.numbers | {"block": 128})
    find = ops.find
    monkeypatch.setattr(
        ops, "find", lambda *at, **key: narrow if key["kind"] == "wide" else find(*at, **key)
    )
    given = {"rows": 3, "width": 300, "add": add, "centre": centre}
    check_case("norm backward", given, torch.bfloat16, device)


@both
def test_programs_share_rows(centre, device, monkeypatch):
    """More tiles than programs, a last one that is not whole."""
    real = ops.configuration
    shared = {"rows": 4, "programs": 3}
    monkeypatch.setattr(
        ops, "configuration", lambda *given: dataclasses.replace(real(*given), **shared)
    )
    given = {"rows": 21, "width": 64, "add": True, "centre": centre}
    check_passes("norm", given, torch.bfloat16, device)


def operands(shape, dtype, device):
    """x, a residual, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, shape, shape[-1:], shape[-1:])
    x, *rest = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return x * 2 + 0.5, *rest


def test_layers_rounding_of_rms_norm(device):
    """x rstd is rounded before the product with the weight: few results differ by a bit, as rstd
    does; without it a fourth does. The sum with a residual is rounded before it is normed.
    """
    x, residual, weight, _ = operands((16, 256), torch.bfloat16, device)
    y, total, _ = ops.add_norm(x, residual, weight, None, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, ops.norm(total, weight, None, EPS)[0])
    expected, wide = ops.norm_reference(x, weight, None, EPS), x.double()
    assert (ops.norm(x, weight, None, EPS)[0] != expected).float().mean() < 0.01
    unrounded = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert (unrounded.bfloat16() != expected).float().mean() > 0.1


def test_views_of_the_fused_qkv_output(device):
    """Read where they lie, as rows at two strides, or copied."""
    qkv = torch.randn(3, 2, 3, 5, 32, device=device)
    weight = torch.randn(32, device=device)
    for view, copied in (
        (qkv[:, :, :, 3], False),
        (qkv[:, :, :, :3], False),
        (qkv[:, :, 1:, :3], True),
        (qkv[:, :, :, :3, ::2], True),
    ):
        assert (ops._rows(view)[0].data_ptr() != view.data_ptr()) == copied
        given = (weight[: view.shape[-1]], None, EPS)
        found, whole = ops.norm(view, *given), ops.norm(view.clone(), *given)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@both
def test_what_is_not_finite_stays_in_its_row(centre, device):
    x, dy, weight, bias = operands((6, 80), torch.float32, device)
    results = []
    for _ in range(2):
        y, statistics = ops.norm(x, weight, bias if centre else None, EPS)
        results.append((y, *ops.norm_backward(dy, x, weight, statistics, None)))
        x[1, 3], x[4, 79] = torch.nan, torch.inf
    (clean_y, clean_dx, _), (y, dx, gradients) = results
    assert not (y[1].isfinite().any() or y[4, 79].isfinite() or dx[[1, 4]].isfinite().any())
    for mine, before in ((y, clean_y), (dx, clean_dx)):
        assert torch.equal(mine[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert not gradients[0, 79].isfinite()


def test_large_and_constant_rows(device):
    """Offsets that cancel: the variance is taken about the mean; a constant row's is zero."""
    x, _, weight, bias = operands((4, 200), torch.float32, device)
    x = x + 1000
    x[2] = 3.0
    y, _ = ops.norm(x, weight, bias, EPS)
    exact = ops.norm_reference(x.double(), weight.double(), bias.double(), EPS)
    torchs = ops.norm_reference(x, weight, bias, EPS)
    mine, other = ((found - exact)[[0, 1, 3]].abs().max() for found in (y, torchs))
    assert mine <= 2 * other + 1e-6
    assert torch.equal(y[2], bias)
