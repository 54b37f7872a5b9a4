"""Rotary positions in place, on the views that the model passes."""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels.rotary import rotary_, rotary_reference


def tables(s, b, width, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = 100 * torch.randn(s, b, 1, width // 2, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def check(x, cos, sin, direction, dtype):
    """x is turned as the definition does, and nothing next to it."""
    exact = rotary_reference(x.double(), cos.double(), sin.double(), direction)
    torchs = rotary_reference(x.clone(), cos, sin, direction)
    rotary_(x, cos, sin, direction)
    assert_as_good(x, exact, torchs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("heads, d, width", [(3, 64, 64), (20, 24, 12), (1, 10, 6), (5, 128, 64)])
def test_against_the_definition(heads, d, width, direction, dtype, device):
    with canaries():
        x = torch.empty(3, 2, heads, d, dtype=dtype, device=device).normal_()
        rest = x[..., width:].clone()
        check(x, *tables(3, 2, width, device), direction, dtype)
        assert torch.equal(x[..., width:], rest)


@pytest.mark.parametrize("groups, queries", [(3, 2), (1, 4), (4, 1)])
def test_queries_and_keys_of_the_fused_output(groups, queries, device):
    """One launch turns both; values stay."""
    s, b, d = 2, 3, 16
    qkv = torch.randn(s, b, groups, queries + 2, d, device=device)
    before = qkv.clone()
    cos, sin = tables(s, b, d, device)
    rotary_(qkv[:, :, :, :-1], cos, sin, 1)
    heads = before[:, :, :, :-1].reshape(s, b, -1, d)
    expected = rotary_reference(heads, cos, sin, 1).view(s, b, groups, queries + 1, d)
    torch.testing.assert_close(qkv[:, :, :, :-1], expected, rtol=0, atol=1e-6)
    assert torch.equal(qkv[:, :, :, -1], before[:, :, :, -1])


def test_strided_views_and_tables(device):
    """Heads first in memory, tables of which each token reads every second."""
    x = torch.randn(2, 3, 4, 8, device=device).permute(2, 0, 1, 3)  # [s, b, n, d]
    cos, sin = (table[::2] for table in tables(8, 2, 8, device))
    check(x, cos, sin, 1, torch.float32)


def test_direction_back_is_the_gradient(device):
    x = torch.randn(2, 2, 1, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in tables(2, 2, 6, "cpu"))
    dy = torch.randn_like(x)
    (dx,) = torch.autograd.grad(rotary_reference(x, cos, sin, 1), x, dy)
    torch.testing.assert_close(rotary_reference(dy, cos, sin, -1), dx)
    assert torch.autograd.gradcheck(lambda x: rotary_reference(x, cos, sin, 1), x)


def test_what_is_not_finite_stays_in_its_pair(device):
    x = torch.randn(2, 1, 2, 8, device=device)
    clean, (cos, sin) = x.clone(), tables(2, 1, 8, device)
    x[1, 0, 1, 2] = torch.nan
    for each in (x, clean):
        rotary_(each, cos, sin, 1)
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[1, 0, 1, 2] = hit[1, 0, 1, 6] = True
    assert x[hit].isnan().all() and torch.equal(x[~hit], clean[~hit])


def test_operator_is_well_formed(device):
    cos, sin = tables(2, 2, 4, device)
    x = torch.randn(2, 2, 3, 3, 8, device=device)[:, :, :, :2]
    torch.library.opcheck(rotary_.overload, (x, cos, sin, 1))
    rotary_(torch.empty(0, 2, 3, 8, device=device), cos[:0], sin[:0], 1)
