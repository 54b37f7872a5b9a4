"""How certain a figure is that was measured several times.

Called from study/table.py and from benchmarks/ratio_rule.py.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from random import Random  # type: ignore[attr-defined]  # mypy finds kernels/random.py

RESAMPLES = 10_000
ENOUGH = (
    6  # below this number of values no interval between two of them holds a median in 95% of cases
)
# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom; beyond, the next lower entry
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile interval of the median; the same for the same values in any order."""
    return _bootstrap(tuple(sorted(values)))


@functools.cache
def _bootstrap(ordered: tuple[float, ...]) -> tuple[float, float]:
    draw = Random(0)
    medians = sorted(
        statistics.median(draw.choices(ordered, k=len(ordered))) for _ in range(RESAMPLES)
    )
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def coverage(values: int) -> float:
    """Share of cases in which the range of that number of values holds the median of what they are
    drawn from.
    """
    return 1 - 2 * 0.5**values


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95% interval of the typical ratio of interleaved pairs: Student's t on their logarithms.

    Unlike the bootstrap it holds for two or three pairs, for which it is wide. One pair
    decides nothing: (0, infinity).
    """
    if len(ratios) < 2:
        return 0.0, math.inf
    logs = [math.log(ratio) for ratio in ratios]
    t = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle + half)
