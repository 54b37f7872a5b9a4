"""When each rank computed what in one step: simulated, or recorded for the pipeline's timeline and
the straggler report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from megatron.distributed.collectives import gather_objects
from megatron.distributed.groups import Axis
from megatron.distributed.peers import PEERS
from megatron.parallel.schedule import Action, Kind, Schedule


class Span(NamedTuple):
    """One computation, `begin` to `end` in seconds, or in units of cost when simulated."""

    kind: Kind
    stage: int
    micro: int
    begin: float
    end: float

    def to_list(self) -> list[Any]:
        """As in a JSON file: [kind, stage, micro-batch, begin, end]."""
        return [self.kind.value, *self[1:]]


@dataclass(frozen=True)
class Timeline:
    """The computations of one step, on one clock; sends and receives are not in it."""

    schedule: str  # its name
    placement: tuple[int, ...]  # stage -> rank
    micro_batches: int
    rows: tuple[tuple[Span, ...], ...]  # by rank, in the order in which they ran

    @property
    def begin(self) -> float:
        """When the first computation of any rank begins."""
        return min((row[0].begin for row in self.rows if row), default=0.0)

    @property
    def end(self) -> float:
        """When the last computation of any rank ends."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def pairs(self) -> bool:
        """Whether passes ran in pairs, each from the begin to the end of both."""
        return any(any(in_pairs(row)) for row in self.rows)

    def busy(self, rank: int) -> float:
        """Time in which the rank computes."""
        busy, row = 0.0, self.rows[rank]
        for span, is_paired in zip(row, in_pairs(row)):
            busy += (span.end - span.begin) / (2 if is_paired else 1)
        return busy

    def idle(self, rank: int) -> float:
        """Time of the whole step, from any rank's first to any rank's last computation, in which
        the rank does not compute.
        """
        return self.end - self.begin - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        # All ranks begin and end the step together, so each has the whole step as its time.
        ranks = range(len(self.rows))
        total = len(ranks) * (self.end - self.begin)
        return 1 - sum(map(self.busy, ranks)) / total if total else 0.0

    def to_json(self) -> str:
        """One JSON object."""
        rows = [[span.to_list() for span in row] for row in self.rows]
        return json.dumps(vars(self) | {"rows": rows})


def is_pair(span: Span, after: Span) -> bool:
    """Whether two spans of a rank, one after the other, are of passes that ran at the same time."""
    # A pair has one begin and one end; nothing else on a rank overlaps.
    kinds = span.kind is Kind.BACKWARD and after.kind is Kind.FORWARD
    return kinds and span.begin < span.end and span[3:] == after[3:]


def in_pairs(row: Sequence[Span]) -> list[bool]:
    """Of each span of a rank, in their order, whether it is one of a pair."""
    found = [False] * len(row)
    for index, both in enumerate(pairwise(row)):
        if is_pair(*both):
            found[index] = found[index + 1] = True
    return found


class Recording:
    """The computations of one step and when each ran. On a GPU by events, which are read when the
    step is long over.
    """

    schedule: Schedule  # that ran

    def __init__(self, device: torch.device):
        self.device = device
        # (action, begin, end, seconds within it that the host waited for other ranks)
        self.marks: list[tuple[Action, Any, Any, float]] = []
        self.start = self.now()

    def now(self) -> Any:
        """A moment of the work queued so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        # An event is a mark in the stream's queue: the host neither waits nor reads the time here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> tuple[Any, float]:
        """A computation begins now."""
        return self.now(), PEERS.waited

    def add(self, task: tuple[Action, ...], begun: tuple[Any, float]) -> None:
        """The computation, or the pair, that began then has just ended."""
        (begin, waited), end = begun, self.now()
        self.marks += [(action, begin, end, PEERS.waited - waited) for action in task]

    def _seconds(self, moment: Any) -> float:
        """Since the recording was made."""
        if self.device.type == "cuda":
            return self.start.elapsed_time(moment) / 1000
        return moment - self.start

    def spans(self) -> tuple[Span, ...]:
        """The computations, in seconds since the recording was made."""
        return tuple(
            Span(*action, self._seconds(begin), self._seconds(end))
            for action, begin, end, _ in self.marks
        )

    def own_seconds(self) -> tuple[float, float]:
        """Seconds of this rank's forward passes and of its backward passes, without its waits for
        other ranks. On a GPU waits within a pass, for collectives of its layers, are included. The
        time of a pair counts half for each.
        """
        forward = backward = 0.0
        spans = self.spans()
        for span, (*_, waited), is_paired in zip(spans, self.marks, in_pairs(spans)):
            own = span.end - span.begin
            # On a GPU the host's waits are not within the events' span: the stream runs on.
            if self.device.type != "cuda":
                own -= waited
            own /= 2 if is_paired else 1
            if span.kind is Kind.FORWARD:
                forward += own
            else:
                backward += own
        return forward, backward

    def timeline(self, pipeline: Axis) -> Timeline:
        """What all ranks of a pipeline recorded of one step; a collective call of all of them.

        Each row counts from its own rank's recording: they are made when all ranks have just done
        their last step together.
        """
        # All ranks of the pipeline are here: their last collective was the all-reduce of this step.
        rows = tuple(gather_objects(self.spans(), pipeline))
        ran = self.schedule
        return Timeline(ran.name, ran.placement, ran.micro_batches, rows)
