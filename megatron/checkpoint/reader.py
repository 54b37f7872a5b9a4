"""Find and read checkpoints: any box of any tensor, reading and verifying only the chunks that hold it (docs/checkpoint.md).

Opening verifies the manifest, the digest tables, all sizes and all headers; every chunk of data is verified when it is read.
Nothing is executed and nothing is believed without a digest.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.manifest import CheckpointError

if TYPE_CHECKING:
    from megatron.model.layout import Box

BATCH = 8 << 20  # bytes of one coalesced read, rounded out to whole rows and chunks


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
        Checkpoint(newest).close()
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
        Checkpoint(path).close()
    except CheckpointError:
        return False
    return True


def _tracker(root: Path) -> str | None:
    try:
        with open(root / m.TRACKER, "rb") as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor as it lies in one shard; `start` counts from the shard's data."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    shard: _Shard
    start: int


@dataclass(frozen=True)
class Stored:
    """A logical tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


class Checkpoint:
    """An opened checkpoint folder: `.state`, `.iteration`, `.names`, `.tensors`, reads by box, `.bytes_read` of data so far.

    Raises CheckpointError when anything but the tensor data is damaged or missing; damaged data is refused when it is read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = m.decode_manifest(_load(self.path / m.MANIFEST, m.MANIFEST_LIMIT), self.path / m.MANIFEST)
        self.iteration: int = self.manifest["iteration"]
        self.state: dict[str, Any] = self.manifest["state"]
        if self.path.name.startswith("iter_") and self.path.name != m.iteration_folder(self.iteration):
            right = m.iteration_folder(self.iteration)
            raise CheckpointError(f"{self.path}: its manifest is of iteration {self.iteration}: the folder was renamed; name it {right}")
        self._window = _Window()
        self.shards = [_Shard(self.path, index, record) for index, record in enumerate(self.manifest["shards"])]
        self.tensors: dict[str, Stored] = {}
        for shard in self.shards:
            self._index(shard)
        for name, stored in self.tensors.items():
            if not m.tiles(stored.shape, [(piece.offset, piece.extent) for piece in stored.pieces]):
                raise CheckpointError(f"{self.path}: the shards do not hold every element of {name} {list(stored.shape)} exactly once")

    def _index(self, shard: _Shard) -> None:
        header = _load(shard.path, shard.table.data_start)
        if m.chunk_digest(header) != shard.table.header:
            raise CheckpointError(f"{shard.path}: damaged: the header does not match its digest")
        entries, metadata = m.decode_header(header, shard.data_bytes, shard.path)
        try:
            shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{shard.path}: the header lacks the tensors' global shapes") from error
        for key, entry in entries.items():
            name, offset = m.parse_key(key, shard.path)
            stored = self.tensors.setdefault(name, Stored(shapes.get(name, ()), entry.dtype, []))
            agrees = shapes.get(name) == stored.shape and entry.dtype == stored.dtype and entry.start % entry.dtype.itemsize == 0
            if not agrees or not len(offset) == len(entry.shape) == len(stored.shape):
                raise CheckpointError(f"{shard.path}: {key}: shape, dtype or alignment contradicts the other shards")
            stored.pieces.append(Piece(offset, entry.shape, shard, entry.start))
            shard.spans.append((entry.start, entry.stop, name))

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from the files so far: whole chunks."""
        return self._window.bytes_read

    def read(self, box: Box, into: Tensor) -> None:
        """Fill the part of the local parameter `into` that holds `box`, on any device; values are converted to its dtype."""
        self._read(box.name, tuple(box.shape), tuple(box.offset), tuple(box.extent), box.view(into.detach()))

    def read_tensor(self, name: str) -> Tensor:
        """The whole logical tensor `name`, on the CPU, in the dtype it was saved in."""
        stored = self._stored(name)
        result = torch.empty(stored.shape, dtype=stored.dtype)
        self._read(name, stored.shape, (0,) * len(stored.shape), stored.shape, result)
        return result

    __getitem__ = read_tensor

    def verify(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read and verify every chunk of every shard; `report` is told (bytes done, in all). Raises CheckpointError at the first damage."""
        done, total = 0, sum(shard.data_bytes for shard in self.shards)
        for shard in self.shards:
            for start in range(0, shard.data_bytes, BATCH):
                stop = min(start + BATCH, shard.data_bytes)
                self._window.read(shard, start, stop)
                done += stop - start
                report(done, total)

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
            common = m.intersect(offset, extent, piece.offset or (0,), piece.extent or (1,))
            if common is not None:
                _copy(self._window, piece, stored.dtype, *common, offset, view)


def _copy(window: _Window, piece: Piece, dtype: torch.dtype, low: tuple, high: tuple, offset: tuple, view: Tensor) -> None:
    """Copy [low, high) of the logical tensor from `piece` into `view`, which holds a box at `offset`; bounded batches of rows."""
    own, extent = piece.offset or (0,), piece.extent or (1,)
    strides = [math.prod(extent[d + 1 :]) for d in range(len(extent))]
    inner = [h - l for l, h in zip(low[1:], high[1:])]
    first = sum((l - o) * s for l, o, s in zip(low[1:], own[1:], strides[1:]))  # the first needed element of a row
    last = sum((h - 1 - o) * s for h, o, s in zip(high[1:], own[1:], strides[1:])) + 1
    columns = tuple(slice(l - o, h - o) for l, h, o in zip(low[1:], high[1:], offset[1:]))
    size, batch = dtype.itemsize, max(1, BATCH // (strides[0] * dtype.itemsize))
    if strides[0] * size > piece.shard.table.chunk and last - first < strides[0]:
        batch = 1  # chunks between two rows' needed parts may hold nothing that is needed
    for row in range(low[0], high[0], batch):
        rows = min(batch, high[0] - row)
        begin = piece.start + ((row - own[0]) * strides[0] + first) * size
        end = piece.start + ((row - own[0] + rows - 1) * strides[0] + last) * size
        data = window.read(piece.shard, begin, end).view(dtype)
        block = data.as_strided([rows, *inner], strides, data.storage_offset())
        start = row - offset[0]
        for at, to, part in m.row_blocks(view, len(extent), start, start + rows):
            part[(slice(None), *columns)].copy_(block[at - start : to - start])


class _Shard:
    """One shard file that belongs to the checkpoint: its size and its digest table are right. `spans`: (start, stop, tensor name)."""

    def __init__(self, folder: Path, index: int, record: dict[str, Any]) -> None:
        self.path = folder / m.shard_file(index)
        table_path = folder / m.table_file(index)
        raw = _load(table_path, m.MANIFEST_LIMIT)
        if m.table_digest(raw) != record["table_digest"]:
            raise CheckpointError(f"{table_path}: damaged, or of another checkpoint: it does not match its digest in {m.MANIFEST}")
        self.table = m.DigestTable.decode(raw, table_path)
        self.data_bytes = self.table.size - self.table.data_start
        self.spans: list[tuple[int, int, str]] = []
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}: the checkpoint is incomplete") from error
        if not size == self.table.size == record["bytes"]:
            wanted = f"the manifest says {record['bytes']}"
            raise CheckpointError(f"{self.path}: has {size} bytes, {wanted}: truncated, or of another checkpoint")


class _Window:
    """The verified chunks that were read last, of one shard: neighbouring tensors share chunks, and one buffer serves all reads."""

    def __init__(self) -> None:
        self.shard: _Shard | None = None
        self.file: Any = None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.first, self.held = 0, 0  # the first chunk held, and how many bytes of data from its beginning on
        self.bytes_read = 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.shard, self.file, self.held = None, None, 0

    def read(self, shard: _Shard, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of the shard's data as a uint8 tensor, valid until the next read; whole chunks are read and verified."""
        if shard is not self.shard:
            self.close()
            try:
                self.file = open(shard.path, "rb", buffering=0)
            except OSError as error:
                raise CheckpointError(f"{shard.path}: {error.strerror}") from error
            self.shard = shard
        chunk = shard.table.chunk
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
            self._fill(self.buffer[known:size], base + known)
            self.held = size
        return self.buffer[start - base : stop - base]

    def _fill(self, buffer: Tensor, position: int) -> None:
        shard, view, done = self.shard, memoryview(buffer.numpy()), 0
        chunk, data_start = shard.table.chunk, shard.table.data_start
        while done < len(view):
            got = os.preadv(self.file.fileno(), [view[done:]], data_start + position + done)
            if got == 0:
                raise CheckpointError(f"{shard.path}: ends at byte {data_start + position + done}: truncated while it was read")
            done += got
        self.bytes_read += done
        for at in range(0, done, chunk):
            if m.chunk_digest(view[at : at + chunk]) != shard.table.chunks[(position + at) // chunk]:
                low, high = position + at, min(position + at + chunk, position + done)
                hit = [name for start, stop, name in shard.spans if start < high and low < stop]
                names = ", ".join(hit[:16]) + (f" and {len(hit) - 16} more" if len(hit) > 16 else "")
                raise CheckpointError(
                    f"{shard.path}: damaged: bytes {data_start + low} to {data_start + high} (in tensor {names}) do not match "
                    "their digest; load an older checkpoint with --ckpt-step"
                )


def _load(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the checkpoint is incomplete, or not one of this program") from error
