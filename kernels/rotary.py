"""Rotary position embedding in place: channels i and i + r/2 of the first r of each head's d
channels turn by an angle of their token.

    y[i]       = x[i] cos - x[i + r/2] sin
    y[i + r/2] = x[i + r/2] cos + x[i] sin
    direction -1 turns back, which is the backward pass

x [s, b, n, d] or, heads in groups, [s, b, g, n/g, d], any strides but 1 between channels. Query and
key heads of the fused QKV output [s, b, g, q + 2, d] lie side by side: one launch on [..., :q + 1,
:] turns both. cos and sin [s, b, 1, r] in fp32, (cos, cos) and (-sin, sin) over the two halves
(model/attention/rotary.py), of which one half each is read. Products and sums in fp32, rounded
once.

Source: Su et al. 2021; halves as in GPT-NeoX. Roofline, bf16: 4 bytes a turning channel, and 4 r
bytes a token of the tables. 8192 tokens of 32 + 8 heads of 128 at 4.3 TB/s: 39 us and 1 us.
"""

from __future__ import annotations

import torch
from megatron.kernels.configurations import KernelLaunch, find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from torch import Tensor


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """The definition, a new tensor; x [s, b, n, d]."""
    width = cos.shape[-1]
    turning, rest = x[..., :width].to(cos.dtype), x[..., width:]
    turned = turning * cos + direction * turning.roll(width // 2, -1) * sin
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def configuration(heads: int, half: int, arch: int) -> KernelLaunch:
    """1024 to 4096 channels of a token a program, with no more idle heads than there must be, and 8
    pairs a thread.
    """
    block = next_power_of_2(half)
    row = find("rotary", arch)
    together = max(row.numbers["block"] // block, 1)
    while together * block > 512 and heads % together:
        together //= 2
    warps = max(together * block // (32 * row.numbers["per_thread"]), 1)
    return KernelLaunch(row, block, warps, together)


@jit
def load_turn(cos, sin, at, known, direction, HALF: tl.constexpr):
    """(cos, sin direction) [1, BLOCK] of a token's angles, at the places `at` [BLOCK] of both
    tables; a sine is read from the second half, where it has its own sign.
    """
    c = load_fp32(cos + at, known)[None, :]
    return c, (load_fp32(sin + at + HALF, known) * direction)[None, :]


@jit
def rotary_kernel(
    x,
    cos,
    sin,
    batch,
    heads,
    stride_s,
    stride_b,
    stride_g,
    stride_n,
    table_s,
    table_b,
    direction,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads of a token: the pair (channel, channel + HALF) turns by the token's angle."""
    s, b = tl.program_id(0) // batch, tl.program_id(0) % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    known = channel < HALF
    inside = (head < heads)[:, None] & known[None, :]
    table = s.to(tl.int64) * table_s + b * table_b + channel
    c, d = load_turn(cos, sin, table, known, direction, HALF)
    start = s.to(tl.int64) * stride_s + b.to(tl.int64) * stride_b
    of_head = (head // GROUP) * stride_g + (head % GROUP) * stride_n
    low = x + start + of_head[:, None] + channel[None, :]
    first, second = load_fp32(low, inside), load_fp32(low + HALF, inside)
    store_rounded(low, first * c - second * d, inside)
    store_rounded(low + HALF, second * c + first * d, inside)


@operator("rotary_", mutates_args=("x",))
def rotary_(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> None:
    """Turn x in place, by the angles of the tables (direction 1) or back (-1)."""
    assert x.dtype != torch.float64 and cos.dtype == torch.float32, (
        "float64: the definition serves it"
    )
    s, b, *groups, d = x.shape
    width, group = cos.shape[-1], groups[1] if len(groups) == 2 else 1
    assert cos.shape == sin.shape == (s, b, 1, width) and cos.stride() == sin.stride()
    assert width % 2 == 0 and width <= d
    assert len(groups) in (1, 2) and x.stride(-1) == cos.stride(-1) == 1 and direction in (1, -1)
    heads = groups[0] * group
    if x.numel() == 0 or width == 0:
        return
    form = configuration(heads, width // 2, capability(x.device))
    launch(
        rotary_kernel,
        (s * b, cdiv(heads, form.rows)),
        form,
        x,
        cos,
        sin,
        b,
        heads,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        x.stride(3) if group > 1 else 0,
        cos.stride(0),
        cos.stride(1),
        direction,
        GROUP=group,
        HALF=width // 2,
        HEADS=form.rows,
        BLOCK=form.block,
    )
