"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone; sends are started and forgotten until the schedule itself
proves that they have arrived. Each computation walks the layers of its stage: weights are acquired,
the pass is made, weights are released. A schedule knows nothing of how weights are sharded, and a
layer nothing of either. s sequence, b batch, h hidden. Called from training/passes.py and, on
tensors without memory, from plan/engine.py.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.distributed.collectives import gather_bytes
from megatron.distributed.groups import Groups
from megatron.distributed.p2p import Receiving, Sending
from megatron.distributed.peers import PEERS, waiting
from megatron.distributed.ranges import named
from megatron.model.block import Layer, MicroBatch
from megatron.model.gpt import GPTModel
from megatron.parallel.check import WORDS, channel_of, source_of
from megatron.parallel.layer_passes import Call, LayerPasses
from megatron.parallel.schedule import (
    COMPUTATIONS,
    Action,
    Kind,
    Message,
    Schedule,
    acknowledgements,
)
from megatron.parallel.timeline import Span, Timeline

UNRECEIVED = 2  # outputs that a rank in evaluation runs ahead of a neighbour


class Weights(Protocol):
    """How weights and gradients are kept between passes: optimizer/zero.py."""

    def begin_step(self, calls: Sequence[Call]) -> None:
        """These passes will come now, in this order."""

    def acquire(self, layer: Layer, kind: Kind, micro: int) -> None:
        """Before a pass of a layer on a micro-batch: let its weights be whole, and its gradients
        have room.
        """

    def release(self, layer: Layer, kind: Kind, micro: int) -> None:
        """After the pass."""


class StepSums(NamedTuple):
    """What the forward passes of a step gave on this rank."""

    # micro-batch -> [objective sum, reported loss sum], on the rank with the head
    losses: dict[int, Tensor]
    # what layers returned beside their output, by name, summed over micro-batches (float64)
    scalars: dict[str, Tensor]


class Recording:
    """When this rank computed what, in one step. On a GPU by events, which are read when the step
    is long over.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[Action, Any, Any]] = []
        self.waited: list[float] = []  # within each, seconds that the host waited for other ranks
        self.start = self.now()

    def now(self) -> Any:
        """A moment of the work queued so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> tuple[Any, float]:
        """A computation begins now."""
        return self.now(), PEERS.waited

    def add(self, action: Action, begun: tuple[Any, float]) -> None:
        """The computation that began then has just ended."""
        begin, waited = begun
        self.marks.append((action, begin, self.now()))
        self.waited.append(PEERS.waited - waited)

    def own_seconds(self) -> tuple[float, float]:
        """What this rank computed in forward passes and in backward passes, without what it waited
        for others meanwhile. On a GPU waits within a pass, for collectives of its layers, are not
        told apart.
        """
        sums = [0.0, 0.0]
        for span, waited in zip(self.spans(), self.waited):
            lost = 0.0 if self.device.type == "cuda" else waited
            sums[span.kind is not Kind.FORWARD] += span.end - span.begin - lost
        return sums[0], sums[1]

    def spans(self) -> tuple[Span, ...]:
        """The computations, in seconds since the recording was made."""

        def seconds(moment: Any) -> float:
            return (
                self.start.elapsed_time(moment) / 1000
                if self.device.type == "cuda"
                else moment - self.start
            )

        return tuple(
            Span(action.kind, action.stage, action.micro, seconds(begin), seconds(end))
            for action, begin, end in self.marks
        )


class _Known(NamedTuple):
    """What a schedule means for one rank."""

    schedule: Schedule
    acknowledgements: dict[Message, tuple[int, int]]
    calls: list[Call]
    passes: list[tuple[Layer, Kind, int]]  # the calls with their micro-batches
    last_uses: frozenset[Action]  # of each micro-batch


