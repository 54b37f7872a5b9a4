"""When each rank computed what in one step: simulated or measured.

Made by tools/_plan/simulate.py and parallel/recording.py; drawn by tools/plot_schedule.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from megatron.config.errors import UserError
from megatron.parallel.schedule import COMPUTATIONS, WORDS, Kind


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

    def idle_inside(self, rank: int) -> float:
        """Of `idle`, what lies between the rank's own first and last computation."""
        row = self.rows[rank]
        return row[-1].end - row[0].begin - self.busy(rank) if row else 0.0

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

    def chrome_events(self, title: str = "", first: int = 0) -> list[dict[str, Any]]:
        """The same as events of a Chrome trace (microseconds): a process a rank, numbered from
        `first`, each with `title` first. A unit of a simulated cost is a second.
        """
        events: list[dict[str, Any]] = []
        for rank, row in enumerate(self.rows):
            # A process a rank, so that viewers draw one row for each.
            here = {"pid": first + rank, "tid": 0}
            name = {"name": f"{title} rank {rank}".strip()}
            events.append({"ph": "M", "name": "process_name", "args": name, **here})
            for span in row:
                label = f"{WORDS[span.kind]} stage {span.stage} micro-batch {span.micro}"
                when = {
                    "ts": 1e6 * (span.begin - self.begin),
                    "dur": 1e6 * (span.end - span.begin),
                }
                events.append({"ph": "X", "cat": WORDS[span.kind], "name": label, **when, **here})
        return events

    @staticmethod
    def from_json(text: str) -> Timeline:
        """The inverse of `to_json`. Raises UserError for anything else."""
        try:
            # Types are converted here, so that what is drawn has numbers for sure.
            data = json.loads(text)
            rows = tuple(tuple(_span(*values) for values in row) for row in data["rows"])
            timeline = Timeline(
                str(data["schedule"]),
                tuple(map(int, data["placement"])),
                int(data["micro_batches"]),
                rows,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"not the JSON of a time line: {type(error).__name__}: {error}"
            ) from None
        if problem := _problem(timeline):
            raise UserError(f"not a time line: {problem}")
        return timeline


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


def _span(kind: str, stage: int, micro: int, begin: float, end: float) -> Span:
    return Span(Kind(kind), int(stage), int(micro), float(begin), float(end))


def _problem(timeline: Timeline) -> str | None:
    """What contradicts itself in a time line."""
    # A file of a user: each contradiction is named instead of drawn.
    ranks = len(timeline.rows)
    if not all(0 <= rank < ranks for rank in timeline.placement):
        return f"its placement {timeline.placement} names a rank that has no row; there are {ranks}"
    for rank, row in enumerate(timeline.rows):
        for span, after in zip(row, (*row[1:], None)):
            if (
                span.kind not in COMPUTATIONS
                or not 0 <= span.stage < len(timeline.placement)
                or not 0 <= span.micro < timeline.micro_batches
            ):
                return f"rank {rank} has {span}"
            ends = after is None or span.end <= after.begin or is_pair(span, after)
            if not span.begin <= span.end or not ends:
                return f"rank {rank}: {span} does not end before {after or 'its end'}"
    return None
