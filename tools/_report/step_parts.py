"""Where the steps of a profile went, from the Chrome traces of torch's profiler: each moment of a
step belongs to one part, so that the parts add up to its wall time.

On a CPU the thread that trains is looked at: it computes, is in a collective, waits for a message
of its pipeline, or is in Python. On a GPU it is the device, where work on several streams lies side
by side: communication counts where nothing is computed at that time, and the host where the device
has no work at all. What runs there is distinguished by where it was launched. Times in
microseconds, as in the traces. Written by megatron/training/profile.py.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config.errors import UserError

Event = dict[str, Any]
Interval = tuple[float, float]
Layer = tuple[str, Iterable[Interval]]  # a part, and when it may be on

COMPUTE, HOST, BUBBLE = "compute", "host", "pipeline idle"
EXPOSED = "exposed"  # and an axis
# timers of a run; a save waits within the optimizer, whose part it comes before
SECTIONS = ("data", "evaluation", "save-checkpoint", "optimizer")
OPERATIONS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "hop",
    "send",
    "receive",
    "broadcast",
    "exchange of messages",
)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ITERATION = "iteration "


class StepParts(NamedTuple):
    """One step of one rank: its wall time, and the parts of that, both in seconds."""

    rank: int
    iteration: int
    seconds: float
    parts: dict[str, float]


def step_table(folder: Path) -> list[StepParts]:
    """Every step that the traces in a folder hold, by rank and iteration; none where there is no
    trace. Raises UserError for a file that is none.
    """
    paths = {
        int(path.name[5:-11]): path
        for path in folder.glob("rank-*.trace.json")
        if path.name[5:-11].isdecimal()
    }
    return [step for rank in sorted(paths) for step in parts_of_trace(paths[rank])]


def parts_of_trace(path: Path) -> list[StepParts]:
    """The steps of one trace. Raises UserError when it is none."""
    try:
        with open(path, "rb") as file:
            events = json.load(file)["traceEvents"]
        rank = int(path.name[5:-11])
        return parts_of_events(rank, [event for event in events if event.get("ph") == "X"])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not a trace of --profile: {type(error).__name__}: {error}"
        ) from None


class MeanStep(NamedTuple):
    """The mean of the recorded steps of one rank, in seconds."""

    rank: int
    steps: int
    seconds: float
    parts: dict[str, float]


def part_names(steps: Sequence[StepParts]) -> list[str]:
    """The parts that any of the steps has, in the order of a table."""
    return sorted({name for step in steps for name in step.parts}, key=_place)


def mean_steps(steps: Sequence[StepParts]) -> list[MeanStep]:
    """The mean step of each rank."""
    found = []
    for rank in sorted({step.rank for step in steps}):
        own = [step for step in steps if step.rank == rank]
        parts = {
            name: statistics.fmean(step.parts.get(name, 0.0) for step in own)
            for name in part_names(own)
        }
        seconds = statistics.fmean(step.seconds for step in own)
        found.append(MeanStep(rank, len(own), seconds, parts))
    return found


def in_milliseconds(step: MeanStep, name: str) -> str:
    """A part as tables show it, with its share of the step."""
    part = step.parts.get(name, 0.0)
    share = f" ({100 * part / step.seconds:.0f}%)" if step.seconds else ""
    return f"{1000 * part:.1f}{share}"


def parts_of_events(rank: int, events: list[Event]) -> list[StepParts]:
    """The steps of the events of a trace, those with a duration."""
    named = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted(
        (_interval(event), int(event["name"].removeprefix(ITERATION)), event["tid"])
        for event in named
        if event["name"].startswith(ITERATION)
    )
    if not steps:
        return []
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    windows = [window for window, *_ in steps]
    if device:
        launched = _launches(events)
        windows = _windows_of_device(windows, device, launched)
        layers = _layers_of_device(named, device, launched)
    else:
        layers = _layers_of_thread(named, events, steps[0][2])
    tables = [(name, np.array([*intervals]).reshape(-1, 2)) for name, intervals in layers]
    return [
        StepParts(rank, iteration, (window[1] - window[0]) / 1e6, _parts(window, tables))
        for window, (_, iteration, _) in zip(windows, steps, strict=True)
    ]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _parts(window: Interval, layers: list[tuple[str, np.ndarray]]) -> dict[str, float]:
    """Seconds of each part: a moment is that of the first layer that is on."""
    inside = [intervals.clip(*window) for _, intervals in layers]
    # between two of these moments nothing begins or ends
    moments = np.unique(np.concatenate([window, *map(np.ravel, inside)]))
    owner = np.full(len(moments) - 1, len(layers))  # the host, where nothing is on
    for number in reversed(range(len(layers))):
        begins, ends = np.searchsorted(moments, inside[number]).T
        begun, ended = (np.bincount(at, minlength=len(moments)) for at in (begins, ends))
        is_on = (begun - ended).cumsum()[:-1] > 0
        owner[is_on] = number
    seconds = np.bincount(owner, np.diff(moments), len(layers) + 1) / 1e6
    found: dict[str, float] = {}
    for name, value in zip([*(name for name, _ in layers), HOST], seconds.tolist()):
        found[name] = found.get(name, 0.0) + value
    return {name: found[name] for name in sorted(found, key=_place) if found[name]}


def _place(name: str) -> tuple[int, str]:
    """Of a part in a table."""
    names = (COMPUTE, "optimizer", EXPOSED, BUBBLE, HOST, *SECTIONS)
    return names.index(EXPOSED if name.startswith(EXPOSED) else name), name


def _part_of_collective(name: str) -> str | None:
    """The part that the range of a collective counts to; None for another range."""
    operation, _, axis = name.rpartition(" ")
    if operation not in OPERATIONS:
        return None
    return BUBBLE if operation == "receive" else f"{EXPOSED} {axis}"


def _by_part(
    events: Iterable[Event], part_of: Callable[[Event], str | None]
) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for event in events:
        if (part := part_of(event)) is not None:
            found.setdefault(part, []).append(_interval(event))
    return dict(sorted(found.items()))


# ---- on a CPU


def _layers_of_thread(named: list[Event], events: list[Event], thread: object) -> list[Layer]:
    """What the thread that trains does, the most telling first: a collective within the optimizer
    is communication, what else the optimizer computes is the optimizer. The forward passes of pairs
    have a thread of their own, which runs when the other one waits.
    """
    threads = {event["tid"] for event in named if event["name"].startswith("forward ")} | {thread}
    own = [event for event in named if event["tid"] in threads]
    sections = _by_part(own, lambda event: event["name"] if event["name"] in SECTIONS else None)
    operators = (
        _interval(event)
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] in threads
    )
    collectives = _by_part(own, lambda event: _part_of_collective(event["name"]))
    ordered = [(name, sections[name]) for name in SECTIONS if name in sections]
    return [*collectives.items(), *ordered, (COMPUTE, operators)]


# ---- on a GPU


class _Ranges:
    """Ranges of one thread by when they begin; one may be within another."""

    def __init__(self, events: Iterable[Event]):
        self.events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
        self.begins = [event["ts"] for event in self.events]
        self.outer: list[int] = []  # index of the range that encloses each range; -1: none
        for place, begin in enumerate(self.begins):
            self.outer.append(self._open(place - 1, begin))

    def _open(self, place: int, moment: float) -> int:
        """Index of the innermost range open at `moment`, of those up to `place`; -1: none."""
        while place >= 0 and _interval(self.events[place])[1] < moment:
            place = self.outer[place]
        return place

    def at(self, moment: float) -> str | None:
        """The name of the innermost one that is open."""
        place = self._open(bisect_right(self.begins, moment) - 1, moment)
        return self.events[place]["name"] if place >= 0 else None


Launches = dict[int, Event]  # by correlation: the call of CUDA's that launched work


def _launches(events: list[Event]) -> Launches:
    return {event["args"]["correlation"]: event for event in events if event.get("cat") in LAUNCHES}


def _launch(event: Event, launched: Launches) -> Event | None:
    return launched.get(event.get("args", {}).get("correlation"))


def _windows_of_device(
    hosts: list[Interval], device: list[Event], launched: Launches
) -> list[Interval]:
    """When the device is at each step: from the end of the work of the step before to the end of
    its work, the first from when the host begins, before which the device was idle.
    """
    ends = [begin for begin, _ in hosts]
    begins = ends.copy()
    for event in device:
        launch = _launch(event, launched)
        place = bisect_right(begins, launch["ts"]) - 1 if launch is not None else -1
        if place >= 0:
            ends[place] = max(ends[place], _interval(event)[1])
    windows, at = [], begins[0]
    for end in ends:
        windows.append((at, max(at, end)))
        at = windows[-1][1]
    return windows


def _layers_of_device(named: list[Event], device: list[Event], launched: Launches) -> list[Layer]:
    """What the device does: it computes, else communicates, else waits for a message, else waits
    for the host, which may be at another part.
    """
    sections = _Ranges(event for event in named if event["name"] in SECTIONS)

    def part_of_work(event: Event) -> str | None:
        launch = _launch(event, launched)
        return (launch and sections.at(launch["ts"])) or COMPUTE

    work = _by_part((event for event in device if not _is_message(event)), part_of_work)
    messages = _messages(named, filter(_is_message, device), launched)
    waiting = [(BUBBLE, messages.pop(BUBBLE))] if BUBBLE in messages else []
    on_host = _by_part(named, lambda event: event["name"] if event["name"] in SECTIONS else None)
    on_host.pop("optimizer", None)  # Python that launches its kernels is the host
    return [*work.items(), *messages.items(), *waiting, *on_host.items()]


def _is_message(event: Event) -> bool:
    """Whether NCCL does it."""
    return event["name"].startswith("nccl")


def _messages(
    named: list[Event], kernels: Iterable[Event], launched: Launches
) -> dict[str, list[Interval]]:
    """NCCL's kernels by part: that of the collective which launched them on its thread."""
    ranges = [event for event in named if _part_of_collective(event["name"]) is not None]
    by_thread = {
        thread: _Ranges(event for event in ranges if event["tid"] == thread)
        for thread in {event["tid"] for event in ranges}
    }

    def part(event: Event) -> str | None:
        launch = _launch(event, launched)
        own = by_thread.get(launch["tid"]) if launch is not None else None
        name = own.at(launch["ts"]) if own is not None and launch is not None else None
        return _part_of_collective(name) if name else f"{EXPOSED} unnamed"

    return _by_part(kernels, part)
