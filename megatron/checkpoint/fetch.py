"""Verified reads of shards' data: threads read and verify coalesced runs of chunks ahead of the one
that is used. No torch here.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.checkpoint import manifest as m
from megatron.checkpoint.manifest import CheckpointError, DigestTable

if TYPE_CHECKING:
    from megatron.checkpoint.index import ShardFile

# bytes of one coalesced read, rounded out to whole chunks: larger runs leave the caches before they
# are used
BATCH = 2 << 20
THREADS = 2  # that read and verify; hashing and reading leave Python's lock alone
# runs being read or waiting, in addition to the one in use and the one before it: this bounds the
# memory of reading
PREFETCHED = 3


class DamageError(CheckpointError):
    """Tensor data that are not what was saved, or cannot be read."""


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a shard's data that are wanted."""

    shard: ShardFile
    start: int
    stop: int


Wanted = TypeVar("Wanted", bound=Range)


class _OpenShard:
    """A shard that is being read: the first thread that needs it opens it."""

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.lock = threading.Lock()
        self.table: DigestTable | None = None
        self.file = -1

    def open(self) -> None:
        with self.lock:
            if self.file >= 0:
                return
            self.table = self.shard.table()
            try:
                self.file = os.open(self.shard.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DamageError(f"{self.shard.path}: {error.strerror}") from error

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


@dataclass
class _Run:
    """Chunks [first, stop) of one shard, in bytes of its data; the `shared` first ones are the end
    of the run before it.
    """

    source: _OpenShard
    first: int
    stop: int
    shared: int
    wanted: list[Any]
    buffer: bytearray = field(default_factory=bytearray)
    done: Future | None = None

    def follow(self, last: _Run) -> None:
        """Copy the bytes shared with the previous run; close its shard unless this run uses it."""
        end = last.stop - last.first
        self.buffer[: self.shared] = memoryview(last.buffer)[end - self.shared : end]
        if last.source is not self.source:
            last.source.close()


class Fetcher:
    """Reads ranges of shards; every chunk that holds a byte of them is read once where they come in
    order, and verified. `describe(shard, start, stop)`: what has these bytes, for the error.
    `bytes_read`: of data so far, whole chunks.
    """

    def __init__(self, describe: Callable[[Any, int, int], str]) -> None:
        self.describe = describe
        self.bytes_read = 0

    def stream(self, ranges: Iterable[Wanted]) -> Iterator[tuple[Wanted, memoryview]]:
        """Each range with its bytes, which are valid until the next one is asked for. Raises
        CheckpointError at the first chunk, in their order, that cannot be read or does not match
        its digest.
        """
        runs = _runs(ranges)
        ahead = deque[_Run]()
        free: list[bytearray] = []
        last: _Run | None = None
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                while True:
                    # 1. Some runs are read ahead of the one that is used.
                    while len(ahead) <= PREFETCHED and (run := next(runs, None)) is not None:
                        ahead.append(run)
                        if free:
                            run.buffer = free.pop()
                        if len(run.buffer) < run.stop - run.first:
                            run.buffer = bytearray(run.stop - run.first)
                        run.done = threads.submit(_read, run, self.describe)
                    if not ahead:
                        return

                    # 2. The next one is in its buffer, but for what the one before has of it.
                    run = ahead[0]
                    run.done.result()
                    ahead.popleft()
                    self.bytes_read += run.stop - run.first - run.shared
                    if last is not None:
                        run.follow(last)
                        free.append(last.buffer)
                    last = run
                    view = memoryview(run.buffer)
                    for wanted in run.wanted:
                        yield wanted, view[wanted.start - run.first : wanted.stop - run.first]
        finally:
            for run in [*ahead, *([last] if last else [])]:
                run.source.close()


def _runs(ranges: Iterable[Wanted]) -> Iterator[_Run]:
    """Ranges put together while they follow one another in one shard without a chunk between them
    that is not wanted.
    """
    run: _Run | None = None
    for wanted in ranges:
        shard = wanted.shard
        first = wanted.start // shard.chunk * shard.chunk
        stop = min(-(-wanted.stop // shard.chunk) * shard.chunk, shard.data_bytes)
        if run is not None and run.source.shard is shard and run.first <= first <= run.stop:
            if stop <= run.stop or stop - run.first <= BATCH:
                run.stop = max(stop, run.stop)
                run.wanted.append(wanted)
                continue
        source, shared = None, 0
        if run is not None:
            yield run
            if run.source.shard is shard:
                source = run.source
                shared = run.stop - first if run.first <= first < run.stop else 0
        run = _Run(source or _OpenShard(shard), first, stop, shared, [wanted])
    if run is not None:
        yield run


def _read(run: _Run, describe: Callable[[Any, int, int], str]) -> None:
    run.source.open()
    shard = run.source.shard
    table = run.source.table
    position = run.first + run.shared
    into = memoryview(run.buffer)[run.shared : run.stop - run.first]
    done = 0
    while done < len(into):
        at = shard.data_start + position + done
        try:
            got = os.preadv(run.source.file, [into[done:]], at)
        except OSError as error:
            raise DamageError(
                f"{shard.path}: byte {at} and those after it cannot be read: {error.strerror}"
            ) from error
        if got == 0:
            raise DamageError(f"{shard.path}: ends at byte {at}: truncated while it was read")
        done += got
    for at in range(0, done, table.chunk):
        part = into[at : at + table.chunk]
        low = position + at
        if m.chunk_digest(part) != table.chunks[low // table.chunk]:
            high = low + len(part)
            raise DamageError(
                f"{shard.path}: damaged: bytes {shard.data_start + low} to "
                f"{shard.data_start + high}{describe(shard, low, high)} do not match their digest"
            )
