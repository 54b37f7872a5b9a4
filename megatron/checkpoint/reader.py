"""Find and read checkpoints: any box of any tensor, reading and verifying only the chunks that hold
its rows (docs/checkpoint.md). Opening verifies all but the tensor data (index.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.fetch import BATCH, Range
from megatron.checkpoint.index import Index, Piece, StoredTensor, newest_first
from megatron.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    iteration_folder,
    list_iterations,
)
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks
from megatron.config.errors import UserError
from megatron.distributed.collectives import broadcast_object
from megatron.model.spec import Box

if TYPE_CHECKING:
    from megatron.checkpoint.writer import BoxTensor

logger = logging.getLogger(__name__)

# by their safetensors names
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def open_checkpoint(
    root: str | Path,
    step: int | None = None,
    ranks: Ranks = SINGLE_RANK,
    older: bool = False,
    or_none: bool = False,
) -> Checkpoint | None:
    """Open the newest checkpoint under `root` (`newest_first`), or that of iteration `step`; None
    when there is none. All `ranks` call this together: the first finds and verifies it, the others
    get the index from it.

    `older`: instead of a damaged one the newest whole one before it, with a warning; then every
    byte is read and verified first, each rank its part; with `or_none` None when none is whole.
    Raises CheckpointError, on several ranks the same UserError on each, when the wanted checkpoint
    is damaged, naming the newest whole one before it, or `step` is missing.
    """
    # The first rank decides which ones come into question, whatever appears in the meantime.
    root = Path(root)
    iterations, superseded = ranks.from_first(lambda: loadable(root, step))
    if superseded and ranks.first:
        logger.warning(
            f"{root}: NOT taken are iterations {', '.join(map(str, superseded))}: a run resumed "
            "from an earlier one and has saved since; give "
            f"--ckpt-step {superseded[0]} if you want them"
        )
    for place, iteration in enumerate(iterations):
        path, others = root / iteration_folder(iteration), iterations[place + 1 :]
        checkpoint, fault = _open_together(path, ranks, verify=older)
        if checkpoint is not None:
            return checkpoint
        if not older or not (others or or_none):
            fix = ranks.from_first(lambda: _instead(root, others))
            ranks.refuse(CheckpointError(f"{fault}. {path.name} cannot be loaded; {fix}."))
        if ranks.first:
            logger.warning(
                f"{fault}. {path.name} CANNOT BE LOADED; an older checkpoint is "
                "taken instead (--allow-older-checkpoint)"
            )
    return None


def loadable(root: Path, step: int | None) -> tuple[list[int], list[int]]:
    """(the iterations that may be loaded, the wanted one first; those that were superseded)."""
    iterations = list_iterations(root)
    if (root / MANIFEST).is_file():
        raise CheckpointError(
            f"{root} is itself a checkpoint: give its parent folder {root.parent}, and "
            "choose with --ckpt-step"
        )
    if step is None:
        return newest_first(root)
    if step not in iterations:
        known = ", ".join(map(str, iterations)) or "none"
        raise CheckpointError(
            f"{root}: no checkpoint of iteration {step} (--ckpt-step); there: {known}"
        )
    return [step, *(each for each in newest_first(root)[0] if each < step)], []


def _open_together(path: Path, ranks: Ranks, verify: bool) -> tuple[Checkpoint | None, str]:
    """The checkpoint, which the first rank opens for all; or None, and how it is damaged. With
    `verify` every byte is read, each rank its part. Raises UserError where a rank does not see it.
    """
    opened: list[Checkpoint] = []
    encoded: list[bytes] = []

    def open_and_encode() -> None:
        opened.append(Checkpoint(path))
        encoded.append(opened[0].encode() if ranks.world.size > 1 else b"")

    try:
        ranks.from_first(open_and_encode)
    except UserError as error:
        return None, str(error)
    # A checkpoint that a rank does not see is whole: no other one may be taken for it.
    known = broadcast_object(b"".join(encoded), ranks.world)
    ranks.gather_or_raise(lambda: None if opened else opened.append(Checkpoint(path, known)))
    if verify:
        part = ranks.world.rank, ranks.world.size
        try:
            ranks.gather_or_raise(lambda: opened[0].verify(part=part))
        except UserError as error:
            return None, str(error)
    return opened[0], ""


def _instead(root: Path, iterations: list[int]) -> str:
    """What to load instead of a damaged checkpoint: the first of `iterations` that opens."""
    for iteration in iterations:
        with suppress(CheckpointError):
            Index(root / iteration_folder(iteration))
            return f"load the older whole one with --ckpt-step {iteration}"
    return "no older whole checkpoint is there"


class Checkpoint(Index):
    """An opened checkpoint folder, and reads by box. Raises CheckpointError as Index does when it
    is opened, and for damaged data when it is read.
    """

    def read(self, box: Box, into: Tensor) -> None:
        """Fill the part of the local parameter `into` that holds `box`, on any device; values are
        converted to its dtype.
        """
        self.read_all([(box, into)])

    def read_tensor(self, name: str) -> Tensor:
        """The whole logical tensor `name`, on the CPU, in the dtype it was saved in."""
        stored = self._stored(name)
        result = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
        self.read(Box(name, stored.shape, (0,) * len(stored.shape), stored.shape), result)
        return result

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what this checkpoint alone needed: nothing, unless it is a local one."""

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            fix = "the model's flags differ from those it was saved with"
            if name.startswith("optimizer."):
                fix = "it was saved without the optimizer's state: load with --no-load-optim"
            raise CheckpointError(f"{self.path}: holds no tensor {name}: {fix}")
        return self.tensors[name]

    def read_all(self, pairs: Iterable[BoxTensor]) -> None:
        """`read` of many, in the order in which they lie in the files: no shard is opened, and no
        chunk is read, more than once.
        """
        wanted: list[_Rows] = []
        for box, into in pairs:
            stored = self._stored(box.name)
            if stored.shape != tuple(box.shape):
                shapes = f"has shape {list(stored.shape)}, this model needs {list(box.shape)}"
                raise CheckpointError(
                    f"{self.path}: {box.name} {shapes}: the model's flags or the tokenizer differ"
                )
            dtype, view = TORCH_DTYPES[stored.dtype], box.view(into.detach())
            for overlap in self.overlaps(box):
                wanted += _rows(*overlap, dtype, box.offset, view)
        wanted.sort(key=lambda rows: (rows.shard.number, rows.start))
        try:
            for rows, data in self.fetcher.stream(wanted):
                rows.copy(data)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. {self.path.name} cannot be loaded; {self._instead()}."
            ) from error

    def _instead(self) -> str:
        root = self.path.parent
        return _instead(root, [each for each in newest_first(root)[0] if each < self.iteration])


