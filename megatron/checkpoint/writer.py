"""Write a checkpoint: every rank its own shard, without a second copy of a tensor; the first adds
the manifest and renames when it has word from all (commit.py).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.commit import Attempt, commit, not_writable
from megatron.checkpoint.files import write_file, write_shard_file
from megatron.checkpoint.manifest import box_key, encode_header, iteration_folder
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks
from megatron.checkpoint.reader import DTYPE_NAMES
from megatron.config.input_files import JsonObject
from megatron.model.spec import Box, Holder

BoxTensor = tuple[Box, Tensor]  # a box, and the local tensor that holds it
Pairs = list[BoxTensor]
Kind = tuple[str | None, str]  # of the boxes that the same ranks hold

PIECE = 16 << 20  # bytes copied at a time from tensors that lie on a device or are strided
# most shards that a rank writes at a time, for a file takes one write at a time; bytes of the least
MAX_SHARDS = 4
MIN_SHARD_BYTES = 128 << 20


def save_checkpoint(
    root: str | Path,
    iteration: int,
    tensors: Iterable[BoxTensor],
    state: JsonObject,
    ranks: Ranks = SINGLE_RANK,
    *,
    verify: bool = False,
    **earlier: Any,
) -> Path:
    """Write iteration `iteration` under `root`, which all ranks share, and return its folder. All
    `ranks` call this together; each that owns boxes writes a shard, or several at a time where it
    owns much and has several cores.

    `tensors`: (box, local tensor) pairs that this rank owns; the boxes of all ranks cover each
    logical tensor exactly once. `state`: JSON, the same on every rank. `verify`: every rank reads
    its shard back from the disk before it counts. `earlier`: `before` and `continues` of `commit`,
    on the first rank. Of an iteration that exists already, see `commit`. Raises CheckpointError
    when anything prevents the save on any rank, on several the same UserError on each; older
    checkpoints are untouched.
    """
    root = Path(root)
    pairs = not_empty(tensors)
    parts = shard_parts(pairs)
    # Shards of all ranks are durable before the first one commits them.
    with Attempt(root, iteration, ranks, state, len(parts)) as attempt:
        gathered = attempt.gather_or_raise(
            lambda: (write_shards(attempt, parts, verify), ranks.who)
        )
        written = [record | who for records, who in gathered for record in records]
        made = attempt.folder, iteration, attempt.name, written, state
        attempt.gather_or_raise(
            lambda: commit(root, *made, **earlier).name if ranks.first else None
        )
    return root / iteration_folder(iteration)


def try_folder(root: str | Path, ranks: Ranks = SINGLE_RANK) -> None:
    """Write a byte from every rank where checkpoints will go: what is wrong is found before there
    is something to save. Raises CheckpointError, on several ranks the same UserError on each, when
    one cannot write there or does not see what the first made.
    """
    root = Path(root)

    def write() -> None:
        write_file(attempt.folder / f"rank-{ranks.world.rank}", b"x")

    with Attempt(root, 0, ranks, explain=partial(not_writable, root)) as attempt:
        attempt.gather_or_raise(write)


def shard_parts(pairs: Pairs) -> list[Pairs]:
    """What this rank owns, for the shards that it writes at a time: one for each of its cores, but
    none of less than MIN_SHARD_BYTES bytes; a single one where files hold part of it.
    """
    # Tensors in files (--optimizer-nvme-offload) pass through one ring of buffers, in order.
    in_files = any(not isinstance(tensor, Tensor) for _, tensor in pairs)
    threads = 1 if in_files else torch.get_num_threads()
    count = max(1, min(MAX_SHARDS, threads, shard_bytes(pairs) // MIN_SHARD_BYTES))
    parts = (own_part(pairs, lambda box: Holder(part, count)) for part in range(count))
    return [part for part in parts if part]


def write_shards(attempt: Attempt, parts: list[Pairs], verify: bool) -> list[JsonObject]:
    """Write this rank's shards, each by a thread."""

    def write(number: int) -> JsonObject:
        index = attempt.index + number
        where = attempt.folder, index, attempt.shards, attempt.iteration
        return write_shard(*where, parts[number], verify=verify)

    with ThreadPoolExecutor(MAX_SHARDS) as threads:
        return list(threads.map(write, range(len(parts))))


