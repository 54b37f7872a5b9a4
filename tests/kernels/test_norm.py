"""RMSNorm and LayerNorm against their definition in float64, and the rows that programs share."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from checks import assert_as_good, canaries
from megatron.kernels import norm as ops

EPS = 1e-5


def operands(shape, dtype, centre, device, seed=0):
    """x, residual, weight, bias or None, dy, dtotal."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    width = shape[-1]
    return (
        draw(*shape) * 2 + 0.5,
        draw(*shape),
        draw(width) + 1,
        draw(width) if centre else None,
        draw(*shape),
        draw(*shape),
    )


def by_autograd(x, residual, weight, bias, dy, dtotal, dtype):
    """y, total, dx, dweight and dbias of the definition in `dtype`."""
    x, residual, weight, bias, dy, dtotal = (
        None if each is None else each.to(dtype, copy=True)
        for each in (x, residual, weight, bias, dy, dtotal)
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


def check(given, dtype):
    with canaries():
        actual = by_kernels(*given)
    for mine, exact, torchs in zip(
        actual, by_autograd(*given, torch.float64), by_autograd(*given, dtype), strict=True
    ):
        assert_as_good(mine, exact, torchs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "shape, add", [((3, 2, 96), True), ((5, 1, 1000), False), ((1, 2049), True)]
)
def test_against_the_definition(shape, add, centre, dtype, device):
    given = list(operands(shape, dtype, centre, device))
    if not add:
        given[1] = None
    check(given, dtype)


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("add", [False, True])
def test_rows_wider_than_a_program_holds(add, centre, device, monkeypatch):
    monkeypatch.setattr(ops, "WIDEST", {"forward": 128, "backward": 128})
    rows = {
        direction: ops.find(f"norm {direction}", 90, kind="wide")
        for direction in ("forward", "backward")
    }
    monkeypatch.setattr(
        ops,
        "find",
        lambda name, *_, **__: dataclasses.replace(
            rows[name[5:]], numbers=rows[name[5:]].numbers | {"block": 128}
        ),
    )
    given = list(operands((3, 2, 300), torch.bfloat16, centre, device))
    if not add:
        given[1] = None
    check(given, torch.bfloat16)


def test_layers_rounding_of_rms_norm(device):
    """x rstd is rounded before the product with the weight: few results differ by a bit, as rstd
    does; without it a fourth does. The sum with a residual is rounded before it is normed.
    """
    x, residual, weight, *_ = operands((16, 256), torch.bfloat16, False, device)
    y, total, _ = ops.add_norm(x, residual, weight, None, EPS)
    assert torch.equal(total, x + residual) and torch.equal(
        y, ops.norm(total, weight, None, EPS)[0]
    )
    expected = ops.norm_reference(x, weight, None, EPS)
    assert (ops.norm(x, weight, None, EPS)[0] != expected).float().mean() < 0.01
    assert (
        (
            x.double()
            * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
            * weight.double()
        ).bfloat16()
        != expected
    ).float().mean() > 0.1


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_views_of_the_fused_qkv_output(centre, device):
    s, b, groups, queries, d = 3, 2, 3, 3, 32
    _, _, weight, bias, *_ = operands((1, d), torch.float32, centre, device)
    qkv = torch.randn(s, b, groups, queries + 2, d, device=device)
    as_they_are, copies = (
        (qkv[:, :, :, queries], qkv[:, :, :, :queries]),
        (qkv[:, :, 1:, :queries], qkv[:, :, :, :queries, ::2]),
    )
    for view, copied in [(view, False) for view in as_they_are] + [(view, True) for view in copies]:
        weight, bias = weight[: view.shape[-1]], None if bias is None else bias[: view.shape[-1]]
        assert (ops._rows(view)[0].data_ptr() != view.data_ptr()) == copied
        dy = torch.randn_like(view)
        check((view, None, weight, bias, dy, None), torch.float32)


def test_definition_is_torchs():
    x, _, weight, bias, *_ = operands((5, 33), torch.float64, True, "cpu")
    torch.testing.assert_close(
        ops.norm_reference(x, weight, bias, EPS), F.layer_norm(x, (33,), weight, bias, EPS)
    )
    torch.testing.assert_close(
        ops.norm_reference(x, weight, None, EPS), F.rms_norm(x, (33,), weight, EPS)
    )
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *given: ops.norm_reference(*given, EPS), leaves)


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_programs_share_rows(centre, device, monkeypatch):
    """More tiles than programs, a last one that is not whole; twice the same bits; the parameter
    gradients' error does not grow.
    """
    real = ops.configuration
    monkeypatch.setattr(
        ops, "configuration", lambda *given: dataclasses.replace(real(*given), rows=4, programs=3)
    )
    given = list(operands((37, 64), torch.bfloat16, centre, device))
    check(given, torch.bfloat16)
    for first, second in zip(by_kernels(*given), by_kernels(*given), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_what_is_not_finite_stays_in_its_row(centre, device):
    given = list(operands((6, 80), torch.float32, centre, device))
    clean = by_kernels(*given)
    given[0][1, 3], given[0][4, 79] = torch.nan, torch.inf
    y, total, dx, *gradients = by_kernels(*given)
    rows = torch.tensor([1, 4], device=device)
    others = torch.tensor([0, 2, 3, 5], device=device)
    assert not y[1].isfinite().any() and not y[4, 79].isfinite() and not dx[rows].isfinite().any()
    for mine, before in zip((y, total, dx), clean, strict=False):
        assert torch.equal(mine[others], before[others])
    assert not gradients[0][79].isfinite()


def test_large_and_constant_rows(device):
    """Offsets that cancel: the variance is taken about the mean; a constant row's is zero."""
    given = list(operands((4, 200), torch.float32, True, device))
    given[1] = None
    given[0] = given[0] + 1000
    given[0][2] = 3.0
    y, _, dx, *_ = by_kernels(*given)
    exact = by_autograd(*given, torch.float64)
    torchs = by_autograd(*given, torch.float32)
    for mine, right, other in ((y, exact[0], torchs[0]), (dx, exact[2], torchs[2])):
        rows = [0, 1, 3]
        assert (mine[rows] - right[rows]).abs().max() <= 2 * (
            other[rows] - right[rows]
        ).abs().max() + 1e-6
    assert torch.equal(y[2], given[3])


def test_no_rows(device):
    x = torch.empty(0, 3, 16, device=device)
    weight = torch.ones(16, device=device)
    y, statistics = ops.norm(x, weight, None, EPS)
    dx, gradients = ops.norm_backward(x, x, weight, statistics, None)
    assert y.shape == dx.shape == x.shape and torch.equal(
        gradients, torch.zeros(1, 16, device=device)
    )


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_operators_are_well_formed(centre, device):
    x, residual, weight, bias, dy, dtotal = operands((2, 2, 16), torch.float32, centre, device)
    y, statistics = ops.norm(x, weight, bias, EPS)
    torch.library.opcheck(ops.norm.overload, (x, weight, bias, EPS))
    torch.library.opcheck(ops.add_norm.overload, (x, residual, weight, bias, EPS))
    torch.library.opcheck(
        ops.norm_backward.overload, (dy, x, weight, statistics, dtotal if centre else None)
    )
