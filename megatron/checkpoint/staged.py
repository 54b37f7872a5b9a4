"""Saves in the background (--async-save).

Training waits for a copy of this rank's shard into host memory (`Staging`), or for none where the
shard lies in the local tier; a separate process writes the file (background.py). How far all ranks
have come travels in the sum that ends every training step: no collective is added to it but two
small ones when the shards are written and when the checkpoint is committed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.background import Background
from megatron.checkpoint.commit import Attempt, not_saved
from megatron.checkpoint.manifest import ALIGN, CheckpointError
from megatron.checkpoint.writer import in_file_order, shard_bytes, shard_header
from megatron.config.input_files import JsonObject

if TYPE_CHECKING:
    from megatron.checkpoint.local.checkpoints import LocalCheckpoints
    from megatron.checkpoint.manager import Destination, SaveRequest
    from megatron.checkpoint.save_plan import BoxTensor, Pairs

GIB = 1 << 30


def staging_bytes(pairs: Sequence[BoxTensor], limit: float | None) -> int:
    """Host memory for the background save of these (box, tensor) pairs: their shard's file, or
    `limit` GiB where that is less.
    """
    header = len(shard_header(list(pairs), 0, 1, 0)) + ALIGN  # with longer numbers
    chunks = -(-shard_bytes(pairs) // m.CHUNK)
    if limit is not None:
        chunks = min(chunks, max(1, int(limit * GIB) // m.CHUNK))
    return header + chunks * m.CHUNK


class Staging:
    """The copy of a shard's file in memory that the writer process sees; persistent, for fresh
    memory is many times slower. Copies from a GPU run on a stream of their own. Never run on a
    GPU.
    """

    def __init__(self, background: Background, device: torch.device):
        self.background = background
        self.memory = torch.frombuffer(background.memory, dtype=torch.uint8)
        self.memory.zero_()  # the pages are there before the first save
        self.end = 0  # of what has been copied since the writer took the last wave
        self.stream = None
        self.copied = None
        if device.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(
                self.memory.data_ptr(), self.memory.numel(), 0
            )
            assert int(code) == 0, f"cudaHostRegister: {code}"
            self.stream = torch.cuda.Stream(device)

    def fill(self, header: bytes, views: Iterable[Tensor]) -> None:
        """Send the writer the file in waves of what the memory holds; returns with the last one on
        its way into it.
        """
        self.memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self.end = len(header)
        limit = self._limit(len(header))
        if self.stream is None:
            for view in views:
                limit = self._place(view, limit)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for view in views:
                limit = self._place(view, limit)
            self.copied = self.stream.record_event()

    def _limit(self, start: int) -> int:
        """Where a wave ends whose data starts at `start`: with a whole chunk."""
        return start + (len(self.memory) - start) // m.CHUNK * m.CHUNK

    def _place(self, view: Tensor, limit: int) -> int:
        """Copy a tensor into the wave that ends at `limit`, and into waves after it; returns where
        the last one ends.
        """
        while len(view):
            if self.end == limit:
                self._next_wave()
                limit = self._limit(0)
            row = view[0].numel() * view.element_size()
            rows = min(len(view), (limit - self.end) // row)
            if rows == 0:  # a row that goes into two waves
                limit = self._place(view[0], limit)
                view = view[1:]
                continue
            part = view[:rows]
            place = self.memory[self.end : self.end + rows * row]
            place.view(view.dtype).view(part.shape).copy_(part, non_blocking=True)
            self.end += rows * row
            view = view[rows:]
        return limit

    def _next_wave(self) -> None:
        self.hand_over()
        taken = self.background.answer(wait=True)
        if "error" in taken:
            raise CheckpointError(taken["error"])
        self.end = 0

    def hand_over(self) -> None:
        """What has been copied since the last time is the writer's."""
        if self.stream is not None:
            self.stream.synchronize()
        self.background.send({"bytes": self.end})

    @property
    def is_here(self) -> bool:
        """Whether the copies are over."""
        return self.copied is None or self.copied.query()


