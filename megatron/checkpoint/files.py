"""Files that are durable when a function returns, folders that tell whether their maker lives, and bytes digested as they are written.

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

FOLDER_MODE, FILE_MODE = 0o750, 0o640  # the umask may take more away
BUFFERS = 1024  # most buffers that one writev takes
AHEAD = 8 << 20  # bytes after which the kernel is asked to begin to write them to the disk


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that did not exist before; durable when the block ends without an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, buffers: list[memoryview]) -> int:
    """Write them one after the other; returns their bytes. A short write is gone on with, or raises what is wrong."""
    total, left = sum(map(len, buffers)), [data for data in buffers if len(data)]
    while left:
        written = os.writev(file, left[:BUFFERS])
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
    """Mark `folder` as in use while this process lives: a shared lock, which the kernel drops with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: others may clear the folder away, which then ends this save with an error
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

    Renamed before it is deleted: a writer that lives after all (on another node, where locks do not reach) either renames first
    and has a whole checkpoint, or finds its folder gone and fails; a half-deleted folder can never become a checkpoint.
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


def write_shard_file(folder: Path, index: int, header: bytes, data: Iterable[memoryview], *, verify: bool = False,
                     progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Write shard `index`, `header` and then `data`, and its digest table into `folder`, durably; return the shard's entry in the manifest.

    `verify` reads both back from the disk; raises CheckpointError when they are not what was written. `progress` is told of bytes as they are written.
    """
    with new_file(folder / m.shard_file(index)) as file:
        write_all(file, [memoryview(header)])
        stream = ChunkStream(file, progress)
        for part in data:
            stream.append(part)
        stream.finish()
        size = len(header) + stream.size
    table = m.DigestTable(m.CHUNK, len(header), size, m.chunk_digest(header), tuple(stream.digests))
    raw = table.encode()
    with new_file(folder / m.table_file(index)) as file:
        write_all(file, [memoryview(raw)])
    if verify:
        read_back(folder / m.shard_file(index), table)
    if index > 0:
        sync_folder(folder)  # the commit syncs it for the first rank, on whose node this one's names may not be known yet
    return {"file": m.shard_file(index), "bytes": size, "table_digest": m.table_digest(raw)}


class ChunkStream:
    """Writes a stream of buffers, without copying them, and digests every m.CHUNK bytes of it.

    Half a chunk at a time is written, then digested: the write has left it in the cache. The disk writes meanwhile: what is left to the fsync in
    the end is little.
    """

    def __init__(self, file: int, progress: Callable[[int], None] = lambda count: None) -> None:
        self.file, self.digests, self.size, self.progress = file, [], 0, progress
        self.parts: list[memoryview] = []  # of the half chunk that is not full yet
        self.room = self.half = m.CHUNK // 2
        self.begun = 0  # so much is on its way to the disk
        self.hasher = m.chunk_hasher()

    def append(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self.room], data[self.room :]
            self.parts.append(part)
            self.room -= len(part)
            if self.room == 0:
                self._write()

    def _write(self) -> None:
        count = write_all(self.file, self.parts)
        self.size += count
        self.progress(count)
        for part in self.parts:
            self.hasher.update(part)
        self.parts, self.room = [], self.half
        if self.size % m.CHUNK == 0:
            self.digests.append(self.hasher.digest())
            self.hasher.reset()
        if self.size - self.begun >= AHEAD:
            os.posix_fadvise(self.file, self.begun, self.size - self.begun, os.POSIX_FADV_DONTNEED)
            self.begun = self.size

    def finish(self) -> None:
        """Write what has come since the last full half."""
        if self.parts:
            self._write()
        if self.size % m.CHUNK:
            self.digests.append(self.hasher.digest())
