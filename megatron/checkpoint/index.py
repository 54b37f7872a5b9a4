"""What a checkpoint folder holds and where, verified without reading tensor data. No torch here."""

from __future__ import annotations

import json
import math
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.checkpoint import manifest as m
from megatron.checkpoint.boxes import Dims, Shapes, intersect, shapes_of, tiles
from megatron.checkpoint.fetch import BATCH, Fetcher, Range
from megatron.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    MANIFEST_HEAD,
    MANIFEST_LIMIT,
    CheckpointError,
    DigestTable,
    Entry,
    decode_header,
    decode_manifest,
    iteration_folder,
    list_iterations,
    parse_key,
    shard_file,
    table_digest,
    table_file,
)
from megatron.config.errors import some
from megatron.config.input_files import InputError, JsonObject, open_regular, parse_json

if TYPE_CHECKING:
    from megatron.model.spec import Box

# threads that read tables and headers: on a shared file system most of their time is waiting
OPEN_THREADS = 16
MAX_NAMED = 16  # most tensors that a message lists


@dataclass(frozen=True)
class ShardFile:
    """One shard file as the manifest and its table describe it. `data_start`: where tensor data
    begins in the file; `chunk`: bytes under a digest.
    """

    number: int
    path: Path
    size: int
    table_digest: str
    data_start: int
    chunk: int

    @property
    def data_bytes(self) -> int:
        return self.size - self.data_start

    def table(self) -> DigestTable:
        """Its digest table, read and verified now."""
        return read_table(self.path.parent / table_file(self.number), self.table_digest)


