"""Who keeps the others waiting. Each rank puts what it does into the rendezvous store every few
seconds, from a thread; a wait for other ranks that fails is reported with what they did last, and
rank 0 warns of a rank that has fallen silent. No collective waits for any of it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from megatron.config.errors import some
from megatron.distributed.ranges import UNRECORDED

logger = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two reports of a rank
LOOK = 2.5 * BEAT  # seconds in which a rank that lives reports
ANSWER = 5.0  # seconds in which the store answers
SILENT = 30.0  # seconds without a report after which rank 0 warns
NAMED = 8  # most ranks that a message names
CLONED = 256  # ranks of a job in which each has a second connection to the store
MOST = 1024  # ranks of a job in which each looks for itself; in a larger one rank 0 alone


def run_for(seconds: float, part: Callable[[], Any]) -> list[Any]:
    """What `part` returns or raises in a thread within so many seconds; empty where it has not
    ended by then.
    """
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


class PeerError(RuntimeError):
    """Another rank did not do its part; `cause` is what torch reported."""

    def __init__(self, text: str, cause: str):
        super().__init__(text)
        self.cause = cause


class Heartbeat(NamedTuple):
    """What a rank has put into the store."""

    count: int  # type: ignore[assignment]  # tuples have a method of this name
    seconds: float  # Unix time
    place: str
    what: str
    waited: bool  # for other ranks
    ended: bool

    def silent(self, rank: int) -> str:
        return f"rank {rank} ({self.place}) is silent; its last report, {self.ago}: {self.what}"

    def over(self, rank: int) -> str:
        return f"rank {rank} ({self.place}) ended {self.ago}: {self.what}"

    def busy(self, rank: int) -> str:
        return f"rank {rank} ({self.place}) lives and does not wait for others: {self.what}"

    @property
    def ago(self) -> str:
        return f"{max(0.0, time.time() - self.seconds):.0f} s ago"


Reports = dict[int, Heartbeat]  # by rank


@dataclass
class Peers:
    """What this process does, and where the ranks of its job report. There is one for a process, as
    there is one default group.
    """

    iteration: int = 0
    # (text, since), the innermost last
    waits: list[tuple[Callable[[float], str], float]] = field(default_factory=list)
    rank: int = 0
    world: int = 1
    store: Store | None = None
    holder: str = ""
    count: int = 0
    silent: set[int] = field(default_factory=set)  # the ranks that `find` has found so
    waited: float = 0.0  # seconds of all waits that have ended, for other ranks and for the device
    over: threading.Event = field(default_factory=threading.Event)

    def start(self, store: Store, rank: int, world: int, holder: str) -> None:
        """Begin to report. `holder` holds the store."""
        self.rank = rank
        self.world = world
        self.holder = holder
        self.over = threading.Event()
        # A connection of its own, which nothing holds up; many of them would be more than a process
        # may have open.
        own = store.clone() if world <= CLONED else store  # type: ignore[attr-defined]
        self.store = PrefixStore("reports", own)
        self.count = 0
        self.silent = set()
        self.report()
        threading.Thread(target=self._run, args=(self.over,), daemon=True).start()

    def stop(self) -> None:
        """Report no more, and look no more."""
        self.over.set()
        self.store = None
        self.iteration = 0

    def end(self, why: str) -> None:
        """The last report of a rank that fails. Returns within a second or so, whatever holds the
        store up.
        """
        if self.store is None or self.over.is_set():
            return
        self.over.set()

        run_for(1.0, partial(self.report, why))

    def report(self, end: str = "") -> None:
        """Say what this rank does, or why it ends."""
        self.count += 1
        place = f"process {os.getpid()} on {socket.gethostname()}"
        report = Heartbeat(
            self.count, time.time(), place, end or self.doing(), bool(self.waits), bool(end)
        )
        self.store.set(str(self.rank), json.dumps(report))

    def doing(self) -> str:
        """In words."""
        where = (
            f"in iteration {self.iteration}, " if self.iteration else "before the first iteration, "
        )
        waits = self.waits[:1]
        return where + (waits[0][0](time.monotonic() - waits[0][1]) if waits else "computing")

    def _run(self, over: threading.Event) -> None:
        seen: dict[int, tuple[int, float]] = {}  # rank 0's: report, and when it was first seen
        warned: set[int] = set()
        try:
            while not over.wait(BEAT):
                self.report()
                if self.rank == 0:
                    self._warn(seen, warned)
        except (RuntimeError, AttributeError):  # the store has gone, or `stop` was faster
            return

    def _warn(self, seen: dict[int, tuple[int, float]], warned: set[int]) -> None:
        now = time.monotonic()
        for rank, report in self._read(range(1, self.world)).items():
            if rank not in seen or seen[rank][0] != report.count:
                seen[rank] = report.count, now
                if rank in warned:
                    logger.warning(f"rank {rank} reports again")
                    warned.remove(rank)
            elif (
                now - seen[rank][1] > SILENT
                and rank not in warned
                and not report.ended
                and len(warned) < NAMED
            ):
                warned.add(rank)
                logger.warning(f"{report.silent(rank)}. The others wait for it")

    def _read(self, ranks: Sequence[int]) -> Reports:
        """The last reports of these ranks; none while any has not reported yet."""
        keys = [str(rank) for rank in ranks]
        if not keys or not self.store.check(keys):
            return {}
        return {
            rank: Heartbeat(*json.loads(raw))
            for rank, raw in zip(ranks, self.store.multi_get(keys))
        }

    def find(self, waited: float) -> str:
        """Which ranks have ended or fallen silent, in words, after a wait of so many seconds; empty
        where that is not known.

        Returns within LOOK + ANSWER seconds.
        """
        if self.store is None or self.over.is_set():
            return ""
        if self.world > MOST and self.rank > 0:
            return "rank 0 warns of those that are silent"
        others = [rank for rank in range(self.world) if rank != self.rank]

        def look() -> tuple[Reports, Reports]:
            first = self._read(others)
            if waited > LOOK:  # it was no lost connection
                time.sleep(LOOK)
            return first, self._read(others)

        found = run_for(LOOK + ANSWER, look)
        if not found:
            return f"{self.holder}, which holds the rendezvous store, is silent"
        if isinstance(found[0], BaseException):
            return f"{self.holder}, which holds the rendezvous store, has ended"
        first, last = found[0]
        self.silent = {
            rank
            for rank, report in last.items()
            if waited > LOOK
            and rank in first
            and report.count == first[rank].count
            and not report.ended
        }
        return _words(last, self.silent, waited)

    def stay(self) -> None:
        """On the rank that holds the store, wait until the others that live have looked into it,
        which their last report says.

        Returns within LOOK + ANSWER seconds.
        """
        others = sorted(set(range(self.world)) - self.silent - {self.rank})
        if (
            self.store is None
            or self.holder != f"rank {self.rank}"
            or self.world > MOST
            or not others
        ):
            return
        until = time.monotonic() + LOOK + ANSWER
        with suppress(RuntimeError):
            while time.monotonic() < until:
                reports = self._read(others)
                if reports and all(report.ended for report in reports.values()):
                    return
                time.sleep(0.2)


def _words(last: Reports, silent_ranks: set[int], waited: float) -> str:
    timeout = waited > LOOK
    silent = [last[rank].silent(rank) for rank in sorted(silent_ranks)]
    ended = [
        report.over(rank) for rank, report in last.items() if report.ended and not report.waited
    ]
    busy = [
        report.busy(rank)
        for rank, report in last.items()
        if timeout and not report.ended and not report.waited
    ]
    return some(silent or ended or busy, NAMED, "; ")


PEERS = Peers()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, that of the GPU or the host's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)
    )


def busy_clock() -> float:
    """Seconds that stand still while this process waits for other ranks or for its device: a
    difference is this process's own work. Not to be read during a wait.
    """
    return time.perf_counter() - PEERS.waited


@contextmanager
def idle() -> Iterator[None]:
    """While this process waits, for its device or, by `waiting`, for other ranks: `busy_clock`
    stands still. Of several inside each other the outermost counts.
    """
    begun, before = time.perf_counter(), PEERS.waited
    try:
        yield
    finally:
        PEERS.waited = before + time.perf_counter() - begun


@contextmanager
def waiting(
    text: Callable[[float], str], in_trace: AbstractContextManager[Any] = UNRECORDED
) -> Iterator[None]:
    """While other ranks are waited for: what torch raises becomes a PeerError of `text(seconds
    waited)`, which ends by naming the rank to look at. `in_trace`: the range that it is in traces.

    Of several inside each other the outermost of several counts.
    """
    begun, waited_before = time.monotonic(), PEERS.waited
    PEERS.waits.append((text, begun))
    try:
        with in_trace:
            yield
    except RuntimeError as error:
        # memory that runs out is nobody else's fault; of others the outermost looks
        if is_out_of_memory(error) or len(PEERS.waits) > 1:
            raise
        # without Gloo's advice
        cause: Any = (
            error.cause
            if isinstance(error, PeerError)
            else str(error).splitlines()[0].partition(". ")[0]
        )
        waited = time.monotonic() - begun
        report = text(waited)
        finding = PEERS.find(waited)
        PEERS.end(report)
        PEERS.stay()
        raise PeerError(
            f"{report} ended or hangs{': ' + finding if finding else ''}. Look at its output "
            f"first; where it is only slow, raise --distributed-timeout-minutes. ({cause})",
            cause,
        ) from error
    finally:
        PEERS.waits.pop()
        PEERS.waited = waited_before + time.monotonic() - begun
