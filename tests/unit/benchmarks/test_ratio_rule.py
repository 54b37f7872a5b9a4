"""The ratio rule: what passes, what does not, and that the interval is the median's."""

from __future__ import annotations

import random

import pytest
from megatron.benchmarks.ratio_rule import bootstrap, verdict


def test_a_clear_win_passes_and_reports_its_median():
    result = verdict([1.1, 1.2, 1.15, 1.12, 1.3, 1.09, 1.18], goal=1.0)
    assert result.passed and result.median == 1.15 and result.pairs == 7
    assert 1.09 <= result.low <= result.median <= result.high <= 1.3


def test_the_median_must_reach_the_goal_itself():
    ratios = [0.99] * 7
    assert not verdict(ratios, goal=1.0).passed  # within the slack, but only the bound has slack
    assert verdict(ratios, goal=0.99).passed


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
