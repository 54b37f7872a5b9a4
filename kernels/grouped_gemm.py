"""Products of experts: rows that lie in the order of their experts, each group of them times the
matrix of its expert, in one launch for all experts.

    y[r] = x[r] W[e(r)]^T         forward: x [N, i], W [E, o, i], y [N, o]
    dx[r] = dy[r] W[e(r)]         the gradient of the rows: dy [N, o]
    dW[e] (+)= sum over r of e of dy[r]^T x[r]      added to, or written over, [E, o, i]

ends [E] in int32: the end of each expert's rows; expert e has those from ends[e - 1] on. An expert
without a row adds nothing, and its gradient is cleared where it is written over. Sums are in fp32,
over the inner dimension in its order; y and dx are rounded once, dW is added in the precision of
its buffer. Nothing is atomic, so that equal inputs give equal bits.

The numbers of rows stay on the device: a program finds its expert among ends. A tile belongs to one
expert, whose last tile may be partly empty, so that there are at most N / M + E tiles of rows;
those programs for which no tile is left end at once.

Source of the scheme: grouped products of MegaBlocks (Gale et al. 2022). Roofline, bf16: the FLOPs
of all products, 2 N i o each; with few rows an expert the bytes of its matrix.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.kernels.configurations import Row, find
from megatron.kernels.elements import store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from torch import Tensor

GROUP = 8  # tiles of rows whose programs follow each other, so that they find W in the cache


def grouped_gemm_reference(x: Tensor, weight: Tensor, ends: Tensor, turned: bool) -> Tensor:
    """The definition: y of x [N, i] and weight [E, o, i], or where it is not `turned` the gradient
    of rows, of x [N, o].
    """
    matrices = weight.mT if turned else weight
    parts = x.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_weight_grad_reference(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The definition: dW [E, o, i] of dy [N, o] and x [N, i]."""
    inner = ends.tolist()[:-1]
    parts = zip(dy.tensor_split(inner), x.tensor_split(inner), strict=True)
    return torch.stack([of_y.t() @ of_x for of_y, of_x in parts])


