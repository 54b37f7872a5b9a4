"""Read what was written back from the disk before it counts (--verify-integrity). Nothing here
imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.checkpoint import manifest as m
from megatron.checkpoint.manifest import CheckpointError, DigestTable, chunk_hasher

PIECE = 1 << 20  # bytes of one read: all the memory that it takes


def read_back(path: Path, table: DigestTable) -> None:
    """Compare every byte of the shard at `path`, and of the digest table beside it, with `table`,
    which was made of the bytes in memory.

    The files must be durable: the page cache's copy is dropped first, so that the disk answers (a
    tmpfs has no disk, and some file systems keep their copy). Raises CheckpointError with the file
    and the range of bytes that came back different.
    """
    _read_back(path, table.size, _parts(table))
    raw = table.encode()
    _read_back(path.with_suffix(".digests"), len(raw), [(0, len(raw), m.chunk_digest(raw))])


def is_whole(path: Path, table: DigestTable) -> bool:
    """Whether every byte of a shard is as its table says. The page cache may answer."""
    try:
        _read_back(path, table.size, _parts(table), from_disk=False)
    except (CheckpointError, OSError):
        return False
    return True


def _parts(table: DigestTable) -> Iterator[tuple[int, int, bytes]]:
    """(start, stop, digest) in the file."""
    yield 0, table.data_start, table.header
    for index, digest in enumerate(table.chunks):
        start = table.data_start + index * table.chunk
        yield start, min(start + table.chunk, table.size), digest


def _read_back(
    path: Path, size: int, parts: Iterable[tuple[int, int, bytes]], *, from_disk: bool = True
) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(file).st_size
        if found != size:
            raise CheckpointError(
                f"{path}: read back from the disk: {found} bytes instead of the {size} that "
                f"were written. {_FIX}"
            )
        if from_disk:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(min(PIECE, size)))
        hasher = chunk_hasher()
        for start, stop, digest in parts:
            hasher.reset()
            for at in range(start, stop, PIECE):
                hasher.update(_fill(file, buffer[: min(PIECE, stop - at)], at, path))
            if hasher.digest() != digest:
                raise CheckpointError(
                    f"{path}: read back from the disk: bytes {start} to {stop - 1} are not "
                    f"those that were written. {_FIX}"
                )
    finally:
        os.close(file)


_FIX = (
    "The disk, its controller or its network damages data: look at the system's log, and "
    "give another --save folder"
)


def _fill(file: int, buffer: memoryview, at: int, path: Path) -> memoryview:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(file, [buffer[done:]], at + done)
        except OSError as error:
            where = f"bytes {at + done} to {at + len(buffer) - 1}"
            raise CheckpointError(
                f"{path}: read back from the disk: {where} cannot be read: {error.strerror}. {_FIX}"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{path}: read back from the disk: it ends at byte {at + done}. {_FIX}"
            )
        done += count
    return buffer
