"""What a checkpoint folder holds and where: manifest, digest tables, headers and sizes, verified without reading tensor data. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint import manifest as m
from megatron.checkpoint.boxes import parse_key, tiles
from megatron.checkpoint.manifest import CheckpointError, DigestTable, Entry

OPENERS = 16  # threads that read tables and headers: on a shared file system most of their time is waiting
BATCH = 8 << 20  # bytes of one coalesced read, rounded out to whole rows and chunks


@dataclass(frozen=True)
class Shard:
    """One shard file as the manifest and its table describe it. `data_start`: where tensor data begins in the file."""

    path: Path
    table_path: Path
    size: int
    table_digest: str
    data_start: int

    @property
    def data_bytes(self) -> int:
        return self.size - self.data_start

    def table(self) -> DigestTable:
        """Its digest table, read and verified now."""
        return _load_table(self.table_path, self.table_digest)


class Piece(NamedTuple):
    """A box of a logical tensor as it lies in one shard; `start` counts from the shard's data."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    shard: Shard
    start: int


@dataclass(frozen=True)
class Stored:
    """A logical tensor of a checkpoint; `dtype` by its safetensors name."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]

    @property
    def item_bytes(self) -> int:
        return m.ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class Index:
    """An opened checkpoint folder: `.manifest`, `.state`, `.iteration`, `.shards`, `.tensors` by name, `.bytes_read` of tensor data so far.

    Raises CheckpointError when anything but the tensor data is damaged or missing, or does not hold every tensor exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = m.decode_manifest(load_bytes(self.path / m.MANIFEST, m.MANIFEST_LIMIT), self.path / m.MANIFEST)
        self.iteration: int = self.manifest["iteration"]
        self.state: dict[str, Any] = self.manifest["state"]
        if self.path.name.startswith("iter_") and self.path.name != m.iteration_folder(self.iteration):
            right = m.iteration_folder(self.iteration)
            raise CheckpointError(f"{self.path}: its manifest is of iteration {self.iteration}: the folder was renamed; name it {right}")
        self.bytes_read = 0
        self.shards: list[Shard] = []
        self.tensors: dict[str, Stored] = {}
        for shard, entries, shapes in self._open_shards():
            self.shards.append(shard)
            self._add(shard, entries, shapes)
        for name, stored in self.tensors.items():
            if not tiles(stored.shape, [(piece.offset, piece.extent) for piece in stored.pieces]):
                raise CheckpointError(f"{self.path}: the shards do not hold every element of {name} {list(stored.shape)} exactly once")

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def _open_shards(self) -> Iterator[tuple[Shard, dict[str, Entry], dict[str, tuple[int, ...]]]]:
        records = list(enumerate(self.manifest["shards"]))
        if len(records) == 1:
            yield _open_shard(self.path, *records[0])
            return
        with ThreadPoolExecutor(OPENERS) as threads:
            for first in range(0, len(records), 4 * OPENERS):  # so many headers at a time in memory
                yield from threads.map(lambda record: _open_shard(self.path, *record), records[first : first + 4 * OPENERS])

    def _add(self, shard: Shard, entries: dict[str, Entry], shapes: dict[str, tuple[int, ...]]) -> None:
        for key, entry in entries.items():
            name, offset = parse_key(key, shard.path)
            stored = self.tensors.get(name)
            if stored is None:
                stored = self.tensors[name] = Stored(shapes.get(name, ()), entry.dtype, [])
            agrees = shapes.get(name) == stored.shape and entry.dtype == stored.dtype and entry.start % stored.item_bytes == 0
            if not agrees or not len(offset) == len(entry.shape) == len(stored.shape):
                raise CheckpointError(f"{shard.path}: {key}: shape, dtype or alignment contradicts the other shards")
            stored.pieces.append(Piece(offset, entry.shape, shard, entry.start))

    def tensors_in(self, shard: Shard, start: int, stop: int) -> list[str]:
        """Names of the tensors that have any of the bytes [start, stop) of a shard's data."""
        return [name for name, stored in self.tensors.items() for piece in stored.pieces
                if piece.shard is shard and piece.start < stop and start < piece.start + math.prod(piece.extent) * stored.item_bytes]

    def verify(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read and verify every chunk of every shard; `report` is told (bytes done, in all). Raises CheckpointError at the first damage."""
        done, total, buffer = 0, sum(shard.data_bytes for shard in self.shards), memoryview(bytearray())
        for shard in self.shards:
            with ShardFile(self, shard) as file:
                step = max(1, BATCH // file.table.chunk) * file.table.chunk
                if len(buffer) < step:
                    buffer = memoryview(bytearray(step))
                for start in range(0, shard.data_bytes, step):
                    size = min(step, shard.data_bytes - start)
                    file.read_chunks(start, buffer[:size])
                    done += size
                    report(done, total)


class ShardFile:
    """An open shard whose chunks are read and verified."""

    def __init__(self, index: Index, shard: Shard) -> None:
        self.index, self.shard, self.table = index, shard, shard.table()
        try:
            self.file = open(shard.path, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{shard.path}: {error.strerror}") from error

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def read_chunks(self, start: int, into: memoryview) -> None:
        """Fill `into` with the shard's data from `start`, the beginning of a chunk, to the end of a chunk; every chunk is verified."""
        shard, chunk, done = self.shard, self.table.chunk, 0
        while done < len(into):
            at = shard.data_start + start + done
            got = os.preadv(self.file.fileno(), [into[done:]], at)
            if got == 0:
                raise CheckpointError(f"{shard.path}: ends at byte {at}: truncated while it was read")
            done += got
        self.index.bytes_read += done
        for at in range(0, done, chunk):
            part = into[at : at + chunk]
            if m.chunk_digest(part) != self.table.chunks[(start + at) // chunk]:
                low, high = start + at, start + at + len(part)
                hit = self.index.tensors_in(shard, low, high)
                names = ", ".join(hit[:16]) + (f" and {len(hit) - 16} more" if len(hit) > 16 else "")
                raise CheckpointError(
                    f"{shard.path}: damaged: bytes {shard.data_start + low} to {shard.data_start + high} (in tensor {names}) do not match "
                    "their digest; load an older checkpoint with --ckpt-step"
                )


def _open_shard(folder: Path, number: int, record: dict[str, Any]) -> tuple[Shard, dict[str, Entry], dict[str, tuple[int, ...]]]:
    """A shard, the entries of its header and the global shapes of their tensors; its table, its size and its header are right."""
    path, table_path = folder / m.shard_file(number), folder / m.table_file(number)
    table = _load_table(table_path, record["table_digest"])
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the checkpoint is incomplete") from error
    if not size == table.size == record["bytes"]:
        raise CheckpointError(f"{path}: has {size} bytes, the manifest says {record['bytes']}: truncated, or of another checkpoint")
    header = load_bytes(path, table.data_start)
    if m.chunk_digest(header) != table.header:
        raise CheckpointError(f"{path}: damaged: the header does not match its digest")
    entries, metadata = m.decode_header(header, size - table.data_start, path)
    try:
        shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header lacks the tensors' global shapes") from error
    return Shard(path, table_path, size, record["table_digest"], table.data_start), entries, shapes


def _load_table(path: Path, digest: str) -> DigestTable:
    raw = load_bytes(path, m.MANIFEST_LIMIT)
    if m.table_digest(raw) != digest:
        raise CheckpointError(f"{path}: damaged, or of another checkpoint: it does not match its digest in {m.MANIFEST}")
    return DigestTable.decode(raw, path)


def load_bytes(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file."""
    try:
        with open(path, "rb") as file:
            return file.read(min(limit, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the checkpoint is incomplete, or not one of this program") from error
