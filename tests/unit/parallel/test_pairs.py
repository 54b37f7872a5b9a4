"""Schedules in which a backward pass overlaps the forward pass of a later micro-batch: right by
the checker, within their bounds, without more idle time than those without.
"""

from __future__ import annotations

import dataclasses

import pytest
from megatron.tools._plan.schedule_check import ScheduleError, check
from megatron.tools._plan.simulate import Costs, simulate

from megatron.parallel.schedule import Action, Kind, build_schedule
from megatron.parallel.timeline import Span

SIZES = [
    (name, ranks, virtual, m)
    for name, stages in (("1f1b", (1,)), ("interleaved", (1, 2, 3)))
    for ranks in (1, 2, 3, 4, 5, 8)
    for virtual in stages
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 20)
]


def ahead(name: str, ranks: int, virtual: int, m: int, rank: int) -> int:
    """Forward passes of a rank before its first pair."""
    more = 0 if name == "1f1b" else (virtual - 1) * -(-m // max(m // ranks, 1))
    return min(virtual * m, 2 * (ranks - rank - 1) + 1 + more)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_all_sizes_are_right_and_bounded(name):
    for _, ranks, virtual, m in (size for size in SIZES if size[0] == name):
        schedule = build_schedule(name, ranks, virtual, m, True)
        bounds = check(schedule)
        assert bounds.ascending, (ranks, virtual, m)
        for rank in range(ranks):
            before = ahead(name, ranks, virtual, m, rank)
            units = schedule.tasks(rank)
            sizes = [len(unit) for unit in units]
            pairs = virtual * m - before
            assert sizes == [1] * before + [2] * pairs + [1] * before, (ranks, virtual, m)
            # within a pair both activations are alive
            assert bounds.in_flight[rank] == min(before + 1, virtual * m)
            assert all(
                forward.stage != backward.stage or forward.micro > backward.micro
                for backward, forward in (unit for unit in units if len(unit) == 2)
            )


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pairs_leave_no_rank_idle_between(name, virtual, ranks):
    """A rank that has begun its pairs waits for none: a pair takes as long as its two passes, and
    messages between neighbours have been made two pairs before.
    """
    m = 4 * ranks
    schedule = build_schedule(name, ranks, virtual, m, True)
    line = simulate(schedule, Costs.even(schedule))
    for rank, row in enumerate(line.rows):
        paired = [row[i : i + 2] for i in range(len(row) - 1) if row[i][3:] == row[i + 1][3:]]
        assert len(paired) == virtual * m - ahead(name, ranks, virtual, m, rank)
        for (_, before), (after, _) in zip(paired, paired[1:]):
            assert after.begin == pytest.approx(before.end)
        assert line.busy(rank) == pytest.approx(3.0 * m)


def test_exchanges_are_hidden_by_the_other_pass():
    """One rank, forward pass 3 with 1 of exchanges, backward pass 6 with 2: a pair takes what both
    compute; with exchanges longer than the other computes, the rest of them.
    """
    schedule = build_schedule("1f1b", 1, 1, 5, True)
    costs = Costs((3.0,), (4.0,), (2.0,), exchanged_forward=(1.0,), exchanged_backward=(2.0,))
    assert simulate(schedule, costs).end == 3 + 4 * (9 - 3) + 6
    slowed = dataclasses.replace(costs, slowdown=0.5)
    assert simulate(schedule, slowed).end == 3 + 4 * (9 - 1.5) + 6
    # 2.5 of 3 are sent, and 5 of 6: 0.5 and 1 are computed
    sent = dataclasses.replace(costs, exchanged_forward=(2.5,), exchanged_backward=(5.0,))
    assert simulate(schedule, sent).end == 3 + 4 * (9 - 1.5) + 6
    plain = build_schedule("1f1b", 1, 1, 5)
    assert simulate(plain, costs).end == 5 * 9


def test_a_pair_waits_for_both_messages():
    """Rank 1 of two, whose pair needs the second activations, which rank 0 makes at 7."""
    schedule = build_schedule("1f1b", 2, 1, 3, True)
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), latency=5.0)
    row = simulate(schedule, costs).rows[1]
    assert row[0] == Span(Kind.FORWARD, 1, 0, 6.0, 7.0)
    assert row[1] == Span(Kind.BACKWARD, 1, 0, 7.0, 10.0)
    assert row[2] == Span(Kind.FORWARD, 1, 1, 7.0, 10.0)


def test_a_pair_that_waits_for_itself_is_found():
    """One forward pass less before the first pair: the ranks' pairs wait for each other."""
    schedule = build_schedule("1f1b", 2, 1, 4, True)
    first = list(schedule.actions[0])
    # rank 0's first backward pass overlaps its second forward pass, which rank 1's pair needs
    assert [action.kind.value for action in first[:3]] == ["F", "F", "F"]
    backward = Action(Kind.BACKWARD, 0, 0)
    first.remove(backward)
    first.insert(first.index(Action(Kind.FORWARD, 0, 1)), backward)
    broken = dataclasses.replace(schedule, actions=(tuple(first), schedule.actions[1]))
    with pytest.raises(ScheduleError, match="deadlock: rank 0, action .* waits for rank 1"):
        check(broken)
