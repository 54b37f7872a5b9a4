"""How the ranks of a preflight meet and report, in stages, through the rendezvous store: rank 0
opens a stage, every rank does its part within a limit and puts the result into the store, and who
has put none is missing. No collective decides anything, so that a rank that is stopped, hangs or
cannot be reached delays no other for longer than that.

Called from tools/preflight.py.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.tools._preflight.links import (
    AxisLinks,
    Speed,
    pair_speed,
    pairings,
    partner_of,
)
from megatron.tools._preflight.probes import Facts, Probe
from torch.distributed import PrefixStore

from megatron.distributed.groups import Groups
from megatron.distributed.peers import run_for
from megatron.distributed.rendezvous import ERROR_GRACE_S, Launch, open_store

TICK = 0.005  # seconds between two looks at rank 0's clock, and for results
ENDED = "verdict"


@dataclass
class Findings:
    """What rank 0 has gathered."""

    world: int
    nodes: dict[int, str]  # by rank, of those that have arrived
    facts: dict[int, Facts] = field(default_factory=dict)
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)  # GB/s; 0: none went through
    errors: dict[int, str] = field(default_factory=dict)  # of the axes
    axes: list[Speed] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)  # rank -> in what it did not answer

    def ranks_by_node(self) -> dict[str, list[int]]:
        """In the order of the nodes' first ranks."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.nodes):
            found.setdefault(self.nodes[rank], []).append(rank)
        return found


@dataclass(frozen=True)
class Patience:
    """Seconds in which a rank must arrive, and answer in each stage."""

    arrival: float
    answer: float


