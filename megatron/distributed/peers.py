"""Heartbeats of all ranks in the rendezvous store, written by a thread: when a wait for other ranks
fails, the error names the rank to look at, and rank 0 warns of ranks without a heartbeat. No
collective waits for any of it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from megatron.config.errors import some

logger = logging.getLogger(__name__)

POLL_S = 0.05  # between two polls of the store
MAX_POLLS = 10_000  # of the store in a second, by all ranks
HEARTBEAT_S = 2.0  # between two heartbeats of a rank
OBSERVE_S = 2.5 * HEARTBEAT_S  # a living rank has a new heartbeat within this time
STORE_TIMEOUT_S = 5.0
SILENT_S = 30.0  # without a heartbeat, after which rank 0 warns
MAX_NAMED = 8  # ranks in one message
MAX_CLONES = 256  # ranks of a job in which heartbeats and the log have their own connections
MAX_OBSERVERS = 1024  # ranks of a job in which each looks at the others; else rank 0 alone


def own_connection(store: Any, world: int) -> Store:
    """A separate connection to the store; in a large job the store itself, since its host can hold
    a limited number of them.
    """
    return store.clone() if world <= MAX_CLONES else store


def run_for(seconds: float, part: Callable[[], Any]) -> list[Any]:
    """What `part` returns or raises in a thread; empty when it has not ended after `seconds`."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(part())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return ended


def wait_for_count(store: Store, key: str, count: int, seconds: float, own: int = 1) -> None:
    """Add this rank to a count in the store, and wait until the count is reached, for some seconds
    at most. Returns when the store's host has ended.
    """
    until = time.monotonic() + seconds
    with suppress(RuntimeError):
        found = store.add(key, own)
        while found < count and time.monotonic() < until:
            time.sleep(max(POLL_S, count / MAX_POLLS))
            found = store.add(key, 0)


class PeerError(RuntimeError):
    """A wait for another rank failed."""


class Heartbeat(NamedTuple):
    """A rank's entry in the store."""

    seconds: float  # Unix time
    place: str
    what: str
    waits: bool  # for other ranks, which are then to blame
    ended: bool

    def describe(self, rank: int, state: str) -> str:
        """`state` may contain `{ago}`, the time since this entry."""
        ago = f"{max(0.0, time.time() - self.seconds):.0f} s ago"
        return f"rank {rank} ({self.place}) {state.format(ago=ago)}: {self.what}"


SILENT = "is silent; its last report, {ago}"
Reports = dict[int, Heartbeat]  # by rank


