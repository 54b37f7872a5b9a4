"""The simulator against what is known in closed form, and time lines."""

from __future__ import annotations

import json
import random

import pytest
from megatron.tools._plan.drawing import idle_inside, peak_activations
from megatron.tools._plan.simulate import Costs, simulate
from megatron.tools._plan.timeline_files import read_timeline
from random_schedules import random_placement, random_schedule

from megatron.parallel.schedule import Action, Kind, Schedule, build_schedule
from megatron.parallel.timeline import Span, Timeline

F, B = Kind.FORWARD, Kind.BACKWARD


def run(
    name: str, ranks: int, m: int, virtual: int = 1, **costs: float
) -> tuple[Schedule, Timeline]:
    schedule = build_schedule(name, ranks, virtual, m)
    return schedule, simulate(schedule, Costs.even(schedule, **costs))


def idle(line: Timeline) -> list[float]:
    return [line.idle(rank) for rank in range(len(line.rows))]


def test_interleaving_divides_the_bubble():
    """Idle 3 (P - 1) / V for every m of at least P, also those that P does not divide."""
    for ranks in (1, 2, 3, 4, 8):
        for virtual in (1, 2, 3, 4):
            for m in (ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 2):
                _, line = run("interleaved", ranks, m, virtual)
                expected = [3 * (ranks - 1) / virtual] * ranks
                assert idle(line) == pytest.approx(expected), (ranks, virtual, m)


def test_zero_bubble_is_idle_a_third_of_1f1b():
    """P - 1 a rank from m = P on, P - m more below; min(m, P) micro-batches held on every rank."""
    for ranks in (1, 2, 3, 4, 5, 8, 16):
        for m in (1, 2, 3, ranks, ranks + 1, 2 * ranks, 2 * ranks + 3, 5 * ranks):
            schedule, line = run("zero-bubble", ranks, m)
            assert idle(line) == [ranks - 1 + max(ranks - m, 0)] * ranks, (ranks, m)
            assert peak_activations(schedule) == (min(m, ranks),) * ranks
    assert idle(run("zero-bubble", 8, 16)[1]) == [7] * 8 and idle(run("1f1b", 8, 16)[1]) == [21] * 8


def test_the_v_schedule_has_no_bubble_of_its_own():
    """From 2 P - 1 micro-batches on a rank waits for the pipeline to fill or to drain, (P - 1) / 2
    in all, and never in between.
    """
    for ranks in (1, 2, 3, 4, 8):
        for m in (2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 3 * ranks, 5 * ranks + 1):
            schedule, line = run("zero-bubble-v", ranks, m, 2)
            assert idle_inside(line) == [0] * ranks, (ranks, m)
            assert idle(line) == [(ranks - 1) / 2] * ranks
            assert max(peak_activations(schedule)) <= ranks + 0.5
        for m in range(1, 2 * ranks - 1):
            schedule, line = run("zero-bubble-v", ranks, m, 2)
            assert idle(line) == [max((ranks - 1) / 2, 2 * ranks - 1 - m)] * ranks, (ranks, m)
            assert max(peak_activations(schedule)) == min(m, ranks)
    assert idle(run("zero-bubble-v", 8, 16, 2)[1]) == [3.5] * 8


def test_messages_take_latency_once_and_their_link_each():
    """One forward pass after the other through 3 ranks; then through links that are slower than the
    stages.
    """
    placement, m = (0, 1, 2), 5
    actions = tuple(tuple(Action(F, stage, i) for i in range(m)) for stage in range(3))
    schedule = Schedule("forward", placement, m, actions)
    for message, end in ((0.5, 3 + 2 * 0.75 + (m - 1)), (4.0, 3 + 2 * 4.25 + 4 * (m - 1))):
        costs = Costs.even(schedule, latency=0.25, message=message)
        assert simulate(schedule, costs).end == end


