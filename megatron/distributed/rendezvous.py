"""The rendezvous: the ranks of a job find each other and check that they belong together, through a
few keys of a torch TCPStore, which torchrun's agent or rank 0 hosts.

1. Every rank appends a line with a random `ticket` to `arrivals`.
2. Rank 0 calls each ticket to its `meeting`; a called rank appends its line to `{meeting}/present`.
   Lines of an earlier attempt in the same store answer no call.
3. The first `{meeting}/verdict` counts for all ranks: OK, or the error that every rank raises. Rank
   0 writes it when all are present; the first rank whose timeout expires writes it otherwise.
"""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from megatron.config.errors import some
from megatron.config.groups import Config
from megatron.config.input_files import JsonObject
from megatron.config.metadata import flag_name
from megatron.distributed.launchers import Launch, LaunchError
from megatron.distributed.peers import run_for

MAX_PAUSE_S = 0.5  # between two polls of the store
ERROR_GRACE_S = 5.0  # that a rank gives the others to read an error, before it ends
ARRIVAL_GRACE_S = 2.0  # that rank 0 gives late ranks once it has found a fault
OK = "in order"
MAX_DIFFERENCES = 5  # named in one message


@dataclass(frozen=True)
class Arrival:
    """A rank's line in the store."""

    rank: int
    ticket: str
    world_size: int
    digest: str  # of the fingerprint
    gpu: str  # unique id of the GPU that no other rank may use; empty: none

    def line(self) -> str:
        return json.dumps([self.rank, self.ticket, self.world_size, self.digest, self.gpu]) + "\n"


def meet(launch: Launch, seconds: float, fingerprint: JsonObject, gpu: str = "") -> Store:
    """The store of this job, after every rank has arrived with an equal fingerprint and a separate
    GPU; else LaunchError, on every rank.

    Runs in a thread: torch waits without limit for a server that accepts a connection and then
    sends nothing.
    """
    ended = run_for(
        seconds + ERROR_GRACE_S + 1, lambda: _Meeting(launch, seconds, fingerprint, gpu).store
    )
    if not ended:
        raise _no_store(launch)
    if isinstance(ended[0], RuntimeError):
        host = "torchrun's store" if launch.agent_store else "rank 0's store"
        raise LaunchError(
            f"rank {launch.rank}: lost the connection to {host} at "
            f"{launch.address}:{launch.port} before all {launch.world_size} ranks "
            f"had arrived ({str(ended[0]).splitlines()[0]}); look for the error of its host, "
            "which has ended"
        ) from None
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


