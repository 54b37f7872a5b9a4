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


class _Open:
    """A shard that is being read: opened by the thread that comes first."""

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.lock = threading.Lock()
        self.table: DigestTable | None = None
        self.file: int | None = None

    def open(self) -> None:
        with self.lock:
            if self.file is not None:
                return
            self.table = self.shard.table()
            try:
                self.file = os.open(self.shard.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DamageError(f"{self.shard.path}: {error.strerror}") from error

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = None


@dataclass
class _Run:
    """Chunks [first, stop) of one shard, in bytes of its data; the `shared` first ones are the end
    of the run before it.
    """

    source: _Open
    first: int
    stop: int
    shared: int
    wanted: list[Any] = field(default_factory=list)
    buffer: bytearray = field(default_factory=bytearray)
    done: Future | None = None

    @property
    def is_old(self) -> bool:
        """Whether all of it has been read with the run before."""
        return self.shared == self.stop - self.first


class Fetcher:
    """Reads ranges of shards; every chunk that holds a byte of them is read once where they come in
    order, and verified.

    `describe(shard, start, stop)`: the tensors that have these bytes, for the error. `bytes_read`:
    of data, whole chunks.
    """

    def __init__(self, describe: Callable[[Any, int, int], str]) -> None:
        self.describe = describe
        self.bytes_read = 0
        self._threads: ThreadPoolExecutor | None = None
        self._free: list[bytearray] = []
        self._last: _Run | None = None  # what was read last: neighbouring tensors share chunks

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._last is not None:
            self._last.source.close()
        self._threads = None
        self._last = None
        self._free = []

    def stream(self, ranges: Iterable[Wanted]) -> Iterator[tuple[Wanted, memoryview]]:
        """Each range with its bytes, which are valid until the next one is asked for.

        Raises CheckpointError at the first chunk, in the order of the ranges, that cannot be read
        or does not match its digest.
        """
        runs = self._runs(ranges)
        ahead = deque[Any]()
        try:
            while True:
                while len(ahead) <= PREFETCHED and (run := next(runs, None)) is not None:
                    ahead.append(run)
                    self._start(run)
                if not ahead:
                    return
                run = ahead[0]
                self._finish(run)
                ahead.popleft()
                view = memoryview(run.buffer)
                for wanted in run.wanted:
                    yield wanted, view[wanted.start - run.first : wanted.stop - run.first]
        finally:
            for run in ahead:  # left behind by an error, or by a reader that stops early
                if run.done is not None and not run.done.cancel():
                    run.done.exception()
                if self._last is None or run.source is not self._last.source:
                    run.source.close()

    def _runs(self, ranges: Iterable[Wanted]) -> Iterator[_Run]:
        """Ranges put together while they follow one another in one shard without a chunk between
        them that is not wanted.
        """
        before = self._last
        run = None
        for wanted in ranges:
            shard = wanted.shard
            chunk = wanted.shard.chunk
            first = wanted.start // chunk * chunk
            stop = min(-(-wanted.stop // chunk) * chunk, shard.data_bytes)
            if run is not None and run.source.shard is shard and run.first <= first <= run.stop:
                if stop <= run.stop or (stop - run.first <= BATCH and not run.is_old):
                    run.stop = max(stop, run.stop)
                    run.wanted.append(wanted)
                    continue
            if run is not None:
                yield run
                before = run
            if before is None or before.source.shard is not shard:
                run = _Run(_Open(shard), first, stop, 0, [wanted])
            elif before.first <= first and stop <= before.stop:
                run = _Run(
                    before.source, before.first, before.stop, before.stop - before.first, [wanted]
                )
            else:
                shared = before.stop - first if before.first <= first < before.stop else 0
                run = _Run(before.source, first, stop, shared, [wanted])
        if run is not None:
            yield run

    def _start(self, run: _Run) -> None:
        if run.is_old:
            return
        size = run.stop - run.first
        fitting = next((i for i, buffer in enumerate(self._free) if len(buffer) >= size), None)
        run.buffer = bytearray(size) if fitting is None else self._free.pop(fitting)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS)
        run.done = self._threads.submit(_read, run, self.describe)

    def _finish(self, run: _Run) -> None:
        """Wait until the run is in its buffer; it takes the place of the one before."""
        last = self._last
        if run.is_old:
            run.buffer = last.buffer
            last.buffer = bytearray()
        else:
            run.done.result()
            self.bytes_read += run.stop - run.first - run.shared
            if run.shared:
                end = last.stop - last.first
                run.buffer[: run.shared] = memoryview(last.buffer)[end - run.shared : end]
        if last is not None:
            if last.source is not run.source:
                last.source.close()
            if last.buffer:
                self._free.append(last.buffer)
        self._last = run


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
        if m.chunk_digest(part) != table.chunks[(position + at) // table.chunk]:
            low = position + at
            high = position + at + len(part)
            raise DamageError(
                f"{shard.path}: damaged: bytes {shard.data_start + low} to "
                f"{shard.data_start + high} (in tensor {describe(shard, low, high)}) do not "
                "match their digest"
            )
