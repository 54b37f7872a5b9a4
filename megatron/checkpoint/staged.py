"""Saves in the background (--async-save).

Training waits for a copy of this rank's shard into host memory (`Staging`), or for none where the
shard lies in the local tier; a separate process writes the file (background.py). How far all ranks
have come travels in the sum that ends every training step: no collective is added to it but two
small ones when the shards are written and when the checkpoint is committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.background import Background
from megatron.checkpoint.commit import Attempt, not_saved
from megatron.checkpoint.manifest import ALIGN, CheckpointError
from megatron.checkpoint.writer import contiguous_pieces, in_file_order, shard_bytes, shard_header
from megatron.config.input_files import JsonObject

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.manager import CheckpointManager
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
    memory is many times slower. Copies from a GPU run on a separate stream. Never run on a GPU.
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
        # a wave ends with a whole chunk, so that the writer digests what it has
        self.memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self.end = len(header)
        limit = self._limit(self.end)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for view in views:
                for piece in contiguous_pieces(view):
                    data = piece.reshape(-1).view(torch.uint8)
                    while len(data):
                        if self.end == limit:
                            self._next_wave()
                            limit = self._limit(0)
                        count = min(len(data), limit - self.end)
                        place = self.memory[self.end : self.end + count]
                        place.copy_(data[:count], non_blocking=True)
                        self.end += count
                        data = data[count:]
        if self.stream is not None:
            self.copied = self.stream.record_event()

    def _limit(self, start: int) -> int:
        """Where a wave ends whose data starts at `start`: with a whole chunk."""
        return start + (len(self.memory) - start) // m.CHUNK * m.CHUNK

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


class StagedSave:
    """A save under way, in two phases: all ranks' shards are written (0), and the first rank's
    process commits the checkpoint (1).

    Raises UserError on every rank where anything prevents it on one.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        iteration: int,
        pairs: Pairs,
        state: JsonObject,
        replicas: DesyncCheck | None,
    ):
        self.manager = manager
        self.background = manager.background
        self.staging = manager.staging
        self.state = state
        self.replicas = replicas if self.staging is not None else None
        self.phase = 0
        self.takes_part = bool(pairs)  # in this phase
        self.handed_over = self.staging is None  # all of this rank's shard
        self.outcome: JsonObject | None = None  # of this rank's part of the phase
        explain = partial(not_saved, manager.root, iteration)
        own = int(bool(pairs))
        self.attempt = Attempt(manager.root, iteration, manager.ranks, explain, state, own)
        with ExitStack() as opened:
            opened.enter_context(self.attempt)
            self.attempt.gather_or_raise(lambda: self._start_writing(pairs, opened))
            self._opened = opened.pop_all()  # the attempt and files, until the save is over

    @property
    def iteration(self) -> int:
        return self.attempt.iteration

    def _start_writing(self, pairs: Pairs, opened: ExitStack) -> None:
        attempt, manager = self.attempt, self.manager
        if attempt.index is None:
            return
        options = {"index": attempt.index, "verify": manager.verify, "rate": manager.rate}
        if self.staging is None:
            path, record = manager.local_checkpoints.shard(attempt.iteration, attempt.index)
            # open, for it may be removed in the local tier before it has been copied
            shard = opened.enter_context(open(path, "rb"))
            source = f"/proc/{os.getpid()}/fd/{shard.fileno()}"
            self._send("copy", options | {"source": source, "record": record})
            return
        pairs = in_file_order(pairs)
        header = shard_header(pairs, attempt.index, attempt.shards, attempt.iteration)
        size = len(header) + shard_bytes(pairs)
        self._send("write", options | {"header": len(header), "bytes": size})
        self.staging.fill(header, (box.view(tensor.detach()) for box, tensor in pairs))

    def _send(self, do: str, what: JsonObject) -> None:
        """Have the writer process do something. Raises CheckpointError."""
        self.background.start()
        attempt = self.attempt
        command = {"root": str(attempt.root), "iteration": attempt.iteration}
        self.background.send({"do": do, "folder": str(attempt.folder)} | command | what)

    def ready(self) -> list[float]:
        """1 for each phase that this rank has done its part of."""
        self.look(wait=False)
        done = float(self.outcome is not None)
        return [done, 0.0] if self.phase == 0 else [1.0, done]

    def before_update(self) -> None:
        """The tensors are about to change: the current stream waits for the copies."""
        if self.staging is not None and self.staging.copied is not None:
            torch.cuda.current_stream().wait_event(self.staging.copied)

    def look(self, *, wait: bool) -> None:
        """See what has become of this rank's part of the phase."""
        if self.outcome is not None:
            return
        if not self.takes_part:
            self.outcome = {"result": None}
            return
        try:
            if not self.handed_over and (wait or self.staging.is_here):
                self.staging.hand_over()
                self.handed_over = True
            if self.handed_over:
                self.outcome = self.background.answer(wait=wait)
        except CheckpointError as error:
            where = f"{self.manager.root}: the checkpoint of iteration"
            self.outcome = {"error": f"{where} {self.iteration} was not saved: {error}"}

    def next_phase(self) -> bool:
        """All ranks call this when every one has done its part; whether the checkpoint is
        committed. Raises UserError on every rank where one's part has failed.
        """
        ranks = self.manager.ranks

        def result() -> Any:
            if "error" in self.outcome:
                raise CheckpointError(self.outcome["error"])
            return self.outcome["result"], ranks.who

        results = self.attempt.gather_or_raise(result)
        if self.phase == 1:
            return True

        # Shards of diverged replicas are written, and not committed.
        if self.replicas is not None:
            self.replicas.check(ranks)
        self.phase, self.takes_part, self.outcome = 1, ranks.first, None
        self.handed_over = True
        if ranks.first:
            self._commit([record | who for record, who in results if record is not None])
        return False

    def _commit(self, shards: list[JsonObject]) -> None:
        what = {
            "attempt": self.attempt.name,
            "shards": shards,
            "state": self.state,
            "before": self.manager.before,
            "retention": asdict(self.manager.retention),
        }
        try:
            self._send("commit", what)
        except CheckpointError as error:
            self.outcome = {"error": str(error)}

    def close(self) -> None:
        """Close the files and remove the temporary folder."""
        self._opened.close()
