"""Initial weights: any rectangle of a normal(0, std) matrix of the field that philox.py defines,
drawn where the weights are.

Shapes: out [R, C] in fp32 is the rectangle at (first_row, first_column) of a matrix under a key of
two 32-bit words. Element (row, column) is lane column % 4 of the counter (row, column // 4, 0, 0),
whose words w0..w3 make two pairs of normals:

    out = std x sqrt(-2 ln((w0 + 1/2) / 2^32)) x (cos, sin)(2 pi w1 / 2^32)
    and the same of w2 and w3

in float64, rounded once to fp32. The definition is `philox.normal`. A GPU's logarithm, sine and
cosine differ from a CPU's in the last bits of float64, so that few numbers are rounded the other
way: at most 2 ulp of fp32 apart, which is what a run started on another kind of device may differ
by, and two runs on one kind never.

Source: Box and Muller, "A note on the generation of random normal deviates", 1958; Philox: see
philox.py.

Roofline: 4 bytes written for each weight, 1e9 weights at 4.3 TB/s: 0.9 ms; but the kernel has about
200 instructions a weight, most in float64, of which a Hopper does 64 a clock on each of 132
multiprocessors: some 10 ms. It happens once in a run.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from megatron.kernels import philox
from megatron.kernels.configurations import KernelLaunch, find
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from megatron.kernels.random import philox4x32
from torch import Tensor

normal_reference = philox.normal
ANGLE = 2 * math.pi / 2**32


@jit
def _pair(w, v, STD: tl.constexpr, ANGLE: tl.constexpr):
    """Two normals in fp32 from two words."""
    radius = tl.sqrt(-2.0 * tl.log((w.to(tl.float64) + 0.5) / 4294967296.0))
    angle = v.to(tl.float64) * ANGLE
    return (tl.cos(angle) * radius * STD).to(tl.float32), (tl.sin(angle) * radius * STD).to(
        tl.float32
    )


@jit
def normals(row, block, k0, k1, STD: tl.constexpr, ANGLE: tl.constexpr):
    """The field's normals [ROWS, 4 BLOCKS] of rows [ROWS] and blocks [BLOCKS] of four columns,
    which a thread has next to each other.
    """
    zero = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        row.to(tl.uint32)[:, None], block.to(tl.uint32)[None, :], zero, zero, k0, k1
    )
    z0, z1 = _pair(w0, w1, STD, ANGLE)
    z2, z3 = _pair(w2, w3, STD, ANGLE)
    lanes = tl.join(tl.join(z0, z2), tl.join(z1, z3))
    return tl.reshape(lanes, [row.shape[0], 4 * block.shape[0]])


@partial(jit, do_not_specialize=("k0", "k1", "first_row", "first_block", "rows"))
def normal_kernel(
    out,
    k0: tl.uint32,
    k1: tl.uint32,
    first_row,
    first_block,
    skip,
    rows,
    columns,
    STD: tl.constexpr,
    ANGLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A tile of ROWS rows and BLOCKS blocks of four columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCKS
    block = first_block + first + tl.arange(0, BLOCKS)
    values = normals(first_row + row, block, k0, k1, STD, ANGLE)
    column = 4 * first - skip + tl.arange(0, 4 * BLOCKS)
    inside = (row < rows)[:, None] & (column >= 0)[None, :] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], values, mask=inside)


def configuration(columns: int, arch: int) -> KernelLaunch:
    """Two counters a thread, along a row where it is long enough."""
    row = find("initialise", arch)
    size = row.numbers["block"]
    blocks = min(size, next_power_of_2(cdiv(columns, 4) + 1))
    return KernelLaunch(row, blocks, row.numbers["num_warps"], size // blocks)


@operator("normal_", mutates_args=("out",))
def normal_(out: Tensor, k0: int, k1: int, first_row: int, first_column: int, std: float) -> None:
    """Fill out [R, C] (fp32) with the rectangle at (first_row, first_column) of a normal(0, std)
    matrix under the key (k0, k1).
    """
    assert out.is_contiguous() and out.dtype == torch.float32
    (rows, columns), tile = out.shape, configuration(out.shape[1], capability(out.device))
    if out.numel():
        blocks = cdiv(first_column % 4 + columns, 4)
        launch(
            normal_kernel,
            (cdiv(rows, tile.rows), cdiv(blocks, tile.block)),
            tile,
            out,
            k0,
            k1,
            first_row,
            first_column // 4,
            first_column % 4,
            rows,
            columns,
            STD=std,
            ANGLE=ANGLE,
            ROWS=tile.rows,
            BLOCKS=tile.block,
        )