class StagedSaves:
    """Starts saves that a writer process of this rank carries out.

    `memory`: bytes of host memory for this rank's shard. With `local_checkpoints` none is taken: a
    shard is copied from there.
    """

    def __init__(
        self, destination: Destination, memory: int, local_checkpoints: LocalCheckpoints | None
    ):
        self.destination = destination
        self.local_checkpoints = local_checkpoints
        self.background = Background(memory if local_checkpoints is None else mmap.PAGESIZE)
        destination.ranks.gather_or_raise(self.background.start)
        self.staging = None
        if local_checkpoints is None:
            self.staging = Staging(self.background, destination.ranks.device)

    def start(self, request: SaveRequest) -> StagedSave:
        """Begin a save. Raises UserError on every rank where anything prevents it on one."""
        root = self.destination.root
        ranks = self.destination.ranks
        attempt = Attempt(
            root,
            request.iteration,
            ranks,
            partial(not_saved, root, request.iteration),
            request.state,
            int(bool(request.pairs)),
        )
        with ExitStack() as opened:
            opened.enter_context(attempt)

            def hand_over() -> None:
                if attempt.index is None:
                    return
                if self.staging is None:
                    self._copy(attempt, opened)
                else:
                    self._stage(attempt, in_file_order(request.pairs))

            attempt.gather_or_raise(hand_over)
            return StagedSave(self, request, attempt, opened.pop_all())

    def _copy(self, attempt: Attempt, opened: ExitStack) -> None:
        path, record = self.local_checkpoints.shard(attempt.iteration, attempt.index)
        # open, for it may be removed in the local tier before it has been copied
        shard = opened.enter_context(open(path, "rb"))
        source = f"/proc/{os.getpid()}/fd/{shard.fileno()}"
        what = {"source": source, "record": record}
        self.send("copy", attempt, what | self._options(attempt))

    def _stage(self, attempt: Attempt, pairs: Pairs) -> None:
        header = shard_header(pairs, attempt.index, attempt.shards, attempt.iteration)
        what = {"header": len(header), "bytes": len(header) + shard_bytes(pairs)}
        self.send("write", attempt, what | self._options(attempt))
        self.staging.fill(header, (box.view(tensor.detach()) for box, tensor in pairs))

    def _options(self, attempt: Attempt) -> JsonObject:
        to = self.destination
        return {"index": attempt.index, "verify": to.verify, "rate": to.rate}

    def send(self, do: str, attempt: Attempt, what: JsonObject) -> None:
        """Have the writer process `do` something for an attempt. Raises CheckpointError."""
        self.background.start()
        command = {
            "do": do,
            "root": str(self.destination.root),
            "iteration": attempt.iteration,
            "folder": str(attempt.folder),
        }
        self.background.send(command | what)


class StagedSave:
    """A save under way, in two phases: all ranks' shards are written (0), and the first rank's
    process commits the checkpoint (1).
    """

    def __init__(
        self, saves: StagedSaves, request: SaveRequest, attempt: Attempt, opened: ExitStack
    ):
        self.saves = saves
        self.request = request
        self.attempt = attempt
        self.opened = opened  # the attempt and files, until the save is over
        self.replicas = request.replicas if saves.staging is not None else None
        self.handed_over = saves.staging is None  # all of this rank's shard
        self.outcome: JsonObject | None = None  # of this rank's part of the phase
        self.records: list[JsonObject] | None = None  # of all shards, once they are written

    @property
    def phase(self) -> int:
        """0: shards; 1: commit."""
        return int(self.records is not None)

    def ready(self) -> list[float]:
        """1 for each phase that this rank has done its part of."""
        self.look(wait=False)
        done = float(self.outcome is not None)
        return [done, 0.0] if self.phase == 0 else [1.0, done]

    def before_update(self) -> float:
        """The tensors are about to change: wait until they have been digested; on a GPU the current
        stream waits for the copies. Returns the seconds waited.
        """
        began = time.perf_counter()
        if self.replicas is not None:
            self.replicas.wait()
        waited = time.perf_counter() - began
        staging = self.saves.staging
        if staging is not None and staging.copied is not None:
            torch.cuda.current_stream().wait_event(staging.copied)
        return waited

    def look(self, *, wait: bool) -> None:
        """See what has become of this rank's part of the phase."""
        if self.outcome is not None:
            return
        ranks = self.saves.destination.ranks
        if not (self.request.pairs if self.phase == 0 else ranks.first):
            self.outcome = {"result": None}
            return
        staging = self.saves.staging
        try:
            if not self.handed_over and (wait or staging.is_here):
                staging.hand_over()
                self.handed_over = True
            if self.handed_over:
                self.outcome = self.saves.background.answer(wait=wait)
        except CheckpointError as error:
            where = f"{self.saves.destination.root}: the checkpoint of iteration"
            text = f"{where} {self.request.iteration} was not saved: {error}"
            self.outcome = {"error": text}

    def next_phase(self) -> bool:
        """All ranks call this when every one has done its part; whether the checkpoint is
        committed. Raises UserError on every rank where one's part has failed.
        """
        ranks = self.saves.destination.ranks
        results = self.attempt.gather_or_raise(partial(_result_of, self.outcome, ranks.who))
        if self.phase == 1:
            return True
        if self.replicas is not None:
            self.replicas.check(ranks)
        self.records = [record | who for record, who in results if record is not None]
        self.outcome = None
        self.handed_over = True
        if ranks.first:
            self._commit()
        return False

    def _commit(self) -> None:
        to = self.saves.destination
        what = {
            "attempt": self.attempt.name,
            "shards": self.records,
            "state": self.request.state,
            "before": to.before,
            "retention": asdict(to.retention),
        }
        try:
            self.saves.send("commit", self.attempt, what)
        except CheckpointError as error:
            self.outcome = {"error": str(error)}

    def close(self) -> None:
        """Close the files and remove the temporary folder."""
        self.opened.close()


def _result_of(outcome: JsonObject, who: JsonObject) -> tuple[Any, JsonObject]:
    if "error" in outcome:
        raise CheckpointError(outcome["error"])
    return outcome["result"], who
