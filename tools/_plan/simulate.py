"""The time line of a schedule, from the cost of each computation and message.

Called from tools/_plan/stages.py and tools/plot_schedule.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megatron.tools._plan.schedule_check import channel_of, walk

from megatron.parallel.schedule import (
    Action,
    Kind,
    Message,
    Schedule,
    message_made,
    message_needed,
)
from megatron.parallel.timeline import Span, Timeline


@dataclass(frozen=True)
class Costs:
    """Seconds, or any one unit. Every stage has its own: the head, an uneven split."""

    forward: tuple[float, ...]  # by stage
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]  # a whole backward pass costs both
    # that a message fills its link, from one rank to another: bytes / bandwidth
    message: float = 0.0
    latency: float = 0.0  # from then to its arrival
    # of a forward and of a backward pass, in exchanges with other ranks that travel alongside the
    # other pass of a pair, by stage; none
    exchanged_forward: tuple[float, ...] = ()
    exchanged_backward: tuple[float, ...] = ()
    slowdown: float = 0.0  # what an exchange takes of it from what is computed alongside it

    @staticmethod
    def even(
        schedule: Schedule,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
        latency: float = 0.0,
    ) -> Costs:
        """Stages that cost the same. The first three are those of one micro-batch on a whole rank,
        whatever the number of its stages.
        """
        share = schedule.ranks / schedule.stages
        forwards, inputs, weights = (
            (cost * share,) * schedule.stages for cost in (forward, backward_input, backward_weight)
        )
        return Costs(forwards, inputs, weights, message, latency)

    def of(self, kind: Kind, stage: int) -> float:
        """What a computation takes."""
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.BACKWARD:
            return self.backward_input[stage] + self.backward_weight[stage]
        return (
            self.backward_input[stage]
            if kind is Kind.BACKWARD_INPUT
            else self.backward_weight[stage]
        )

    def of_unit(self, unit: tuple[Action, ...]) -> float:
        """What a computation takes, or a pair: its exchanges are hidden by what the other pass
        computes.
        """
        if len(unit) == 1:
            return self.of(unit[0].kind, unit[0].stage)
        backward, forward = unit
        total = self.of(*backward[:2]) + self.of(*forward[:2])
        if not self.exchanged_forward:
            return total
        ahead = self.exchanged_forward[forward.stage]
        back = self.exchanged_backward[backward.stage]
        hidden = min(ahead, self.of(*backward[:2]) - back) + min(
            back, self.of(*forward[:2]) - ahead
        )
        return total - hidden * (1 - self.slowdown)


@dataclass
class _Link:
    """From one rank to another. A message starts when its send and its receive are posted and the
    one before it has left.
    """

    sent: list[float] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    free: float = 0.0

    def arrival(self, number: int, costs: Costs) -> float:
        """Of the message with this number; all up to it are posted on both sides."""
        while len(self.arrived) <= number:
            index = len(self.arrived)
            self.free = max(self.sent[index], self.posted[index], self.free) + costs.message
            self.arrived.append(self.free + costs.latency)
        return self.arrived[number]


class _Messages:
    """All messages under way."""

    def __init__(self, placement: tuple[int, ...], costs: Costs):
        self.placement, self.costs = placement, costs
        self.links: defaultdict[tuple[int, int], _Link] = defaultdict(_Link)
        self.sent: dict[Message, tuple[_Link, int]] = {}

    def receive(self, messages: list[Message], time: float) -> None:
        """Post receives."""
        for message in messages:
            self.links[channel_of(message, self.placement)].posted.append(time)

    def send(self, task: tuple[Action, ...], time: float) -> None:
        """Send what a task makes."""
        for action in task:
            message = message_made(action, self.placement)
            if message is not None:
                link = self.links[channel_of(message, self.placement)]
                self.sent[message] = link, len(link.sent)
                link.sent.append(time)

    def arrival(self, task: tuple[Action, ...]) -> float:
        """When all messages that a task needs have arrived."""
        last = 0.0
        for action in task:
            message = message_needed(action, self.placement)
            if message is not None:
                link, number = self.sent.pop(message)
                last = max(last, link.arrival(number, self.costs))
        return last


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """When each computation runs, the earliest that order and messages allow. Raises ScheduleError
    on a deadlock; `check` specifies what else is wrong.
    """
    placement, ranks = schedule.placement, range(schedule.ranks)
    rows: list[list[Span]] = [[] for _ in ranks]
    clock = [0.0] * len(ranks)
    messages = _Messages(placement, costs)
    tasks, receives = [schedule.tasks(rank) for rank in ranks], schedule.receives
    for rank, index in walk(schedule):
        task = tasks[rank][index]
        messages.receive(receives[rank][index], clock[rank])
        begin = max(clock[rank], messages.arrival(task))
        end = clock[rank] = begin + costs.of_unit(task)
        rows[rank] += [Span(*action, begin, end) for action in task]  # type: ignore[call-arg]
        messages.send(task, end)
    return Timeline(schedule.name, placement, schedule.micro_batches, tuple(map(tuple, rows)))
