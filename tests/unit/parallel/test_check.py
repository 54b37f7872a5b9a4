"""The checker: accepts any valid schedule, and refuses others with the reason."""

from __future__ import annotations

import dataclasses
import random

import pytest
from megatron.tools._plan.schedule_check import ScheduleError, check
from random_schedules import random_placement, random_schedule

from megatron.parallel.schedule import Action, Kind, Schedule, build_schedule, forward_only

F, B = Kind.FORWARD, Kind.BACKWARD


def changed(schedule: Schedule, rank: int, edit) -> Schedule:
    """The schedule with `edit` done to one rank's list."""
    actions = list(schedule.actions[rank])
    edit(actions)
    return dataclasses.replace(
        schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    )


def accepted(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def test_random_schedules_are_accepted():
    for seed in range(200):
        draw = random.Random(seed)
        ranks, ascending, training = draw.randint(1, 4), draw.random() < 0.5, draw.random() < 0.9
        placement = random_placement(draw, ranks, draw.randint(ranks, 6))
        check(random_schedule(draw, placement, draw.randint(1, 4), ascending, training))


@pytest.mark.parametrize(
    "schedule",
    [
        build_schedule("1f1b", 3, 1, 4),
        build_schedule("interleaved", 2, 2, 3),
        build_schedule("zero-bubble-v", 2, 2, 3),
        forward_only((0, 1, 0), 3),
    ],
    ids=lambda schedule: schedule.name,
)
def test_without_or_with_a_second_or_another_action_it_is_refused(schedule: Schedule):
    for rank, actions in enumerate(schedule.actions):
        for index, (kind, stage, micro) in enumerate(actions):
            edits = [lambda a: a.pop(index), lambda a: a.insert(index, a[index])]  # noqa: B023
            others = [
                Action(kind, stage, (micro + 1) % schedule.micro_batches),
                Action(kind, (stage + 1) % schedule.stages, micro),
                Action(kind, schedule.stages, micro),
                Action(kind, stage, -1),
            ]
            edits += [lambda a, other=other: a.__setitem__(index, other) for other in others]
            for edit in edits:
                broken = changed(schedule, rank, edit)
                assert not accepted(broken), (rank, index)


def exchange(schedule: Schedule, rank: int, one: Action, two: Action) -> Schedule:
    i, j = (schedule.actions[rank].index(action) for action in (one, two))

    def edit(actions):
        actions[i], actions[j] = actions[j], actions[i]

    return changed(schedule, rank, edit)


GPIPE, ONE = build_schedule("gpipe", 2, 1, 3), build_schedule("1f1b", 2, 1, 3)


CROSSED = exchange(ONE, 1, Action(F, 1, 1), Action(B, 1, 1))
MISPLACED = changed(GPIPE, 0, lambda actions: actions.insert(0, Action(F, 1, 0)))
WRONG = {
    "(backward of stage 1, micro-batch 1) comes before the forward of stage 1, micro": CROSSED,
    "(forward of stage 1, micro-batch 0) is on the wrong rank: stage 1 lies on rank 1": MISPLACED,
    "its placement (0, 2) names other ranks": dataclasses.replace(GPIPE, placement=(0, 2)),
    "0 has for stage 0, micro-batch 3: nothing": dataclasses.replace(GPIPE, micro_batches=4),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_named(words: str):
    schedule = WRONG[words]
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"schedule {schedule.name}: ")


def test_a_circle_of_ranks_is_named():
    """Rank 0 wants stage 2 of micro-batch 0 before it starts micro-batch 1, rank 1 wants
    micro-batch 1 first.
    """
    orders = [
        [Action(F, 0, 0), Action(F, 2, 0), Action(F, 0, 1), Action(F, 2, 1)],
        [Action(F, 1, 1), Action(F, 1, 0)],
    ]
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("crossed", (0, 1, 0), 2, tuple(map(tuple, orders))))
    assert str(caught.value) == (
        "schedule crossed: deadlock: rank 0, action 1 (forward of stage 2, micro-batch 0) "
        "waits for rank 1; rank 1, action 0 (forward of stage 1, micro-batch 1) waits for rank 0"
    )


def test_receives_in_another_order_than_the_sends_are_refused():
    schedule = dataclasses.replace(ONE)
    first, second, *_ = (posts for posts in schedule.receives[1] if posts)
    first[0], second[0] = second[0], first[0]
    with pytest.raises(ScheduleError, match="schedule 1f1b: rank 1 receives .* from rank 0, which"):
        check(schedule)
