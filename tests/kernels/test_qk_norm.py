"""Norms of query and key heads with their rotation, in one pass over the fused projection."""

import pytest
import torch
from checks import check_passes
from megatron.kernels.qk_norm import qk_norm, qk_norm_backward

SHAPES = [
    {"s": 24, "g": 2, "m": 2, "d": 64},  # more heads than one program takes
    {"g": 2, "m": 3, "d": 64},
    {"g": 1, "m": 4, "d": 24, "rotary": 12},
    {"g": 4, "m": 1, "d": 128, "rotary": 0},
    {"g": 3, "m": 2, "d": 10, "rotary": 6},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centre", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(shape, centre, dtype, device):
    check_passes("qk_norm", {"s": 3, "b": 2, **shape, "centre": centre}, dtype, device)


def test_values_stay_to_the_bit(device):
    qkv, dy = (torch.randn(3, 1, 2, 5, 64, device=device).bfloat16() for _ in range(2))
    weights = torch.randn(2, 64, device=device).bfloat16().unbind()
    y, statistics = qk_norm(qkv, *weights, None, None, None, None, 1e-5)
    dx, _ = qk_norm_backward(dy, qkv, *weights, None, None, statistics)
    assert torch.equal(y[..., -1, :], qkv[..., -1, :])
    assert torch.equal(dx[..., -1, :], dy[..., -1, :])