class Pipeline:
    """The stages of this rank and their neighbours. `placement`: stage -> pipeline rank; `shape`:
    [s, b, h] of what travels between stages.
    """

    def __init__(
        self,
        model: GPTModel,
        weights: Weights,
        passes: LayerPasses,
        placement: tuple[int, ...],
        shape: tuple[int, int, int],
        groups: Groups,
        device: torch.device,
    ):
        self.model, self.weights, self.passes = model, weights, passes
        self.placement, self.shape, self.groups, self.device = placement, shape, groups, device
        self.rank = groups.pp.rank
        own = [stage for stage, rank in enumerate(placement) if rank == self.rank]
        chunks = ([layer for _, layer in chunk] for chunk in model.chunks)
        self.layers: dict[int, list[Layer]] = dict(zip(own, chunks, strict=True))  # by stage
        self.places = {  # of each layer in its stage
            layer: place for layers in self.layers.values() for place, layer in enumerate(layers)
        }
        self.names = {layer: name for chunk in model.chunks for name, layer in chunk}
        self.calls = {
            (kind, stage): calls_of(kind, layers)
            for kind in COMPUTATIONS
            for stage, layers in self.layers.items()
        }
        self.objectives = {spec.name for spec in model.scalars if spec.in_objective}
        self.has_head = placement[-1] == self.rank  # losses come to light here
        self.known: dict[int, _Known] = {}  # by identity: a schedule is long

    def know(self, schedule: Schedule) -> _Known:
        """What a schedule means for this rank."""
        actions = [action for action in schedule.actions[self.rank] if action.kind in COMPUTATIONS]
        passes = [
            (*call, micro) for kind, stage, micro in actions for call in self.calls[kind, stage]
        ]
        last_use = {action.micro: action for action in actions}
        return _Known(
            schedule,
            acknowledgements(schedule, self.rank),
            [(layer, kind) for layer, kind, _ in passes],
            passes,
            frozenset(last_use.values()),
        )

    def compute(
        self, action: Action, x: Tensor | None, held: deque[Any]
    ) -> tuple[Tensor | None, deque[Any]]:
        """One computation of a stage, layer by layer: (its result, what the next one of this stage
        and micro-batch needs of each layer).

        `x` and the result: activations [s, b, h] in a forward pass, their gradients in a backward
        pass. `held` is what the computation before has left, in the order of the layers; it is
        consumed.
        """
        left: deque[Any] = deque()
        kept: Any
        for layer, kind in self.calls[action.kind, action.stage]:
            with named(WORDS[kind], self.names[layer], "micro-batch", action.micro):
                self.weights.acquire(layer, kind, action.micro)
                if kind is Kind.FORWARD:
                    x, kept = self.passes.forward(layer, x, held.pop())
                    left.append(kept)
                elif kind is Kind.REBUILD:
                    at = self.places[layer]
                    held[at], held[at + 1] = self.passes.rebuild(layer, held[at], held[at + 1])
                else:
                    x, kept = self.passes.backward(kind, layer, x, held.pop())
                    if kind is Kind.BACKWARD_INPUT:
                        left.appendleft(kept)
                self.weights.release(layer, kind, action.micro)
        return self.passes.handed_on(x), left

    def timeline(self, schedule: Schedule, recording: Recording) -> Timeline:
        """What all ranks of this pipeline recorded of one step; the collective call of all of them.

        Each row counts from its own rank's recording: they are made when all ranks have just done
        their last step together.
        """
        own = json.dumps([[span.kind.value, *span[1:]] for span in recording.spans()]).encode()
        rows = (json.loads(text) for text in gather_bytes(own, self.groups.pp, self.device))
        spans = (tuple(Span(Kind(span[0]), *span[1:]) for span in row) for row in rows)
        return Timeline(schedule.name, self.placement, schedule.micro_batches, tuple(spans))

    def run(
        self,
        schedule: Schedule,
        micro_batch: Callable[[int], MicroBatch],
        scale: float = 0.0,
        recording: Recording | None = None,
    ) -> StepSums:
        """Carry out a schedule.

        `micro_batch(i)` makes the i-th when it is first needed; `scale` multiplies the objective
        before it is differentiated. Raises PeerError when a neighbour dies or hangs.
        """
        assert schedule.placement == self.placement
        if id(schedule) not in self.known:
            self.known[id(schedule)] = self.know(schedule)
        known = self.known[id(schedule)]
        self.weights.begin_step(known.calls)
        self.passes.begin(scale, self.objectives)
        self.passes.expect(known.passes)
        step = _Step(self, known, micro_batch, scale)
        for action in step.actions:
            if action.kind in COMPUTATIONS:
                x, held = step.take(action)
                begun = None if recording is None else recording.begin()
                with named(WORDS[action.kind], "stage", action.stage, "micro-batch", action.micro):
                    y, left = self.compute(action, x, held)
                step.give(action, y, left)
                del x, y, held, left  # or they would live as long as the next computation
                if recording is not None:
                    recording.add(action, begun)
                if action in known.last_uses:
                    step.leave(action.micro)
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                step.send(action)
            else:
                step.receive(action)
        step.finish()
        return StepSums(step.sums, self.passes.scalars)


