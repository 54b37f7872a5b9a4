"""Goodput: the share of a run's wall time in which it made the progress that it has now, and what
the rest was lost to, over all restarts. Computed from events.jsonl and metrics.jsonl.

Seconds of each cause come from the run's clock, wall time from time stamps. The sum is therefore a
check: the difference is `other`, and more than TOLERANCE of it means that events are missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.tools._report.metrics_file import read_json_lines

from megatron.config.errors import UserError
from megatron.observe.events import NAME, Step
from megatron.observe.metrics import Metrics

CAUSES = {
    "restart": "from the last event or metric of a start to the next start",
    "start-up": "from the start of the process to the first step, without loading a checkpoint",
    "restore": "loading the checkpoint",
    "warm-up": "extra time of the first step of a start",
    "data": "waiting for batches",
    "checkpoint": "training waited for a save",
    "evaluation": "validation and test",
    "lost-steps": "steps repeated after a restart, and skipped steps",
}
MEANINGS = {"productive": "steps that changed the weights", **CAUSES, "other": "not explained"}
PAUSES = {  # event -> what its seconds were lost to
    "ready": "start-up",
    "restore": "restore",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "checkpoint-wait": "checkpoint",
}
TOLERANCE = 0.01  # of the wall time, for what no cause explains
Event = dict[str, Any]


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run. `losses`: by CAUSES."""

    wall: float
    productive: float
    losses: dict[str, float]
    starts: int
    replayed: float  # steps
    skipped: float

    @property
    def other(self) -> float:
        """What no cause explains; negative where causes overlap."""
        return self.wall - self.productive - sum(self.losses.values())

    @property
    def adds_up(self) -> bool:
        """Whether the causes explain the wall time, up to TOLERANCE."""
        return abs(self.other) <= TOLERANCE * self.wall

    def rows(self) -> list[tuple[str, float]]:
        """(cause, seconds): productive, CAUSES, other; the sum is the wall time."""
        return [("productive", self.productive), *self.losses.items(), ("other", self.other)]

    @property
    def share(self) -> float:
        """Productive time of the wall time."""
        return self.productive / (self.wall or 1.0)

    def headline(self) -> str:
        """One line: goodput, starts, repeated and skipped steps."""
        return (
            f"goodput {self.share:.1%} of {self.wall:.1f} s, {self.starts} starts, "
            f"{self.replayed:.0f} steps repeated, {self.skipped:.0f} skipped"
        )

    def fault(self) -> str:
        """Why the causes do not add up to the wall time; empty when they do."""
        if self.adds_up:
            return ""
        other = self.other
        much = f"all but {other:.1f} s of" if other > 0 else f"{-other:.1f} s beyond"
        return (
            f"the causes explain {much} the wall time, which is more than 1%: events are missing "
            "in events.jsonl, or the clocks of the nodes differ"
        )

    def summary(self) -> Metrics:
        """For the end of a run: share, starts, and seconds of the wall time and of each cause."""
        seconds = {
            f"goodput/{cause}": value for cause, value in [("wall", self.wall), *self.rows()]
        }
        return {"goodput/share": self.share, "goodput/starts": self.starts, **seconds}


