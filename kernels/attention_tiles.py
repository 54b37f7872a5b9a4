"""Tiles of attention's operands in memory, by tensor descriptor or by pointer: what a kernel calls
is the same, what it is given decides.

A descriptor is the TMA unit's on Hopper and newer. Older GPUs have no such unit, and Triton would
compute every element's address and bounds in 64 bits, without vectors and asynchronous copies:
there an operand is the tuple (pointer, length, width, stride of rows, strides of the coordinates
before). Rows beyond `length` and columns beyond `width` read zeros and are not written.
"""

from __future__ import annotations

from megatron.kernels.lang import jit, tl


@jit
def _addresses(x, at, row, ROWS: tl.constexpr, D: tl.constexpr):
    """(pointers [ROWS, D], mask) of the rows from `row` on at the coordinates `at`."""
    base, length, width, step = x[0], x[1], x[2], x[3]
    start = tl.cast(row, tl.int64) * step
    for i in tl.static_range(len(at)):
        start += tl.cast(at[i], tl.int64) * x[4 + i]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    mask = (row + rows < length)[:, None] & (columns < width)[None, :]
    return base + start + (rows[:, None] * step + columns[None, :]), mask


@jit
def load_tile(x, at, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows row .. row + ROWS at the coordinates `at`: [ROWS, D]."""
    if isinstance(x, tl.tensor_descriptor):
        return tl.reshape(x.load(at + (row, 0)), [ROWS, D])
    else:
        pointers, mask = _addresses(x, at, row, ROWS, D)
        return tl.load(pointers, mask=mask, other=0.0)


@jit
def store_tile(x, at, row, tile, ROWS: tl.constexpr, D: tl.constexpr):
    """Write a tile [ROWS, D], rounded to what x holds."""
    if isinstance(x, tl.tensor_descriptor):
        x.store(at + (row, 0), tl.reshape(tile.to(x.dtype), x.block_shape))
    else:
        pointers, mask = _addresses(x, at, row, ROWS, D)
        tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=mask)
