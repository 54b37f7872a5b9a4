"""Attention of the fused projection where it lies: the same numbers as of its parts."""

import pytest
import torch
from checks import canaries
from megatron.kernels import lang
from megatron.kernels.attention import flash_attention
from megatron.kernels.attention_masks import attention_mask
from selection import each_value
from test_attention import assert_near, defined, results

pytestmark = pytest.mark.table(traits=each_value)

S, B = 24, 1
TILES = {"scale": 0.25, "tile": 16}
FORMS = [(2, 1), (2, 2), (3, 4), (1, 4)]  # key heads, query heads each


def split(qkv):
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    return q.flatten(2, 3), k, v


@pytest.mark.parametrize("g, m", FORMS)
@pytest.mark.parametrize("programs", [1, 12])
@pytest.mark.default("1-2-2")
def test_same_bits_as_of_the_parts(device, monkeypatch, g, m, programs):
    """Where one program takes all heads of a key and where it takes some; dk and dv are the fused
    gradient's own.
    """
    monkeypatch.setattr(lang, "multiprocessors", lambda _: programs)
    generator = torch.Generator().manual_seed(g + m)
    qkv, dout = (
        torch.randn(S, B, *heads, 16, generator=generator).to(device)
        for heads in ((g, m + 2), (g * m,))
    )
    given = (dout, torch.randn(B, g * m, S, generator=generator).to(device)), attention_mask(S, S)
    apart = results(flash_attention, [x.contiguous() for x in split(qkv)], *given, **TILES)
    exact, torchs = defined(split(qkv), *given, scale=0.25)
    with canaries():
        out, lse, of_qkv = results(flash_attention, [qkv], *given, **TILES)
    dq, dk, dv = split(of_qkv)
    assert of_qkv.is_contiguous()
    for got, want, low, part in zip((out, lse, dq, dk, dv), exact, torchs, apart, strict=True):
        assert_near(got, want, low)
        assert torch.equal(got, part)
