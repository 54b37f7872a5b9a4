"""Verified reads of shards' data: threads read and verify coalesced runs of chunks ahead of the one
that is used. No torch here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
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


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a shard's data that are wanted."""

    shard: ShardFile
    start: int
    stop: int


Wanted = TypeVar("Wanted", bound=Range)


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
        with ThreadPoolExecutor(THREADS) as threads:
            for shard, wanted in groupby(ranges, key=lambda each: each.shard):
                table = shard.table()
                try:
                    file = open(shard.path, "rb", buffering=0)
                except OSError as error:
                    raise CheckpointError(f"{shard.path}: {error.strerror}") from error
                with file:
                    read = partial(_read, shard, file.fileno(), table, self.describe)
                    yield from self._stream(_runs(wanted), partial(threads.submit, read))

    def _stream(
        self, runs: Iterator[_Run], submit: Callable[..., Future]
    ) -> Iterator[tuple[Any, memoryview]]:
        """`stream` of one shard; `submit(position, into)` reads from there on."""
        started = _started(runs, submit)
        ahead = deque[tuple[_Run, memoryview, Future]]()  # being read
        before = memoryview(b"")
        try:
            while True:
                # Some runs are read ahead of the one that is used.
                ahead.extend(islice(started, PREFETCHED + 1 - len(ahead)))
                if not ahead:
                    return

                # The next run is in its buffer, but for chunks shared with the one before.
                run, view, done = ahead.popleft()
                done.result()
                self.bytes_read += len(view) - run.shared
                view[: run.shared] = before[len(before) - run.shared :]
                before = view
                for wanted in run.wanted:
                    yield wanted, view[wanted.start - run.first : wanted.stop - run.first]
        finally:
            wait([done for _, _, done in ahead])  # before the file is closed


@dataclass
class _Run:
    """Chunks [first, stop) of one shard, in bytes of its data; the `shared` first ones are the end
    of the run before it.
    """

    first: int
    stop: int
    shared: int
    wanted: list[Any]


def _started(
    runs: Iterator[_Run], submit: Callable[..., Future]
) -> Iterator[tuple[_Run, memoryview, Future]]:
    """Each run on its way into a buffer, which is used again when its turn comes."""
    buffers = [bytearray()] * (PREFETCHED + 2)
    for number, run in enumerate(runs):
        size, place = run.stop - run.first, number % len(buffers)
        if len(buffers[place]) < size:
            buffers[place] = bytearray(size)
        view = memoryview(buffers[place])[:size]
        yield run, view, submit(run.first + run.shared, view[run.shared :])


def _runs(ranges: Iterable[Range]) -> Iterator[_Run]:
    """Ranges of one shard put together while they follow one another without a chunk between them
    that is not wanted.
    """
    run: _Run | None = None
    for wanted in ranges:
        shard = wanted.shard
        first = wanted.start // shard.chunk * shard.chunk
        stop = min(-(-wanted.stop // shard.chunk) * shard.chunk, shard.data_bytes)
        shared = 0
        if run is not None:
            if run.first <= first <= run.stop:
                if stop <= run.stop or stop - run.first <= BATCH:
                    run.stop = max(stop, run.stop)
                    run.wanted.append(wanted)
                    continue
                shared = run.stop - first
            yield run
        run = _Run(first, stop, shared, [wanted])
    if run is not None:
        yield run


def _read(
    shard: ShardFile,
    file: int,
    table: DigestTable,
    describe: Callable[[Any, int, int], str],
    position: int,
    into: memoryview,
) -> None:
    """Fill `into` with the shard's data from `position` on, whole chunks, and verify it."""
    done = 0
    while done < len(into):
        at = shard.data_start + position + done
        try:
            got = os.preadv(file, [into[done:]], at)
        except OSError as error:
            raise CheckpointError(
                f"{shard.path}: byte {at} and those after it cannot be read: {error.strerror}"
            ) from error
        if got == 0:
            raise CheckpointError(f"{shard.path}: ends at byte {at}: truncated while it was read")
        done += got
    for at in range(0, done, table.chunk):
        part = into[at : at + table.chunk]
        low = position + at
        if m.chunk_digest(part) != table.chunks[low // table.chunk]:
            high = low + len(part)
            raise CheckpointError(
                f"{shard.path}: damaged: bytes {shard.data_start + low} to "
                f"{shard.data_start + high}{describe(shard, low, high)} do not match their digest"
            )