def goodput(folder: str | Path) -> Goodput:
    """The goodput of a run folder (--save). Raises UserError when it has no events."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"{str(path)[:4000]}: no such file; give a folder that was --save of a run")
    events = read_events(path)
    if not events:
        raise UserError(f"{path}: not an events file: none of its lines is an event of a run")
    # Rows of metrics show only how long a killed start lived; a long run has many.
    metrics = Path(folder) / "metrics.jsonl"
    following = [*events[1:], {"event": "start"}]
    ends = [event for event, after in zip(events, following) if after["event"] == "start"]
    is_killed = any(event["event"] not in ("start", "end") for event in ends)
    return account(events, read_json_lines(metrics) if is_killed and metrics.is_file() else ())


def read_events(path: Path) -> list[Event]:
    """The events of a file, from the first start on; damaged lines are skipped."""
    rows = [
        row
        for row in read_json_lines(path)
        if isinstance(row.get("event"), str)
        and _number(row.get("time"))
        and _whole(row.get("iteration"))
        and all(_number(row.get(name, 0)) for name in ("seconds", "data", "checkpoint"))
        and all(_whole(row.get(name, 0)) for name in ("count", "skipped"))
        and ("seconds" in row or row["event"] not in (*PAUSES, "steps"))
        and (row["event"] != "steps" or row.get("count", 0) > 0)
    ]
    return list(itertools.dropwhile(lambda row: row["event"] != "start", rows))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def account(events: Sequence[Event], metrics: Iterable[Metrics] = ()) -> Goodput:
    """Add up the events of a run, the first of which is a start. Rows of `metrics` show how long a
    start lived that was killed between two events.
    """
    starts: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            starts.append([])
        starts[-1].append(event)
    metrics = [
        row for row in metrics if _number(row.get("timestamp")) and _whole(row.get("iteration"))
    ]
    for own, after in itertools.zip_longest(starts, starts[1:]):
        own += _tail(own, metrics, after[0]["time"] if after else math.inf)
    return _sums(_forward_in_time(starts))


def _forward_in_time(starts: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """The starts with monotonic time stamps: nodes' clocks may differ, and be set back. An event
    with an earlier stamp than the one before follows it by the seconds that it measured.
    """
    shift, last, found = 0.0, -math.inf, []
    for own in starts:
        moved = []
        for event in own:
            time = event["time"] + shift
            if time < last:
                shift += last - time + event.get("seconds", 0.0)
                time = event["time"] + shift
            moved.append({**event, "time": time})
            last = time
        found.append(moved)
    return found


def _tail(own: list[Event], metrics: Sequence[Metrics], until: float) -> list[Event]:
    """The steps between the last event of a start and its last row of metrics, as an event."""
    last = own[-1]
    rows = [row for row in metrics if last["time"] < row["timestamp"] < until]
    if last["event"] == "end" or not rows or rows[-1]["iteration"] <= last["iteration"]:
        return []
    iteration, time = rows[-1]["iteration"], rows[-1]["timestamp"]
    count = iteration - last["iteration"]
    seconds = time - last["time"]
    return [
        {"event": "steps", "time": time, "iteration": iteration, "count": count, "seconds": seconds}
    ]


def _step(event: Event) -> Step:
    names = (field.name for field in dataclasses.fields(Step))
    return Step(**{name: event[name] for name in names if name in event})


def _sums(starts: Sequence[Sequence[Event]]) -> Goodput:
    losses = dict.fromkeys(CAUSES, 0.0)
    productive = replayed = skipped = 0.0
    steps = [_step(row) for own in starts for row in own if row["event"] == "steps"]
    usual = median([step.own / step.count for step in steps if not step.first] or [math.inf])
    for before, own in itertools.pairwise(starts):
        losses["restart"] += own[0]["time"] - before[-1]["time"]
    for index, own in enumerate(starts):
        # steps beyond the checkpoint of a later start are lost
        kept = min((later[0]["iteration"] for later in starts[index + 1 :]), default=math.inf)
        for event in own:
            if event["event"] in PAUSES:
                losses[PAUSES[event["event"]]] += event["seconds"]
            elif event["event"] == "steps":
                step = _step(event)
                share = min(1.0, max(0.0, (kept - event["iteration"]) / step.count + 1))
                productive += _add_losses(losses, step, share, usual)
                replayed += step.count * (1 - share)
                skipped += step.skipped * share
    return Goodput(
        _seconds_between(starts[0], starts[-1]), productive, losses, len(starts), replayed, skipped
    )


def _seconds_between(first: Sequence[Event], last: Sequence[Event]) -> float:
    return last[-1]["time"] - first[0]["time"]


def _add_losses(losses: dict[str, float], step: Step, share: float, usual: float) -> float:
    """Enter into `losses` what steps lost, of which a `share` was kept; their productive seconds.
    `usual`: seconds of a step.
    """
    warm_up = max(0.0, step.own - usual) if step.first and usual < math.inf else 0.0
    moved = (step.own - warm_up) * (1 - step.skipped / step.count)
    losses["warm-up"] += warm_up * share
    losses["data"] += step.data * share
    losses["checkpoint"] += step.checkpoint * share
    losses["lost-steps"] += (step.own - warm_up - moved) * share + step.seconds * (1 - share)
    return moved * share
