"""Shapes and boxes of logical tensors: what two boxes have in common, and whether many cover a
tensor. No torch here.
"""

from __future__ import annotations

from collections import Counter

Dims = tuple[int, ...]  # a size or an offset in each dimension
Box = tuple[Dims, Dims]  # offset, extent


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
    """Whether boxes cover `shape` exactly once.

    The mixed difference of a box's indicator function is +1 and -1 at its corners and 0 elsewhere,
    and determines the function: the boxes tile the shape when the corners of all of them add up to
    those of the shape.
    """
    whole = (0,) * len(shape), shape
    if boxes == [whole]:
        return True
    corners: Counter[Dims] = Counter()
    for box, count in [(whole, -1), *((box, 1) for box in boxes)]:
        signed: list[tuple[Dims, int]] = [((), count)]
        for offset, extent in zip(*box):
            signed = [
                ((*corner, at), sign * factor)
                for corner, sign in signed
                for at, factor in ((offset, 1), (offset + extent, -1))
            ]
        for corner, sign in signed:
            corners[corner] += sign
    return not any(corners.values())
