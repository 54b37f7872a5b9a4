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
from statistics import mean, median

from megatron.observe.metrics import Metrics

SECTIONS = ("data", "forward", "backward", "optimizer", "host")
BLOCKS = 8  # parts of a log interval
WINDOW = 16  # parts that a verdict looks at
FAR = 5.0  # standard errors that a straggler is away from its peers
APART = 3.0  # and standard deviations between ranks
MANY = 8  # ranks from which on one is held against what the others differ by
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
    With threshold 0 there is always a straggler.
    """

    def __init__(
        self,
        stages: Sequence[int],
        threshold: float,
        far: float = FAR,
        nodes: Sequence[str] | None = None,
    ):
        self.threshold, self.far = threshold, far if threshold else 0.0
        self.nodes = nodes or [""] * len(stages)  # of each rank
        groups: dict[int, list[int]] = {}
        for rank, stage in enumerate(stages):
            groups.setdefault(stage, []).append(rank)
        self.lone = [ranks[0] for ranks in groups.values() if len(ranks) == 1]
        self.groups = [ranks for ranks in groups.values() if len(ranks) > 1]
        self.blocks: deque[list[float]] = deque(maxlen=WINDOW)  # seconds of a step, by rank
        self.sections: deque[list[list[float]]] = deque(maxlen=2)  # [rank][section] of intervals
        self.best: list[list[float]] = []  # of each rank's best interval, the sections
        self.straggler: Straggler | None = None

    def add(self, table: Sequence[Sequence[float]]) -> Metrics:
        """Add the rows of all ranks (training/timing.py) at a log line; its metrics. `straggler`
        is the new verdict.
        """
        totals = [row[: -len(SECTIONS)] for row in table]
        sections = [list(row[-len(SECTIONS) :]) for row in table]
        self.blocks.extend(map(list, zip(*totals)))
        self.sections.append(sections)
        self.straggler = self._judge() if len(self.blocks) == WINDOW else None
        self.best = [min(pair, key=sum) for pair in zip(self.best or sections, sections)]
        times = sorted(map(sum, sections))
        metrics: Metrics = {
            "rank-time-min": times[0],
            "rank-time-median": median(times),
            "rank-time-max": times[-1],
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

    def _judge(self) -> Straggler | None:
        """The straggler with the greatest excess."""
        found: list[Straggler] = []
        for ranks in self.groups:
            found += self._far([[block[rank] for rank in ranks] for block in self.blocks], ranks)
        if len(self.lone) > 1:
            best = [sum(self.best[rank]) for rank in self.lone]
            slower = [
                [block[rank] / own for rank, own in zip(self.lone, best)] for block in self.blocks
            ]
            found += self._far(slower, self.lone)
        return max(found, key=lambda each: each.excess, default=None)

    def _far(self, blocks: list[list[float]], ranks: list[int]) -> list[Straggler]:
        """The stragglers among comparable ranks; blocks: [block][rank]."""
        parts = list(zip(*map(excesses, blocks)))  # [rank][block]
        middles = [mean(own) for own in parts]
        noise = (
            OF_MEAN
            * math.sqrt(WINDOW / (WINDOW - 1))
            * mean(abs(excess - middle) for own, middle in zip(parts, middles) for excess in own)
        )
        bound = max(self.threshold, self.far * noise / math.sqrt(WINDOW))
        differ = medians_of_others([abs(middle) for middle in middles])
        half = WINDOW // 2
        return [
            Straggler(rank, middle, self._section(rank, ranks))
            for rank, own, middle, usual in zip(ranks, parts, middles, differ)
            if middle >= bound
            and (not self.threshold or min(median(own[:half]), median(own[half:])) >= bound / 2)
            and (len(ranks) < MANY or middle >= APART * NORMAL * usual)
        ]

    def _section(self, rank: int, ranks: list[int]) -> str:
        """The section with the greatest loss against peers, or else against the best interval."""

        def seconds(rank: int, section: int) -> float:
            return sum(interval[rank][section] for interval in self.sections) / len(self.sections)

        def lost(section: int) -> float:
            usual = (
                self.best[rank][section]
                if rank in self.lone
                else median(seconds(other, section) for other in ranks if other != rank)
            )
            return seconds(rank, section) - usual

        return SECTIONS[max(range(len(SECTIONS)), key=lost)]


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    rest = len(values) - 1
    for place, index in enumerate(order):
        low, high = (at + (at >= place) for at in ((rest - 1) // 2, rest // 2))
        result[index] = (values[order[low]] + values[order[high]]) / 2
    return result


def excesses(values: Sequence[float]) -> list[float]:
    """The fraction by which each value exceeds the median of the others."""
    usual = medians_of_others(values)
    return [value / other - 1 if other > 0 else 0.0 for value, other in zip(values, usual)]
