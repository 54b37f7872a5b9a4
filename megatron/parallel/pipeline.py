"""The executor: carries out any list of actions, on any number of stages, one included.

A computation waits for its input alone; sends are started and forgotten until the schedule itself
proves that they have arrived. Each computation walks the layers of its stage: weights are acquired,
the pass is made, weights are released. Of a pair, two computations go through their layers side by
side, the backward pass first. A schedule knows nothing of how weights are sharded, and a
layer nothing of either. s sequence, b batch, h hidden. Called from training/passes.py and, on
tensors without memory, from tools/_plan/engine.py.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
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
from megatron.parallel.timeline import Span, Timeline, in_pairs

UNRECEIVED = 2  # outputs that a rank in evaluation runs ahead of a neighbour


class Weights(Protocol):
    """How weights and gradients are kept between passes: parallel/zero.py."""

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

    def add(self, unit: tuple[Action, ...], begun: tuple[Any, float]) -> None:
        """The computation, or the pair, that began then has just ended."""
        (begin, waited), end = begun, self.now()
        for action in unit:
            self.marks.append((action, begin, end))
            self.waited.append(PEERS.waited - waited)

    def own_seconds(self) -> tuple[float, float]:
        """What this rank computed in forward passes and in backward passes, without what it waited
        for others meanwhile. On a GPU waits within a pass, for collectives of its layers, are not
        told apart. The time of a pair counts half for each.
        """
        sums = [0.0, 0.0]
        spans = self.spans()
        for span, waited, is_paired in zip(spans, self.waited, in_pairs(spans)):
            lost = 0.0 if self.device.type == "cuda" else waited
            own = span.end - span.begin - lost
            sums[span.kind is not Kind.FORWARD] += own / 2 if is_paired else own
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


class Computation:
    """A computation of a stage that goes through its layers.

    `x`: activations [s, b, h] in a forward pass, their gradients in a backward pass; at the end the
    result. `held` is what the computation before has left of each layer, in their order; it is
    consumed. `left`: what the next one of this stage and micro-batch needs.
    """

    def __init__(self, action: Action, x: Tensor | None, held: deque[Any]):
        self.action, self.x, self.held = action, x, held
        self.left: deque[Any] = deque()


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
        passes = []
        last_use: dict[int, Action] = {}
        for unit in schedule.units(self.rank):
            if unit[0].kind in COMPUTATIONS:
                for calls in self.steps(unit):
                    passes += [(*call, action.micro) for action, call in calls]
                last_use |= {action.micro: action for action in unit}
        return _Known(
            schedule,
            acknowledgements(schedule, self.rank),
            [(layer, kind) for layer, kind, _ in passes],
            passes,
            frozenset(last_use.values()),
        )

    def steps(self, unit: tuple[Action, ...]) -> Iterator[list[tuple[Action, Call]]]:
        """The passes of layers of a computation, one after the other; of a pair, two at a time
        until one of its computations is over.
        """
        for calls in zip_longest(*(self.calls[action.kind, action.stage] for action in unit)):
            yield [(action, call) for action, call in zip(unit, calls) if call is not None]

    def compute(self, works: Sequence[Computation]) -> None:
        """One computation of a stage, layer by layer, or a pair."""
        by_action = {work.action: work for work in works}
        for calls in self.steps(tuple(by_action)):
            passes = [partial(self._pass, by_action[action], *call) for action, call in calls]
            for action, call in calls:
                self.weights.acquire(*call, action.micro)
            if len(passes) == 1:
                passes[0]()
            else:
                self.passes.together(*passes)
            for action, call in calls:
                self.weights.release(*call, action.micro)
        for work in works:
            work.x = self.passes.handed_on(work.x)

    def _pass(self, work: Computation, layer: Layer, kind: Kind) -> None:
        """One pass of a layer."""
        kept: Any
        held = work.held
        with named(WORDS[kind], self.names[layer], "micro-batch", work.action.micro):
            if kind is Kind.FORWARD:
                work.x, kept = self.passes.forward(layer, work.x, held.pop())
                work.left.append(kept)
            elif kind is Kind.REBUILD:
                at = self.places[layer]
                held[at], held[at + 1] = self.passes.rebuild(layer, held[at], held[at + 1])
            else:
                work.x, kept = self.passes.backward(kind, layer, work.x, held.pop())
                if kind is Kind.BACKWARD_INPUT:
                    work.left.appendleft(kept)

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
        *,
        aux_scale: float | None = None,
    ) -> StepSums:
        """Carry out a schedule.

        `micro_batch(i)` makes the i-th when it is first needed; `scale` multiplies the objective
        before it is differentiated, `aux_scale` (default: the same) the layers' part of it. Raises
        PeerError when a neighbour dies or hangs.
        """
        assert schedule.placement == self.placement
        if id(schedule) not in self.known:
            self.known[id(schedule)] = self.know(schedule)
        known = self.known[id(schedule)]
        self.weights.begin_step(known.calls)
        self.passes.begin(scale if aux_scale is None else aux_scale, self.objectives)
        self.passes.expect(known.passes)
        step = _Step(self, known, micro_batch, scale)
        for unit in schedule.units(self.rank):
            kind = unit[0].kind
            if kind in COMPUTATIONS:
                works = [step.take(action) for action in unit]
                begun = None if recording is None else recording.begin()
                with named(*_words(unit)):
                    self.compute(works)
                for work in works:
                    step.give(work)
                del works, work  # or they would live as long as the next computation
                if recording is not None:
                    recording.add(unit, begun)
                for action in known.last_uses.intersection(unit):
                    step.leave(action.micro)
            elif kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                step.send(unit[0])
            else:
                step.receive(unit[0])
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
        self.acknowledgements = known.acknowledgements
        self.micro_batches: dict[int, MicroBatch] = {}
        self.inbox: dict[Message, Receiving | Tensor] = {}
        self.outbox: dict[Message, Tensor] = {}
        self.sending: dict[int, deque[Sending]] = {}
        self.arrived: dict[int, int] = {}  # messages to each rank that are known to have done so
        # by stage and micro-batch: what a backward pass needs, or its second half
        self.held: dict[tuple[int, int], deque[Any]] = {}
        self.sums: dict[int, Tensor] = {}

    def take(self, action: Action) -> Computation:
        """A computation with what it reads: hidden states or their gradient [s, b, h], and what
        each layer needs beside.
        """
        kind, stage, micro = action
        if kind is Kind.FORWARD:
            if micro not in self.micro_batches:
                self.micro_batches[micro] = self.pipeline.passes.place(self.make(micro))
            x = self._received(Message(kind, stage, micro), action) if stage > 0 else None
            micros = [self.micro_batches[micro]] * len(self.pipeline.layers[stage])
            return Computation(action, x, deque(micros))
        held = self.held.pop((stage, micro))
        if kind is Kind.BACKWARD_WEIGHT:
            dy = None
        elif stage + 1 == len(self.placement):
            dy = loss_gradient(self.sums[micro], self.scale)
        else:
            dy = self._received(Message(Kind.BACKWARD, stage, micro), action)
        return Computation(action, dy, held)

    def leave(self, micro: int) -> None:
        """A micro-batch has had its last computation on this rank."""
        if micro in self.micro_batches:
            self.pipeline.passes.leave(self.micro_batches.pop(micro))

    def give(self, work: Computation) -> None:
        """Keep what a computation has left for the next one of its stage and micro-batch, and hand
        its result to the computation that reads it: here, or behind the send that follows.
        """
        (kind, stage, micro), y = work.action, work.x
        if kind is Kind.BACKWARD_INPUT or kind is Kind.FORWARD and torch.is_grad_enabled():
            self.held[stage, micro] = work.left
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
    # not zeros_like: on meta tensors, which the memory plan runs with, it imports sympy (2 s)
    dy = sums.new_zeros(sums.shape)
    dy[0].fill_(scale)  # a tensor of numbers would be copied from the host, which waits for the GPU
    return dy


def _words(unit: tuple[Action, ...]) -> list[object]:
    """The name of a computation, or of a pair."""
    words: list[object] = []
    for kind, stage, micro in unit:
        words += [*["beside"] * bool(words), WORDS[kind], "stage", stage, "micro-batch", micro]
    return words


def _what(message: Message) -> str:
    return (
        f"{'activations' if message.kind is Kind.FORWARD else 'the gradient'} of micro-batch "
        f"{message.micro}"
    )
