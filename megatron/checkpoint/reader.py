"""Find and read checkpoints: any box of any tensor, reading and verifying only the chunks that hold it (docs/checkpoint.md).

Opening verifies all but the tensor data (index.py); every chunk of data is verified when it is read. Nothing is executed and nothing is
believed without a digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.boxes import intersect
from megatron.checkpoint.index import BATCH, Index, Piece, Shard, ShardFile, Stored
from megatron.checkpoint.manifest import CheckpointError

if TYPE_CHECKING:
    from megatron.model.layout import Box

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their safetensors names
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def find_checkpoint(root: str | Path, step: int | None = None, say: Callable[[str], None] = print) -> Path | None:
    """The folder of the newest checkpoint under `root` (or of iteration `step`), verified as far as opening goes; None when there is none.

    The tracker file is only a hint: one that disagrees is ignored, and `say` is told. Raises CheckpointError when the wanted
    checkpoint is damaged, naming the newest whole one before it, and when `step` is given and missing.
    """
    root = Path(root)
    iterations = m.list_iterations(root)
    if (root / m.MANIFEST).is_file():
        raise CheckpointError(f"{root} is itself a checkpoint: give its parent folder {root.parent}, and choose with --ckpt-step")
    if step is not None:
        if step not in iterations:
            known = ", ".join(map(str, iterations)) or "none"
            raise CheckpointError(f"{root}: no checkpoint of iteration {step} (--ckpt-step); there: {known}")
        iterations = iterations[iterations.index(step) :]
    if not iterations:
        return None
    newest = root / m.iteration_folder(iterations[0])
    try:
        Index(newest)
    except CheckpointError as error:
        whole = next((i for i in iterations[1:] if _opens(root / m.iteration_folder(i))), None)
        fix = f"load the older whole one with --ckpt-step {whole}" if whole is not None else "no older whole checkpoint is there"
        raise CheckpointError(f"{error}. {newest.name} cannot be loaded; {fix}.") from error
    if step is None:
        tracker = _tracker(root)
        if tracker != str(iterations[0]):
            says = "is missing" if tracker is None else f"says {tracker!r}"
            say(f"{root / m.TRACKER} {says}; ignored: the newest whole checkpoint is {newest.name}")
    return newest


def _opens(path: Path) -> bool:
    try:
        Index(path)
    except CheckpointError:
        return False
    return True


def _tracker(root: Path) -> str | None:
    try:
        with open(root / m.TRACKER, "rb") as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


class Checkpoint(Index):
    """An opened checkpoint folder, and reads by box.

    Raises CheckpointError when anything but the tensor data is damaged or missing; damaged data is refused when it is read.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._window = _Window(self)

    def read(self, box: Box, into: Tensor) -> None:
        """Fill the part of the local parameter `into` that holds `box`, on any device; values are converted to its dtype."""
        self._read(box.name, tuple(box.shape), tuple(box.offset), tuple(box.extent), box.view(into.detach()))

    def read_tensor(self, name: str) -> Tensor:
        """The whole logical tensor `name`, on the CPU, in the dtype it was saved in."""
        stored = self._stored(name)
        result = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
        self._read(name, stored.shape, (0,) * len(stored.shape), stored.shape, result)
        return result

    __getitem__ = read_tensor

    def close(self) -> None:
        self._window.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            fix = "the model's flags differ from those it was saved with"
            if name.startswith("optimizer."):
                fix = "it was saved without the optimizer's state: load with --no-load-optim"
            raise CheckpointError(f"{self.path}: holds no tensor {name}: {fix}")
        return self.tensors[name]

    def _read(self, name: str, shape: tuple, offset: tuple, extent: tuple, view: Tensor) -> None:
        stored = self._stored(name)
        if stored.shape != shape:
            shapes = f"has shape {list(stored.shape)}, this model wants {list(shape)}"
            raise CheckpointError(f"{self.path}: {name} {shapes}: the model's flags or the tokenizer differ")
        if not shape:  # a scalar is read as a vector of one
            offset, extent, view = (0,), (1,), view.view(1)
        for piece in stored.pieces:
            common = intersect(offset, extent, piece.offset or (0,), piece.extent or (1,))
            if common is not None:
                _copy(self._window, piece, TORCH_DTYPES[stored.dtype], *common, offset, view)


