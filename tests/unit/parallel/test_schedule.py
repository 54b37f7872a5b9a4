"""Every schedule, over hundreds of sizes: right by the checker, within its memory bound, its
gradients in the order of the micro-batches.
"""

from __future__ import annotations

import pytest
from megatron.tools._plan.schedule_check import check
from megatron.tools._plan.simulate import Costs, simulate

from megatron.config.schedules import SCHEDULES
from megatron.parallel.schedule import (
    BUILDERS,
    Kind,
    build_schedule,
    forward_only,
)

SIZES = [(ranks, m) for ranks in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 17)]


def virtual_stages(name: str) -> tuple[int, ...]:
    virtual = SCHEDULES[name].virtual
    return (1, 2, 3, 4) if virtual is None else (virtual,)


def most_in_flight(name: str, ranks: int, virtual: int, m: int, rank: int) -> int:
    """Pairs of stage and micro-batch that a rank may hold, by the schedules' definitions."""
    if name == "gpipe":
        return m
    if name == "1f1b":
        return min(m, ranks - rank)
    if name == "zero-bubble":
        return min(m, ranks)
    if name == "zero-bubble-v":
        return min(2 * m, 2 * ranks)
    if name != "interleaved":
        return virtual * m  # nothing is promised
    groups = max(m // ranks, 1)
    return min(virtual * m, 2 * (ranks - rank - 1) + (virtual - 1) * -(-m // groups) + 1)


@pytest.mark.parametrize("name", BUILDERS)
def test_all_sizes_are_right_and_bounded(name: str):
    for virtual in virtual_stages(name):
        for ranks, m in SIZES:
            schedule = build_schedule(name, ranks, virtual, m)
            bounds = check(schedule)
            if name == "interleaved":
                assert schedule.placement == tuple(s % ranks for s in range(schedule.stages))
            sizes = ranks, virtual, m
            assert bounds.ascending and (schedule.ranks, schedule.stages) == (
                ranks,
                ranks * virtual,
            )
            assert max(bounds.received) <= 3, sizes
            bound = [most_in_flight(name, *sizes, rank) for rank in range(ranks)]
            if name == "zero-bubble-v":
                assert all(held <= most for held, most in zip(bounds.in_flight, bound)), sizes
            else:
                assert list(bounds.in_flight) == bound, sizes
            kinds = {action.kind for actions in schedule.actions for action in actions}
            split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
            assert kinds == (split if "zero-bubble" in name else {Kind.FORWARD, Kind.BACKWARD})


def test_forward_only_keeps_every_rank_busy():
    """Evaluation takes m turns for each stage of a rank and the way through the other ranks once;
    on a V down to the last rank and up again.
    """
    for ranks, virtual, name in (
        (1, 1, "1f1b"),
        (4, 1, "1f1b"),
        (4, 2, "zero-bubble-v"),
        (4, 2, "interleaved"),
        (3, 3, "interleaved"),
    ):
        for m in (1, 2, 5, 12):
            schedule = forward_only(SCHEDULES[name].place(ranks, virtual), m)
            check(schedule)
            if m % ranks == 0 or name != "interleaved":
                way = (2 if name == "zero-bubble-v" else 1) * (ranks - 1)
                end = simulate(schedule, Costs.even(schedule, forward=virtual)).end
                assert end == m * virtual + way, (name, ranks, m)
