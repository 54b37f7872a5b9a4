"""Which part of what several ranks hold each of them writes: local arithmetic, the same on all of
them, so nothing is exchanged.

The ranks that hold a box hold all boxes of its kind, in the same order: laid end to end they are
one range of bytes, cut into as many equal parts as there are holders, each cut moved to the next
row. A row is an element of a vector.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from megatron.model.spec import Box, Holder

BoxTensor = tuple[Box, Tensor]  # a box, and the local tensor that holds it
Pairs = list[BoxTensor]
Kind = tuple[str | None, str]  # of the boxes that the same ranks hold


def not_empty(pairs: Iterable[BoxTensor]) -> Pairs:
    """Those whose box has elements."""
    return [(box, tensor) for box, tensor in pairs if math.prod(box.extent)]


def own_part(
    pairs: Iterable[BoxTensor], holder: Callable[[Box], Holder | None], *, balanced: bool
) -> Pairs:
    """The (box, local tensor) pairs that this rank writes: of what it shares with others an equal
    part, or all when it is the first of them.

    `holder` is None for a box that only others may write; it must be the same for all boxes with
    the same `replicated` and `group`, and all its ranks hold the same of them: under ZeRO ranks
    with the same state of a router have different slices of weights.
    """
    held = [(box, tensor, place) for box, tensor in pairs if (place := holder(box)) is not None]
    if not balanced:
        return [(box, tensor) for box, tensor, place in held if place.rank == 0]
    totals: Counter[Kind] = Counter()
    for box, tensor, _ in held:
        totals[box.replicated, box.group] += _bytes(box, tensor)
    passed: Counter[Kind] = Counter()
    found = []
    for box, tensor, place in held:
        kind = box.replicated, box.group
        size = _bytes(box, tensor)
        begin = passed[kind]  # of this box in the bytes of its kind
        passed[kind] += size
        if place.size == 1:
            found.append((box, tensor))
            continue
        rows = box.extent[0]
        # a row belongs to the range that its first byte lies in: count those before each cut
        first, stop = (
            min(max(-(-(cut - begin) // (size // rows)), 0), rows)
            for cut in _cuts(totals[kind], place)
        )
        found += cut_rows(box, tensor, first, stop)
    return found


def _cuts(total: int, place: Holder) -> tuple[int, int]:
    """Begin and end of a holder's range of `total` bytes."""
    return total * place.rank // place.size, total * (place.rank + 1) // place.size


def in_parts(pairs: Sequence[BoxTensor], count: int) -> list[Pairs]:
    """The pairs cut by rows into at most `count` lists of about equal bytes, none of them empty."""
    parts = (
        own_part(pairs, lambda box: Holder(part, count), balanced=True) for part in range(count)
    )
    return [part for part in parts if part]


def _bytes(box: Box, tensor: Tensor) -> int:
    return math.prod(box.extent) * tensor.element_size()


def cut_rows(box: Box, tensor: Tensor, first: int, stop: int) -> Iterator[BoxTensor]:
    """Rows [first, stop) of a box as (box, the part of its local tensor): of a box in several
    groups of rows up to three.
    """
    rows = box.extent[0] // box.groups
    stride = tensor.shape[0] // box.groups
    while first < stop:
        group, row = divmod(first, rows)
        groups = (stop - first) // rows if row == 0 else 0
        count = groups * rows or min(rows - row, stop - first)
        part = replace(
            box, offset=(box.offset[0] + first, *box.offset[1:]), extent=(count, *box.extent[1:])
        )
        if groups:
            yield replace(part, groups=groups), tensor[group * stride : (group + groups) * stride]
        else:
            start = group * stride + box.start + row
            yield replace(part, groups=1, start=0), tensor[start : start + count]
        first += count
