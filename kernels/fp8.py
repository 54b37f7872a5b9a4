"""Quantisation to 8-bit floats, with the transposed copy that the products of a backward pass read:
Hopper's fp8 products take both factors with the summed dimension contiguous, so x [m, n] is wanted
as q [m, n] and as q_t [n, m], each scaled along its own rows.

    scale = max(amax, 2^-100) (1 / largest)    amax: the greatest |x| of what shares a scale
                                               largest: 448 for e4m3, 57344 for e5m2
    q = round(x (1 / scale))                   saturating, to nearest, ties to even
    x is about q scale; inverses and products are rounded to fp32

x bf16, fp16 or fp32. What shares a scale, in q (in q_t the same of x^T):
    tensor   all of x                      scale [1, 1]
    row      a row                         scale [m, 1]
    block    128 consecutive of a row      scale [m, ceil(n / 128)]
A column of the scales of blocks is contiguous: what torch's scaled products of 1 x 128 blocks take.

Where amax is not finite neither is what q scale gives, for all that shares the scale: a fault
upstream stays loud. Maxima do not depend on an order: the same bits every time.
Sources: Micikevicius et al., "FP8 formats for deep learning", 2022; the blocks: DeepSeek-AI,
"DeepSeek-V3 technical report", 2024.

Roofline, bytes an element of bf16: row 3, block 3, block with q_t 4; with tensor scales or both of
rows 2 more for the maxima, which come first. 8192 x 4096 at 4.3 TB/s: 23, 23, 31 us. Blocks with
q_t take 1,130 instructions a thread of 32 elements, which 132 processors at 1.75 GHz issue in 37
us: maxima both ways, divisions and a turn through shared memory. Called from model/fp8.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megatron.kernels.configurations import columns_launch, find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import HOPPER, capability, cdiv, jit, launch, operator, tl
from torch import Tensor

from megatron.config.fp8 import BLOCK

TINY = 2.0**-100  # below it a scale and its inverse would leave fp32's normal numbers
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SCALINGS = ("tensor", "row", "block")


class Quantised(NamedTuple):
    """q [m, n] and its scale, q_t [n, m] and its own; two Nones for what was not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


class Maxima(NamedTuple):
    """The greatest |x| of what shares a scale, in q and in q_t: [1] and [1], or of rows [m] and of
    columns [n].
    """

    amax: Tensor
    amax_t: Tensor


def maxima_reference(x: Tensor, scaling: str) -> Maxima:
    """The definition of `find_maxima`."""
    assert scaling != "block"
    wide = x.float().abs()
    found = (wide.amax().view(1),) * 2 if scaling == "tensor" else (wide.amax(1), wide.amax(0))
    return Maxima(*(torch.where(amax.isnan(), torch.inf, amax) for amax in found))


