"""Shapes and boxes of logical tensors: what two boxes have in common, and whether many cover a
tensor. No torch here.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from typing import Any

from megatron.config.input_files import InputError, expect

Dims = tuple[int, ...]  # a size or an offset in each dimension
Shapes = dict[str, Dims]  # of tensors by name
Box = tuple[Dims, Dims]  # offset, extent


def shapes_of(value: Any) -> Shapes:
    """Shapes of tensors by name, from JSON. Raises InputError."""
    expect(value, dict)
    for name, shape in value.items():
        if type(shape) is not list or any(
            type(size) is not int or not 0 <= size < 2**63 for size in shape
        ):
            raise InputError(f"the shape of {name[:60]} is not a list of natural numbers")
    return {name: tuple(shape) for name, shape in value.items()}


def intersect(
    offset_a: tuple, extent_a: tuple, offset_b: tuple, extent_b: tuple
) -> tuple[tuple, tuple] | None:
    """(low, high) of the common part of two boxes, or None."""
    low = tuple(map(max, offset_a, offset_b))
    high = tuple(
        min(oa + ea, ob + eb) for oa, ea, ob, eb in zip(offset_a, extent_a, offset_b, extent_b)
    )
    return (low, high) if all(l < h for l, h in zip(low, high)) else None


def tiles(shape: Dims, boxes: list[Box]) -> bool:
    """Whether boxes cover `shape` exactly once: they lie inside, their volumes add up to its own,
    and no two have anything in common.
    """
    volume = 0
    for offset, extent in boxes:
        if any(o < 0 or o + e > n for o, e, n in zip(offset, extent, shape)):
            return False
        volume += math.prod(extent)
    if volume != math.prod(shape):
        return False
    # A sweep along dimension 0 over the boxes that reach its line. In one or two dimensions those
    # are disjoint intervals of the other one, and a new box is compared with its neighbours there:
    # n log n. In more it is compared with all of them.
    full = sorted(box for box in boxes if math.prod(box[1]))
    return len(boxes) == 1 or not (
        _any_boxes_meet(full) if len(shape) > 2 else _any_intervals_meet(full, len(shape))
    )


def _any_boxes_meet(boxes: list[Box]) -> bool:
    """The sweep in any number of dimensions."""
    line: list[Box] = []
    for box in boxes:
        line = [other for other in line if other[0][0] + other[1][0] > box[0][0]]
        if any(intersect(*box, *other) for other in line):
            return True
        line.append(box)
    return False


def _any_intervals_meet(boxes: list[Box], dims: int) -> bool:
    """The sweep in one or two dimensions."""
    begins: list[int] = []  # of the intervals on the line, and
    ends: list[int] = []
    # (end in dimension 0, begin in dimension 1) of the same boxes, a heap
    leaving: list[tuple[int, int]] = []
    for offset, extent in boxes:
        row = offset[0]
        if dims == 2:
            begin = offset[1]
            end = offset[1] + extent[1]
        else:
            begin, end = 0, 1  # all boxes of a vector take the whole line
        while leaving and leaving[0][0] <= row:
            at = bisect_left(begins, heapq.heappop(leaving)[1])
            del begins[at], ends[at]
        at = bisect_left(begins, begin)
        if (at and ends[at - 1] > begin) or (at < len(begins) and begins[at] < end):
            return True
        begins.insert(at, begin)
        ends.insert(at, end)
        heapq.heappush(leaving, (row + extent[0], begin))
    return False