class Piece(NamedTuple):
    """A box of a logical tensor as it lies in one shard; `start` counts from the shard's data."""

    offset: Dims
    extent: Dims
    shard: ShardFile
    start: int


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor of a checkpoint; `dtype` by its safetensors name. `rows`: the shard's
    number, start, offset and extent of each piece.
    """

    shape: Dims
    dtype: str
    shards: list[ShardFile]
    rows: array

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def pieces(self) -> list[Piece]:
        dims = len(self.shape)
        rows = self.rows.tolist()
        return [
            Piece(
                tuple(rows[at + 2 : at + 2 + dims]),
                tuple(rows[at + 2 + dims : at + 2 + 2 * dims]),
                self.shards[rows[at]],
                rows[at + 1],
            )
            for at in range(0, len(rows), 2 + 2 * dims)
        ]


class Index:
    """An opened checkpoint folder. `known`: what `encode` gave on another rank, which has verified
    it; then nothing is read but the first bytes of the manifest.

    Raises CheckpointError when anything but the tensor data is damaged or missing, or does not hold
    every tensor exactly once; with `known`, when this rank does not see the same checkpoint.
    """

    def __init__(self, path: str | Path, known: bytes | None = None) -> None:
        self.path = Path(path)
        self.fetcher = Fetcher(self._names_of)
        self.shards: list[ShardFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.manifest: JsonObject = {}
        if known is None:
            self._open()
        else:
            self._take(known)

    @property
    def iteration(self) -> int:
        return self.manifest["iteration"]

    @property
    def state(self) -> JsonObject:
        return self.manifest["state"]

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def _open(self) -> None:
        # 1. The manifest, then tables and headers of all shards, which it has the digests of.
        self.manifest = self._read_manifest()
        for shard, entries, shapes in self._open_shards():
            self.shards.append(shard)
            self._add(shard, entries, shapes)

        # 2. Every element of every tensor once, and every tensor that the run has.
        for name, stored in self.tensors.items():
            if not tiles(stored.shape, [piece[:2] for piece in stored.pieces]):
                raise CheckpointError(
                    f"{self.path}: the shards do not hold every element of {name} "
                    f"{list(stored.shape)} exactly once"
                )
        self._compare_with_expected()

    def _read_manifest(self) -> JsonObject:
        return read_manifest(self.path)

    def _read_head(self, number: int) -> tuple[int, bytes]:
        return read_head(self.path, number, self.manifest["shards"][number])

    def _open_shard(self, number: int) -> tuple[ShardFile, dict[str, Entry], Shapes]:
        """A shard, the entries of its header and the global shapes of their tensors."""
        path, record = self.path / shard_file(number), self.manifest["shards"][number]
        size, digest = record["bytes"], record["table_digest"]
        chunk, header = self._read_head(number)
        entries, metadata = decode_header(header, size - len(header), path)
        try:
            shapes = shapes_of(parse_json(metadata["shapes"].encode()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: the header lacks the tensors' global shapes: {error}"
            ) from error
        return ShardFile(number, path, size, digest, len(header), chunk), entries, shapes

    def _compare_with_expected(self) -> None:
        """Compare with the run's list of tensors: one that no rank has written is found here."""
        try:
            expected = shapes_of(self.state.get("tensors", {}))
        except InputError as error:
            raise CheckpointError(
                f"{self.path / MANIFEST}: not a manifest of this format: state.tensors: {error}"
            ) from error
        missing = [
            f"{name} {list(shape)}"
            for name, shape in expected.items()
            if name not in self.tensors or self.tensors[name].shape != shape
        ]
        if missing:
            raise CheckpointError(
                f"{self.path}: the shards do not hold {some(missing, MAX_NAMED)}, which the run has"
            )

    def _open_shards(self) -> Iterator[tuple[ShardFile, dict[str, Entry], Shapes]]:
        numbers = range(len(self.manifest["shards"]))
        with ThreadPoolExecutor(OPEN_THREADS) as threads:
            for first in numbers[:: 4 * OPEN_THREADS]:  # bounds the headers in memory
                yield from threads.map(self._open_shard, numbers[first : first + 4 * OPEN_THREADS])

    def _add(self, shard: ShardFile, entries: dict[str, Entry], shapes: Shapes) -> None:
        for key, entry in entries.items():
            name, offset = parse_key(key, shard.path)
            stored = self.tensors.get(name)
            if stored is None:
                stored = self.tensors[name] = StoredTensor(
                    shapes.get(name, ()), entry.dtype, self.shards, array("q")
                )
            # all shards have the same tensor in mind
            agrees = (
                shapes.get(name) == stored.shape
                and entry.dtype == stored.dtype
                and entry.start % stored.item_bytes == 0
            )
            if not agrees or not len(offset) == len(entry.shape) == len(stored.shape):
                raise CheckpointError(
                    f"{shard.path}: {key}: shape, dtype or alignment contradicts the other shards"
                )
            stored.rows.extend((shard.number, entry.start, *offset, *entry.shape))

    def encode(self) -> bytes:
        """All of it, for other ranks of the job."""
        content = {
            "head": load_bytes(self.path / MANIFEST, MANIFEST_HEAD).hex(),
            "manifest": self.manifest,
            "shards": [[shard.data_start, shard.chunk] for shard in self.shards],
            "tensors": [
                [name, each.dtype, each.shape, each.rows.tolist()]
                for name, each in self.tensors.items()
            ],
        }
        return zlib.compress(json.dumps(content).encode(), 1)

    def _take(self, known: bytes) -> None:
        content = json.loads(zlib.decompress(known))
        self.manifest = content["manifest"]
        # another folder, or another save of the same iteration, has another manifest
        seen = load_bytes(self.path / MANIFEST, MANIFEST_HEAD) if self.path.is_dir() else b""
        if seen.hex() != content["head"]:
            raise CheckpointError(
                f"{self.path}: the checkpoint that rank 0 found there is not seen from here: "
                "is --load on a file system that all nodes share?"
            )
        pairs = zip(self.manifest["shards"], content["shards"], strict=True)
        for number, (record, (start, chunk)) in enumerate(pairs):
            path = self.path / shard_file(number)
            digest = record["table_digest"]
            self.shards.append(ShardFile(number, path, record["bytes"], digest, start, chunk))
        for name, dtype, shape, rows in content["tensors"]:
            self.tensors[name] = StoredTensor(tuple(shape), dtype, self.shards, array("q", rows))

    def overlaps(self, box: Box) -> Iterator[tuple[Piece, Dims, Dims]]:
        """The pieces that hold anything of a box, and (low, high) of what; a scalar counts as a
        vector of one.
        """
        place = box.offset or (0,), box.extent or (1,)
        for piece in self.tensors[box.name].pieces:
            common = intersect(*place, piece.offset or (0,), piece.extent or (1,))
            if common is not None:
                yield piece, *common

    def _names_of(self, shard: ShardFile, start: int, stop: int) -> str:
        """The tensors that have any of the bytes [start, stop) of a shard's data."""
        hit = [
            name
            for name, stored in self.tensors.items()
            for piece in stored.pieces
            if piece.shard is shard
            and piece.start < stop
            and start < piece.start + math.prod(piece.extent) * stored.item_bytes
        ]
        return some(hit, MAX_NAMED)

    def verify(
        self,
        report: Callable[[int, int], None] = lambda done, total: None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Read and verify every chunk of every shard, or the i-th of n about equal parts of them
        (`part`: i, n); `report` is called with the bytes done and those in all. Raises
        CheckpointError at the first damage.
        """
        # whole batches, so that no two parts read the same chunk
        spans = []
        for shard in self.shards:
            step = max(1, BATCH // shard.chunk) * shard.chunk
            for start in range(0, shard.data_bytes, step):
                spans.append(Range(shard, start, min(start + step, shard.data_bytes)))
        low, high = (len(spans) * at // part[1] for at in (part[0], part[0] + 1))
        done = 0
        total = sum(span.stop - span.start for span in spans[low:high])
        for span, _ in self.fetcher.stream(spans[low:high]):
            done += span.stop - span.start
            report(done, total)


def read_head(folder: Path, number: int, record: JsonObject) -> tuple[int, bytes]:
    """(bytes of data under a digest, header with its padding) of a shard; both files are verified
    as far as they are read.
    """
    path = folder / shard_file(number)
    table = read_table(folder / table_file(number), record["table_digest"])
    header = load_bytes(path, table.data_start)
    size = path.stat().st_size
    if not size == table.size == record["bytes"]:
        raise CheckpointError(
            f"{path}: has {size} bytes, the manifest has {record['bytes']}: truncated, or "
            "of another checkpoint"
        )
    if m.chunk_digest(header) != table.header:
        raise CheckpointError(f"{path}: damaged: the header does not match its digest")
    return table.chunk, header


def read_table(path: Path, digest: str) -> DigestTable:
    """The digest table at `path`, verified by its own digest."""
    raw = load_bytes(path, MANIFEST_LIMIT)
    if table_digest(raw) != digest:
        raise CheckpointError(
            f"{path}: damaged, or of another checkpoint: it does not match its digest in {MANIFEST}"
        )
    return DigestTable.decode(raw, path)


def read_manifest(folder: Path) -> JsonObject:
    """The manifest of a checkpoint folder, verified by its own digest."""
    content = decode_manifest(load_bytes(folder / MANIFEST, MANIFEST_LIMIT), folder / MANIFEST)
    # the folder's name decides which checkpoint is the newest, so it has to be the manifest's
    right = iteration_folder(content["iteration"])
    if folder.name.startswith("iter_") and folder.name != right:
        raise CheckpointError(
            f"{folder}: its manifest is of iteration {content['iteration']}: the folder was "
            f"renamed; name it {right}"
        )
    return content


def newest_first(root: Path) -> tuple[list[int], list[int]]:
    """Iterations under `root`: (those that count, those that were superseded when a run went
    back), each newest first. A manifest names the later ones, and their attempts, that were there
    before its run began. What cannot be read counts.
    """
    iterations = list_iterations(root)
    attempts = {}
    superseded = set()
    for iteration in iterations if len(iterations) > 1 else ():
        with suppress(CheckpointError):
            content = read_manifest(root / iteration_folder(iteration))
            attempts[iteration] = content["attempt"]
            superseded |= {(int(later), each) for later, each in content.get("left", {}).items()}
    behind = [each for each in iterations if (each, attempts.get(each)) in superseded]
    return [each for each in iterations if each not in behind], behind


def load_bytes(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file; one of another kind is refused, not waited for."""
    try:
        with open_regular(path) as file:
            return file.read(min(limit, os.fstat(file.fileno()).st_size))
    except (OSError, InputError) as error:
        what = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: {what}: the checkpoint is incomplete, or not one of this program"
        ) from error
