"""Norms of query and key heads and their rotary embedding in one pass over the fused QKV
projection, forward and backward.

    z = norm(x; weight, bias) of each query and key head (norm.py), in fp32
    y[i] = z[i] cos[i] + z[p(i)] sin[i] for the first r channels; p(i) = i + r/2 or i - r/2 is the
           other channel of a pair (rotary.py)
    y = z beyond them, y = x for value heads
    backward: dz[i] = dy[i] cos[i] + dy[p(i)] sin[p(i)], and from dz as in norm.py

qkv, y, dy, dx [s, b, g, q + 2, d], contiguous: g groups of q query heads, a key and a value head.
Weights and biases [d], two of each: queries' and keys'. cos and sin [s, b, 1, r] in fp32, (cos,
cos) and (-sin, sin) over the halves; without them nothing turns. Statistics [1, rows] (rstd) or
[2, rows] (rstd, mean) for each of the s b g (q + 2) heads. Parameter gradients are added up in the
order of rows by a fixed number of programs, and over programs by one reduction: equal inputs give
equal bits.

Sources: those of norm.py and rotary.py; norms of queries and keys: Dehghani et al. 2023. Roofline,
bf16: forward 4 bytes an element of the projection, backward 6. 8192 tokens of 32 + 2 x 8 heads of
128 at 4.3 TB/s: 47 us and 70 us, where the parts apart take 3 and 5 passes and 4 launches each.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.kernels.configurations import KernelLaunch, find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from megatron.kernels.norm import (
    allocate_gradients,
    allocate_outputs,
    norm_reference,
    normed_rows,
    row_means,
    store_parameter_gradients,
    tile_of_rows,
)
from megatron.kernels.rotary import rotary_reference
from torch import Tensor


def qk_norm_reference(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor] | None,
    rotary: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """The definition, a new tensor; what is narrower than fp32 is computed in fp32 and rounded
    once.
    """
    wide = torch.promote_types(qkv.dtype, torch.float32)
    *normed, values = qkv.to(wide).split((qkv.shape[3] - 2, 1, 1), dim=3)
    for i, part in enumerate(normed):
        bias = None if biases is None else biases[i].to(wide)
        part = norm_reference(part, weights[i].to(wide), bias, eps)
        if rotary is not None:
            part = rotary_reference(part.flatten(2, 3), *rotary, 1).view(part.shape)
        normed[i] = part
    return torch.cat((*normed, values), dim=3).to(qkv.dtype)


def configuration(direction: str, d: int, arch: int) -> KernelLaunch:
    """Of "forward" or "backward", for heads of d channels."""
    row = find(f"qk_norm {direction}", arch)
    block = next_power_of_2(d)
    rows = max(1, row.numbers["block"] // block)
    programs = row.numbers.get("programs", 0)
    return KernelLaunch(row, block, row.numbers["num_warps"], rows, programs)


@jit
def partner(channel, HALF: tl.constexpr):
    """The other channel of each pair; a channel that does not turn is its own."""
    other = tl.where(channel < HALF, channel + HALF, channel - HALF)
    return tl.where(channel < 2 * HALF, other, channel)


@jit
def angles_of(row, per_token, batch, table_s, table_b):
    """Where in a table the angles of each head's token begin [ROWS]."""
    token = row // per_token
    return (token // batch).to(tl.int64) * table_s + (token % batch) * table_b


@jit
def load_angles(table, begin, at, inside, width):
    """A table's entries [ROWS, BLOCK] at the channels `at` of the tokens that begin there; zeros
    outside and for channels from `width` on.
    """
    return load_fp32(table + begin[:, None] + at[None, :], inside & (at < width)[None, :])


@jit
def turned(z, paired, cos, sin, begin, channel, of_sine, inside, HALF: tl.constexpr):
    """z [ROWS, BLOCK] with the channels that turn turned: `paired` are the other channels of their
    pairs, `of_sine` the channels whose sines are taken.
    """
    turn = load_angles(cos, begin, channel, inside, 2 * HALF)
    cross = load_angles(sin, begin, of_sine, inside, 2 * HALF)
    return tl.where((channel < 2 * HALF)[None, :], z * turn + paired * cross, z)


@jit
def load_parameters(of_queries, of_keys, is_key, at, known):
    """Weights or biases [ROWS, BLOCK] of each row's own norm, at the channels `at`."""
    q, k = load_fp32(of_queries + at, known)[None, :], load_fp32(of_keys + at, known)[None, :]
    return tl.where(is_key[:, None], k, q)


@jit
def scaled_heads(value, rstd, weights, biases, is_key, at, known, CENTRE: tl.constexpr):
    """y of z = value rstd [ROWS, BLOCK] by each row's own weights and, LayerNorm, biases, those of
    (queries, keys), at the channels `at`.
    """
    z = value * rstd[:, None] * load_parameters(weights[0], weights[1], is_key, at, known)
    if CENTRE:
        z += load_parameters(biases[0], biases[1], is_key, at, known)
    return z


@jit
def forward_kernel(
    x,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    cos,
    sin,
    y,
    statistics,
    rows,
    heads,
    per_token,
    batch,
    table_s,
    table_b,
    width,
    eps,
    CENTRE: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS heads a program."""
    channel = tl.arange(0, BLOCK)
    known = channel < width
    row, inside, _ = tile_of_rows(tl.program_id(0), channel, rows, width, ROWS)
    is_value, is_key = row % heads == heads - 1, row % heads == heads - 2
    start = x + (row.to(tl.int64) * width)[:, None]
    raw = load_fp32(start + channel[None, :], inside)
    value, mean = raw, tl.zeros([ROWS], tl.float32)
    if CENTRE:
        mean = row_means(raw, width)
        tl.store(statistics + rows + row, mean, mask=row < rows)
        value = tl.where(inside, raw - mean[:, None], 0)
    rstd = tl.rsqrt(row_means(value * value, width) + eps)
    tl.store(statistics + row, rstd, mask=row < rows)
    weights, biases = (q_weight, k_weight), (q_bias, k_bias)
    z = scaled_heads(value, rstd, weights, biases, is_key, channel, known, CENTRE)
    if TURN:
        other = partner(channel, HALF)
        paired = load_fp32(start + other[None, :], inside) - mean[:, None]
        paired = scaled_heads(paired, rstd, weights, biases, is_key, other, known, CENTRE)
        begin = angles_of(row, per_token, batch, table_s, table_b)
        z = turned(z, paired, cos, sin, begin, channel, channel, inside, HALF)
    z = tl.where(is_value[:, None], raw, z)
    store_rounded(y + (row.to(tl.int64) * width)[:, None] + channel[None, :], z, inside)


@jit
def backward_kernel(
    dy,
    x,
    q_weight,
    k_weight,
    cos,
    sin,
    statistics,
    dx,
    partials,
    rows,
    heads,
    per_token,
    batch,
    table_s,
    table_b,
    width,
    CENTRE: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every n-th tile of ROWS heads a program, whose parameter gradients it adds up: partials
    [dweight of queries, of keys, dbias of queries, of keys] [programs, width].
    """
    channel = tl.arange(0, BLOCK)
    known = channel < width
    dweight_q = tl.zeros([BLOCK], tl.float32)
    dweight_k = tl.zeros([BLOCK], tl.float32)
    dbias_q = tl.zeros([BLOCK], tl.float32)
    dbias_k = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row, inside, _ = tile_of_rows(tile, channel, rows, width, ROWS)
        is_value = (row % heads == heads - 1)[:, None]
        is_key = row % heads == heads - 2
        of_query = inside & (row % heads < heads - 2)[:, None]
        of_key = inside & is_key[:, None]
        start = (row.to(tl.int64) * width)[:, None]
        raw = load_fp32(dy + start + channel[None, :], inside)
        grad = raw
        if TURN:
            other = partner(channel, HALF)
            paired = load_fp32(dy + start + other[None, :], inside)
            begin = angles_of(row, per_token, batch, table_s, table_b)
            grad = turned(raw, paired, cos, sin, begin, channel, other, inside, HALF)
        value = load_fp32(x + start + channel[None, :], inside)
        normed, rstd = normed_rows(value, statistics, row, rows, inside, CENTRE)
        if CENTRE:
            dbias_q += tl.sum(tl.where(of_query, grad, 0), 0)
            dbias_k += tl.sum(tl.where(of_key, grad, 0), 0)
        dweight_q += tl.sum(tl.where(of_query, grad * normed, 0), 0)
        dweight_k += tl.sum(tl.where(of_key, grad * normed, 0), 0)
        grad *= load_parameters(q_weight, k_weight, is_key, channel, known)
        change = normed * row_means(grad * normed, width)[:, None]
        if CENTRE:
            change += row_means(grad, width)[:, None]
        result = tl.where(is_value, raw, (grad - change) * rstd)
        store_rounded(dx + start + channel[None, :], result, inside)
    store_parameter_gradients(partials, dweight_q, dweight_k, channel, width, 0, True)
    if CENTRE:
        of_biases = partials + 2 * tl.num_programs(0) * width
        store_parameter_gradients(of_biases, dbias_q, dbias_k, channel, width, 0, True)


def _shared(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, form: KernelLaunch
) -> dict[str, Any]:
    """The arguments of both kernels: sizes and tables. Where there are no tables, what is passed
    for them is not read.
    """
    s, b, g, heads, d = qkv.shape
    width = 0 if cos is None else cos.shape[-1]
    table_s, table_b = 0, 0
    if width == 0:
        cos = sin = qkv
    else:
        table_s, table_b, _, step = cos.stride()
        assert cos.shape == sin.shape == (s, b, 1, width) and cos.stride() == sin.stride()
        assert cos.dtype == torch.float32 and width % 2 == 0 and width <= d and step == 1
    return {
        "rows": qkv.numel() // d,
        "heads": heads,
        "per_token": g * heads,
        "batch": b,
        "width": d,
        "cos": cos,
        "sin": sin,
        "table_s": table_s,
        "table_b": table_b,
        "TURN": width > 0,
        "HALF": width // 2,
        "ROWS": form.rows,
        "BLOCK": form.block,
    }


def _check(qkv: Tensor, *parameters: Tensor | None) -> None:
    # float64: the definition serves it
    fits = qkv.dtype != torch.float64 and qkv.dim() == 5 and qkv.is_contiguous()
    assert fits, (qkv.dtype, qkv.shape, qkv.stride())
    for each in parameters:
        if each is not None:
            assert each.shape == qkv.shape[-1:] and each.dtype == qkv.dtype, each.shape


@operator("qk_norm")
def qk_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(y, statistics): RMSNorm without biases, LayerNorm with both."""
    _check(qkv, q_weight, k_weight, q_bias, k_bias)
    y, statistics = allocate_outputs(qkv, q_bias)
    d, rows = qkv.shape[-1], statistics.shape[1]
    if not rows:
        return y, statistics
    form = configuration("forward", d, capability(qkv.device))
    launch(
        forward_kernel,
        (cdiv(rows, form.rows),),
        form,
        qkv,
        q_weight,
        k_weight,
        q_weight if q_bias is None else q_bias,
        k_weight if k_bias is None else k_bias,
        y=y,
        statistics=statistics,
        eps=eps,
        CENTRE=q_bias is not None,
        **_shared(qkv, cos, sin, form),
    )
    return y, statistics


@operator("qk_norm_backward")
def qk_norm_backward(
    dy: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    statistics: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dx, fp32 gradients [2, d] of both weights, or [4, d] with those of both biases)."""
    _check(qkv, q_weight, k_weight)
    _check(dy)
    assert dy.shape == qkv.shape and dy.dtype == qkv.dtype
    form = configuration("backward", qkv.shape[-1], capability(qkv.device))
    dx, partials = allocate_gradients(qkv, form, 2 * len(statistics))
    if dx.numel():
        launch(
            backward_kernel,
            (partials.shape[1],),
            form,
            dy,
            qkv,
            q_weight,
            k_weight,
            statistics=statistics,
            dx=dx,
            partials=partials,
            CENTRE=len(statistics) == 2,
            **_shared(qkv, cos, sin, form),
        )
    return dx, partials.sum(1)