@dataclass
class Peers:
    """The heartbeats of this process, and access to those of others. There is one object for a
    process, as there is one default group.
    """

    iteration: int = 0
    # (text, since), the innermost last
    waits: list[tuple[Callable[[float], str], float]] = field(default_factory=list)
    rank: int = 0
    world: int = 1
    store: Store | None = None
    holder: str = ""
    num_silent: int = 0  # ranks without a heartbeat, set by `find`
    waited: float = 0.0  # seconds of completed waits, for other ranks and for the device
    over: threading.Event = field(default_factory=threading.Event)

    def start(self, store: Store, rank: int, world: int, holder: str) -> None:
        """Start the heartbeats. `holder` hosts the store."""
        self.rank, self.world, self.holder = rank, world, holder
        self.num_silent, self.over = 0, threading.Event()
        self.store = PrefixStore("reports", own_connection(store, world))  # nothing blocks it
        self.report()
        threading.Thread(target=self._run, args=(self.over,), daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self.over.set()
        self.store = None
        self.iteration = 0

    def end(self, why: str) -> None:
        """Write the last heartbeat of a rank that fails. Returns after a second at most."""
        if self.store is None or self.over.is_set():
            return
        self.over.set()
        run_for(1.0, partial(self.report, why))

    def report(self, end: str = "") -> None:
        """Write what this rank does, or why it ends."""
        place = f"process {os.getpid()} on {socket.gethostname()}"
        what = end or self.doing()
        report = Heartbeat(time.time(), place, what, bool(self.waits), bool(end))
        self.store.set(str(self.rank), json.dumps(report))
        if end:
            self.store.add("ended", 1)

    def doing(self) -> str:
        """What this rank does now, for messages."""
        where = f"in iteration {self.iteration}" if self.iteration else "before the first iteration"
        if not self.waits:
            return f"{where}, computing"
        text, since = self.waits[0]
        return f"{where}, {text(time.monotonic() - since)}"

    def _run(self, over: threading.Event) -> None:
        seen: dict[int, tuple[Heartbeat, float]] = {}  # rank 0's, and when each was first seen
        with suppress(RuntimeError, AttributeError):  # the store has gone, or `stop` was faster
            while not over.wait(HEARTBEAT_S):
                self.report()
                if self.rank == 0:
                    self._warn(seen)

    def _warn(self, seen: dict[int, tuple[Heartbeat, float]]) -> None:
        """Log the ranks that have become silent."""
        now = time.monotonic()
        silent = []
        for rank, report in self._read(range(1, self.world)).items():
            before, since = seen.get(rank, (None, now))
            if report != before:
                seen[rank] = report, now
            elif now - since > SILENT_S and not report.ended:
                seen[rank] = report, math.inf  # logged once
                silent.append(report.describe(rank, SILENT))
        if silent:
            logger.warning(f"{some(silent, MAX_NAMED, '; ')}. The others wait for it")

    def _read(self, ranks: Sequence[int]) -> Reports:
        """The last heartbeats of these ranks; none while any has not written one yet."""
        keys = [str(rank) for rank in ranks]
        if not keys or not self.store.check(keys):
            return {}
        lines = self.store.multi_get(keys)
        return {rank: Heartbeat(*json.loads(line)) for rank, line in zip(ranks, lines)}

    def find(self, waited: float) -> str:
        """Name the ranks that have ended or have no heartbeat, after a wait of `waited` seconds;
        empty when nothing is known. Returns within OBSERVE_S + STORE_TIMEOUT_S.
        """
        if self.store is None or self.over.is_set():
            return ""
        if self.world > MAX_OBSERVERS and self.rank > 0:
            return "rank 0 warns of those that are silent"
        others = [rank for rank in range(self.world) if rank != self.rank]
        timed_out = waited > OBSERVE_S  # else a connection was lost

        def look() -> tuple[Reports, Reports]:
            before = self._read(others) if timed_out else {}
            time.sleep(OBSERVE_S if timed_out else 0)
            return before, self._read(others)

        found = run_for(OBSERVE_S + STORE_TIMEOUT_S, look)
        if not found or isinstance(found[0], BaseException):
            state = "has ended" if found else "is silent"
            return f"{self.holder}, which holds the rendezvous store, {state}"
        before, last = found[0]
        silent: list[str] = []
        ended: list[str] = []
        busy: list[str] = []
        for rank, report in last.items():
            if report.ended:
                if not report.waits:
                    ended.append(report.describe(rank, "ended {ago}"))
            elif report == before.get(rank):
                silent.append(report.describe(rank, SILENT))
            elif not report.waits:
                busy.append(report.describe(rank, "lives and does not wait for others"))
        # Silent ranks explain the rest; then those that ended while they computed; then those that
        # have not reached the operation.
        self.num_silent = len(silent)
        causes = silent or ended or busy if timed_out else ended
        return some(causes, MAX_NAMED, "; ")

    def stay(self) -> None:
        """On the host of the store, wait until all living ranks have read it and ended. Returns
        within OBSERVE_S + STORE_TIMEOUT_S.
        """
        if self.store is None or self.holder != f"rank {self.rank}":
            return
        living = self.world - self.num_silent
        wait_for_count(self.store, "ended", living, OBSERVE_S + STORE_TIMEOUT_S, own=0)


PEERS = Peers()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that memory of the GPU or the host ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)
    )


def busy_clock() -> float:
    """A clock that stops while this process waits for other ranks or its device: a difference is
    this process's compute time. Not to be read during a wait.
    """
    return time.perf_counter() - PEERS.waited


@contextmanager
def idle() -> Iterator[None]:
    """Stops `busy_clock` in the block, while this process waits for its device. Of nested blocks
    the outermost counts.
    """
    begun, before = time.perf_counter(), PEERS.waited
    try:
        yield
    finally:
        PEERS.waited = before + time.perf_counter() - begun


@contextmanager
def waiting(
    text: Callable[[float], str], in_trace: AbstractContextManager[Any] = nullcontext()
) -> Iterator[None]:
    """Inside, this process waits for other ranks: an error of torch becomes a PeerError of
    `text(seconds waited)`, with the rank to look at. `in_trace`: the range of the wait in traces.
    Of nested blocks the outermost counts.
    """
    begun, waited_before = time.monotonic(), PEERS.waited
    PEERS.waits.append((text, begun))
    try:
        with in_trace:
            yield
    except RuntimeError as error:
        # no peer is to blame for memory that ran out, or for an error of an earlier kernel here
        is_own = is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)
        if is_own or len(PEERS.waits) > 1:
            raise
        cause = str(error).splitlines()[0].partition(". ")[0]  # without Gloo's advice
        waited = time.monotonic() - begun
        report = text(waited)
        finding = PEERS.find(waited)
        PEERS.end(report)
        PEERS.stay()
        raise PeerError(
            f"{report} ended or hangs{': ' + finding if finding else ''}. Look at its output "
            f"first; where it is only slow, raise --distributed-timeout-minutes. ({cause})"
        ) from error
    finally:
        PEERS.waits.pop()
        PEERS.waited = waited_before + time.monotonic() - begun