def test_a_message_starts_when_its_receive_is_posted():
    """Rank 1 posts its second receive at 12, when its first computation is over: what was sent at 2
    arrives at 12 + 6.
    """
    down = [Action(F, stage, i) for stage in (0, 3) for i in (0, 1)]
    up = [Action(F, stage, i) for i in (0, 1) for stage in (1, 2)]
    costs = Costs((1.0, 5.0, 5.0, 1.0), (0.0,) * 4, (0.0,) * 4, message=6.0)
    line = simulate(Schedule("late", (0, 1, 1, 0), 2, (tuple(down), tuple(up))), costs)
    times = [[(span.begin, span.end) for span in row] for row in line.rows]
    assert times[1] == [(7, 12), (12, 17), (18, 23), (23, 28)]
    assert times[0] == [(0, 1), (1, 2), (23, 24), (34, 35)]


def test_deferred_weight_gradients_and_sizes_of_stages():
    """ZB-H1 on 2 ranks, 3 micro-batches: rank 1 computes F I F I W F I W W."""
    schedule = build_schedule("zero-bubble", 2, 1, 3)
    assert peak_activations(schedule) == (2, 2)
    assert peak_activations(schedule, held=(10.0, 4.0), deferred=0.5) == (20.0, 6.0)
    assert peak_activations(schedule, held=(10.0, 4.0), deferred=0.0) == (20.0, 4.0)


def test_any_valid_schedule_runs_in_time():
    """Spans of a rank do not overlap, nothing starts before what it uses, and no rank is lazy: each
    begins when rank and input are free.
    """
    for seed in range(60):
        draw = random.Random(seed)
        ranks = draw.randint(1, 4)
        placement = random_placement(draw, ranks, draw.randint(ranks, 6))
        schedule = random_schedule(draw, placement, draw.randint(1, 4))
        costs = Costs(*(tuple(draw.randint(1, 5) for _ in placement) for _ in range(3)))
        line = simulate(schedule, costs)
        ends = {span[:3]: span.end for row in line.rows for span in row}
        for row in line.rows:
            free = 0.0
            for kind, stage, micro, begin, end in row:
                inputs: list[tuple[Kind, int, int]] = []
                if kind is F:
                    inputs = [(F, stage - 1, micro)]
                elif kind in (B, Kind.BACKWARD_INPUT):
                    inputs = [(each, stage + 1, micro) for each in (B, Kind.BACKWARD_INPUT)]
                assert begin == max([free, *(ends[each] for each in inputs if each in ends)]), seed
                assert end == begin + costs.of(kind, stage), seed
                free = end


def test_a_time_line_counts_its_idle_time():
    """Two ranks from 1 to 9: rank 0 works 2 + 3 with a gap of 1 and ends 2 early, rank 1 begins 4
    late and works 4.
    """
    rows = (
        (Span(F, 0, 0, 1.0, 3.0), Span(B, 0, 0, 4.0, 7.0)),
        (Span(F, 1, 0, 5.0, 6.5), Span(B, 1, 0, 6.5, 9.0)),
    )
    line = Timeline("1f1b", (0, 1), 1, rows)
    assert (line.begin, line.end) == (1, 9)
    assert [line.busy(0), line.busy(1)] == [5, 4] and idle(line) == [3, 4]
    assert line.bubble == 1 - 9 / 16
    empty = Timeline("1f1b", (0, 1), 1, ((), ()))
    assert (empty.bubble, empty.busy(0)) == (0, 0)


def test_a_time_line_survives_json():
    _, line = run("zero-bubble-v", 3, 4, 2, latency=0.1, message=1 / 3)
    assert read_timeline(line.to_json()) == line
    assert json.loads(line.to_json())["rows"][1][0][:3] == ["F", 1, 0]


@pytest.mark.parametrize(
    "rows, words",
    [
        ([[["F", 0, 0, 0.0, 1.0]], [["F", 1, 0, 2.0, 1.0]]], "rank 1: Span.kind=<Kind.FORWARD"),
        ([[["F", 0, 0, 0.0, 2.0], ["B", 0, 0, 1.0, 3.0]], []], "does not end before"),
        ([[["R", 0, 0, 0.0, 2.0]], []], "rank 0 has Span"),
        ([[["F", 0, 0, 0.0]], []], "not the JSON of a time line: TypeError"),
        ([[["F", 0, 0, 0.0, 1.0]]], "names a rank that has no row"),
    ],
)
def test_what_is_no_time_line_is_refused(rows, words):
    _, line = run("1f1b", 2, 1)
    with pytest.raises(ValueError, match=words):
        read_timeline(json.dumps(json.loads(line.to_json()) | {"rows": rows}))