class _Meeting:
    """Runs the protocol above on one rank; `store` is the result."""

    def __init__(self, launch: Launch, seconds: float, fingerprint: JsonObject, gpu: str):
        self.launch = launch
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.fingerprint = json.dumps(fingerprint, sort_keys=True, default=str)
        digest = hashlib.sha256(self.fingerprint.encode()).hexdigest()[:16]
        self.me = Arrival(launch.rank, secrets.token_hex(8), launch.world_size, digest, gpu)
        self.keys: Any = PrefixStore(launch.job, open_store(launch, self.deadline, seconds))
        self.keys.append("arrivals", self.me.line())  # type: ignore[attr-defined]
        self.meeting = self.me.ticket if launch.rank == 0 else self._wait_for_call()
        verdict = self._lead() if launch.rank == 0 else self._wait_for_verdict()
        if verdict != OK:
            self._wait_until_read()
            raise LaunchError(verdict)
        self.store = PrefixStore(self.meeting, self.keys)

    def _polls(self) -> Iterator[None]:
        """Yield for each poll of the store until the deadline, with growing pauses."""
        pause = 0.005
        while time.monotonic() < self.deadline:
            yield
            time.sleep(max(0.0, min(pause, self.deadline - time.monotonic())))
            pause = min(1.3 * pause, MAX_PAUSE_S)

    def _get(self, key: str) -> str | None:
        return self.keys.get(key).decode() if self.keys.check([key]) else None

    def _arrivals(self, key: str) -> list[Arrival]:
        return [Arrival(*json.loads(line)) for line in (self._get(key) or "").splitlines()]

    def _give_verdict(self, verdict: str) -> str:
        """Write the verdict unless there is one; the verdict that counts."""
        return self.keys.compare_set(f"{self.meeting}/verdict", "", verdict).decode()

    def _wait_for_call(self) -> str:
        """Wait for rank 0's call; the name of its meeting."""
        for _ in self._polls():
            call = self._get(f"call/{self.me.ticket}")
            if call is not None:
                meeting, digest = call.split()
                if digest != self.me.digest:
                    self.keys.set(f"{meeting}/fingerprint/{self.me.rank}", self.fingerprint)
                self.keys.append(f"{meeting}/present", self.me.line())
                return meeting
        raise LaunchError(self._missing(self._arrivals("arrivals")))

    def _wait_for_verdict(self) -> str:
        for _ in self._polls():
            verdict = self._get(f"{self.meeting}/verdict")
            if verdict is not None:
                return verdict
        return self._give_verdict(self._missing(self._arrivals(f"{self.meeting}/present")))

    def _lead(self) -> str:
        """Rank 0's part: call all ranks, then give the verdict."""
        self.keys.append(f"{self.meeting}/present", self.me.line())
        called = {self.me.ticket}
        present = [self.me]
        until: float | None = None  # deadline of missing ranks after a fault
        for _ in self._polls():
            for arrival in self._arrivals("arrivals"):
                if arrival.ticket not in called:
                    self.keys.set(f"call/{arrival.ticket}", f"{self.meeting} {self.me.digest}")
                    called.add(arrival.ticket)
            present = self._arrivals(f"{self.meeting}/present")
            fault = impossible(present)
            if fault and until is None:
                until = time.monotonic() + ARRIVAL_GRACE_S
            complete = len(present) >= self.launch.world_size
            if complete or (fault and time.monotonic() > until):
                return self._give_verdict(fault or self._differing(present) or OK)
            verdict = self._get(f"{self.meeting}/verdict")
            if verdict is not None:
                return verdict
        return self._give_verdict(self._differing(present) or self._missing(present))

    def _missing(self, arrived: list[Arrival]) -> str:
        missing = sorted(set(range(self.launch.world_size)) - {arrival.rank for arrival in arrived})
        there = sorted({arrival.rank for arrival in arrived})
        place = f"{self.launch.address}:{self.launch.port}"
        minutes = f"{self.seconds / 60:g} minutes (--distributed-timeout-minutes)"
        return (
            f"{name_ranks(missing)} of {self.launch.world_size} did not arrive at {place} "
            f"within {minutes}; {name_ranks(there)} did. Look for an earlier "
            "error of the missing ranks, check that all were started, with the same "
            "MASTER_ADDR and MASTER_PORT, or allow more time"
        )

    def _differing(self, present: list[Arrival]) -> str:
        """The error when fingerprints differ, else an empty string."""
        ours = json.loads(self.fingerprint)
        found: dict[str, str] = {}
        for arrival in sorted(present, key=lambda arrival: arrival.rank):
            if arrival.digest != self.me.digest and len(found) < MAX_DIFFERENCES:
                theirs = json.loads(self._get(f"{self.meeting}/fingerprint/{arrival.rank}") or "{}")
                for name, (here, there) in differences(ours, theirs).items():
                    found.setdefault(
                        name, f"{name}: {here} on rank 0, {there} on rank {arrival.rank}"
                    )
        if not found:
            return ""
        return (
            "the ranks were started differently: "
            f"{some(list(found.values()), MAX_DIFFERENCES, '; ')}. "
            "Give every rank the same flags and software"
        )

    def _wait_until_read(self) -> None:
        """Wait until all present ranks have read the error: the first process that ends may end
        the store, or the whole job.
        """
        self.deadline = time.monotonic() + ERROR_GRACE_S
        try:
            self.keys.add(f"{self.meeting}/read", 1)
            for _ in self._polls():
                if self.keys.add(f"{self.meeting}/read", 0) >= len(
                    self._arrivals(f"{self.meeting}/present")
                ):
                    return
        except RuntimeError:
            return  # the store is closed: its host has read the error


