"""Activations and their gradients on the way from one stage to the next.

A receive is posted before its computation, which waits for it. A send is started and not awaited:
the schedule itself proves that it has arrived, when a later message comes back from that rank. What
stays on the rank is handed over as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron.distributed.collectives import Handle, start_receive, start_send
from megatron.distributed.groups import Groups
from megatron.distributed.peers import waiting
from megatron.parallel.schedule import WORDS, Action, Kind, Message

MAX_UNACKNOWLEDGED = 2  # sends in flight to a rank in evaluation, where no message comes back


class StageMessages:
    """The messages of this rank. `shape`: [s, b, h] of each. Raises PeerError when a neighbor dies
    or hangs.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        groups: Groups,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.placement, self.groups, self.rank = placement, groups, groups.pp.rank
        self.last_stage = len(placement) - 1
        # Of the schedule that runs: how many of our sends to a rank each message from it proves to
        # have arrived (schedule.acknowledgements).
        self.acknowledgements: dict[Message, tuple[int, int]] = {}
        self.shape, self.dtype, self.device = shape, dtype, device
        self.inbox: dict[Message, Handle | Tensor] = {}
        self.outbox: dict[Message, Tensor] = {}
        # by receiver, oldest first
        self.sending: defaultdict[int, deque[Handle]] = defaultdict(deque)
        self.num_arrived: Counter[int] = Counter()  # of the sends to each rank

    def put(self, message: Message, x: Tensor) -> None:
        """Hand a result to its reader: here, or on the rank that it is sent to."""
        stays = self.placement[message.stage] == self.rank
        (self.inbox if stays else self.outbox)[message] = x

    def wait_for(self, message: Message, action: Action) -> Tensor:
        """Wait for the input of a computation [s, b, h]."""
        coming = self.inbox.pop(message)
        if isinstance(coming, Tensor):
            return coming
        with self._waiting_for(
            self.placement[message.source],
            f"send {_describe(message)} to the {WORDS[action.kind]} pass of stage {action.stage}",
        ):
            x = coming.wait()
        # The sender has computed with some of our earlier messages: free the tensors of those
        # sends.
        to, count = self.acknowledgements[message]
        while self.num_arrived[to] < count:
            self._finish_send(to)  # has arrived: does not wait
        return x

    def send(self, message: Message) -> None:
        """Start to send a result."""
        # Started and not awaited: the host computes on while the message travels.
        to = self.placement[message.stage]
        queue = self.sending[to]
        channel = self.groups.channel(self.rank, to)
        with self._waiting_for(to, f"take {_describe(message)}"):
            queue.append(start_send(self.outbox.pop(message), to, channel, self._tag(message)))
            # in evaluation no message comes back that would prove an arrival
            if not torch.is_grad_enabled() and len(queue) > MAX_UNACKNOWLEDGED:
                self._finish_send(to)

    def receive(self, message: Message) -> None:
        """Post a receive."""
        source = self.placement[message.source]
        channel = self.groups.channel(source, self.rank)
        with self._waiting_for(source, f"send {_describe(message)}"):
            self.inbox[message] = start_receive(
                self.shape, self.dtype, self.device, source, channel, self._tag(message)
            )

    def finish(self) -> None:
        """At the end of a schedule: wait until all sends have arrived."""
        # The last messages of a step have no later message that proves their arrival.
        for to, queue in self.sending.items():
            with self._waiting_for(to, "take the last messages of the step"):
                while queue:
                    queue.popleft().wait()
        self.num_arrived.clear()
        assert not (self.inbox or self.outbox), "the schedule left messages unread or unsent"

    def _finish_send(self, to: int) -> None:
        """Wait for the oldest send to a rank, and free its tensor."""
        self.sending[to].popleft().wait()
        self.num_arrived[to] += 1

    def _tag(self, message: Message) -> int:
        # Unique in a step: a message that is received out of order fails on Gloo instead of being
        # taken for another.
        number = message.micro * len(self.placement) + message.stage
        return 2 * number + (message.kind is Kind.BACKWARD)

    def _waiting_for(self, other: int, what: str) -> AbstractContextManager[None]:
        """Around a wait for a neighbor; names both ranks if it fails."""

        def text(seconds: float) -> str:
            # Built only when the wait has failed: an ordinary wait formats no text.
            ranks = self.groups.pp.ranks
            stages = [str(stage) for stage, rank in enumerate(self.placement) if rank == other]
            named = f"stage{'s' * (len(stages) > 1)} {' and '.join(stages)} (rank {ranks[other]})"
            return (
                f"rank {ranks[self.rank]} waited {seconds:.1f} s for pipeline {named} to "
                f"{what}. That rank"
            )

        return waiting(text)


def _describe(message: Message) -> str:
    kind = "activations" if message.kind is Kind.FORWARD else "the gradient"
    return f"{kind} of micro-batch {message.micro}"
