"""When each rank computed what in one step: simulated or measured.

Made by tools/_plan/simulate.py and parallel/recording.py; drawn by tools/plot_schedule.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron.parallel.schedule import Kind


class Span(NamedTuple):
    """One computation, `begin` to `end` in seconds, or in units of cost when simulated."""

    kind: Kind
    stage: int
    micro: int
    begin: float
    end: float


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
        row = self.rows[rank]
        return sum(
            (span.end - span.begin) / (2 if is_paired else 1)
            for span, is_paired in zip(row, in_pairs(row))
        )

    def idle(self, rank: int) -> float:
        """Time of the whole step, from any rank's first to any rank's last computation, in which
        the rank does not compute.
        """
        return self.end - self.begin - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        # All ranks begin and end the step together, so each has the whole step as its time.
        total = len(self.rows) * (self.end - self.begin)
        return 1 - sum(map(self.busy, range(len(self.rows)))) / total if total else 0.0

    def to_json(self) -> str:
        """One JSON object; a span is [kind, stage, micro-batch, begin, end]."""
        rows = [[[span.kind.value, *span[1:]] for span in row] for row in self.rows]
        return json.dumps(
            {
                "schedule": self.schedule,
                "placement": list(self.placement),
                "micro_batches": self.micro_batches,
                "rows": rows,
            }
        )


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
