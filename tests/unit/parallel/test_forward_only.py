"""Evaluation waits for old sends, which training never does: that must not close a circle."""

from collections import Counter, defaultdict

import pytest

from megatron.parallel.messages import MAX_UNACKNOWLEDGED
from megatron.parallel.schedule import (
    Kind,
    Schedule,
    channel_of,
    forward_only,
    message_needed,
    place,
)


def ends(schedule, limit):
    """Whether all lists end when a rank stops behind a send while more than `limit` of its outputs
    are not received.
    """
    at, before = [0] * schedule.ranks, None
    sent, posted, arrived = defaultdict(list), Counter(), {None}
    while at != before:
        before = list(at)
        for rank, actions in enumerate(schedule.actions):
            for action in actions[at[rank] :]:
                channel, message = channel_of(action, schedule.placement)
                if channel is None:
                    if message_needed(action, schedule.placement) not in arrived:
                        break
                    at[rank] += 1
                    continue
                if action.kind is Kind.RECEIVE_FORWARD:
                    posted[channel] += 1
                elif message not in sent[channel]:
                    sent[channel].append(message)
                arrived.update(sent[channel][: posted[channel]])
                is_send = action.kind is Kind.SEND_FORWARD
                if is_send and len(sent[channel]) - posted[channel] > limit:
                    break
                at[rank] += 1
    return at == [len(actions) for actions in schedule.actions]


@pytest.mark.parametrize(
    "name, virtual", [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble-v", 2)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_evaluation_that_waits_for_old_sends_ends(name, virtual, ranks):
    for micro_batches in (1, 2, 3, 5, 13):
        schedule = forward_only(place(name, ranks, virtual), micro_batches)
        assert ends(schedule, MAX_UNACKNOWLEDGED) and ends(schedule, 1)


def test_the_machine_sees_a_circle():
    schedule = forward_only((0, 1, 0), 3)
    late = [action for action in schedule.actions[0] if action.kind is not Kind.RECEIVE_FORWARD]
    posts = [action for action in schedule.actions[0] if action.kind is Kind.RECEIVE_FORWARD]
    uses = [index for index, action in enumerate(late) if action.stage == 2]
    crossed = Schedule(
        "crossed", (0, 1, 0), 3, ((*late[: uses[0]], *posts, *late[uses[0] :]), schedule.actions[1])
    )
    assert ends(crossed, MAX_UNACKNOWLEDGED), (
        "receives posted at the last moment are late, not wrong"
    )
    assert not ends(
        Schedule("never", (0, 1, 0), 3, (tuple(late), schedule.actions[1])), MAX_UNACKNOWLEDGED
    )
