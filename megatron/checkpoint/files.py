"""Files that are durable when a function returns, folders that tell whether their maker lives, and
bytes digested as they are written.

Nothing here imports torch: the writer process (background.py) starts with it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest as m
from megatron.checkpoint.integrity import read_back
from megatron.checkpoint.manifest import (
    DigestTable,
    chunk_hasher,
    shard_file,
    table_digest,
    table_file,
)

FOLDER_MODE, FILE_MODE = 0o750, 0o640  # the umask may take more away
BUFFERS = 1024  # most buffers that one pwritev takes
AHEAD = 8 << 20  # bytes after which the kernel is asked to begin to write them to the disk


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that did not exist before; durable when the block ends without an
    error.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, buffers: list[memoryview], at: int = 0) -> int:
    """Write them one after the other from byte `at` of the file on; returns their bytes. A short
    write is gone on with, or raises what is wrong.
    """
    total = 0
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
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # a file system without locks: others may clear the folder away, which then ends this save
        # with an error
        pass
    return descriptor


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def clean(root: Path, attempt: str) -> None:
    """Remove what attempts that are no longer alive have left.

    Renamed before it is deleted: a writer that lives after all (on another node, where locks do not
    reach) either renames first and has a whole checkpoint, or finds its folder gone and fails; a
    half-deleted folder can never become a checkpoint.
    """
    for entry in list(os.scandir(root)):
        path = Path(entry.path)
        if re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}", entry.name) and not is_held(path):
            trash = root / f".trash-{entry.name.removeprefix('.tmp-')}-{attempt}"
            try:
                os.rename(path, trash)
            except FileNotFoundError:
                continue  # it was committed, or cleared away by another
            shutil.rmtree(trash, ignore_errors=True)
        elif re.fullmatch(r"\.trash-iter-\d+-[0-9a-f-]+", entry.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}\.txt", entry.name):
            path.unlink(missing_ok=True)


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

    What of `data` has filled a chunk is written before more is asked for. `verify` reads both files
    back from the disk; raises CheckpointError when they are not what was written. `progress` is
    called with the number of bytes as they are written.
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
        # the commit syncs it for the first rank, on whose node this one's names may not be known
        # yet
        sync_folder(folder)
    return {"file": shard_file(index), "bytes": table.size, "table_digest": table_digest(raw)}


def _write_data(
    file: int, start: int, data: Iterable[memoryview], progress: Callable[[int], None]
) -> tuple[list[bytes], int]:
    """Write `data` from byte `start` of the file on, without copying it; returns the digests of its
    chunks, and its bytes.

    A chunk is digested, then written: the digest leaves it in the cache, which saves the write more
    than the digest takes. The disk writes meanwhile: what is left to the fsync in the end is
    little.
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
        if size - begun >= AHEAD:
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
