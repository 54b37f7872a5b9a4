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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.checkpoint import manifest as m
from megatron.checkpoint.boxes import Dims, intersect, tiles
from megatron.checkpoint.fetch import BATCH, Fetcher, Range
from megatron.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    MANIFEST_HEAD,
    MANIFEST_LIMIT,
    CheckpointError,
    DigestTable,
    decode_header,
    decode_manifest,
    iteration_folder,
    list_iterations,
    shard_file,
    table_digest,
    table_file,
)
from megatron.config.errors import some
from megatron.config.input_files import InputError, JsonObject, open_regular

if TYPE_CHECKING:
    from megatron.model.spec import Box

# threads that read tables and headers: on a shared file system most of their time is waiting
OPEN_THREADS = 16
MAX_NAMED = 16  # most tensors that a message lists
Head = tuple[int, bytes]  # of a shard: bytes of data under a digest, the header with its padding


@dataclass(frozen=True)
class ShardFile:
    """One shard file, as `record`, its entry in the manifest, and its digest table describe it.
    `data_start`: where tensor data begins in the file; `chunk`: bytes under a digest.
    """

    folder: Path
    number: int
    record: JsonObject = field(hash=False)
    data_start: int
    chunk: int

    @property
    def path(self) -> Path:
        return self.folder / shard_file(self.number)

    @property
    def size(self) -> int:
        return self.record["bytes"]

    @property
    def data_bytes(self) -> int:
        return self.size - self.data_start

    def table(self) -> DigestTable:
        """Its digest table, read and verified now."""
        return read_table(self.folder, self.number, self.record)

    def spans(self) -> list[Range]:
        """All of its data, in runs of whole chunks, so that no two read the same one."""
        step = max(1, BATCH // self.chunk) * self.chunk
        starts = range(0, self.data_bytes, step)
        return [Range(self, start, min(start + step, self.data_bytes)) for start in starts]


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
        width = 2 + 2 * dims
        pieces = []
        for at in range(0, len(self.rows), width):
            number, start, *box = self.rows[at : at + width]
            shard = self.shards[number]
            pieces.append(Piece(tuple(box[:dims]), tuple(box[dims:]), shard, start))
        return pieces


class Index:
    """An opened checkpoint folder. `known`: what `encode` gave on another rank, which has verified
    it; then nothing is read but the first bytes of the manifest. `manifest` and `heads` (as
    `read_head`, by shard): what of them is not read from the folder.

    Raises CheckpointError when anything but the tensor data is damaged or missing, or does not hold
    every tensor exactly once; with `known`, when this rank does not see the same checkpoint.
    """

    def __init__(
        self,
        path: str | Path,
        known: bytes | None = None,
        manifest: JsonObject | None = None,
        heads: dict[int, Head] = {},
    ) -> None:
        self.path = Path(path)
        self.fetcher = Fetcher(self._names_of)
        self.shards: list[ShardFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        if known is not None:
            self._take(known)
            return

        # The manifest, then digest tables and headers of all shards, verified from it.
        self.manifest: JsonObject = read_manifest(self.path) if manifest is None else manifest
        records = self.manifest["shards"]

        def head_of(number: int) -> Head:
            return heads.get(number) or read_head(self.path, number, records[number])

        step = 4 * OPEN_THREADS  # headers in memory
        with ThreadPoolExecutor(OPEN_THREADS) as threads:
            for first in range(0, len(records), step):
                batch = range(first, min(first + step, len(records)))
                for number, head in zip(batch, threads.map(head_of, batch)):
                    self._add(number, *head)
        self._check_complete()

    @property
    def iteration(self) -> int:
        return self.manifest["iteration"]

    @property
    def state(self) -> JsonObject:
        return self.manifest["state"]

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def _add(self, number: int, chunk: int, header: bytes) -> None:
        record = self.manifest["shards"][number]
        shard = ShardFile(self.path, number, record, len(header), chunk)
        self.shards.append(shard)
        for name, shape, dtype, offset, extent, start in decode_header(header, shard.path):
            if name not in self.tensors:
                self.tensors[name] = StoredTensor(shape, dtype, self.shards, array("q"))
            stored = self.tensors[name]
            # all shards have the same tensor in mind
            if (shape, dtype) != (stored.shape, stored.dtype):
                raise CheckpointError(
                    f"{shard.path}: {name}: shape or dtype contradicts the other shards"
                )
            stored.rows.extend((number, start, *offset, *extent))

    def _check_complete(self) -> None:
        """Every element of every tensor is there once, and so is every tensor that the run has."""
        for name, stored in self.tensors.items():
            if not tiles(stored.shape, [piece[:2] for piece in stored.pieces]):
                raise CheckpointError(
                    f"{self.path}: the shards do not hold every element of {name} "
                    f"{list(stored.shape)} exactly once"
                )
        missing = [
            f"{name} {shape}"
            for name, shape in self.state.get("tensors", {}).items()
            if name not in self.tensors or self.tensors[name].shape != tuple(shape)
        ]
        if missing:
            raise CheckpointError(
                f"{self.path}: the shards do not hold {some(missing, MAX_NAMED)}, which the run has"
            )

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
                "--load must be on a file system that all nodes share"
            )
        for number, record in enumerate(self.manifest["shards"]):
            data_start, chunk = content["shards"][number]
            self.shards.append(ShardFile(self.path, number, record, data_start, chunk))
        for name, dtype, shape, rows in content["tensors"]:
            self.tensors[name] = StoredTensor(tuple(shape), dtype, self.shards, array("q", rows))

    def overlaps(self, box: Box) -> Iterator[tuple[Piece, Dims, Dims]]:
        """The pieces that hold anything of a box, and (low, high) of what."""
        for piece in self.tensors[box.name].pieces:
            common = intersect(box.offset, box.extent, piece.offset, piece.extent)
            if common is not None:
                yield piece, *common

    def _names_of(self, shard: ShardFile, start: int, stop: int) -> str:
        """For an error: the tensors that have any of the bytes [start, stop) of a shard's data."""
        hit = [
            name
            for name, stored in self.tensors.items()
            for piece in stored.pieces
            if piece.shard is shard
            and piece.start < stop
            and start < piece.start + math.prod(piece.extent) * stored.item_bytes
        ]
        return f" (in tensor {some(hit, MAX_NAMED)})"

    def verify(
        self,
        report: Callable[[int, int], None] = lambda done, total: None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Read and verify every chunk of every shard, or the i-th of n about equal parts of them
        (`part`: i, n); `report` is called with the bytes done and those in all. Raises
        CheckpointError at the first damage.
        """
        spans = [span for shard in self.shards for span in shard.spans()]
        low, high = (len(spans) * at // part[1] for at in (part[0], part[0] + 1))
        done = 0
        total = sum(span.stop - span.start for span in spans[low:high])
        for span, _ in self.fetcher.stream(spans[low:high]):
            done += span.stop - span.start
            report(done, total)


def read_head(folder: Path, number: int, record: JsonObject) -> Head:
    """The head of a shard; both of its files are verified as far as they are read."""
    path = folder / shard_file(number)
    table = read_table(folder, number, record)
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


def verify_shard(folder: Path, number: int, record: JsonObject) -> None:
    """Read and verify every byte of a shard and of its digest table."""
    chunk, header = read_head(folder, number, record)
    shard = ShardFile(folder, number, record, len(header), chunk)
    for _ in Fetcher(lambda *_: "").stream(shard.spans()):
        pass


def read_table(folder: Path, number: int, record: JsonObject) -> DigestTable:
    """The digest table of a shard, verified by its own digest."""
    path = folder / table_file(number)
    raw = load_bytes(path, MANIFEST_LIMIT)
    if table_digest(raw) != record["table_digest"]:
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
    before its run began ("" of one that cannot be read). Any other that cannot be read counts.
    """
    iterations = list_iterations(root)
    attempts = {}
    superseded = set()
    for iteration in iterations if len(iterations) > 1 else ():
        with suppress(CheckpointError):
            content = read_manifest(root / iteration_folder(iteration))
            attempts[iteration] = content["attempt"]
            superseded |= {(int(later), each) for later, each in content.get("left", {}).items()}
    behind = [each for each in iterations if (each, attempts.get(each, "")) in superseded]
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
