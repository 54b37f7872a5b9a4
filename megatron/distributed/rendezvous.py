"""The rendezvous: the ranks of a job find each other and check that they belong together, through a
few keys of a torch TCPStore, which torchrun's agent or rank 0 hosts.

1. Every rank appends a line with a random `ticket` to `arrivals`.
2. Rank 0 calls each ticket to its `meeting`; a called rank appends its line to `{meeting}/present`.
   Lines of an earlier attempt in the same store answer no call.
3. The first `{meeting}/verdict` counts for all ranks: OK, or the error that every rank raises. Rank
   0 writes it when all are present; the first rank whose timeout expires writes it otherwise.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from megatron.config.errors import some
from megatron.config.groups import Config
from megatron.config.input_files import JsonObject
from megatron.config.metadata import flag_name
from megatron.distributed.launchers import Launch, LaunchError
from megatron.distributed.peers import POLL_S, run_for, wait_for_count

ERROR_GRACE_S = 5.0  # that a rank gives the others to read an error, before it ends
ARRIVAL_GRACE_S = 2.0  # that rank 0 gives late ranks once it has found a fault
OK = "in order"
MAX_DIFFERENCES = 5  # named in one message


class Arrival(NamedTuple):
    """A rank's line in the store."""

    rank: int
    ticket: str
    world_size: int
    digest: str  # of the fingerprint


