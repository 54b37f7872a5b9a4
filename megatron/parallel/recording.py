"""When this rank computed what in one step, for the pipeline's timeline and the straggler report.

Made by training/step.py, filled by parallel/pipeline.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from megatron.distributed.collectives import gather_bytes
from megatron.distributed.groups import Axis
from megatron.distributed.peers import PEERS
from megatron.parallel.schedule import Action, Kind, Schedule
from megatron.parallel.timeline import Span, Timeline, in_pairs


class Recording:
    """The computations of one step and when each ran. On a GPU by events, which are read when the
    step is long over.
    """

    schedule: Schedule  # that ran

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[Action, Any, Any]] = []
        self.waited: list[float] = []  # within each, seconds that the host waited for other ranks
        self.start = self.now()

    def now(self) -> Any:
        """A moment of the work queued so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        # An event is a mark in the stream's queue: the host neither waits nor reads the time here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> tuple[Any, float]:
        """A computation begins now."""
        return self.now(), PEERS.waited

    def add(self, task: tuple[Action, ...], begun: tuple[Any, float]) -> None:
        """The computation, or the pair, that began then has just ended."""
        (begin, waited), end = begun, self.now()
        for action in task:
            self.marks.append((action, begin, end))
            self.waited.append(PEERS.waited - waited)

    def own_seconds(self) -> tuple[float, float]:
        """Seconds of this rank's forward passes and of its backward passes, without its waits for
        other ranks. On a GPU waits within a pass, for collectives of its layers, are included. The
        time of a pair counts half for each.
        """
        sums = [0.0, 0.0]
        spans = self.spans()
        for span, waited, is_paired in zip(spans, self.waited, in_pairs(spans)):
            # On a GPU the host's waits are not within the events' span: the stream runs on without
            # it.
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

    def timeline(self, pipeline: Axis) -> Timeline:
        """What all ranks of a pipeline recorded of one step; a collective call of all of them.

        Each row counts from its own rank's recording: they are made when all ranks have just done
        their last step together.
        """
        # All ranks of the pipeline are here: their last collective was the all-reduce of this step.
        own = json.dumps([[span.kind.value, *span[1:]] for span in self.spans()]).encode()
        rows = (json.loads(text) for text in gather_bytes(own, pipeline, self.device))
        spans = (tuple(Span(Kind(span[0]), *span[1:]) for span in row) for row in rows)
        ran = self.schedule
        return Timeline(ran.name, ran.placement, ran.micro_batches, tuple(spans))