def impossible(present: list[Arrival]) -> str:
    """The error of ranks that were numbered or placed incorrectly, else an empty string."""
    by_rank: dict[int, Arrival] = {}
    by_gpu: dict[str, Arrival] = {}
    for arrival in present:
        first = min(present, key=lambda arrival: arrival.rank)
        if arrival.world_size != first.world_size:
            return (
                f"the ranks disagree on their number: rank {first.rank} has WORLD_SIZE "
                f"{first.world_size}, rank {arrival.rank} has {arrival.world_size}; "
                "give every rank the same WORLD_SIZE (torchrun: the same --nnodes and "
                "--nproc-per-node on every node)"
            )
        if arrival.rank in by_rank:
            return (
                f"rank {arrival.rank} was started twice; give every process a different "
                "RANK (torchrun: every node a different --node-rank)"
            )
        if arrival.gpu and arrival.gpu in by_gpu:
            return (
                f"rank {by_gpu[arrival.gpu].rank} and rank {arrival.rank} were given the "
                f"same GPU ({arrival.gpu}), and nccl needs one for each; "
                "give each rank a different one (srun: --gpus-per-task 1), or share it with "
                "--distributed-backend gloo"
            )
        by_rank[arrival.rank] = by_gpu[arrival.gpu] = arrival
    return ""


def differences(
    ours: JsonObject, theirs: JsonObject, path: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
    """The differences of two nested dictionaries: name -> both values. Fields of a Config's groups
    are named as flags, others by their path.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(ours.keys() | theirs.keys()):
        here = ours.get(key, "nothing")
        there = theirs.get(key, "nothing")
        if isinstance(here, dict) and isinstance(there, dict):
            found |= differences(here, there, (*path, key))
        elif here != there:
            flag = len(path) == 1 and path[0] in Config.__dataclass_fields__
            found[flag_name(key) if flag else " ".join((*path, key))] = here, there
    return found


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, run)) for run in runs)


def open_store(launch: Launch, deadline: float, seconds: float) -> Store:
    """The store where the ranks meet: hosted by rank 0 unless torchrun's agent does. Raises
    LaunchError when it cannot be hosted or reached.
    """
    if launch.rank == 0 and not launch.agent_store:
        return TCPStore(
            "127.0.0.1",
            launch.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=_listen(launch).detach(),
        )
    host = _reach(launch, deadline, seconds)
    try:
        store = TCPStore(
            host,
            launch.port,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(0.1, deadline - time.monotonic())),
        )
    except RuntimeError:
        raise _no_store(launch) from None
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _no_store(launch: Launch) -> LaunchError:
    return LaunchError(
        f"rank {launch.rank}: what listens at {launch.address}:{launch.port} is not a "
        "rendezvous store; another program seems to use that port: set MASTER_PORT to a free one "
        "on every rank"
    )


def _listen(launch: Launch) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", launch.port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=4096,
        )
    except OSError as error:
        why = (
            "it is taken by another program" if error.errno == errno.EADDRINUSE else error.strerror
        )
        raise LaunchError(
            f"rank 0 cannot listen at port {launch.port} of {socket.gethostname()}: {why}; "
            "set MASTER_PORT to a free one on every rank"
        ) from None


def _reach(launch: Launch, deadline: float, seconds: float) -> str:
    """The numeric address at which the store's port is open, polled until the deadline: failed
    attempts of torch print a traceback each.
    """
    while True:
        try:
            with socket.create_connection(
                (launch.address, launch.port),
                timeout=max(0.1, min(5.0, deadline - time.monotonic())),
            ) as connection:
                return connection.getpeername()[0]
        except OSError as error:
            problem = error
        if time.monotonic() + 0.1 > deadline:
            break
        time.sleep(0.1)
    if isinstance(problem, socket.gaierror):
        why = "the name is unknown here"
        fix = "give a MASTER_ADDR that every node can resolve"
    elif isinstance(problem, ConnectionRefusedError):
        why = "nothing listens there"
        fix = (
            "look for rank 0's error, and check that it was started at this MASTER_ADDR and "
            "MASTER_PORT"
        )
    else:
        why = problem.strerror or "no answer"
        fix = "check that MASTER_ADDR is rank 0's host and that no firewall closes MASTER_PORT"
    raise LaunchError(
        f"rank {launch.rank} cannot reach rank 0 at {launch.address}:{launch.port} ({why}) "
        f"within {seconds / 60:g} minutes (--distributed-timeout-minutes); {fix}"
    )
