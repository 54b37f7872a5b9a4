"""The ratio rule: what passes, what does not, and that the interval is the median's."""

from __future__ import annotations

import random

import pytest
from megatron.benchmarks.ratio_rule import bootstrap, verdict


@pytest.mark.parametrize(
    "ratios, goal, upper, passed",
    [
        ([1.1, 1.2, 1.15, 1.12, 1.3, 1.09, 1.18], 1.0, False, True),
        ([1.1] * 6, 1.0, False, False),  # too few pairs
        ([0.99] * 7, 1.0, False, False),  # only the bound has slack, not the median
        ([0.99] * 7, 0.99, False, True),
        ([1.01] * 4 + [0.9] * 3, 1.0, False, False),  # the bound is beyond its slack
        ([0.9] * 7, 1.0, True, True),
        ([1.01] * 7, 1.0, True, False),
    ],
)
def test_what_passes(ratios, goal, upper, passed):
    result = verdict(ratios, goal, upper_limit=upper)
    assert result.passed == passed and result.pairs == len(ratios)
    assert min(ratios) <= result.low <= result.median <= result.high <= max(ratios)


def test_the_interval_does_not_depend_on_the_order_and_narrows_with_pairs():
    ratios = [1 + 0.01 * i for i in range(9)]
    turned = ratios[:]
    random.Random(3).shuffle(turned)
    assert bootstrap(ratios) == bootstrap(turned)
    few, many = bootstrap(ratios), bootstrap(ratios * 20)
    assert many[1] - many[0] < few[1] - few[0]


@pytest.mark.full
def test_the_interval_covers_the_true_median_as_often_as_it_says():
    draw, covered = random.Random(7), 0
    for _ in range(60):
        low, high = bootstrap([draw.gauss(1.0, 0.1) for _ in range(15)])
        covered += low <= 1.0 <= high
    # 95% in the limit; the percentile bootstrap of 15 values falls a little short of it
    assert covered >= 51