@dataclass(frozen=True)
class _Rows(Range):
    """Whole rows of a piece, of which `columns` go to `into`."""

    dtype: torch.dtype
    extent: Dims  # of a row
    columns: tuple[slice, ...]
    into: Tensor

    def copy(self, data: memoryview) -> None:
        rows = torch.frombuffer(data, dtype=self.dtype).view(-1, *self.extent)
        self.into.copy_(rows[:, *self.columns])


def _rows(
    piece: Piece, low: Dims, high: Dims, dtype: torch.dtype, offset: Dims, view: Tensor
) -> Iterator[_Rows]:
    """What `view` [groups, rows, ...] (Box.view), which holds a box at `offset`, wants of a piece,
    [low, high) of the logical tensor, in batches of rows of one group.
    """
    first, *begins = piece.offset
    columns, inside = (
        tuple(slice(l - o, h - o) for l, h, o in zip(low[1:], high[1:], origin))
        for origin in (begins, offset[1:])
    )
    into = view[:, :, *inside]
    height = view.shape[1]  # rows of a group
    extent = piece.extent[1:]
    size = math.prod(extent) * dtype.itemsize
    batch = max(1, BATCH // size)
    row = low[0]
    while row < high[0]:
        group, at = divmod(row - offset[0], height)
        count = min(batch, height - at, high[0] - row)
        start = piece.start + (row - first) * size
        stop = start + count * size
        yield _Rows(piece.shard, start, stop, dtype, extent, columns, into[group, at : at + count])
        row += count
