"""Per-rank compute time, without waits for other ranks: a slow rank makes all others wait, so the
time of a step is the same on every rank and names none.

The run's timers and event log are made here, too; observe/stragglers.py judges.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from megatron.checkpoint.ranks import Ranks
from megatron.config.groups import Config
from megatron.distributed.collectives import profiler_range
from megatron.distributed.groups import Axis, Groups
from megatron.distributed.peers import busy_clock
from megatron.observe.events import EventLog, Timers
from megatron.observe.stragglers import BLOCKS, StragglerWatch
from megatron.parallel.timeline import Recording
from megatron.training.advisor import Advisor


class RankTimer:
    """Per-rank compute time, excluding time spent waiting for other ranks: the laps since the last
    log line. A lap ends just before the step's reduction: it holds the optimizer of the step
    before, and the passes of this one.

    On a GPU the passes are timed there, by events of the step before, which have come; all else is
    the host's time. The longer of the two is what the rank needs for a lap.
    """

    def __init__(self, device: torch.device, world: Axis, timers: Timers):
        self.device, self.world = device, world
        self.timers = timers  # of which `data` is never a wait for other ranks
        self.laps: list[list[float]] = []  # seconds by section
        self.before: Recording | None = None
        self.begin()

    def begin(self) -> None:
        """The first lap begins now."""
        self.begun = busy_clock()
        self.data = self.timers.total("data")
        self.optimizer_seconds = 0.0

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Around what is no part of a lap, such as an evaluation."""
        stopped = busy_clock()
        yield
        self.begun += busy_clock() - stopped

    def end_update(self) -> None:
        """The optimizer ends, which began with the lap."""
        self.optimizer_seconds = busy_clock() - self.begun

    def end_lap(self, recording: Recording) -> None:
        """Close a lap, in which `recording` was made."""
        # On a GPU the events of this step have not happened yet: those of the step before are read,
        # which costs no wait.
        on_gpu = self.device.type == "cuda"
        complete, self.before = self.before if on_gpu else recording, recording
        forward, backward = (0.0, 0.0) if complete is None else complete.own_seconds()
        # What the clock counts but no section does is the rest: Python, launches, logging.
        total, data = busy_clock() - self.begun, self.timers.total("data") - self.data
        if on_gpu:
            total = max(total, forward + backward)
        sections = [data, forward, backward, self.optimizer_seconds]
        self.laps.append([*sections, max(0.0, total - sum(sections))])
        self.begin()

    def table(self) -> list[float]:
        """[ranks x numbers] of the laps since the last call, zeros but for this rank's row, so that
        the sum over ranks is everyone's: seconds of a lap, mean over each of up to BLOCKS parts of
        the interval, then of each section, mean over all laps.
        """
        # Parts of the interval show whether a rank is slow always or only for a while.
        laps, self.laps = np.array(self.laps), []
        parts = [part.sum(1).mean() for part in np.array_split(laps, min(BLOCKS, len(laps)))]
        row = [*parts, *laps.mean(0)]
        # Zeros in the other rows: the step's all-reduce carries the table at no extra message.
        before, after = self.world.rank, self.world.size - self.world.rank - 1
        return [0.0] * (before * len(row)) + row + [0.0] * (after * len(row))


@dataclass
class Timing:
    """Where a run's time goes."""

    events: EventLog  # that of rank 0 writes
    rank_timer: RankTimer | None = None  # on all of several ranks with --log-straggler
    stragglers: StragglerWatch | None = None  # on rank 0 of them
    records: bool = False  # the passes of each step, for the pipeline's timeline and `rank_timer`
    recording: Recording | None = None  # of the last step
    # around what is no part of a rank's compute time
    outside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def begin(self) -> None:
        """The first lap of this rank begins now."""
        if self.rank_timer is not None:
            self.rank_timer.begin()


def make_timing(
    config: Config,
    groups: Groups,
    ranks: Ranks,
    iteration: int,
    advisor: Advisor,
    closing: contextlib.ExitStack,
) -> Timing:
    """The timing of a run that starts at an iteration; all ranks call it together. `closing` closes
    the file of events.
    """
    folder = config.checkpoint.save if groups.rank == 0 else None
    events = EventLog(folder, iteration, Timers(profiler_range), advisor.goodput)
    closing.callback(events.close)
    timing = Timing(events, records=groups.pp.size > 1)
    if config.logging.log_straggler and groups.world.size > 1:
        timing.rank_timer = RankTimer(ranks.device, groups.world, events.timers)
        timing.records, timing.outside = True, timing.rank_timer.outside
        # Host names are gathered once, so that a report can name the node of a slow rank.
        nodes = ranks.gather_or_raise(socket.gethostname)
        if groups.rank == 0:
            stages = [groups.layout.coordinates(rank)["pp"] for rank in range(len(nodes))]
            threshold = config.logging.straggler_threshold
            timing.stragglers = StragglerWatch(stages, threshold, nodes=nodes)
    return timing
