"""Finds stragglers from the compute time of each rank, once a log line.

A rank is compared with its peers, the ranks of the same pipeline stage: its excess is how much
slower it is than their median, in each of the last WINDOW parts of log intervals (two intervals of
eight steps or more). It is a straggler when the mean excess is at least `threshold`, the median of
each half of the window at least half of that, and the mean is significant against the noise of the
parts (a busy machine) and of the ranks (nodes that differ).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.observe.metrics import Metrics

SECTIONS = ("data", "forward", "backward", "optimizer", "host")
BLOCKS = 8  # parts of a log interval
WINDOW = 16  # parts that a verdict looks at
FAR = 5.0  # standard errors that a straggler is away from its peers
APART = 3.0  # and standard deviations between ranks
MANY = 8  # ranks from which on one is compared with how much the others differ
NORMAL = 1.4826  # standard deviation / median deviation of normal numbers
OF_MEAN = 1.2533  # standard deviation / mean deviation


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers by `excess`, a fraction of their time, most of it in
    `section`.
    """

    rank: int
    excess: float
    section: str


class StragglerWatch:
    """The verdicts of a run. `stages`: the pipeline stage of each rank. Ranks without peers in
    their stage are compared with each other, by how much slower each is than in its best interval.
    """

    def __init__(
        self,
        stages: Sequence[int],
        threshold: float,
        far: float = FAR,
        nodes: Sequence[str] | None = None,
    ):
        self.threshold, self.far = threshold, far
        self.nodes = nodes or [""] * len(stages)  # of each rank
        groups: dict[int, list[int]] = {}
        for rank, stage in enumerate(stages):
            groups.setdefault(stage, []).append(rank)
        self.lone = [ranks[0] for ranks in groups.values() if len(ranks) == 1]
        self.groups = [ranks for ranks in groups.values() if len(ranks) > 1]
        self.parts: deque[np.ndarray] = deque(maxlen=WINDOW)  # [ranks] seconds of a step
        self.sections: deque[np.ndarray] = deque(maxlen=2)  # [ranks, sections] of an interval
        self.best: np.ndarray | None = None  # of each rank's best interval, the sections
        self.straggler: Straggler | None = None

    def add(self, table: ArrayLike) -> Metrics:
        """Add the rows of all ranks (training/timing.py) at a log line; its metrics. `straggler`
        is the new verdict.
        """
        rows = np.asarray(table)
        sections = rows[:, -len(SECTIONS) :]
        self.parts.extend(rows[:, : -len(SECTIONS)].T)
        self.sections.append(sections)
        best = sections if self.best is None else self.best
        self.straggler = self._judge(best) if len(self.parts) == WINDOW else None
        times = sections.sum(1)
        self.best = np.where((times < best.sum(1))[:, None], sections, best)
        metrics: Metrics = {
            "rank-time-min": times.min(),
            "rank-time-median": np.median(times),
            "rank-time-max": times.max(),
        }
        if self.straggler is not None:
            metrics["slowest-rank"] = self.straggler.rank
            metrics["slowest-rank-excess"] = self.straggler.excess
            metrics["slowest-rank-section"] = SECTIONS.index(self.straggler.section)
        return metrics

    def fields(self, metrics: Metrics) -> list[str]:
        """Fields of the training line: the straggler, and times of ranks."""
        if self.straggler is None:
            return []
        rank = self.straggler.rank
        times = (metrics[f"rank-time-{which}"] * 1000 for which in ("min", "median", "max"))
        return [
            f"own time of ranks min/median/max (ms): {'/'.join(f'{time:.1f}' for time in times)}",
            f"slowest rank {rank} ({self.nodes[rank]}): {self.straggler.section}, "
            f"+{self.straggler.excess:.0%} of a step",
        ]

    def _judge(self, best: np.ndarray) -> Straggler | None:
        """The straggler with the greatest excess."""
        parts = np.array(self.parts)
        seconds = np.mean(self.sections, axis=0)
        found: list[Straggler] = []
        for ranks in self.groups:
            usual = medians_of_others(seconds[ranks].T).T
            found += self._far(parts[:, ranks], ranks, seconds[ranks] - usual)
        if len(self.lone) > 1:
            usual = best[self.lone]
            slower = parts[:, self.lone] / usual.sum(1)
            found += self._far(slower, self.lone, seconds[self.lone] - usual)
        return max(found, key=lambda each: each.excess, default=None)

    def _far(self, parts: np.ndarray, ranks: list[int], lost: np.ndarray) -> list[Straggler]:
        """The stragglers among comparable ranks. `parts`: [parts, ranks] times; `lost`:
        [ranks, sections] seconds.
        """
        usual = medians_of_others(parts)
        # no excess over a median of 0
        excess = np.divide(parts, usual, out=np.ones_like(parts), where=usual > 0) - 1
        means = excess.mean(0)
        noise = OF_MEAN * math.sqrt(WINDOW / (WINDOW - 1)) * np.abs(excess - means).mean()
        bound = max(self.threshold, self.far * noise / math.sqrt(WINDOW))
        # slow in both halves: not for a while only
        halves = np.median(excess.reshape(2, WINDOW // 2, len(ranks)), axis=1)
        is_far = (means >= bound) & (halves.min(0) >= bound / 2)
        if len(ranks) >= MANY:
            is_far &= means >= APART * NORMAL * medians_of_others(np.abs(means))
        return [
            Straggler(ranks[at], float(means[at]), SECTIONS[int(lost[at].argmax())])
            for at in np.flatnonzero(is_far)
        ]


def medians_of_others(values: np.ndarray) -> np.ndarray:
    """For each of two or more values along the last axis the median of the others."""
    places = values.argsort(-1).argsort(-1)
    ordered = np.sort(values, -1)
    rest = values.shape[-1] - 1
    # in the order of all, what follows the value itself is one place further
    low, high = (
        np.take_along_axis(ordered, at + (at >= places), -1) for at in ((rest - 1) // 2, rest // 2)
    )
    return (low + high) / 2
