"""The fused step against torch.optim's loop in float64, and what it must leave alone."""

import pytest
import torch
from checks import CANARY, error
from megatron.kernels.adamw import adamw_
from megatron.kernels.configurations import Row
from torch.optim.adamw import adamw

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FP32, BF16 = torch.float32, torch.bfloat16
MARGIN = 64


def scalar(value, device):
    return torch.tensor(float(value), device=device)


def padded(x, dtype):
    """A copy of x between canaries, and the whole buffer."""
    whole = torch.full((x.numel() + 2 * MARGIN,), CANARY, device=x.device, dtype=dtype)
    whole[MARGIN:-MARGIN] = x
    return whole[MARGIN:-MARGIN], whole


def draw(size, device, grad=FP32, moments=FP32):
    generator = torch.Generator().manual_seed(size)
    scale = 10.0 ** torch.randint(-6, 2, (size,), generator=generator)  # gradients of all sizes
    p, g, m, v = (
        torch.randn(size, generator=generator).to(device) * s
        for s in (1, scale.to(device), 0.1, 0.1)
    )
    return p, g.to(grad), m.to(moments), v.square().to(moments)


def exact(p, g, m, v, step, coefficient, settings):
    """torch.optim's own loop in float64."""
    p, g, m, v = (x.double().clone() for x in (p, g, m, v))
    kind = {"foreach": False, "amsgrad": False, "maximize": False}
    steps = [step.double().clone()]
    adamw([p], [g * coefficient.double()], [m], [v], [], steps, **kind, **settings)
    return p, m, v


@pytest.mark.parametrize("size", [1, 63, 1024, 3 * 1024 + 5])
@pytest.mark.parametrize(
    "grad, moments, out",
    [(FP32, FP32, BF16), (BF16, FP32, BF16), (FP32, BF16, torch.float16), (FP32, FP32, None)],
)
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_one_step(device, size, grad, moments, out, step):
    made = draw(size, device, grad, moments)
    step, coefficient, found_inf = scalar(step, device), scalar(0.37, device), scalar(0, device)
    expected = exact(*made, step, coefficient, SETTINGS)
    buffers = [padded(x, x.dtype) for x in made] + (
        [padded(torch.zeros(size, device=device), out)] if out else []
    )
    p, g, m, v, *rounded = (inner for inner, _ in buffers)
    adamw_(p, g, m, v, *(rounded or [None]), step, coefficient, found_inf, **SETTINGS)
    ulp = torch.finfo(FP32).eps
    # m and v: three roundings; the step (some lr times at most 10): ten of them, and the weight
    # itself is rounded twice.
    _, g0, m0, _ = (x.double().abs() for x in made)
    for got, want, size_of, more in (
        (m, expected[1], expected[1].abs() + 2 * (m0 + g0), 0),
        (v, expected[2], expected[2].abs(), 0),
        (p, expected[0], expected[0].abs(), 10 * (expected[0] - made[0].double()).abs()),
    ):
        bound = ulp * (2 * size_of + more) + (2**-8 * want.abs() if got.dtype == BF16 else 0)
        assert ((got.double() - want).abs() <= bound).all()
    assert torch.equal(g, made[1]) and (not rounded or torch.equal(rounded[0], p.to(out)))
    for inner, whole in buffers:
        edge = torch.cat([whole[:MARGIN], whole[-MARGIN:]])
        assert (edge == torch.full((), CANARY, dtype=whole.dtype)).all() and len(inner) == size


def test_many_steps_and_more_blocks_than_programs(device, monkeypatch):
    """Two programs take three blocks in turn; twelve steps in fp32 stay at fp32's rounding."""
    import megatron.kernels.adamw as module

    row = Row("adamw", 90, {}, {"block": 256, "num_warps": 4, "programs": 2})
    monkeypatch.setattr(module, "find", lambda *_: row)
    settings = {**SETTINGS, "beta2": 0.999}
    p, g, m, v = draw(700, device)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    wide, moments = p.double(), [m.double(), v.double()]
    half, zero = scalar(0.5, device), scalar(0, device)
    for step in range(12):
        g, taken = g.roll(1), scalar(step, device)
        adamw_(p, g, m, v, None, taken, half, zero, **settings)
        wide, *moments = exact(wide, g, *moments, taken, half, settings)
    assert error(p, wide) < 12 * torch.finfo(FP32).eps
    assert error(m, moments[0]) < 4e-6 and error(v, moments[1]) < 4e-6


def test_found_inf_leaves_everything(device):
    p, g, m, v = draw(100, device)
    g[3], out = torch.inf, torch.ones(100, dtype=BF16, device=device)
    kept = [x.clone() for x in (p, m, v, out)]
    adamw_(p, g, m, v, out, scalar(0, device), scalar(1, device), scalar(1, device), **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip((p, m, v, out), kept, strict=True))
    adamw_(p, g, m, v, out, scalar(0, device), scalar(1, device), scalar(0, device), **SETTINGS)
    assert p[3].isnan() and p[:3].isfinite().all() and p[4:].isfinite().all()


def test_no_momentum_at_all(device):
    """beta 0: the first moment is the gradient, at any step."""
    p, g, m, v = draw(64, device)
    settings = {**SETTINGS, "beta1": 0.0, "beta2": 0.0}
    expected = exact(p, g, m, v, scalar(5, device), scalar(1, device), settings)
    adamw_(p, g, m, v, None, scalar(5, device), scalar(1, device), scalar(0, device), **settings)
    assert torch.equal(m, g) and error(p, expected[0]) < 1e-6
