"""Proof that a schedule is right, for any lists of actions: complete, in order, its messages
received as they are sent, free of deadlock, bounded in memory.

Called from the tests, for every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.parallel.schedule import (
    WORDS,
    Action,
    Kind,
    Message,
    Schedule,
    message_made,
    message_needed,
    messages_made,
)

# of the gradients
PARTS = {Kind.BACKWARD: "IW", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
Place = tuple[int, int]  # rank, index in its list


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
    _received_as_sent(schedule)
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

    def receive(self, messages: Sequence[Message]) -> None:
        """Post receives of the next messages between their ranks."""
        for message in messages:
            channel = channel_of(message, self._placement)
            self._posted[channel] = self._posted.get(channel, 0) + 1

    def send(self, task: tuple[Action, ...]) -> list[int]:
        """Post the sends of what a task makes; the ranks that receive it."""
        receivers = []
        for action in task:
            message = message_made(action, self._placement)
            if message is not None:
                channel = channel_of(message, self._placement)
                number = self._number[message] = self._sent.get(channel, 0)
                self._sent[channel] = number + 1
                receivers.append(channel[1])
        return receivers

    def awaited(self, task: tuple[Action, ...]) -> tuple[Action, Message] | None:
        """A computation of a task that lacks its message, and this."""
        for action in task:
            needed = message_needed(action, self._placement)
            if needed is None:
                continue
            number = self._number.get(needed)
            if number is None or number >= self._posted.get(channel_of(needed, self._placement), 0):
                return action, needed
        return None


def channel_of(message: Message, placement: tuple[int, ...]) -> tuple[int, int]:
    """The ranks that send and receive a message."""
    return placement[message.source], placement[message.stage]


def walk(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(rank, index of its task) of all ranks in an order in which they can happen, each rank's in
    the order of its list.

    Sends are rendezvous (above). A computation, or a pair, waits for the messages that it needs,
    and for nothing else. Raises ScheduleError when all that are left wait: deadlock.
    """
    ranks = range(schedule.ranks)
    tasks, receives = [schedule.tasks(rank) for rank in ranks], schedule.receives
    # done, and those whose receives are posted: one more while a task waits
    at, posted = [0] * len(ranks), [0] * len(ranks)
    messages = _Rendezvous(schedule.placement)
    able, listed = deque(ranks), [True] * len(ranks)
    while able:
        rank = able.popleft()
        listed[rank] = False
        while at[rank] < len(tasks[rank]):
            index = at[rank]
            task = tasks[rank][index]
            if posted[rank] == index:
                posted[rank] += 1
                messages.receive(receives[rank][index])
            if messages.awaited(task) is not None:
                break
            for receiver in messages.send(task):
                if not listed[receiver]:
                    able.append(receiver)
                    listed[receiver] = True
            at[rank] += 1
            yield rank, index
    left = [own[index] if index < len(own) else None for own, index in zip(tasks, at)]
    if any(left):
        raise ScheduleError(_deadlock(schedule, left, messages))


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
    """The backward pass that makes the gradient of a stage's output on its rank: none for the last
    stage, which computes the loss, or where another rank sends it.
    """
    _, stage, micro = action
    placement, after = schedule.placement, stage + 1
    if after == schedule.stages or placement[after] != placement[stage]:
        return []
    made_by = (Action(Kind.BACKWARD, after, micro), Action(Kind.BACKWARD_INPUT, after, micro))
    return [computation for computation in made_by if computation in where]


def _before(action: Action, schedule: Schedule, where: dict[Action, Place]) -> list[Action]:
    """What must come before an action in the list of its rank."""
    kind, stage, micro = action
    placement = schedule.placement
    if kind is Kind.FORWARD and stage > 0:
        is_here = placement[stage - 1] == placement[stage]
        return [Action(Kind.FORWARD, stage - 1, micro)] if is_here else []
    if kind is Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, micro)]
    if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
        forward = Action(Kind.FORWARD, stage, micro)
        return [forward, *_input_of_backward(action, schedule, where)]
    return []


def _ordered(schedule: Schedule, where: dict[Action, Place]) -> None:
    """On each rank what a computation uses of that rank comes before it."""
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


def _received_as_sent(schedule: Schedule) -> None:
    """Between two ranks receives are posted in the order of the sends: NCCL matches them by it."""
    for (sender, receiver), sent in messages_made(schedule).items():
        posts = chain.from_iterable(schedule.receives[receiver])
        posted = [each for each in posts if schedule.placement[each.source] == sender]
        if posted != sent:
            raise ScheduleError(
                f"schedule {schedule.name}: rank {receiver} receives {posted} from rank {sender}, "
                f"which sends {sent}"
            )


def _deadlock(
    schedule: Schedule, left: list[tuple[Action, ...] | None], messages: _Rendezvous
) -> str:
    """Who waits for whom: a circle, or a chain that ends at a rank that has nothing `left`."""
    waits: dict[int, str] = {}
    rank = next(rank for rank, task in enumerate(left) if task)
    while rank not in waits and (task := left[rank]):
        awaited = messages.awaited(task)
        assert awaited is not None
        action, message = awaited
        index, source = schedule.actions[rank].index(action), schedule.placement[message.source]
        waits[rank] = f"rank {rank}, action {index} ({describe(action)}) waits for rank {source}"
        rank = source
    if rank in waits:
        circle = list(waits.values())[list(waits).index(rank) :]
    else:
        circle = [*waits.values(), f"rank {rank} has ended"]
    return f"schedule {schedule.name}: deadlock: {'; '.join(circle)}"


def _bounds(schedule: Schedule) -> Bounds:
    peaks = [_peaks(rank, schedule) for rank in range(schedule.ranks)]
    in_flight, saved, deferred, received = zip(*peaks)
    return Bounds(in_flight, saved, deferred, received, all(map(_ascending, schedule.actions)))


def in_memory(schedule: Schedule, rank: int) -> Iterator[Action]:
    """A rank's actions in an order in which as much is kept at a time as in the step: of a pair,
    the forward pass keeps what it makes before the backward pass has freed anything.
    """
    for task in schedule.tasks(rank):
        yield from reversed(task)


def _peaks(rank: int, schedule: Schedule) -> tuple[int, int, int, int]:
    """`in_flight`, `saved`, `deferred`, `received` of a rank."""
    training = any(action.kind in PARTS for action in schedule.actions[rank])
    saved = deferred = received = 0
    peaks = [0, 0, 0, 0]
    posts = chain.from_iterable(
        [len(posted), *[0] * (len(task) - 1)]
        for posted, task in zip(schedule.receives[rank], schedule.tasks(rank))
    )
    for posted, action in zip(posts, in_memory(schedule, rank)):
        kind = action.kind
        received += posted
        peaks[3] = max(peaks[3], received)
        if message_needed(action, schedule.placement) is not None:
            received -= 1
        if kind is Kind.FORWARD:
            saved += training
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            saved -= 1
            deferred += kind is Kind.BACKWARD_INPUT
        elif kind is Kind.BACKWARD_WEIGHT:
            deferred -= 1
        peaks[:3] = map(max, peaks, (saved + deferred, saved, deferred))
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