@jit
def tile_of_rows(ends, experts, tile, EXPERTS: tl.constexpr, M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows; `experts` or more for one
    that no expert has. EXPERTS: the next power of 2.
    """
    each = tl.arange(0, EXPERTS)
    end = tl.load(ends + each, mask=each < experts, other=0)
    start = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = (tl.maximum(end - start, 0) + M - 1) // M
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    own = each == expert
    row = tl.sum(tl.where(own, start + (tile - after + tiles) * M, 0), 0)
    return expert, row, tl.sum(tl.where(own, end, 0), 0)


@jit
def tile_of_program(
    ends,
    experts,
    width,
    tiles,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """(expert, first row, end of the expert's rows, first column) of this program's tile; GROUP
    tiles of rows follow each other.
    """
    program, across = tl.program_id(0), tl.cdiv(width, N)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(tiles - first, GROUP)
    place = program % (GROUP * across)
    expert, row, end = tile_of_rows(ends, experts, first + place % height, EXPERTS, M)
    return expert, row, end, place // height * N


@jit
def load_block(pointers, first_known, second_known):
    """A block of elements, zeros where either mask is false."""
    return tl.load(pointers, mask=first_known & second_known, other=0.0)


@jit
def sum_over_columns(at_x, at_w, step_w, known, columns_known, inner, K: tl.constexpr):
    """x [M, inner] times w [inner, N], K columns of x at a time: at_x [M, K] and at_w [K, N] are
    the first blocks' pointers, `known` and `columns_known` which rows of x and columns of w exist.
    """
    k = tl.arange(0, K)
    total = tl.zeros([at_x.shape[0], at_w.shape[1]], tl.float32)
    for start in tl.range(0, inner, K):
        there = k < inner - start
        a = load_block(at_x, known[:, None], there[None, :])
        b = load_block(at_w, there[:, None], columns_known[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
        at_x += K
        at_w += step_w
    return total


@jit
def of_matrix(weight, expert, width, inner, k, columns, TURNED: tl.constexpr):
    """Pointers [K, N] to these rows and columns of an expert's matrix [inner, width]."""
    matrix = weight + expert.to(tl.int64) * width * inner
    if TURNED:
        at = matrix + columns.to(tl.int64)[None, :] * inner + k[:, None]
    else:
        at = matrix + k.to(tl.int64)[:, None] * width + columns[None, :]
    return at


@partial(jit, do_not_specialize=("tiles",))
def rows_kernel(
    x,
    weight,
    y,
    ends,
    experts,
    width,
    inner,
    tiles,
    TURNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """A tile [M, N] of y [rows, width] = x [rows, inner] times each row's matrix, which in memory
    is [width, inner] where it is TURNED, else [inner, width].
    """
    expert, row, end, column = tile_of_program(ends, experts, width, tiles, EXPERTS, GROUP, M, N)
    if expert < experts:
        rows, columns = row + tl.arange(0, M), column + tl.arange(0, N)
        k = tl.arange(0, K)
        at_x = x + rows.to(tl.int64)[:, None] * inner + k[None, :]
        at_w = of_matrix(weight, expert, width, inner, k, columns, TURNED)
        step_w = K if TURNED else K * width
        total = sum_over_columns(at_x, at_w, step_w, rows < end, columns < width, inner, K)
        out = y + rows.to(tl.int64)[:, None] * width + columns[None, :]
        store_rounded(out, total, (rows < end)[:, None] & (columns < width)[None, :])


@jit
def sum_over_rows(dy, x, start, end, above, within, width, inner, K: tl.constexpr):
    """dy^T x [M, N] of the rows from start to end, K at a time: columns `above` [M] of dy [rows,
    width] and `within` [N] of x [rows, inner].
    """
    total = tl.zeros([above.shape[0], within.shape[0]], tl.float32)
    for row in tl.range(start, end, K):
        rows = (row + tl.arange(0, K)).to(tl.int64)
        known = rows < end
        at_dy = dy + rows[None, :] * width + above[:, None]
        a = load_block(at_dy, known[None, :], (above < width)[:, None])
        at_x = x + rows[:, None] * inner + within[None, :]
        b = load_block(at_x, known[:, None], (within < inner)[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@jit
def weight_kernel(
    dy,
    x,
    grad,
    ends,
    width,
    inner,
    OVERWRITE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """A tile [M, N] of one expert's grad [width, inner], the sum over its rows of dy [rows, width]
    times x [rows, inner].
    """
    across = tl.cdiv(inner, N)
    tiles = tl.cdiv(width, M) * across
    expert, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    above = place // across * M + tl.arange(0, M)
    within = place % across * N + tl.arange(0, N)
    total = sum_over_rows(dy, x, start, end, above, within, width, inner, K)
    out = grad + (expert.to(tl.int64) * width + above)[:, None] * inner + within[None, :]
    inside = (above < width)[:, None] & (within < inner)[None, :]
    if not OVERWRITE:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    store_rounded(out, total, inside)


def configuration(what: str, itemsize: int, arch: int) -> Row:
    """The tiles of "rows" or "weight" for operands of `itemsize` bytes."""
    return find(f"grouped_gemm {what}", arch, bytes=itemsize)


def _sizes(row: Row) -> dict[str, int]:
    """The constants of a kernel that are its tile."""
    return {name: row.numbers[name] for name in ("M", "N", "K")}


def unsupported_reason(itemsize: int, arch: int) -> str | None:
    """Why a GPU cannot run the kernels for operands of `itemsize` bytes; None where it can."""
    if itemsize == 8:
        return "float64"
    rows, weight = (configuration(what, itemsize, arch) for what in ("rows", "weight"))
    return rows.unsupported_reason(arch) or weight.unsupported_reason(arch)


def _check(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    assert x.dtype != torch.float64, "float64: the definition serves it"
    assert ends.dtype == torch.int32 and ends.shape == weight.shape[:1]
    assert x.is_contiguous() and weight.is_contiguous()


@operator("grouped_gemm")
def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor, turned: bool) -> Tensor:
    """y [N, o] of x [N, i] and weight [E, o, i], `turned`; or dx [N, i] of x = dy [N, o]."""
    _check(x, weight, ends)
    experts, width, inner = weight.shape if turned else (weight.shape[i] for i in (0, 2, 1))
    assert x.shape[1] == inner, (x.shape, weight.shape, turned)
    y = x.new_empty((x.shape[0], width))
    if y.numel() == 0:
        return y
    row = configuration("rows", x.element_size(), capability(x.device))
    sizes = _sizes(row)
    tiles = cdiv(x.shape[0], sizes["M"]) + min(experts, x.shape[0]) - 1
    launch(
        rows_kernel,
        (tiles * cdiv(width, sizes["N"]),),
        row,
        x,
        weight,
        y,
        ends,
        experts,
        width,
        inner,
        tiles,
        TURNED=turned,
        EXPERTS=next_power_of_2(experts),
        GROUP=GROUP,
        **sizes,
    )
    return y


@operator("grouped_weight_grad_", mutates_args=("grad",))
def grouped_weight_grad_(
    grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor, overwrite: bool
) -> None:
    """grad [E, o, i] += dW of dy [N, o] and x [N, i], or = where it is to `overwrite`."""
    _check(x, grad, ends)
    experts, width, inner = grad.shape
    assert dy.is_contiguous() and dy.shape == (x.shape[0], width) and x.shape[1] == inner
    row = configuration("weight", x.element_size(), capability(x.device))
    sizes = _sizes(row)
    tiles = cdiv(width, sizes["M"]) * cdiv(inner, sizes["N"])
    given = (dy, x, grad, ends, width, inner)
    launch(weight_kernel, (experts * tiles,), row, *given, OVERWRITE=overwrite, **sizes)
