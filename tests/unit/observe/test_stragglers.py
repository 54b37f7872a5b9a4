"""Which rank is named from what all ranks needed, and which is not."""

from __future__ import annotations

import random

import pytest
from megatron.tools._report.metric_names import METRICS

from megatron.observe.stragglers import (
    BLOCKS,
    FAR,
    SECTIONS,
    WINDOW,
    StragglerWatch,
)

USUAL = [0.002, 0.03, 0.06, 0.005, 0.003]  # seconds of a step by section


def table(seconds: list[list[float]], noise: float, generator: random.Random) -> list[list[float]]:
    """What ranks send that need these seconds by section, their parts with some noise."""
    return [
        [*(sum(own) * (1 + generator.gauss(0, noise)) for _ in range(BLOCKS)), *own]
        for own in seconds
    ]


def slow(own: list[float], section: str, factor: float) -> list[float]:
    return [value * (factor if name == section else 1) for name, value in zip(SECTIONS, own)]


@pytest.mark.parametrize("ranks, victim", [(2, 0), (4, 3), (512, 77)])
@pytest.mark.parametrize("section", ["forward", "data"])
def test_a_slow_rank_is_named_within_two_log_lines(ranks, victim, section):
    generator = random.Random(ranks)
    factor = {"forward": 2.0, "data": 16.0}[section]  # 30% of a step
    nodes = [f"node{rank}" for rank in range(ranks)]
    watch = StragglerWatch([0] * ranks, 0.1, nodes=nodes)
    for _ in range(5):
        watch.add(table([USUAL] * ranks, 0.05, generator))
        assert watch.straggler is None
    seconds = [USUAL] * victim + [slow(USUAL, section, factor)] + [USUAL] * (ranks - victim - 1)
    watch.add(table(seconds, 0.05, generator))
    metrics = watch.add(table(seconds, 0.05, generator))
    assert (watch.straggler.rank, watch.straggler.section) == (victim, section)
    assert watch.straggler.excess == pytest.approx(0.3, abs=0.1)
    assert metrics["slowest-rank"] == victim
    assert SECTIONS[metrics["slowest-rank-section"]] == section
    assert metrics["rank-time-max"] == pytest.approx(0.13) and metrics.keys() <= METRICS.keys()
    assert metrics["rank-time-min"] == pytest.approx(0.1)
    field = watch.fields(metrics)[-1]
    assert field.startswith(f"slowest rank {victim} (node{victim}): {section}, +")
    for _ in range(2):  # and no more once it is well
        watch.add(table([USUAL] * ranks, 0.05, generator))
    assert watch.straggler is None


def false_names(far: float, noise: float) -> int:
    """Of 700 log lines those with a slowest rank."""
    generator = random.Random(1)
    watch = StragglerWatch([0] * 4, 0.1, far)
    tables = (table([USUAL] * 4, noise, generator) for _ in range(700))
    return sum("slowest-rank" in watch.add(rows) for rows in tables)


def test_noise_names_nobody():
    """Each part of each rank's time is off by a fifth: more than a busy neighbour did."""
    assert false_names(FAR, 0.2) == 0


def test_what_keeps_noise_from_naming():
    """Negative control: without its bound the same noise does."""
    assert false_names(0.0, 0.2) > 25


def test_one_hiccup_and_one_slow_interval_name_nobody():
    generator = random.Random(2)
    watch = StragglerWatch([0] * 4, 0.1)
    for line in range(12):
        rows = table([USUAL] * 4, 0.02, generator)
        if line == 4:
            rows[2][1] *= 30
        if line == 8:
            rows[1][:BLOCKS] = [value * 1.3 for value in rows[1][:BLOCKS]]
        watch.add(rows)
        assert watch.straggler is None


def test_stages_do_different_work():
    """Two ranks a stage, the second stage twice as slow: no straggler; a slow rank is."""
    generator, twice = random.Random(3), [2 * value for value in USUAL]
    watch = StragglerWatch([0, 0, 1, 1], 0.1)
    for _ in range(4):
        watch.add(table([USUAL, USUAL, twice, twice], 0.02, generator))
    assert watch.straggler is None
    for _ in range(2):
        rows = [USUAL, slow(USUAL, "backward", 1.5), twice, twice]
        watch.add(table(rows, 0.02, generator))
    assert (watch.straggler.rank, watch.straggler.section) == (1, "backward")


def test_ranks_with_a_stage_for_themselves():
    """Each is held against what it was at its best."""
    generator, twice = random.Random(4), [2 * value for value in USUAL]
    watch = StragglerWatch([0, 1, 2], 0.1)
    for _ in range(4):
        watch.add(table([USUAL, twice, USUAL], 0.02, generator))
    assert watch.straggler is None
    for _ in range(2):
        watch.add(table([USUAL, slow(twice, "optimizer", 5), USUAL], 0.02, generator))
    assert (watch.straggler.rank, watch.straggler.section) == (1, "optimizer")


def test_nodes_of_two_kinds():
    """Half of the ranks are slower by 15%: none of them is the straggler; one that is slower still
    by 60% is.
    """
    generator = random.Random(5)
    fast, old = USUAL, [1.15 * value for value in USUAL]
    watch = StragglerWatch([0] * 16, 0.1)
    for _ in range(3):
        watch.add(table([fast, old] * 8, 0.01, generator))
    assert watch.straggler is None
    for _ in range(2):
        watch.add(table([fast, old] * 7 + [fast, slow(old, "forward", 3)], 0.01, generator))
    assert watch.straggler.rank == 15


def test_short_intervals_are_put_together():
    """Of one step a line, as many lines are looked at as two long intervals have parts."""
    watch = StragglerWatch([0, 0], 0.1)
    for line in range(1, WINDOW + 1):
        watch.add([[0.1, *USUAL], [0.14, *slow(USUAL, "forward", 2)]])
        assert (watch.straggler is not None) == (line == WINDOW)


@pytest.mark.filterwarnings("error")
def test_parts_without_measured_time_name_nobody():
    """As of a clock that is too coarse."""
    watch = StragglerWatch([0, 0], 0.1)
    for _ in range(WINDOW):
        watch.add([[0.0] * BLOCKS + USUAL, [0.1] * BLOCKS + USUAL])
    assert watch.straggler is None
