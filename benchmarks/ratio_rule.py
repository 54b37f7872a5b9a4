"""The rule by which every speed ratio here passes: enough interleaved pairs, the median, and a
bootstrap bound that noise cannot fake.

A goal is a least ratio (throughput) or, where smaller is better (overhead), a largest one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.tools._study.intervals import bootstrap

PAIRS = 7
# how far the bound on the unlucky side may lie on the wrong side of the goal, as a share of it
SLACK = 0.05


@dataclass(frozen=True)
class Verdict:
    """One row of a benchmark: the median ratio with its 95% interval, and whether it reaches the
    goal.
    """

    pairs: int
    median: float
    low: float
    high: float
    goal: float
    passed: bool


def verdict(ratios: Sequence[float], goal: float, *, upper_limit: bool = False) -> Verdict:
    """Judge the ratios of interleaved pairs: median at least `goal` and lower bound at least 0.95
    of it, or, when the goal is an upper limit, median at most `goal` and upper bound at most 1.05
    of it. Fewer than 7 pairs never pass. Raises ValueError without a ratio.
    """
    if not ratios or not all(ratio > 0 for ratio in ratios):
        raise ValueError(f"ratios must be positive numbers, at least one: {list(ratios)}")
    median, (low, high) = statistics.median(ratios), bootstrap(ratios)
    reached = (
        median <= goal and high <= (1 + SLACK) * goal
        if upper_limit
        else median >= goal and low >= (1 - SLACK) * goal
    )
    return Verdict(len(ratios), median, low, high, goal, len(ratios) >= PAIRS and reached)