def write_shard(
    folder: Path, index: int, shards: int, iteration: int, pairs: Pairs, **options: Any
) -> JsonObject:
    """Write shard `index` of `shards` and its digest table into `folder`; `options` and result as
    `write_shard_file`'s.
    """
    header, data = shard_content(pairs, index, shards, iteration)
    pieces = (memoryview(part.cpu().numpy()) for each in data for part in each.split(PIECE))
    return write_shard_file(folder, index, header, pieces, **options)


def shard_content(
    pairs: Pairs, index: int, shards: int, iteration: int
) -> tuple[bytes, Iterator[Tensor]]:
    """The header of a shard file that holds `pairs`, and its data as flat tensors of bytes."""
    # wide items first, which keeps every tensor aligned to its item size
    pairs = sorted(pairs, key=lambda pair: -pair[1].element_size())
    data = (
        piece.reshape(-1).view(torch.uint8)
        for box, tensor in pairs
        for piece in contiguous_pieces(box.view(tensor.detach()))
    )
    return shard_header(pairs, index, shards, iteration), data


def shard_bytes(pairs: Iterable[BoxTensor]) -> int:
    """Bytes of the data of a shard that holds `pairs`."""
    return sum(math.prod(box.extent) * tensor.element_size() for box, tensor in pairs)


def shard_header(pairs: Pairs, index: int, shards: int, iteration: int) -> bytes:
    """The bytes before the data of a shard that holds `pairs` one after the other."""
    shapes = json.dumps({box.name: list(box.shape) for box, _ in pairs}, separators=(",", ":"))
    metadata = {
        "iteration": str(iteration),
        "shard": str(index),
        "shards": str(shards),
        "shapes": shapes,
    }
    return encode_header(
        [
            (box_key(box.name, box.offset), DTYPE_NAMES[tensor.dtype], tuple(box.extent))
            for box, tensor in pairs
        ],
        metadata,
    )


def contiguous_pieces(view: Tensor) -> Iterator[Tensor]:
    """Contiguous tensors that hold `view`'s elements in order: the memory itself where possible,
    else copies of at most PIECE bytes.
    """
    if view.is_contiguous():
        yield view
    elif view[0].numel() * view.element_size() > PIECE:
        for part in view:
            yield from contiguous_pieces(part)
    else:
        step = max(1, PIECE // (view[0].numel() * view.element_size()))
        for start in range(0, len(view), step):
            yield view[start : start + step].contiguous()


# ---- who writes what -----------------------------------------------------------------------------
#
# Local arithmetic, the same on all ranks, so nothing is exchanged. The ranks that hold a box hold
# all boxes of its kind, in the same order: laid end to end they are one range of bytes, cut into as
# many equal parts as there are holders, each cut moved to the next row. A row is an element of a
# vector.


def not_empty(pairs: Iterable[BoxTensor]) -> Pairs:
    """Those whose box has elements."""
    return [(box, tensor) for box, tensor in pairs if math.prod(box.extent)]


def own_part(pairs: Iterable[BoxTensor], holder: Callable[[Box], Holder | None]) -> Pairs:
    """The (box, local tensor) pairs that this rank writes: of what it shares with others an equal
    part.

    `holder` is None for a box that only others may write; it is the same for all boxes with the
    same `replicated` and `group`: under ZeRO ranks with the same state of a router have different
    slices of weights.
    """
    held = [(box, tensor, place) for box, tensor in pairs if (place := holder(box)) is not None]
    totals: Counter[Kind] = Counter()
    for box, tensor, _ in held:
        totals[box.replicated, box.group] += shard_bytes([(box, tensor)])
    passed: Counter[Kind] = Counter()
    found: Pairs = []
    for box, tensor, place in held:
        kind = box.replicated, box.group
        size = shard_bytes([(box, tensor)])
        begin = passed[kind]  # of this box in the bytes of its kind
        passed[kind] += size
        rows = box.extent[0]
        # a row belongs to the range that its first byte lies in: count those before each cut
        cuts = (totals[kind] * (place.rank + end) // place.size for end in (0, 1))
        first, stop = (min(max(-(-(cut - begin) // (size // rows)), 0), rows) for cut in cuts)
        found += cut_rows(box, tensor, first, stop)
    return found


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