def quantise_reference(
    x: Tensor, dtype: torch.dtype, scaling: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition: (q, scale) of x [m, n], with the maxima `amax` where they are given; q_t and
    its scale are those of x.t().
    """
    m, n = x.shape
    width = {"tensor": n, "row": n, "block": BLOCK}[scaling]
    wide = torch.nn.functional.pad(x.float(), (0, -n % width)).view(m, -1, width)
    if amax is None:
        amax = wide.abs().amax(-1) if scaling != "tensor" else wide.abs().amax().view(1, 1)
        amax = torch.where(amax.isnan(), torch.inf, amax)
    scale = amax.view(-1, wide.shape[1] if scaling == "block" else 1).clamp_min(TINY)
    scale = scale * (1 / LARGEST[dtype])
    y = (wide * (1 / scale)[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return y.view(m, -1)[:, :n].to(dtype), scale


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """q scale [m, n] in fp32."""
    wide = q.float()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    return wide.mul_(scale)


@jit
def magnitude(x):
    """|x|, and infinity where x is not a number, which a maximum would pass over."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@jit
def scale_of(amax, LARGEST: tl.constexpr):
    """(scale, 1 / scale)."""
    scale = tl.maximum(amax, 7.888609052210118e-31) * (1 / LARGEST)  # TINY
    return scale, tl.div_rn(1.0, scale)


@jit
def row_kernel(x, q, scale, n, LARGEST: tl.constexpr, COLUMNS: tl.constexpr, LOOPS: tl.constexpr):
    """One row, which is read again where it is longer than COLUMNS."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * n
    column = tl.arange(0, COLUMNS)
    value = load_fp32(x + start + column, column < n)
    amax = tl.max(magnitude(value), 0)
    if LOOPS:
        for first in range(COLUMNS, n, COLUMNS):
            at = first + column
            further = load_fp32(x + start + at, at < n)
            amax = tl.maximum(amax, tl.max(magnitude(further), 0))
    found, inverse = scale_of(amax, LARGEST)
    tl.store(scale + row, found)
    store_rounded(q + start + column, value * inverse, column < n)
    if LOOPS:
        for first in range(COLUMNS, n, COLUMNS):
            at = first + column
            value = load_fp32(x + start + at, at < n)
            store_rounded(q + start + at, value * inverse, at < n)


@jit
def _tile(x, m, n, across, M: tl.constexpr, N: tl.constexpr):
    """This program's tile of x in fp32, zeros beyond: (value [M, N], its rows, its columns)."""
    rows = tl.program_id(0) // across * M + tl.arange(0, M)
    columns = tl.program_id(0) % across * N + tl.arange(0, N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    return load_fp32(x + at, inside), rows, columns


@jit
def maxima_kernel(x, of_rows, of_columns, m, n, M: tl.constexpr, N: tl.constexpr):
    """Of each tile the greatest |x| of its rows, of_rows [tiles across, m], and of its columns,
    of_columns [tiles down, n].
    """
    across = tl.cdiv(n, N)
    value, rows, columns = _tile(x, m, n, across, M, N)
    value = magnitude(value)
    tl.store(
        of_rows + (tl.program_id(0) % across).to(tl.int64) * m + rows,
        tl.max(value, 1),
        mask=rows < m,
    )
    tl.store(
        of_columns + (tl.program_id(0) // across).to(tl.int64) * n + columns,
        tl.max(value, 0),
        mask=columns < n,
    )


@jit
def inverse_scales(
    value,
    scale,
    tile,
    lines,
    count,
    step,
    AXIS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """1 / scale of each of a tile's `lines`, of `count` in all: its rows (AXIS 1) or its columns
    (AXIS 0). BLOCKS: the scales are found in the tile and written to scale [tiles, count] at
    `tile`; else line i's is scale[i step].
    """
    if BLOCKS:
        found, inverse = scale_of(tl.max(magnitude(value), AXIS), LARGEST)
        tl.store(scale + tile.to(tl.int64) * count + lines, found, mask=lines < count)
    else:
        found = tl.load(scale + lines * step, mask=lines < count, other=1.0)
        inverse = tl.div_rn(1.0, found)
    return inverse


@jit
def tile_kernel(
    x,
    q,
    scale,
    q_t,
    scale_t,
    m,
    n,
    step,
    LARGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """A tile, PLAIN of q, TRANSPOSED of q_t. BLOCKS: the scales are those of its rows and columns,
    and written; else row i's is scale[i step].
    """
    across = tl.cdiv(n, N)
    value, rows, columns = _tile(x, m, n, across, M, N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    if PLAIN:
        tile = tl.program_id(0) % across
        inverse = inverse_scales(value, scale, tile, rows, m, step, 1, LARGEST, BLOCKS)
        at = q + rows.to(tl.int64)[:, None] * n + columns[None, :]
        store_rounded(at, value * inverse[:, None], inside)
    if TRANSPOSED:
        tile = tl.program_id(0) // across
        inverse = inverse_scales(value, scale_t, tile, columns, n, step, 0, LARGEST, BLOCKS)
        # rounded first, so that what is turned is narrow
        turned = tl.trans((value * inverse[None, :]).to(q_t.dtype.element_ty))
        tl.store(
            q_t + columns.to(tl.int64)[:, None] * m + rows[None, :], turned, mask=tl.trans(inside)
        )


@operator("maxima_fp8")
def maxima_fp8(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """What `find_maxima` gives."""
    m, n = x.shape
    down, across = cdiv(m, BLOCK), cdiv(n, BLOCK)
    of_rows = torch.empty(across, m, dtype=torch.float32, device=x.device)
    of_columns = torch.empty(down, n, dtype=torch.float32, device=x.device)
    row, given = find("fp8 tiles", capability(x.device)), (x.contiguous(), of_rows, of_columns)
    launch(maxima_kernel, (down * across,), row, *given, m, n, M=BLOCK, N=BLOCK)
    if scaling == "row":
        return of_rows.amax(0), of_columns.amax(0)
    amax = of_rows.amax().view(1)
    return amax, amax.clone()


def find_maxima(x: Tensor, scaling: str) -> Maxima:
    """Of x [m, n] with at least one element, scaled by "tensor" or "row"."""
    assert scaling in ("tensor", "row")
    return Maxima(*maxima_fp8(x, scaling))


def _scale(count: int, length: int, scaling: str, device: torch.device) -> Tensor:
    """Allocate the scales of `count` rows of `length` elements."""
    if scaling == "block":
        blocks = cdiv(length, BLOCK)
        return torch.empty(blocks, count, dtype=torch.float32, device=device).t()
    return torch.empty(count if scaling == "row" else 1, 1, dtype=torch.float32, device=device)


@operator("quantise_fp8")
def quantise_fp8(
    x: Tensor,
    dtype: torch.dtype,
    scaling: str,
    plain: bool,
    transposed: bool,
    amax: Tensor | None,
    amax_t: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, scale, q_t, scale_t) of x [m, n] with at least one element; what is not asked for is of
    no size. `amax` and `amax_t`: see `find_maxima`, by which they are found where not given.
    """
    m, n = x.shape
    assert x.dtype != torch.float64, "float64: the definition serves it"
    assert dtype in LARGEST and scaling in SCALINGS and x.numel() and (plain or transposed)
    arch = capability(x.device)
    assert arch >= HOPPER, (
        f"the 8-bit floats of compute capability {arch / 10} are not compiled for: Hopper and newer"
    )
    x = x.contiguous()
    q, scale = _side(x, dtype, scaling, plain, m, n)
    q_t, scale_t = _side(x, dtype, scaling, transposed, n, m)
    if scaling == "row" and not transposed and amax is None:
        form = columns_launch("fp8 rows", n, arch)
        fixed = {"LARGEST": LARGEST[dtype], "COLUMNS": form.block, "LOOPS": form.block < n}
        launch(row_kernel, (m,), form, x, q, scale, n, **fixed)
    else:
        if scaling != "block":
            _fill_scales(x, scaling, LARGEST[dtype], (scale, scale_t), (amax, amax_t))
        _quantise_tiles(x, q, scale, q_t, scale_t, scaling)
    return q, scale, q_t, scale_t


def _side(
    x: Tensor, dtype: torch.dtype, scaling: str, asked: bool, rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """Allocate q or q_t and its scale, of no size where it is not asked for."""
    if not asked:
        return x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0), dtype=torch.float32)
    return x.new_empty((rows, length), dtype=dtype), _scale(rows, length, scaling, x.device)


def _fill_scales(
    x: Tensor,
    scaling: str,
    largest: float,
    scales: tuple[Tensor, Tensor],
    maxima: tuple[Tensor | None, Tensor | None],
) -> None:
    """The scales of tensors or rows from their maxima, which are found where not given."""
    pairs = list(zip(scales, maxima, strict=True))
    if any(scale.numel() and amax is None for scale, amax in pairs):
        pairs = list(zip(scales, find_maxima(x, scaling), strict=True))
    for scale, amax in pairs:
        if scale.numel():
            torch.mul(amax.clamp_min(TINY).view(scale.shape), 1 / largest, out=scale)


def _quantise_tiles(
    x: Tensor, q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, scaling: str
) -> None:
    """Fill q and q_t, whichever has room; with blocks their scales, too."""
    m, n = x.shape
    launch(
        tile_kernel,
        (cdiv(m, BLOCK) * cdiv(n, BLOCK),),
        find("fp8 tiles", capability(x.device)),
        x,
        q,
        scale,
        q_t,
        scale_t,
        m,
        n,
        int(scaling == "row"),
        LARGEST=LARGEST[q.dtype],
        BLOCKS=scaling == "block",
        PLAIN=q.numel() > 0,
        TRANSPOSED=q_t.numel() > 0,
        M=BLOCK,
        N=BLOCK,
    )


def quantise(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: str = "row",
    *,
    plain: bool = True,
    transposed: bool = False,
    maxima: Maxima | None = None,
) -> Quantised:
    """x [m, n] in 8 bits, `plain` as it is, `transposed` its transposed copy. `maxima`: those of x
    as part of a larger tensor, whose scales it then takes.
    """
    given = maxima or (None, None)
    q, scale, q_t, scale_t = quantise_fp8(x, dtype, scaling, plain, transposed, *given)
    own = (q, scale) if plain else (None, None)
    turned = (q_t, scale_t) if transposed else (None, None)
    return Quantised(*own, *turned)


def quantise_by_definition(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: str = "row",
    *,
    plain: bool = True,
    transposed: bool = False,
    maxima: Maxima | None = None,
) -> Quantised:
    """The same by the definition, on any device, and in float64."""
    amax, amax_t = maxima or (None, None)
    own = quantise_reference(x, dtype, scaling, amax) if plain else (None, None)
    turned = quantise_reference(x.t(), dtype, scaling, amax_t) if transposed else (None, None)
    return Quantised(*own, *turned)
