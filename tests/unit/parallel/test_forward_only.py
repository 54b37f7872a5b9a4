"""Evaluation waits for old sends, which training never does: that must not close a circle."""

from collections import Counter, defaultdict

import pytest

from megatron.config.schedules import SCHEDULES
from megatron.parallel.messages import MAX_UNACKNOWLEDGED
from megatron.parallel.schedule import Schedule, forward_only, message_made, message_needed


def steps_of(schedule: Schedule) -> list[list[tuple]]:
    """By rank what it does, in order: (what, message)."""
    found = []
    for actions, receives in zip(schedule.actions, schedule.receives):
        steps = []
        for action, posted in zip(actions, receives, strict=True):
            steps += [("receive", message) for message in posted]
            steps.append(("compute", message_needed(action, schedule.placement)))
            if made := message_made(action, schedule.placement):
                steps.append(("send", made))
        found.append(steps)
    return found


def ends(lists, placement, limit):
    """Whether all lists end when a rank stops behind a send while more than `limit` of its outputs
    are not received.
    """
    at, before = [0] * len(lists), None
    sent, posted, arrived = defaultdict(list), Counter(), {None}
    while at != before:
        before = list(at)
        for rank, steps in enumerate(lists):
            for what, message in steps[at[rank] :]:
                if what == "compute":
                    if message not in arrived:
                        break
                    at[rank] += 1
                    continue
                channel = placement[message.source], placement[message.stage]
                if what == "receive":
                    posted[channel] += 1
                elif message not in sent[channel]:
                    sent[channel].append(message)
                arrived.update(sent[channel][: posted[channel]])
                if what == "send" and len(sent[channel]) - posted[channel] > limit:
                    break
                at[rank] += 1
    return at == [len(steps) for steps in lists]


@pytest.mark.parametrize(
    "name, virtual", [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble-v", 2)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_evaluation_that_waits_for_old_sends_ends(name, virtual, ranks):
    for micro_batches in (1, 2, 3, 5, 13):
        schedule = forward_only(SCHEDULES[name].place(ranks, virtual), micro_batches)
        lists = steps_of(schedule)
        assert ends(lists, schedule.placement, MAX_UNACKNOWLEDGED)
        assert ends(lists, schedule.placement, 1)


def test_the_machine_sees_a_circle():
    placement = 0, 1, 0
    first, second = steps_of(forward_only(placement, 3))
    late = [step for step in first if step[0] != "receive"]
    posts = [step for step in first if step[0] == "receive"]
    use = late.index(("compute", posts[0][1]))
    crossed = [*late[:use], *posts, *late[use:]]
    # receives posted at the last moment are late, not wrong
    assert ends([crossed, second], placement, MAX_UNACKNOWLEDGED)
    assert not ends([late, second], placement, MAX_UNACKNOWLEDGED)
