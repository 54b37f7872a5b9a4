"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone; sends are started and forgotten until the schedule itself proves that they have arrived.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.dist.collectives import gather_bytes
from megatron.dist.groups import Groups
from megatron.dist.p2p import Receiving, Sending
from megatron.dist.peers import waiting
from megatron.model.block import BlockWrapper, Call, MicroBatch
from megatron.model.gpt import GPTModel
from megatron.parallel.check import WORDS, channel_of, source_of
from megatron.parallel.schedule import COMPUTATIONS, Action, Kind, Message, Schedule, makes, needs, receipts
from megatron.parallel.timeline import Span, Timeline

METHODS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "backward_input", Kind.BACKWARD_WEIGHT: "backward_weight"}
UNRECEIVED = 2  # outputs that a rank in evaluation runs ahead of a neighbour


class Recording:
    """When this rank computed what, in one step. On a GPU by events, which are read when the step is long over."""

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []
        self.start = self.now()

    def now(self) -> Any:
        """A moment of the work queued so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, begin: Any) -> None:
        """A computation that began then has just ended."""
        self.marks.append((action, begin, self.now()))

    def spans(self) -> tuple[Span, ...]:
        """The computations, in seconds since the recording was made."""
        def seconds(moment: Any) -> float:
            return self.start.elapsed_time(moment) / 1000 if self.device.type == "cuda" else moment - self.start

        return tuple(Span(*action, seconds(begin), seconds(end)) for action, begin, end in self.marks)


class _Known(NamedTuple):
    """What a schedule means for one rank."""

    schedule: Schedule
    receipts: dict[Message, tuple[int, int]]
    calls: list[Call]  # of the wrapper
    last_uses: frozenset[Action]  # of each micro-batch


class Pipeline:
    """The stages of this rank and their neighbours. `placement`: stage -> pipeline rank; `shape`: [s, b, h] of what travels between stages."""

    def __init__(self, model: GPTModel, wrapper: BlockWrapper, placement: tuple[int, ...], shape: tuple[int, int, int], groups: Groups,
                 device: torch.device):
        self.model, self.wrapper, self.placement, self.shape, self.groups, self.device = model, wrapper, placement, shape, groups, device
        self.rank = groups.pp.rank
        own = [stage for stage, rank in enumerate(placement) if rank == self.rank]
        assert len(own) == len(model.chunks)
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(own)}
        self.known: dict[int, _Known] = {}  # by identity: a schedule is long

    @property
    def has_head(self) -> bool:
        """Whether losses come to light here."""
        return self.placement[-1] == self.rank

    def know(self, schedule: Schedule) -> _Known:
        """What a schedule means for this rank, found out once."""
        if id(schedule) not in self.known:
            actions = [action for action in schedule.actions[self.rank] if action.kind in COMPUTATIONS]
            calls = []
            for kind, stage, _ in actions:
                units = self.model.chunks[self.chunk_of[stage]]
                calls += [(METHODS[kind], unit) for _, unit in (units if kind is Kind.FORWARD else reversed(units))]
            last_use = {action.micro: action for action in actions}
            self.known[id(schedule)] = _Known(schedule, receipts(schedule, self.rank), calls, frozenset(last_use.values()))
        return self.known[id(schedule)]

    def timeline(self, schedule: Schedule, recording: Recording) -> Timeline:
        """What all ranks of this pipeline recorded of one step; the collective call of all of them.

        Each row counts from its own rank's recording: they are made when all ranks have just done their last step together.
        """
        own = json.dumps([[span.kind.value, *span[1:]] for span in recording.spans()]).encode()
        rows = (json.loads(text) for text in gather_bytes(own, self.groups.pp, self.device))
        spans = (tuple(Span(Kind(span[0]), *span[1:]) for span in row) for row in rows)
        return Timeline(schedule.name, self.placement, schedule.micro_batches, tuple(spans))

    def run(self, schedule: Schedule, micro_batch: Callable[[int], MicroBatch], scale: float = 0.0,
            recording: Recording | None = None) -> dict[int, Tensor]:
        """Carry out a schedule; on the rank with the head each micro-batch's [objective sum, reported loss sum].

        `micro_batch(i)` makes the i-th when it is first needed; `scale` multiplies the objective before it is differentiated. Raises PeerError
        when a neighbour dies or hangs.
        """
        assert schedule.placement == self.placement
        known = self.know(schedule)
        self.wrapper.begin_step(known.calls)
        step = _Step(self, known, micro_batch, scale)
        for action in step.actions:
            if action.kind in COMPUTATIONS:
                step.compute(action, recording)
                if action in known.last_uses:
                    step.micro_batches.pop(action.micro, None)
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                step.send(action)
            else:
                step.receive(action)
        step.finish()
        return step.sums


class _Step:
    """What is alive during one run of a schedule."""

    def __init__(self, pipeline: Pipeline, known: _Known, micro_batch: Callable[[int], MicroBatch], scale: float):
        self.pipeline, self.make, self.scale = pipeline, micro_batch, scale
        self.model, self.wrapper, self.placement, self.rank = pipeline.model, pipeline.wrapper, pipeline.placement, pipeline.rank
        self.actions, self.receipts = known.schedule.actions[self.rank], known.receipts
        self.micro_batches: dict[int, MicroBatch] = {}
        self.inbox: dict[Message, Receiving | Tensor] = {}
        self.outbox: dict[Message, Tensor] = {}
        self.sending: dict[int, deque[Sending]] = {}
        self.arrived: dict[int, int] = {}  # messages to each rank that are known to have done so
        self.saved: dict[tuple[int, int], list[Any]] = {}
        self.left: dict[tuple[int, int], list[Any]] = {}
        self.sums: dict[int, Tensor] = {}

    def compute(self, action: Action, recording: Recording | None) -> None:
        kind, stage, micro = action
        chunk, last = self.pipeline.chunk_of[stage], stage + 1 == len(self.placement)
        if kind is Kind.FORWARD and micro not in self.micro_batches:
            self.micro_batches[micro] = self.make(micro)
        x = None
        if kind is Kind.FORWARD and stage > 0:
            x = self._take(Message(Kind.FORWARD, stage, micro), action)
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            x = self.model.loss_gradient(self.sums[micro], self.scale) if last else self._take(Message(Kind.BACKWARD, stage, micro), action)
        begin = None if recording is None else recording.now()
        if kind is Kind.FORWARD:
            y, saved = self.model.forward(self.micro_batches[micro], self.wrapper, x, chunk)
            if torch.is_grad_enabled():
                self.saved[stage, micro] = saved
            if last:
                self.sums[micro] = y
            else:
                self._give(Message(Kind.FORWARD, stage + 1, micro), y)
        elif kind is Kind.BACKWARD_WEIGHT:
            self.model.backward_weight(self.left.pop((stage, micro)), self.wrapper, chunk)
        else:
            saved = self.saved.pop((stage, micro))
            if kind is Kind.BACKWARD:
                dx = self.model.backward(saved, x, self.wrapper, chunk)
            else:
                dx, self.left[stage, micro] = self.model.backward_input(saved, x, self.wrapper, chunk)
            if stage > 0:
                self._give(Message(Kind.BACKWARD, stage - 1, micro), dx)
        if recording is not None:
            recording.add(action, begin)

    def _give(self, message: Message, x: Tensor) -> None:
        """Hand a result to the next computation: here, or to the send that follows."""
        here = self.placement[message.stage] == self.rank
        (self.inbox if here else self.outbox)[message] = x

    def _take(self, message: Message, action: Action) -> Tensor:
        coming = self.inbox.pop(message)
        if isinstance(coming, Tensor):
            return coming
        with self._with_neighbour(source_of(message, self.placement), f"send {_what(message)} to the {WORDS[action.kind]} pass of stage {action.stage}"):
            x = coming.wait()
        to, count = self.receipts[message]
        while self.arrived.get(to, 0) < count:
            self._settle(to)  # has arrived: does not wait
        return x

    def _settle(self, to: int) -> None:
        """Let go of the oldest message on its way to a rank."""
        self.sending[to].popleft().wait()
        self.arrived[to] = self.arrived.get(to, 0) + 1

    def _with_neighbour(self, other: int, what: str) -> AbstractContextManager[None]:
        """While a neighbour is waited for to do something."""
        def text(seconds: float) -> str:
            ranks = self.pipeline.groups.pp.ranks
            stages = [str(stage) for stage, rank in enumerate(self.placement) if rank == other]
            named = f"stage{'s' * (len(stages) > 1)} {' and '.join(stages)} (rank {ranks[other]})"
            return f"rank {ranks[self.rank]} waited {seconds:.1f} s for pipeline {named} to {what}. That rank"

        return waiting(text)

    def send(self, action: Action) -> None:
        (_, to), message = channel_of(action, self.placement)
        queue = self.sending.setdefault(to, deque())
        with self._with_neighbour(to, f"take {_what(message)}"):
            queue.append(Sending(self.outbox.pop(message), to, self.pipeline.groups.channel(self.rank, to), self._tag(message)))
            if not torch.is_grad_enabled() and len(queue) > UNRECEIVED:  # nothing comes back that would prove an arrival
                self._settle(to)

    def receive(self, action: Action) -> None:
        (source, _), message = channel_of(action, self.placement)
        channel = self.pipeline.groups.channel(source, self.rank)
        with self._with_neighbour(source, f"send {_what(message)}"):
            self.inbox[message] = Receiving(self.pipeline.shape, self.model.dtype, self.pipeline.device, source, channel, self._tag(message))

    def _tag(self, message: Message) -> int:
        return 2 * (message.micro * len(self.placement) + message.stage) + (message.kind is Kind.BACKWARD)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for to, queue in self.sending.items():
            with self._with_neighbour(to, "take the last messages of the step"):
                while queue:
                    queue.popleft().wait()
        assert not (self.inbox or self.outbox or self.saved or self.left or self.micro_batches), "the schedule left something undone"


def _what(message: Message) -> str:
    return f"{'activations' if message.kind is Kind.FORWARD else 'the gradient'} of micro-batch {message.micro}"