def meet(launch: Launch, seconds: float, fingerprint: JsonObject) -> Store:
    """The store of this job, after every rank has arrived with an equal fingerprint; else
    LaunchError, on every rank.

    Runs in a thread: torch waits without limit for a server that accepts a connection and then
    sends nothing.
    """
    limit = seconds + ERROR_GRACE_S + 1
    ended = run_for(limit, lambda: _Meeting(launch, seconds, fingerprint).store)
    if not ended:
        raise _no_store(launch)
    [result] = ended
    if isinstance(result, RuntimeError):
        host = "torchrun's store" if launch.agent_store else "rank 0's store"
        raise LaunchError(
            f"rank {launch.rank}: lost the connection to {host} at "
            f"{launch.address}:{launch.port} before all {launch.world_size} ranks "
            f"had arrived ({str(result).splitlines()[0]}); look for the error of its host, "
            "which has ended"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result


class _Meeting:
    """Runs the protocol above on one rank; `store` is the result."""

    def __init__(self, launch: Launch, seconds: float, fingerprint: JsonObject):
        self.launch = launch
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.fingerprint = json.dumps(fingerprint, sort_keys=True, default=str)
        digest = hashlib.sha256(self.fingerprint.encode()).hexdigest()[:16]
        self.me = Arrival(launch.rank, secrets.token_hex(8), launch.world_size, digest)
        self.meeting = self.me.ticket  # rank 0's; the others learn it
        self.keys: Any = PrefixStore(launch.job, open_store(launch, self.deadline, seconds))
        self._append("arrivals")
        verdict = self._lead() if launch.rank == 0 else self._join()
        if verdict != OK:
            # the first process that ends may end the store, or the whole job
            with suppress(RuntimeError):  # the store is closed: its host has read the error
                present = len(self._present())
                wait_for_count(self.keys, f"{self.meeting}/read", present, ERROR_GRACE_S)
            raise LaunchError(verdict)
        self.store = PrefixStore(self.meeting, self.keys)

    def _append(self, key: str) -> None:
        self.keys.append(key, json.dumps(self.me) + "\n")

    def _arrivals(self, key: str) -> list[Arrival]:
        if not self.keys.check([key]):
            return []
        return [Arrival(*json.loads(line)) for line in self.keys.get(key).splitlines()]

    def _present(self) -> list[Arrival]:
        return self._arrivals(f"{self.meeting}/present")

    def _wait_for(self, key: str) -> str:
        """The text of a key; empty when there is none at the deadline."""
        left = timedelta(seconds=max(0.1, self.deadline - time.monotonic()))
        try:
            self.keys.wait([key], left)
        except DistStoreError:
            return ""
        return self.keys.get(key).decode()

    def _give_verdict(self, verdict: str) -> str:
        """Write the verdict unless there is one; the verdict that counts."""
        return self.keys.compare_set(f"{self.meeting}/verdict", "", verdict).decode()

    def _join(self) -> str:
        """Answer rank 0's call; the verdict."""
        call = self._wait_for(f"call/{self.me.ticket}")
        if not call:
            raise LaunchError(self._missing(self._arrivals("arrivals")))
        self.meeting, digest = call.split()
        if digest != self.me.digest:
            self.keys.set(f"{self.meeting}/fingerprint/{self.me.rank}", self.fingerprint)
        self._append(f"{self.meeting}/present")
        verdict = self._wait_for(f"{self.meeting}/verdict")
        return verdict or self._give_verdict(self._missing(self._present()))

    def _lead(self) -> str:
        """Rank 0's part: call all ranks, then give the verdict."""
        self._append(f"{self.meeting}/present")
        called = {self.me.ticket}
        deadline = self.deadline
        while True:
            self._call(called)
            present = self._present()
            fault = impossible(present)
            is_complete = len(present) >= self.launch.world_size
            is_over = time.monotonic() > deadline or self.keys.check([f"{self.meeting}/verdict"])
            if is_complete or is_over:
                break
            if fault:
                deadline = min(deadline, time.monotonic() + ARRIVAL_GRACE_S)
            time.sleep(POLL_S)
        missing = OK if is_complete else self._missing(present)
        return self._give_verdict(fault or self._differing(present) or missing)

    def _call(self, called: set[str]) -> None:
        """Call the tickets that are not in `called`, and add them."""
        for arrival in self._arrivals("arrivals"):
            if arrival.ticket not in called:
                self.keys.set(f"call/{arrival.ticket}", f"{self.meeting} {self.me.digest}")
                called.add(arrival.ticket)

    def _missing(self, arrived: list[Arrival]) -> str:
        there = {arrival.rank for arrival in arrived}
        missing = set(range(self.launch.world_size)) - there
        place = f"{self.launch.address}:{self.launch.port}"
        minutes = f"{self.seconds / 60:g} minutes (--distributed-timeout-minutes)"
        return (
            f"{name_ranks(sorted(missing))} of {self.launch.world_size} did not arrive at {place} "
            f"within {minutes}; {name_ranks(sorted(there))} did. Look for an earlier "
            "error of the missing ranks, check that all were started, with the same "
            "MASTER_ADDR and MASTER_PORT, or allow more time"
        )

    def _differing(self, present: list[Arrival]) -> str:
        """The error when fingerprints differ, else an empty string."""
        ours = named_values(json.loads(self.fingerprint))
        found: dict[str, str] = {}
        others = [arrival.rank for arrival in sorted(present) if arrival.digest != self.me.digest]
        for rank in others:
            text = self.keys.get(f"{self.meeting}/fingerprint/{rank}")
            theirs = named_values(json.loads(text))
            for name in sorted(ours.keys() | theirs.keys()):
                here, there = ours.get(name, "nothing"), theirs.get(name, "nothing")
                if here != there:
                    found.setdefault(name, f"{name}: {here} on rank 0, {there} on rank {rank}")
        if not found:
            return ""
        return (
            "the ranks were started differently: "
            f"{some(list(found.values()), MAX_DIFFERENCES, '; ')}. "
            "Give every rank the same flags and software"
        )


def impossible(present: list[Arrival]) -> str:
    """The error of ranks that were numbered incorrectly, else an empty string."""
    first = present[0]  # rank 0
    seen: set[int] = set()
    for arrival in present:
        if arrival.world_size != first.world_size:
            return (
                f"the ranks disagree on their number: rank {first.rank} has WORLD_SIZE "
                f"{first.world_size}, rank {arrival.rank} has {arrival.world_size}; "
                "give every rank the same WORLD_SIZE (torchrun: the same --nnodes and "
                "--nproc-per-node on every node)"
            )
        if arrival.rank in seen:
            return (
                f"rank {arrival.rank} was started twice; give every process a different "
                "RANK (torchrun: every node a different --node-rank)"
            )
        seen.add(arrival.rank)
    return ""


def named_values(settings: JsonObject, *path: str) -> dict[str, Any]:
    """The values in nested dictionaries. Fields of a Config's groups are named as flags, others by
    their path.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= named_values(value, *path, key)
            continue
        is_flag = len(path) == 1 and path[0] in Config.__dataclass_fields__
        found[flag_name(key) if is_flag else " ".join((*path, key))] = value
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
        return _host_store(launch, seconds)
    host = _reach(launch, deadline, seconds)
    left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    try:
        store = TCPStore(host, launch.port, wait_for_workers=False, timeout=left)
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


def _host_store(launch: Launch, seconds: float) -> Store:
    try:
        return TCPStore(
            "127.0.0.1",
            launch.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank 0 cannot listen at port {launch.port} of {socket.gethostname()}: set "
            "MASTER_PORT to a free one on every rank, or end the program that uses it "
            f"({str(error).splitlines()[0]})"
        ) from None


def _reach(launch: Launch, deadline: float, seconds: float) -> str:
    """The numeric address at which the store's port is open, polled until the deadline: failed
    attempts of torch print a traceback each.
    """
    place = launch.address, launch.port
    while True:
        try:
            left = max(0.1, min(5.0, deadline - time.monotonic()))
            with socket.create_connection(place, timeout=left) as connection:
                return connection.getpeername()[0]
        except OSError as error:
            problem = error.strerror or "no answer"
        if time.monotonic() + 0.1 > deadline:
            break
        time.sleep(0.1)
    raise LaunchError(
        f"rank {launch.rank} cannot reach rank 0 at {launch.address}:{launch.port} ({problem}) "
        f"within {seconds / 60:g} minutes (--distributed-timeout-minutes); look for rank 0's "
        "error, and check that MASTER_ADDR is its host, by a name that every node can resolve, "
        "and that no firewall closes MASTER_PORT"
    )
