"""Verified reads of shards' data: threads read and verify coalesced runs of chunks ahead of the one
that is used. No torch here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
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

Opened = tuple[int, DigestTable]  # a shard's descriptor and digests


class DamageError(CheckpointError):
    """Tensor data that are not what was saved, or cannot be read."""


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a shard's data that are wanted."""

    shard: ShardFile
    start: int
    stop: int


Wanted = TypeVar("Wanted", bound=Range)


@dataclass
class _Run:
    """Chunks [first, stop) of one shard, in bytes of its data; the `shared` first ones are the end
    of the run before it.
    """

    shard: ShardFile
    first: int
    stop: int
    shared: int
    wanted: list[Any]
    opened: Future[Opened] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    done: Future | None = None


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
        ahead = deque[_Run]()  # being read
        free: list[bytearray] = []
        last: _Run | None = None
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                runs = self._submitted(_runs(ranges), threads, free)
                while True:
                    # Some runs are read ahead of the one that is used.
                    ahead.extend(islice(runs, PREFETCHED + 1 - len(ahead)))
                    if not ahead:
                        return

                    # The next run is in its buffer, but for chunks shared with the one before.
                    ahead[0].done.result()
                    run = ahead.popleft()
                    self.bytes_read += run.stop - run.first - run.shared
                    if last is not None:
                        end = last.stop - last.first
                        run.buffer[: run.shared] = memoryview(last.buffer)[end - run.shared : end]
                        if last.shard is not run.shard:
                            _close(last.opened)
                        free.append(last.buffer)
                    last = run
                    view = memoryview(run.buffer)
                    for wanted in run.wanted:
                        yield wanted, view[wanted.start - run.first : wanted.stop - run.first]
        finally:
            for opened in {run.opened for run in [last, *ahead] if run is not None}:
                _close(opened)

    def _submitted(
        self, runs: Iterable[_Run], threads: ThreadPoolExecutor, free: list[bytearray]
    ) -> Iterator[_Run]:
        """The runs, each on its way into a buffer."""
        before: _Run | None = None
        for run in runs:
            # before the file is opened, which a lack of memory would leave open
            if free:
                run.buffer = free.pop()
            if len(run.buffer) < run.stop - run.first:
                run.buffer = bytearray(run.stop - run.first)
            if before is not None and before.shard is run.shard:
                run.opened = before.opened
            else:
                run.opened = threads.submit(_open, run.shard)
            run.done = threads.submit(_read, run, self.describe)
            before = run
            yield run


def _runs(ranges: Iterable[Wanted]) -> Iterator[_Run]:
    """Ranges put together while they follow one another in one shard without a chunk between them
    that is not wanted.
    """
    run: _Run | None = None
    for wanted in ranges:
        shard = wanted.shard
        first = wanted.start // shard.chunk * shard.chunk
        stop = min(-(-wanted.stop // shard.chunk) * shard.chunk, shard.data_bytes)
        shared = 0
        if run is not None and run.shard is shard and run.first <= first <= run.stop:
            if stop <= run.stop or stop - run.first <= BATCH:
                run.stop = max(stop, run.stop)
                run.wanted.append(wanted)
                continue
            shared = run.stop - first
        if run is not None:
            yield run
        run = _Run(shard, first, stop, shared, [wanted])
    if run is not None:
        yield run


def _open(shard: ShardFile) -> Opened:
    table = shard.table()
    try:
        return os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC), table
    except OSError as error:
        raise DamageError(f"{shard.path}: {error.strerror}") from error


def _close(opened: Future[Opened]) -> None:
    if opened.exception() is None:
        os.close(opened.result()[0])


def _read(run: _Run, describe: Callable[[Any, int, int], str]) -> None:
    file, table = run.opened.result()
    shard = run.shard
    position = run.first + run.shared
    into = memoryview(run.buffer)[run.shared : run.stop - run.first]
    done = 0
    while done < len(into):
        at = shard.data_start + position + done
        try:
            got = os.preadv(file, [into[done:]], at)
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