class _Step:
    """What is alive during one run of a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        known: _Known,
        micro_batch: Callable[[int], MicroBatch],
        scale: float,
    ):
        self.pipeline, self.make, self.scale = pipeline, micro_batch, scale
        self.placement, self.rank = pipeline.placement, pipeline.rank
        self.actions, self.acknowledgements = (
            known.schedule.actions[self.rank],
            known.acknowledgements,
        )
        self.micro_batches: dict[int, MicroBatch] = {}
        self.inbox: dict[Message, Receiving | Tensor] = {}
        self.outbox: dict[Message, Tensor] = {}
        self.sending: dict[int, deque[Sending]] = {}
        self.arrived: dict[int, int] = {}  # messages to each rank that are known to have done so
        # by stage and micro-batch: what a backward pass needs, or its second half
        self.held: dict[tuple[int, int], deque[Any]] = {}
        self.sums: dict[int, Tensor] = {}

    def take(self, action: Action) -> tuple[Tensor | None, deque[Any]]:
        """What a computation reads: hidden states or their gradient [s, b, h], and what each layer
        needs beside.
        """
        kind, stage, micro = action
        if kind is Kind.FORWARD:
            if micro not in self.micro_batches:
                self.micro_batches[micro] = self.pipeline.passes.place(self.make(micro))
            x = self._received(Message(kind, stage, micro), action) if stage > 0 else None
            return x, deque([self.micro_batches[micro]] * len(self.pipeline.layers[stage]))
        held = self.held.pop((stage, micro))
        if kind is Kind.BACKWARD_WEIGHT:
            return None, held
        if stage + 1 == len(self.placement):
            return loss_gradient(self.sums[micro], self.scale), held
        return self._received(Message(Kind.BACKWARD, stage, micro), action), held

    def leave(self, micro: int) -> None:
        """A micro-batch has had its last computation on this rank."""
        if micro in self.micro_batches:
            self.pipeline.passes.leave(self.micro_batches.pop(micro))

    def give(self, action: Action, y: Tensor | None, left: deque[Any]) -> None:
        """Keep what a computation has left for the next one of its stage and micro-batch, and hand
        its result to the computation that reads it: here, or behind the send that follows.
        """
        kind, stage, micro = action
        if kind is Kind.BACKWARD_INPUT or kind is Kind.FORWARD and torch.is_grad_enabled():
            self.held[stage, micro] = left
        if kind is Kind.FORWARD and stage + 1 == len(self.placement):
            self.sums[micro] = y
            return
        if kind is Kind.BACKWARD_WEIGHT or kind is not Kind.FORWARD and stage == 0:
            return
        forward = kind is Kind.FORWARD
        to = (
            Message(Kind.FORWARD, stage + 1, micro)
            if forward
            else Message(Kind.BACKWARD, stage - 1, micro)
        )
        here = self.placement[to.stage] == self.rank
        (self.inbox if here else self.outbox)[to] = y

    def _received(self, message: Message, action: Action) -> Tensor:
        """The input of a computation, from a neighbour or from another stage of this rank."""
        coming = self.inbox.pop(message)
        if isinstance(coming, Tensor):
            return coming
        with self._with_neighbour(
            source_of(message, self.placement),
            f"send {_what(message)} to the {WORDS[action.kind]} pass of stage {action.stage}",
        ):
            x = coming.wait()
        to, count = self.acknowledgements[message]
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
            return (
                f"rank {ranks[self.rank]} waited {seconds:.1f} s for pipeline {named} to "
                f"{what}. That rank"
            )

        return waiting(text)

    def send(self, action: Action) -> None:
        (_, to), message = channel_of(action, self.placement)
        queue = self.sending.setdefault(to, deque())
        with self._with_neighbour(to, f"take {_what(message)}"):
            queue.append(
                Sending(
                    self.outbox.pop(message),
                    to,
                    self.pipeline.groups.channel(self.rank, to),
                    self._tag(message),
                )
            )
            # nothing comes back that would prove an arrival
            if not torch.is_grad_enabled() and len(queue) > UNRECEIVED:
                self._settle(to)

    def receive(self, action: Action) -> None:
        (source, _), message = channel_of(action, self.placement)
        channel = self.pipeline.groups.channel(source, self.rank)
        with self._with_neighbour(source, f"send {_what(message)}"):
            self.inbox[message] = Receiving(
                self.pipeline.shape,
                self.pipeline.model.dtype,
                self.pipeline.device,
                source,
                channel,
                self._tag(message),
            )

    def _tag(self, message: Message) -> int:
        return 2 * (message.micro * len(self.placement) + message.stage) + (
            message.kind is Kind.BACKWARD
        )

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for to, queue in self.sending.items():
            with self._with_neighbour(to, "take the last messages of the step"):
                while queue:
                    queue.popleft().wait()
        assert not (self.inbox or self.outbox or self.held or self.micro_batches), (
            "the schedule left something undone"
        )


def calls_of(kind: Kind, layers: Sequence[Layer]) -> list[Call]:
    """The passes that a computation of a stage consists of. A layer that cannot split its backward
    pass does all of it in the first half. Layers that are recomputed in a group are rebuilt in
    order, up to the last, whose own backward pass does that.
    """
    if kind is Kind.FORWARD:
        return [(layer, kind) for layer in layers]
    if kind is Kind.BACKWARD_WEIGHT:
        return [(layer, kind) for layer in reversed(layers) if layer.splits_backward]
    calls: list[Call] = []
    for place, layer in reversed(list(enumerate(layers))):
        if layer.recompute.last:
            first = max(at for at in range(place + 1) if layers[at].recompute.first)
            calls += [(before, Kind.REBUILD) for before in layers[first:place]]
        calls.append((layer, kind if layer.splits_backward else Kind.BACKWARD))
    return calls


def loss_gradient(sums: Tensor, scale: float) -> Tensor:
    """dy of a head's output [objective sum, reported loss sum], for the gradient of scale x
    objective.
    """
    dy = torch.zeros_like(sums)
    dy[0].fill_(scale)  # a tensor of numbers would be copied from the host, which waits for the GPU
    return dy


def _what(message: Message) -> str:
    return (
        f"{'activations' if message.kind is Kind.FORWARD else 'the gradient'} of micro-batch "
        f"{message.micro}"
    )
