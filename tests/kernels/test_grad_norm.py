"""The sum of squares in float64: its accuracy, its range, and its result for numbers that are
none.
"""

import math

import megatron.kernels.grad_norm as module
import pytest
import torch
from megatron.kernels.configurations import Row
from megatron.kernels.grad_norm import sum_of_squares, sum_of_squares_reference

from megatron.optimizer import optimizer as grad_norm

# three programs, so that a program has several blocks
FEW = Row("grad_norm", 90, {}, {"block": 256, "num_warps": 4, "programs": 3})


def draw(size, dtype, device, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("configuration", [None, FEW], ids=["shipped", "few programs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_optimizers_sum(device, dtype, configuration, monkeypatch):
    if configuration:
        monkeypatch.setattr(module, "find", lambda *_: configuration)
    buffer = draw(9000, dtype, device)
    pieces = [buffer[0:1], buffer[1:1], buffer[7:300], buffer[300:4396], buffer[4397:9000]]
    got = sum_of_squares(pieces)
    assert got.dtype == torch.float64
    exact = math.fsum(x * x for piece in pieces for x in piece.double().tolist())
    assert abs(float(got) - exact) <= 1e-14 * exact
    torch.testing.assert_close(got, grad_norm.sum_of_squares(pieces, device), rtol=1e-13, atol=0)
    torch.testing.assert_close(got, sum_of_squares_reference(pieces), rtol=1e-13, atol=0)
    assert torch.equal(got, sum_of_squares(pieces)) and torch.equal(
        got, grad_norm.sum_of_squares(iter(pieces), device, "triton")
    )


@pytest.mark.parametrize("value", [3e38, 1e-38, 1e-45])
def test_squares_beyond_fp32(device, value):
    buffer = torch.full((5000,), value, device=device)
    assert float(sum_of_squares([buffer])) == pytest.approx(5000 * float(buffer[0]) ** 2, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [0, 4095, 4096, 4999])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_anything_that_is_not_finite_shows(device, value, where, dtype):
    buffer = draw(5000, dtype, device)
    other = draw(100, dtype, device)
    assert sum_of_squares([other, buffer[:where], buffer[where + 1 :]]).isfinite()
    buffer[where] = value
    assert not sum_of_squares([other, buffer]).isfinite()
