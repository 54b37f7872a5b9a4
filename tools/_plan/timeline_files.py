"""Time lines as files: JSON, and events of a Chrome trace."""

from __future__ import annotations

import json
from typing import Any

from megatron.config.errors import UserError
from megatron.parallel.schedule import COMPUTATIONS, WORDS, Kind
from megatron.parallel.timeline import Span, Timeline, is_pair


def read_timeline(text: str) -> Timeline:
    """The inverse of `Timeline.to_json`. Raises UserError for anything else."""
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
        raise UserError(f"not the JSON of a time line: {type(error).__name__}: {error}") from None
    if problem := _problem(timeline):
        raise UserError(f"not a time line: {problem}")
    return timeline


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


def chrome_events(line: Timeline, title: str = "", first: int = 0) -> list[dict[str, Any]]:
    """A time line as events of a Chrome trace (microseconds): a process a rank, numbered from
    `first`, each with `title` first. A unit of a simulated cost is a second.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(line.rows):
        # A process a rank, so that viewers draw one row for each.
        here = {"pid": first + rank, "tid": 0}
        name = {"name": f"{title} rank {rank}".strip()}
        events.append({"ph": "M", "name": "process_name", "args": name, **here})
        for span in row:
            label = f"{WORDS[span.kind]} stage {span.stage} micro-batch {span.micro}"
            when = {
                "ts": 1e6 * (span.begin - line.begin),
                "dur": 1e6 * (span.end - span.begin),
            }
            events.append({"ph": "X", "cat": WORDS[span.kind], "name": label, **when, **here})
    return events
