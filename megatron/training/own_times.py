"""What a rank does of each step itself, without what it waits for others: a slow rank makes all
others wait, so the time of a step is the same on every rank and names none.

Called from training/loop.py; the verdict is observe/stragglers.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.distributed.groups import Axis
from megatron.distributed.peers import busy_clock
from megatron.observe.metrics import Timers
from megatron.observe.stragglers import BLOCKS, SECTIONS
from megatron.parallel.pipeline import Recording
from megatron.training.arriving import sent


class OwnTimes:
    """The laps of one rank since the last log line. A lap ends just before the step's reduction:
    it holds the optimizer of the step before, and the passes of this one.

    On a GPU the passes are timed there, by events of the step before, which have come; all else is
    the host's time. The longer of the two is what the rank needs for a lap.
    """

    def __init__(self, device: torch.device, world: Axis):
        self.device, self.world = device, world
        self.timers = Timers(busy_clock)  # data, optimizer
        self.laps: list[list[float]] = []  # seconds by section
        self.begun = busy_clock()
        self.stopped = self.begun
        self.before: Recording | None = None

    def stop(self) -> None:
        """What comes now, such as an evaluation, is no part of a lap."""
        self.stopped = busy_clock()

    def go_on(self) -> None:
        """The lap goes on."""
        self.begun += busy_clock() - self.stopped

    def end_lap(self, recording: Recording) -> None:
        """Close a lap, in which `recording` was made."""
        on_gpu = self.device.type == "cuda"
        complete, self.before = self.before if on_gpu else recording, recording
        forward, backward = (0.0, 0.0) if complete is None else complete.own_seconds()
        now, parts = busy_clock(), self.timers.take()
        total, self.begun = now - self.begun, now
        if on_gpu:
            total = max(total, forward + backward)
        sections = [parts.get("data", 0.0), forward, backward, parts.get("optimizer", 0.0)]
        self.laps.append([*sections, max(0.0, total - sum(sections))])

    def table(self) -> Tensor:
        """[ranks, numbers] of the laps since the last call, zeros but for this rank's row, so that
        the sum over ranks is everyone's: seconds of a lap in each part of the interval, then of
        each section.
        """
        row, self.laps = summary(self.laps), []
        table = torch.zeros(self.world.size, len(row), dtype=torch.float64, device=self.device)
        table[self.world.rank] = sent(row, self.device)
        return table


def rows_of_ranks(numbers: Sequence[float], ranks: int) -> list[list[float]]:
    """The rows of a table that has travelled flat."""
    width = len(numbers) // ranks
    return [list(numbers[rank * width : (rank + 1) * width]) for rank in range(ranks)]


def summary(laps: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of a lap, mean over each of up to BLOCKS parts of the laps, then those of each
    section, mean over all laps.
    """
    count = len(laps)
    blocks = min(BLOCKS, count)
    parts = [laps[count * i // blocks : count * (i + 1) // blocks] for i in range(blocks)]
    return [
        *(sum(map(sum, part)) / len(part) for part in parts),
        *(sum(lap[i] for lap in laps) / count for i in range(len(SECTIONS))),
    ]
