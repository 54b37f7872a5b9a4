"""Rotary positions in place, on the views that the model passes."""

import pytest
import torch
from checks import assert_as_good, canaries, check_case
from megatron.kernels.rotary import rotary_, rotary_reference


def tables(s, b, width, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = 100 * torch.randn(s, b, 1, width // 2, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(
    "heads",
    [
        {"n": 20, "d": 24, "rotary": 12},
        {"n": 1, "d": 10, "rotary": 6},
        {"n": 5, "d": 128, "rotary": 64},
        {"g": 3, "m": 2, "d": 16},
        {"g": 4, "m": 1, "d": 64},
    ],
    ids=str,
)
def test_against_the_definition(heads, direction, dtype, device):
    """Queries and keys of the fused projection too, by one launch."""
    settings = {"s": 3, "b": 2, **heads, "direction": direction}
    check_case("rotary", settings, dtype, device, allocates=False)


def test_nothing_outside_is_written(device):
    with canaries():
        x = torch.empty(3, 2, 5, 24, device=device).normal_()
        qkv = torch.empty(3, 2, 3, 4, 12, device=device).normal_()
        for each in (x, qkv[:, :, :, :-1]):
            rotary_(each, *tables(3, 2, 12, device), 1)


def test_strided_views_and_tables(device):
    """Heads first in memory, tables of which each token reads every second."""
    x = torch.randn(2, 3, 4, 8, device=device).permute(2, 0, 1, 3)  # [s, b, n, d]
    cos, sin = (table[::2] for table in tables(8, 2, 8, device))
    exact = rotary_reference(x.double(), cos.double(), sin.double(), 1)
    torchs = rotary_reference(x.clone(), cos, sin, 1)
    rotary_(x, cos, sin, 1)
    assert_as_good(x, exact, torchs)


def test_what_does_not_turn_stays_to_the_bit(device):
    """Channels beyond the width, values of the fused projection, and of what is not finite all
    other pairs.
    """
    qkv = torch.randn(2, 1, 1, 4, 8, device=device)
    whole, (cos, sin) = qkv.clone(), tables(2, 1, 6, device)
    rotary_(whole[:, :, :, :-1], cos, sin, 1)
    bad = qkv.clone()
    bad[1, 0, 0, 1, 2] = torch.nan
    rotary_(bad[:, :, :, :-1], cos, sin, 1)
    hit = torch.zeros_like(bad, dtype=torch.bool)
    hit[1, 0, 0, 1, 2] = hit[1, 0, 0, 1, 5] = True
    assert bad[hit].isnan().all() and torch.equal(bad[~hit], whole[~hit])
    assert torch.equal(whole[:, :, :, -1], qkv[:, :, :, -1])
    assert torch.equal(whole[..., 6:], qkv[..., 6:])
