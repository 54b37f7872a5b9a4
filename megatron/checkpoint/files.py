"""Durable files, and shards digested as they are written and read back. No torch here: the writer
process (background.py) starts with it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from xxhash import xxh3_128

from megatron.checkpoint import manifest as m
from megatron.checkpoint.index import verify_shard
from megatron.checkpoint.manifest import (
    HEADER_LIMIT,
    CheckpointError,
    DigestTable,
    shard_file,
    table_digest,
    table_file,
)
from megatron.config.input_files import JsonObject

FOLDER_MODE, FILE_MODE = 0o750, 0o640  # the umask may take more away
WRITEBACK_BYTES = 8 << 20  # after which the kernel is asked to write them to the disk
GB = 1e9
GIB = 1 << 30


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a new file; durable when the block ends without an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: bytes | memoryview, at: int = 0) -> None:
    """Write all of `data` from byte `at` of the file on; a short write is continued."""
    left = memoryview(data)
    while len(left):
        written = os.pwrite(file, left, at)
        left = left[written:]
        at += written


def write_file(path: Path, content: bytes) -> None:
    """A new file, durable."""
    with new_file(path) as file:
        write_all(file, content)


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_root(root: Path) -> None:
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync_folder(folder.parent)


def clean(root: Path, attempt: str) -> None:
    """Remove what earlier attempts have left, before the folder of `attempt` is made.

    One run at a time writes here (lease.py). Renamed before it is deleted: a writer that lives
    after all either renames first and has a whole checkpoint, or finds its folder gone and fails; a
    half-deleted folder can never become a checkpoint.
    """
    for name in os.listdir(root):
        path = root / name
        if re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}", name):
            trash = root / f".trash-{name.removeprefix('.tmp-')}-{attempt}"
            with suppress(FileNotFoundError):  # it was committed, or cleared away by another
                os.rename(path, trash)
                shutil.rmtree(trash, ignore_errors=True)
        elif re.fullmatch(r"\.trash-iter-\d+-[0-9a-f-]+", name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}\.txt", name):
            path.unlink(missing_ok=True)


# ---- shards --------------------------------------------------------------------------------------


def write_shard_file(
    folder: Path,
    index: int,
    header: bytes,
    data: Iterable[memoryview],
    *,
    verify: bool = False,
) -> JsonObject:
    """Write shard `index`, `header` and then `data`, and its digest table into `folder`, durably;
    return the shard's entry in the manifest.

    Each part of `data` is written before the next one is asked for. `verify`: as `read_back`.
    """
    with new_file(folder / shard_file(index)) as file:
        write_all(file, header)
        chunks, size = _write_data(file, len(header), data)
    table = DigestTable(m.CHUNK, len(header), len(header) + size, m.chunk_digest(header), chunks)
    raw = table.encode()
    write_file(folder / table_file(index), raw)
    record = {"file": shard_file(index), "bytes": table.size, "table_digest": table_digest(raw)}
    if verify:
        read_back(folder, index, record)
    if index > 0:
        # the commit syncs it for the first rank, whose node may not know this one's names yet
        sync_folder(folder)
    return record


def _write_data(file: int, start: int, data: Iterable[memoryview]) -> tuple[tuple[bytes, ...], int]:
    """Write `data` from byte `start` of the file on, without copying it; returns the digests of its
    chunks, and its bytes.

    A part is digested, then written: the digest leaves it in the cache, which saves the write more
    than the digest takes. The disk writes at the same time, so that little remains for the fsync
    at the end.
    """
    digests = []
    hasher = xxh3_128()
    size = flushed = 0
    for part in data:
        while len(part):
            space = m.CHUNK - size % m.CHUNK
            piece, part = part[:space], part[space:]
            hasher.update(piece)
            write_all(file, piece, start + size)
            size += len(piece)
            if len(piece) == space:
                digests.append(hasher.digest())
                hasher.reset()
            if size - flushed >= WRITEBACK_BYTES:
                os.posix_fadvise(file, start + flushed, size - flushed, os.POSIX_FADV_DONTNEED)
                flushed = size
    if size % m.CHUNK:
        digests.append(hasher.digest())
    return tuple(digests), size


def split_header(pieces: Iterator[memoryview], what: str) -> tuple[bytes, Iterator[memoryview]]:
    """The bytes of a shard file before its data, and the pieces of its data; `what` it is."""
    head = bytearray()
    for piece in pieces:
        head += piece
        end = 8 + int.from_bytes(head[:8], "little")
        if end > HEADER_LIMIT:
            break
        if end <= len(head):
            return bytes(head[:end]), chain([memoryview(head)[end:]], pieces)
    raise CheckpointError(f"{what} is damaged: it has no header")


def read_back(folder: Path, index: int, record: JsonObject) -> None:
    """Compare every byte of a shard and of its digest table with `record`, their entry in the
    manifest, which was made of the bytes in memory. The files are durable, and the page cache's
    copies are dropped first, so that the disk answers. Raises CheckpointError naming the bytes that
    differ.
    """
    for name in (shard_file(index), table_file(index)):
        with open(folder / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        verify_shard(folder, index, record)
    except CheckpointError as error:
        raise CheckpointError(
            f"read back from the disk: {error}. The disk, its controller or its network damages "
            "data: look at the system's log, and give another --save folder"
        ) from error