class Meeting:
    """One connection to the store, of one thread: an operation that waits holds up the others on
    its connection.
    """

    def __init__(self, launch: Launch, limits: Patience, store: Any) -> None:
        self.launch, self.limits, self.store = launch, limits, store

    @classmethod
    def at(cls, launch: Launch, limits: Patience) -> Meeting:
        """The store of this job, which rank 0 holds. Raises LaunchError where it cannot be
        reached.
        """
        if launch.world_size == 1:
            return cls(launch, limits, dist.HashStore())
        seconds = limits.arrival
        store = open_store(launch, time.monotonic() + seconds, seconds)
        return cls(launch, limits, PrefixStore(f"{launch.job}/preflight", store))

    def clone(self) -> Meeting:
        """Another connection. Raises RuntimeError when the store does not answer."""
        store = self._ask(self.store.clone, self.limits.answer)
        return Meeting(self.launch, self.limits, store)

    def _ask(self, part: Callable[[], Any], seconds: float) -> Any:
        """What the store answers. Raises RuntimeError when it does not: torch itself waits for ever
        for one whose process is stopped.
        """
        self.store.set_timeout(timedelta(seconds=seconds))
        ended = run_for(seconds + 1, part)
        if not ended:
            raise RuntimeError("the store does not answer")
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0]

    def put(self, stage: str, result: object) -> None:
        """This rank's result of a stage. Raises RuntimeError when the store does not answer."""
        text, key = json.dumps(result), f"{stage}/{self.launch.rank}"
        self._ask(lambda: self.store.set(key, text), self.limits.answer)

    def wait(self, key: str, *, arrival: bool = False) -> str:
        """What rank 0 puts there, in a stage, or when all have arrived. Raises RuntimeError when it
        does not.
        """
        limits = self.limits
        seconds = ERROR_GRACE_S + (limits.arrival if arrival else 2 * limits.answer)
        return self._ask(lambda: self.store.get(key), seconds).decode()

    def gather(
        self, stage: str, seconds: float, ranks: Collection[int] | None = None
    ) -> dict[int, Any]:
        """The results of a stage, of all ranks or of these, but of those that have none in time."""
        until = time.monotonic() + seconds
        left = set(range(self.launch.world_size) if ranks is None else ranks)
        found: dict[int, Any] = {}
        while left:
            for rank in sorted(left):
                if self.store.check([f"{stage}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"{stage}/{rank}"))
                    left.remove(rank)
            if time.monotonic() > until:
                break
            time.sleep(TICK)
        return found


class Member:
    """The part that every rank has."""

    def __init__(
        self, meeting: Meeting, node: str, probe: Probe, make_groups: Callable[[], Groups]
    ) -> None:
        self.meeting, self.node = meeting, node
        self.probe, self.make_groups = probe, make_groups

    def take_part(self) -> int:
        """All stages that rank 0 opens; the exit code that it gives. Raises RuntimeError when it
        is silent.
        """
        meeting = self.meeting
        token = meeting.wait("token")
        # what goes wrong here, the check of --save will report
        run_for(self._limit() / 2, lambda: self.probe.leave_mark(token))
        meeting.put("arrived", {"node": self.node})
        self._look(json.loads(meeting.wait("everybody", arrival=True)))
        number = 0
        while True:
            stage, _, text = meeting.wait(f"stage/{number}").partition(" ")
            if stage == ENDED:
                with suppress(OSError):
                    self.probe.remove_mark()
                with suppress(RuntimeError):  # rank 0 has waited long enough
                    meeting.put("left", 0)
                return int(text)
            if stage == "axes":
                meeting.put(stage, self._measure_axes())
            else:
                meeting.put(stage, self._measure_pair(stage, json.loads(text)))
            number += 1

    def _limit(self) -> float:
        return 0.8 * self.meeting.limits.answer  # so that the result arrives within it

    def _look(self, nodes: list[int]) -> None:
        own = self.meeting.clone()
        ended = run_for(
            self._limit(),
            lambda: self.probe.run(lambda: own.store.get("clock"), nodes),
        )
        facts = self.probe.facts
        if not ended:
            facts.problems["time"] = f"did not come back from {self.probe.doing}"
        elif isinstance(ended[0], BaseException):
            facts.problems["error"] = (
                f"{type(ended[0]).__name__} while {self.probe.doing}: {ended[0]}"
            )
        self.meeting.put("facts", asdict(facts))

    def _measure_pair(self, stage: str, nodes: list[list[int]]) -> Any:
        rank = self.meeting.launch.rank
        found = partner_of(rank, nodes, int(stage.removeprefix("pairs-")))
        if found is None:
            return None
        partner, node = found
        seconds = self._limit() / 2
        device, backend = self.probe.device, self.probe.facts.backend
        store = PrefixStore(stage, self.meeting.clone().store)
        ended = run_for(
            seconds,
            lambda: pair_speed(rank, partner, store, backend, device, seconds),
        )
        return [node, ended[0] if ended and isinstance(ended[0], float) else 0.0]

    def _measure_axes(self) -> Any:
        links = AxisLinks()
        ended = run_for(self._limit(), lambda: links.run(self._groups, self.probe.device))
        error = ""
        if not ended or ended[0] is not None:
            why = f" ({str(ended[0]).splitlines()[0]})" if ended else ""
            error = f"waited in vain in {links.doing}{why}"
        return [error, links.found]

    def _groups(self) -> Groups:
        device = self.probe.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        backend = self.probe.facts.backend
        launch = self.meeting.launch
        if launch.world_size > 1:
            dist.init_process_group(
                backend,
                store=PrefixStore("groups", self.meeting.clone().store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=self._limit()),
                device_id=device if backend == "nccl" else None,
            )
        return self.make_groups()


class Leader:
    """What rank 0 does in addition to its part as a member."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.number = 0
        self.over = threading.Event()
        threading.Thread(target=self._show_clock, args=(meeting.clone(),), daemon=True).start()
        meeting.store.set("token", secrets.token_hex(4))

    def _show_clock(self, own: Meeting) -> None:
        with suppress(RuntimeError):  # the store has gone
            while not self.over.wait(TICK):
                own.store.set("clock", repr(time.time()))

    def gather(self) -> Findings:
        """All stages, or those before one in which a rank is missing."""
        seconds = self.meeting.limits.answer
        arrived = self.meeting.gather("arrived", self.meeting.limits.arrival)
        world = self.meeting.launch.world_size
        findings = Findings(world, {rank: found["node"] for rank, found in arrived.items()})
        first = [ranks[0] for ranks in findings.ranks_by_node().values()]
        self.meeting.store.set("everybody", json.dumps(first))
        looked = self.meeting.gather("facts", seconds, arrived)
        findings.facts = {rank: Facts(**found) for rank, found in looked.items()}
        for rank in range(world):
            if rank not in arrived:
                findings.missing[rank] = "did not arrive"
            elif rank not in looked:
                findings.missing[rank] = "arrived, and fell silent in the look at its node"
        backends = {facts.backend for facts in findings.facts.values()}
        if not findings.missing and len(backends) == 1 and "" not in backends:
            self._measure_links(findings)
        return findings

    def _measure_links(self, findings: Findings) -> None:
        nodes = list(findings.ranks_by_node().values())
        for number in range(len(pairings(len(nodes)))):
            results = self._stage(f"pairs-{number}", findings, json.dumps(nodes))
            if findings.missing:
                return
            for rank, found in results.items():
                if found is not None:
                    mine = next(i for i, ranks in enumerate(nodes) if rank in ranks)
                    pair = (min(mine, found[0]), max(mine, found[0]))
                    # a node is as slow as its slowest adapter
                    findings.pairs[pair] = min(found[1], findings.pairs.get(pair, found[1]))
        if 0.0 in findings.pairs.values():
            return
        for rank, (error, speeds) in self._stage("axes", findings).items():
            if error:
                findings.errors[rank] = error
            findings.axes += [
                Speed(axis, operation, size, tuple(ranks), speed)
                for axis, operation, size, ranks, speed in speeds
            ]

    def _stage(self, stage: str, findings: Findings, text: str = "") -> dict[int, Any]:
        self.meeting.store.set(f"stage/{self.number}", f"{stage} {text}")
        self.number += 1
        results = self.meeting.gather(stage, self.meeting.limits.answer)
        for rank in set(findings.nodes) - set(results):
            findings.missing[rank] = f"fell silent in the measurement of {stage}"
        return results

    def end(self, code: int, findings: Findings) -> None:
        """Give the exit code to all, and wait until those who live have read it."""
        self.meeting.store.set(f"stage/{self.number}", f"{ENDED} {code}")
        self.meeting.gather("left", ERROR_GRACE_S, findings.nodes.keys() - findings.missing.keys())
        self.over.set()
