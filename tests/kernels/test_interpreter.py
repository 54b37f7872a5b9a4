"""The harness itself: the interpreter's bf16, canaries, and what counts as good enough."""

import pytest
import torch
from checks import FROBENIUS, MARGIN, assert_as_good, canaries
from megatron.kernels.lang import jit, tl


@jit
def product_kernel(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)).to(c.dtype.element_ty))


@jit
def round_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@jit
def long_kernel(y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.zeros([N], tl.float32))


def test_bf16_products(device):
    a, b = (torch.randn(32, 32, dtype=torch.bfloat16, device=device) for _ in range(2))
    c = torch.empty(32, 32, dtype=torch.bfloat16, device=device)
    product_kernel[(1,)](a, b, c, 32)
    assert_as_good(c, a.double() @ b.double(), a @ b)


def test_rounding_to_bf16_is_to_nearest_even(device):
    ends = [1.00390625, 1.01171875, torch.inf, -torch.inf, torch.nan, -0.0]
    x = torch.cat([torch.randn(250), torch.tensor(ends)]).to(device)
    y = torch.empty(256, dtype=torch.bfloat16, device=device)
    round_kernel[(1,)](x, y, 256)
    assert torch.equal(y.nan_to_num(7), x.bfloat16().nan_to_num(7))


def test_canaries_find_a_write_outside(device):
    with canaries():
        long_kernel[(1,)](torch.empty(16, device=device), 16)
    with pytest.raises(AssertionError, match="outside a buffer of 15 elements"), canaries():
        long_kernel[(1,)](torch.empty(15, device=device), 16)
    assert MARGIN >= 16


def test_what_is_not_good_enough():
    exact = torch.randn(64, 64, dtype=torch.float64)
    low = exact.bfloat16()
    assert_as_good(low, exact, low)
    one_off = low.clone()
    one_off[3, 3] += 0.25
    for bad in (
        low * (1 + 4 * FROBENIUS[torch.bfloat16]),
        one_off,
        torch.where(torch.eye(64) > 0, torch.nan, low),
    ):
        with pytest.raises(AssertionError):
            assert_as_good(bad, exact, low)
