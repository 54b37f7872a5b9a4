"""Durable files, folders that show whether their maker is alive, and shards digested as they are
written and read back. No torch here: the writer process (background.py) starts with it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest as m
from megatron.checkpoint.manifest import (
    HEADER_LIMIT,
    CheckpointError,
    DigestTable,
    chunk_hasher,
    shard_file,
    table_digest,
    table_file,
)

logger = logging.getLogger(__name__)

FOLDER_MODE, FILE_MODE = 0o750, 0o640  # the umask may take more away
BUFFERS = 1024  # most buffers that one pwritev takes
WRITEBACK_BYTES = 8 << 20  # after which the kernel is asked to write them to the disk
GB = 1e9
GIB = 1 << 30
PROGRESS_S = 10.0  # seconds between two lines of progress
_FIX = (
    "The disk, its controller or its network damages data: look at the system's log, and give "
    "another --save folder"
)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a new file; durable when the block ends without an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, buffers: list[memoryview], at: int = 0) -> int:
    """Write them one after the other from byte `at` of the file on; returns their bytes."""
    total = 0
    # a short write is continued, or raises what is wrong
    left = [data for data in buffers if len(data)]
    while left:
        written = os.pwritev(file, left[:BUFFERS], at + total)
        total += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return total


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


def hold(folder: Path) -> int:
    """Mark `folder` as in use while this process lives: a shared lock, which the kernel drops with
    the process.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # A file system may have no locks: if others clear the folder away, this save ends in an error.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def clean(root: Path, attempt: str) -> None:
    """Remove what attempts that are no longer alive have left.

    Renamed before it is deleted: a writer that lives after all (on another node, where locks do not
    reach) either renames first and has a whole checkpoint, or finds its folder gone and fails; a
    half-deleted folder can never become a checkpoint.
    """
    for name in os.listdir(root):
        path = root / name
        if re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}", name) and not is_held(path):
            trash = root / f".trash-{name.removeprefix('.tmp-')}-{attempt}"
            with suppress(FileNotFoundError):  # it was committed, or cleared away by another
                os.rename(path, trash)
                shutil.rmtree(trash, ignore_errors=True)
        elif re.fullmatch(r"\.trash-iter-\d+-[0-9a-f-]+", name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}\.txt", name):
            path.unlink(missing_ok=True)


# ---- shards --------------------------------------------------------------------------------------


class WriteProgress:
    """Called with the bytes of a shard as they are written; logs them every PROGRESS_S seconds."""

    def __init__(
        self, iteration: int, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.iteration = iteration
        self.total = total
        self.clock = clock
        self.done = 0
        self.start = self.last = clock()

    def __call__(self, count: int) -> None:
        self.done += count
        now = self.clock()
        if now - self.last < PROGRESS_S or self.done >= self.total:
            return
        self.last = now
        rate = self.done / (now - self.start)
        logger.info(
            f" saving iteration {self.iteration}: {self.done / GB:.2f} of {self.total / GB:.2f} GB "
            f"of this rank, {rate / GB:.2f} GB/s, ETA {(self.total - self.done) / rate:.0f} s"
        )


def write_shard_file(
    folder: Path,
    index: int,
    header: bytes,
    data: Iterable[memoryview],
    *,
    verify: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write shard `index`, `header` and then `data`, and its digest table into `folder`, durably;
    return the shard's entry in the manifest.

    What of `data` has filled a chunk is written before more is asked for. `verify`: as `read_back`.
    `progress` is called with the number of bytes as they are written.
    """
    with new_file(folder / shard_file(index)) as file:
        write_all(file, [memoryview(header)])
        digests, size = _write_data(file, len(header), data, progress)
    table = DigestTable(
        m.CHUNK, len(header), len(header) + size, m.chunk_digest(header), tuple(digests)
    )
    raw = table.encode()
    with new_file(folder / table_file(index)) as file:
        write_all(file, [memoryview(raw)])
    if verify:
        read_back(folder / shard_file(index), table)
    if index > 0:
        # the commit syncs it for the first rank, whose node may not know this one's names yet
        sync_folder(folder)
    return {"file": shard_file(index), "bytes": table.size, "table_digest": table_digest(raw)}


def _write_data(
    file: int, start: int, data: Iterable[memoryview], progress: Callable[[int], None]
) -> tuple[list[bytes], int]:
    """Write `data` from byte `start` of the file on, without copying it; returns the digests of its
    chunks, and its bytes.

    A chunk is digested, then written: the digest leaves it in the cache, which saves the write more
    than the digest takes. The disk writes at the same time, so that little remains for the fsync
    at the end.
    """
    hasher = chunk_hasher()
    digests = []
    size = 0
    begun = 0
    for parts in _chunks(data):
        hasher.reset()
        for part in parts:
            hasher.update(part)
        digests.append(hasher.digest())
        count = write_all(file, parts, start + size)
        size += count
        progress(count)
        if size - begun >= WRITEBACK_BYTES:
            os.posix_fadvise(file, start + begun, size - begun, os.POSIX_FADV_DONTNEED)
            begun = size
    return digests, size


def _chunks(data: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The stream in lists of parts of m.CHUNK bytes in all; the last list may hold less."""
    parts = []
    space = m.CHUNK
    for each in data:
        while len(each):
            parts.append(each[:space])
            each = each[space:]
            space -= len(parts[-1])
            if space == 0:
                yield parts
                parts = []
                space = m.CHUNK
    if parts:
        yield parts


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


def read_back(path: Path, table: DigestTable) -> None:
    """Compare every byte of the shard at `path` and of its digest table with `table`, which was
    made of the bytes in memory. The files are durable, and the page cache's copy is dropped first,
    so that the disk answers. Raises CheckpointError with the file and the bytes that differ.
    """
    raw = table.encode()
    of_table = path.with_suffix(".digests"), len(raw), [(0, len(raw), m.chunk_digest(raw))]
    for file, size, parts in ((path, table.size, _parts(table)), of_table):
        damage = _damage(file, size, parts, from_disk=True)
        if damage:
            raise CheckpointError(f"{file}: read back from the disk: {damage}. {_FIX}")


def is_whole(path: Path, table: DigestTable) -> bool:
    """Whether every byte of a shard is as its table specifies. The page cache may answer."""
    try:
        return not _damage(path, table.size, _parts(table))
    except OSError:
        return False


def _parts(table: DigestTable) -> Iterator[tuple[int, int, bytes]]:
    """(start, stop, digest) in the file."""
    yield 0, table.data_start, table.header
    for index, digest in enumerate(table.chunks):
        start = table.data_start + index * table.chunk
        yield start, min(start + table.chunk, table.size), digest


def _damage(
    path: Path, size: int, parts: Iterable[tuple[int, int, bytes]], *, from_disk: bool = False
) -> str:
    """What of a file is not as the digests of its parts specify; empty when it is whole."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            return f"{found} bytes instead of the {size} that were written"
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for start, stop, digest in parts:
            where = f"bytes {start} to {stop - 1}"
            try:
                read = m.chunk_digest(file.read(stop - start))
            except OSError as error:
                return f"{where} cannot be read: {error.strerror}"
            if read != digest:
                return f"{where} are not those that were written"
    return ""
