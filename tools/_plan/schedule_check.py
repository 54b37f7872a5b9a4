"""Proof that a schedule is right, for any lists of actions: complete, in order, its messages
matched, free of deadlock, bounded in memory.

Called from the tests, for every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.parallel.schedule import (
    WORDS,
    Action,
    Kind,
    Message,
    Schedule,
    channel_of,
    message_made,
    message_needed,
    send_of,
    task_at,
)

# of the gradients
PARTS = {Kind.BACKWARD: "IW", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
Place = tuple[int, int]  # rank, index in its list
# sends or receives in order, by sender and receiver
Ends = dict[tuple[int, int], list[tuple[Message, Place]]]


class ScheduleError(ValueError):
    """A schedule that cannot run, or would compute something wrong: names rank and action."""


@dataclass(frozen=True)
class Bounds:
    """What a schedule holds at most, by rank, in pairs of (stage, micro-batch), however long
    computations and messages take.
    """

    # from the forward pass to the backward pass, or to the weight gradient where that is apart
    in_flight: tuple[int, ...]
    # of these, from the forward pass to the backward pass or the input gradient
    saved: tuple[int, ...]
    deferred: tuple[int, ...]  # of these, from the input gradient to the weight gradient
    # messages whose receive is posted and whose computation has not begun
    received: tuple[int, ...]
    # each stage adds up its gradients in the order of the micro-batches: sums bitwise equal to
    # those of every other such schedule
    ascending: bool


def describe(action: Action) -> str:
    """An action as text."""
    return f"{WORDS[action.kind]} of stage {action.stage}, micro-batch {action.micro}"


def check(schedule: Schedule) -> Bounds:
    """The bounds of a schedule, of training or of forward passes alone. Raises ScheduleError at the
    first thing that is wrong.
    """
    where = _computations(schedule)
    _complete(schedule, where)
    _ordered(schedule, where)
    _matched(schedule, where)
    for _ in walk(schedule):
        pass
    return _bounds(schedule)


class _Rendezvous:
    """The sends and receives that are posted so far. A message has arrived when its send and its
    receive are both posted, and those of all earlier messages between the two ranks.
    """

    def __init__(self, placement: tuple[int, ...]):
        self._placement = placement
        # of a sent message, among those from its sender to its receiver
        self._number: dict[Message, int] = {}
        # by sender and receiver
        self._sent: dict[tuple[int, int], int] = {}
        self._posted: dict[tuple[int, int], int] = {}

    def send(self, channel: tuple[int, int], message: Message) -> None:
        """Post the send of a message from one rank to another."""
        number = self._sent.get(channel, 0)
        self._number[message] = number
        self._sent[channel] = number + 1

    def receive(self, channel: tuple[int, int]) -> None:
        """Post the receive of the next message from one rank to another."""
        self._posted[channel] = self._posted.get(channel, 0) + 1

    def arrived(self, message: Message, rank: int) -> bool:
        """Whether a rank has received a message."""
        number = self._number.get(message)
        if number is None:
            return False
        return number < self._posted.get((self._placement[message.source], rank), 0)


def walk(schedule: Schedule) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """(rank, action or pair) of all ranks in an order in which they can happen, each rank's in the
    order of its list.

    Sends are rendezvous (above). A computation, or a pair, waits for the messages that it needs,
    and for nothing else. Raises ScheduleError when all that are left wait: deadlock.
    """
    placement, lists = schedule.placement, schedule.actions
    at = [0] * len(lists)
    messages = _Rendezvous(placement)
    able, listed = deque(range(len(lists))), [True] * len(lists)
    while able:
        rank = able.popleft()
        listed[rank] = False
        while at[rank] < len(lists[rank]):
            unit = task_at(schedule.actions[rank], at[rank], schedule.pairs)
            channel, message = channel_of(unit[0], placement)
            if channel is None:
                if _awaited(unit, rank, placement, messages) is not None:
                    break
            elif unit[0].kind in SENDS:
                messages.send(channel, message)
                receiver = channel[1]
                if not listed[receiver]:
                    able.append(receiver)
                    listed[receiver] = True
            else:
                messages.receive(channel)
            at[rank] += len(unit)
            yield rank, unit
    if any(index < len(actions) for index, actions in zip(at, lists)):
        raise ScheduleError(_deadlock(schedule, at, messages))


def _awaited(
    unit: tuple[Action, ...], rank: int, placement: tuple[int, ...], messages: _Rendezvous
) -> tuple[Action, Message] | None:
    """A computation of a rank that lacks its message, and this."""
    for action in unit:
        needed = message_needed(action, placement)
        if needed is not None and not messages.arrived(needed, rank):
            return action, needed
    return None


def _error(schedule: Schedule, place: Place, problem: str) -> ScheduleError:
    rank, index = place
    return ScheduleError(
        f"schedule {schedule.name}: rank {rank}, action {index} "
        f"({describe(schedule.actions[rank][index])}) {problem}"
    )


def _computations(schedule: Schedule) -> dict[Action, Place]:
    """Where each computation is; each lies on the rank of its stage, and there once."""
    placement = schedule.placement
    if not placement or not all(0 <= rank < schedule.ranks for rank in placement):
        raise ScheduleError(
            f"schedule {schedule.name}: its placement {placement} names other ranks than "
            f"those of its {schedule.ranks} lists"
        )
    where: dict[Action, Place] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            place = (rank, index)
            if (
                not 0 <= action.stage < schedule.stages
                or not 0 <= action.micro < schedule.micro_batches
            ):
                raise _error(
                    schedule,
                    place,
                    (
                        f"does not exist: there are {schedule.stages} stages and "
                        f"{schedule.micro_batches} micro-batches"
                    ),
                )
            if placement[action.stage] != rank:
                raise _error(
                    schedule,
                    place,
                    (
                        f"is on the wrong rank: stage {action.stage} lies on rank "
                        f"{placement[action.stage]}"
                    ),
                )
            if action in where:
                raise _error(
                    schedule, place, f"is a second time in the list, first at {where[action][1]}"
                )
            where[action] = place
    return where


def _complete(schedule: Schedule, where: dict[Action, Place]) -> None:
    """Each stage and micro-batch has one forward pass and, unless there are only these, one
    backward pass, whole or in its two parts.
    """
    training = any(action.kind in PARTS for action in where)
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            found = [kind for kind in (Kind.FORWARD, *PARTS) if Action(kind, stage, micro) in where]
            whole = found == [Kind.FORWARD, Kind.BACKWARD] or found == [
                Kind.FORWARD,
                Kind.BACKWARD_INPUT,
                Kind.BACKWARD_WEIGHT,
            ]
            if not (whole if training else found == [Kind.FORWARD]):
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {schedule.placement[stage]} has for "
                    f"stage {stage}, micro-batch {micro}: "
                    f"{', '.join(WORDS[kind] for kind in found) or 'nothing'}; it must have "
                    "a forward and, to train, a backward or an input gradient and a weight gradient"
                )


def _input_of_backward(
    action: Action, schedule: Schedule, where: dict[Action, Place]
) -> list[Action]:
    """What brings the gradient of a stage's output to its rank; nothing for the last stage, which
    computes the loss.
    """
    _, stage, micro = action
    placement, after = schedule.placement, stage + 1
    if after == schedule.stages:
        return []
    if placement[after] != placement[stage]:
        return [Action(Kind.RECEIVE_BACKWARD, stage, micro)]
    made_by = (Action(Kind.BACKWARD, after, micro), Action(Kind.BACKWARD_INPUT, after, micro))
    return [computation for computation in made_by if computation in where]


def _before(action: Action, schedule: Schedule, where: dict[Action, Place]) -> list[Action]:
    """What must come before an action in the list of its rank."""
    kind, stage, micro = action
    placement = schedule.placement
    if kind is Kind.FORWARD and stage > 0:
        if placement[stage - 1] == placement[stage]:
            return [Action(Kind.FORWARD, stage - 1, micro)]
        return [Action(Kind.RECEIVE_FORWARD, stage, micro)]
    if kind is Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, micro)]
    if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
        forward = Action(Kind.FORWARD, stage, micro)
        return [forward, *_input_of_backward(action, schedule, where)]
    if kind is Kind.SEND_FORWARD:
        return [Action(Kind.FORWARD, stage, micro)]
    if kind is Kind.SEND_BACKWARD:
        whole = Action(Kind.BACKWARD, stage, micro)
        return [whole if whole in where else Action(Kind.BACKWARD_INPUT, stage, micro)]
    return []


def _ordered(schedule: Schedule, where: dict[Action, Place]) -> None:
    """On each rank what a computation uses of that rank comes before it, and so does the receive of
    what comes from others.
    """
    for action, place in where.items():
        for earlier in _before(action, schedule, where):
            if earlier not in where:
                raise _error(schedule, place, f"has no {describe(earlier)}")
            if where[earlier] > place:
                raise _error(
                    schedule,
                    place,
                    f"comes before the {describe(earlier)}, action {where[earlier][1]}",
                )


def _matched(schedule: Schedule, where: dict[Action, Place]) -> None:
    """What one rank sends to another is what that one receives, in the same order, and nothing else
    travels.
    """
    sends, receives = _ends(schedule, where)
    for channel in sends | receives:
        _same_order(schedule, channel, sends.get(channel, []), receives.get(channel, []))


def _ends(schedule: Schedule, where: dict[Action, Place]) -> tuple[Ends, Ends]:
    """All sends and all receives; each has another rank at its other end, and all that must be sent
    is.
    """
    placement = schedule.placement
    sends: Ends = {}
    receives: Ends = {}
    for action, place in where.items():
        channel, message = channel_of(action, placement)
        if channel is None:
            if message_made(action, placement) is not None and send_of(action) not in where:
                raise _error(
                    schedule, place, f"is not sent: there is no {describe(send_of(action))}"
                )
            continue
        if channel[0] == channel[1] or -1 in channel:
            raise _error(schedule, place, "has no rank at its other end")
        ends = sends if action.kind in SENDS else receives
        ends.setdefault(channel, []).append((message, place))
    return sends, receives


def _same_order(
    schedule: Schedule,
    channel: tuple[int, int],
    sends: list[tuple[Message, Place]],
    receives: list[tuple[Message, Place]],
) -> None:
    """The sends of one rank to another and the receives there are of the same messages, in the same
    order.
    """
    sender, receiver = channel
    for number, ((sent, there), (received, here)) in enumerate(zip(sends, receives)):
        if sent != received:
            rank, index = there
            other = describe(schedule.actions[rank][index])
            raise _error(
                schedule,
                here,
                f"is number {number} from rank {rank}, which there has the {other}, action {index}",
            )
    if len(sends) > len(receives):
        raise _error(
            schedule,
            sends[len(receives)][1],
            f"is not received: rank {receiver} receives {len(receives)} messages of rank {sender}",
        )
    if len(receives) > len(sends):
        raise _error(
            schedule,
            receives[len(sends)][1],
            f"is not sent: rank {sender} sends {len(sends)} messages to rank {receiver}",
        )


def _deadlock(schedule: Schedule, at: list[int], messages: _Rendezvous) -> str:
    """Who waits for whom: a circle, or a chain that ends at a rank that has nothing left to do."""
    waits: dict[int, str] = {}
    rank = next(rank for rank, index in enumerate(at) if index < len(schedule.actions[rank]))
    while rank not in waits and at[rank] < len(schedule.actions[rank]):
        unit = task_at(schedule.actions[rank], at[rank], schedule.pairs)
        awaited = _awaited(unit, rank, schedule.placement, messages)
        assert awaited is not None
        action, message = awaited
        index = at[rank] + unit.index(action)
        source = schedule.placement[message.source]
        waits[rank] = f"rank {rank}, action {index} ({describe(action)}) waits for rank {source}"
        rank = source
    if rank in waits:
        chain = list(waits.values())[list(waits).index(rank) :]
    else:
        chain = [*waits.values(), f"rank {rank} has ended"]
    return f"schedule {schedule.name}: deadlock: {'; '.join(chain)}"


def _bounds(schedule: Schedule) -> Bounds:
    peaks = [_peaks(rank, schedule) for rank in range(schedule.ranks)]
    in_flight, saved, deferred, received = zip(*peaks)
    return Bounds(in_flight, saved, deferred, received, all(map(_ascending, schedule.actions)))


def _peaks(rank: int, schedule: Schedule) -> tuple[int, int, int, int]:
    """`in_flight`, `saved`, `deferred`, `received` of a rank."""
    training = any(action.kind in PARTS for action in schedule.actions[rank])
    saved = deferred = received = 0
    peaks = [0, 0, 0, 0]
    for action in schedule.in_memory(rank):
        kind = action.kind
        if kind is Kind.RECEIVE_FORWARD or kind is Kind.RECEIVE_BACKWARD:
            received += 1
        elif message_needed(action, schedule.placement) is not None:
            received -= 1
        if kind is Kind.FORWARD:
            saved += training
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            saved -= 1
            deferred += kind is Kind.BACKWARD_INPUT
        elif kind is Kind.BACKWARD_WEIGHT:
            deferred -= 1
        if (
            saved + deferred > peaks[0]
            or saved > peaks[1]
            or deferred > peaks[2]
            or received > peaks[3]
        ):
            peaks = [
                max(pair) for pair in zip(peaks, (saved + deferred, saved, deferred, received))
            ]
    most, most_saved, most_deferred, most_received = peaks
    return most, most_saved, most_deferred, most_received


def _ascending(actions: tuple[Action, ...]) -> bool:
    """Whether each stage makes its gradients, at input gradients and at weight gradients, in the
    order of the micro-batches.
    """
    made: dict[tuple[str, int], int] = {}
    for kind, stage, micro in actions:
        for part in PARTS.get(kind, ""):
            if made.get((part, stage), -1) > micro:
                return False
            made[part, stage] = micro
    return True