def _copy(window: _Window, piece: Piece, dtype: torch.dtype, low: tuple, high: tuple, offset: tuple, view: Tensor) -> None:
    """Copy [low, high) of the logical tensor from `piece` into `view`, which holds a box at `offset`; bounded batches of rows."""
    own, extent = piece.offset or (0,), piece.extent or (1,)
    strides = [math.prod(extent[d + 1 :]) for d in range(len(extent))]
    inner = [h - l for l, h in zip(low[1:], high[1:])]
    first = sum((l - o) * s for l, o, s in zip(low[1:], own[1:], strides[1:]))  # the first needed element of a row
    last = sum((h - 1 - o) * s for h, o, s in zip(high[1:], own[1:], strides[1:])) + 1
    columns = tuple(slice(l - o, h - o) for l, h, o in zip(low[1:], high[1:], offset[1:]))
    size, batch = dtype.itemsize, max(1, BATCH // (strides[0] * dtype.itemsize))
    if strides[0] * size > window.chunk(piece.shard) and last - first < strides[0]:
        batch = 1  # chunks between two rows' needed parts may hold nothing that is needed
    for row in range(low[0], high[0], batch):
        rows = min(batch, high[0] - row)
        begin = piece.start + ((row - own[0]) * strides[0] + first) * size
        end = piece.start + ((row - own[0] + rows - 1) * strides[0] + last) * size
        data = window.read(piece.shard, begin, end).view(dtype)
        block = data.as_strided([rows, *inner], strides, data.storage_offset())
        start = row - offset[0]
        for at, to, part in row_blocks(view, len(extent), start, start + rows):
            part[(slice(None), *columns)].copy_(block[at - start : to - start])


def row_blocks(view: Tensor, dims: int, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """Rows [start, stop) of a box held by `view`, as (first, last + 1, tensor [rows, ...]) blocks that alias `view`.

    A view has the box's `dims` dimensions, or leading group dimensions before them whose rows follow one another (Box.view).
    """
    groups = view.shape[: view.ndim - dims]
    if not groups:
        yield start, stop, view[start:stop]
        return
    rows = view.shape[len(groups)]
    for group in range(start // rows, -(-stop // rows)):
        index, rest = [], group
        for size in reversed(groups):
            rest, at = divmod(rest, size)
            index.insert(0, at)
        low, high = max(start, group * rows), min(stop, (group + 1) * rows)
        yield low, high, view[tuple(index)][low - group * rows : high - group * rows]


class _Window:
    """The verified chunks that were read last, of one shard: neighbouring tensors share chunks, and one buffer serves all reads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.file: ShardFile | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.first, self.held = 0, 0  # the first chunk held, and how many bytes of data from its beginning on

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file, self.held = None, 0

    def chunk(self, shard: Shard) -> int:
        """Bytes of a chunk of `shard`, which is opened."""
        if self.file is None or shard is not self.file.shard:
            self.close()
            self.file = ShardFile(self.index, shard)
        return self.file.table.chunk

    def read(self, shard: Shard, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of the shard's data as a uint8 tensor, valid until the next read; whole chunks are read and verified."""
        chunk = self.chunk(shard)
        base = self.first * chunk
        if not base <= start < stop <= base + self.held:
            first, end = start // chunk, min(-(-stop // chunk) * chunk, shard.data_bytes)
            known = max(0, base + self.held - first * chunk) if base <= first * chunk else 0
            keep = self.buffer[self.held - known : self.held].clone()
            base, size = first * chunk, end - first * chunk
            if len(self.buffer) < size:
                self.buffer = torch.empty(size, dtype=torch.uint8)
            self.buffer[:known] = keep
            self.first, self.held = first, 0  # nothing is held while the read may fail
            self.file.read_chunks(base + known, memoryview(self.buffer[known:size].numpy()))
            self.held = size
        return self.buffer[start - base : stop - base]
