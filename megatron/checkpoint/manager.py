"""The checkpoints that a run writes, one at a time, on all ranks together (docs/checkpoint.md):
while training waits, or in the background (--async-save).

In the background training waits for a copy of this rank's shard into host memory (`Staging`), or
for none where the shard lies in the local tier; a separate process writes the file (background.py).
How far all ranks have come travels in the sum that ends every training step; a save adds two small
collectives.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.background import Background
from megatron.checkpoint.commit import Attempt, Policy, not_saved, retire
from megatron.checkpoint.files import GB, GIB
from megatron.checkpoint.index import read_manifest
from megatron.checkpoint.manifest import ALIGN, CheckpointError, iteration_folder, list_iterations
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.writer import (
    BoxTensor,
    Pairs,
    data_bytes,
    in_file_order,
    not_empty,
    save_checkpoint,
    shard_bytes,
    shard_header,
)
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.local.checkpoints import LocalCheckpoints

logger = logging.getLogger(__name__)

DONE: JsonObject = {"result": None}  # a rank's part of a phase in which it does nothing


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
        self.end = 0  # of what has been copied and is not the writer's yet
        self.stream = None
        self.copied = None
        if device.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(
                self.memory.data_ptr(), self.memory.numel(), 0
            )
            assert int(code) == 0, f"cudaHostRegister: {code}"
            self.stream = torch.cuda.Stream(device)

    def fill(self, header: bytes, data: Iterable[Tensor]) -> None:
        """Send the writer the file in waves of what the memory holds; returns with the last one on
        its way into it.
        """
        self.memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self.end = len(header)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for part in data:
                while len(part):
                    if self.end == len(self.memory):
                        self.hand_over()
                        taken = self.background.answer(wait=True)
                        if "error" in taken:
                            raise CheckpointError(taken["error"])
                    count = min(len(part), len(self.memory) - self.end)
                    place = self.memory[self.end : self.end + count]
                    place.copy_(part[:count], non_blocking=True)
                    self.end += count
                    part = part[count:]
        if self.stream is not None:
            self.copied = self.stream.record_event()

    def hand_over(self) -> None:
        """What has been copied since the last time is the writer's."""
        if self.stream is not None:
            self.stream.synchronize()
        count, self.end = self.end, 0
        self.background.send({"bytes": count})

    @property
    def is_here(self) -> bool:
        """Whether the copies are over."""
        return self.copied is None or self.copied.query()

    def before_update(self) -> None:
        """The current stream waits for the copies."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


@dataclass(frozen=True)
class Saved:
    """A save of all ranks that went well. Training waited for `stall` of its seconds."""

    bytes: int
    seconds: float
    stall: float


@dataclass
class CheckpointManager:
    """`save` a run's checkpoints under `root`: synchronously, or with `memory`, bytes of host
    memory for this rank's shard, in the background, at most at `rate` MB/s. With
    `local_checkpoints` every save begins with one there, of which a background save is a copy.

    `ready` and `advance` carry a background save on from step to step; `finalize` waits for its
    end. A failed save is logged, and stops nothing. After each save that went well `report` is
    called with it, and older ones go by `retention`.
    """

    root: Path
    ranks: Ranks
    memory: int | None = None
    retention: Policy = Policy()
    verify: bool = False
    local_checkpoints: LocalCheckpoints | None = None
    rate: float | None = None
    report: Callable[[int, Saved], None] = lambda iteration, saved: None

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        # iterations that were there before this run, on the first rank
        self.before = list_iterations(self.root) if self.ranks.first else []
        # the save under way, which waits at each `yield` until all ranks have come so far
        self.pending: Iterator[None] | None = None
        self.phase = 0  # of it: the number of the `yield`
        self.outcome: JsonObject | None = None  # of this rank's part of the phase, once it is over
        self.opened = ExitStack()  # its temporary folder and files
        self.went_well = True  # the last save
        self.stall = 0.0  # seconds that the last one has held training up
        self.began = 0.0  # when it started, by time.perf_counter
        self.iteration = 0  # its
        # A process writes in the background; a shard of the local tier needs no memory.
        self.background: Background | None = None
        self.staging: Staging | None = None
        if self.memory is not None:
            has_local = self.local_checkpoints is not None
            self.background = Background(mmap.PAGESIZE if has_local else self.memory)
            self.ranks.gather_or_raise(self.background.start)
            if not has_local:
                self.staging = Staging(self.background, self.ranks.device)

    def save(
        self,
        iteration: int,
        pairs: Iterable[BoxTensor],
        state: dict[str, Any],
        replicas: DesyncCheck | None = None,
    ) -> None:
        """Save, or begin to, when the save before is over. All ranks call it together. `pairs`: the
        (box, tensor) pairs that this rank writes; `state`: JSON. `replicas` are compared before
        anything is written, in the background before the commit.
        """
        began = time.perf_counter()
        if self.pending is not None:
            self.finalize()
            logger.info(
                f" the save before was not over: waited {time.perf_counter() - began:.1f} s "
                "for it; a longer --save-interval avoids that"
            )
        self.began, self.iteration = began, iteration
        try:
            # 1. What has diverged is not saved; the local tier comes first.
            if replicas is not None and self.staging is None:
                replicas.check(self.ranks)
            pairs = not_empty(pairs)
            local = self.local_checkpoints is not None and self.local_checkpoints.save(
                iteration, pairs, state
            )

            # 2. In the background from the staging memory or from the local tier, else now.
            if self.staging is not None or (self.background is not None and local):
                saving = self._in_background(iteration, pairs, state, replicas)
                next(saving)
                self.pending, self.phase = saving, 0
            else:
                where = self.root, iteration, pairs, state, self.ranks
                save_checkpoint(*where, verify=self.verify, before=self.before)
                if self.ranks.first:
                    retire(self.root, self.retention, iteration)
        except (UserError, OSError) as error:
            self.close()  # its process may wait for the rest of a shard
            self._end(error)
            return
        self.stall = time.perf_counter() - began
        if self.pending is None:
            self._end()

    def _in_background(
        self, iteration: int, pairs: Pairs, state: JsonObject, replicas: DesyncCheck | None
    ) -> Iterator[None]:
        """A save by the writer processes. Raises UserError on every rank where anything prevents it
        on one.
        """
        # 1. Every rank's process writes its shard.
        attempt = Attempt(self.root, iteration, self.ranks, state, int(bool(pairs)))
        self.opened.enter_context(attempt)
        attempt.gather_or_raise(lambda: self._start_writing(attempt, pairs))
        pairs = []  # tensors that were made for the save need not last until it is over
        yield
        results = attempt.gather_or_raise(self._result)

        # 2. Shards of diverged replicas are written, and not committed.
        if replicas is not None and self.staging is not None:
            replicas.check(self.ranks)

        # 3. The first rank's process commits the checkpoint.
        shards = [record | who for record, who in results if record is not None]
        self._start_commit(attempt, shards, state)
        yield
        attempt.gather_or_raise(self._result)

    def _result(self) -> Any:
        if "error" in self.outcome:
            raise CheckpointError(self.outcome["error"])
        return self.outcome["result"], self.ranks.who

    def _start_writing(self, attempt: Attempt, pairs: Pairs) -> None:
        self.outcome = DONE
        if attempt.index is None:
            return
        options = {"index": attempt.index, "verify": self.verify, "rate": self.rate}
        if self.staging is None:
            path, record = self.local_checkpoints.shard(attempt.iteration, attempt.index)
            # open, for it may be removed in the local tier before it has been copied
            shard = self.opened.enter_context(open(path, "rb"))
            source = f"/proc/{os.getpid()}/fd/{shard.fileno()}"
            copied = {"source": source, "record": record, "bytes": record["bytes"]}
            self._send(attempt, "copy", options | copied)
            return
        pairs = in_file_order(pairs)
        header = shard_header(pairs, attempt.index, attempt.shards, attempt.iteration)
        size = len(header) + shard_bytes(pairs)
        self._send(attempt, "write", options | {"header": len(header), "bytes": size})
        self.staging.fill(header, data_bytes(pairs))

    def _start_commit(self, attempt: Attempt, shards: list[JsonObject], state: JsonObject) -> None:
        """An error is the outcome of the phase: all ranks learn of it at its end."""
        self.outcome = DONE
        if not self.ranks.first:
            return
        what = {"attempt": attempt.name, "shards": shards, "state": state}
        kept = {"before": self.before, "retention": asdict(self.retention)}
        try:
            self._send(attempt, "commit", what | kept)
        except (CheckpointError, OSError) as error:
            self.outcome = {"error": not_saved(self.root, self.iteration, error)}

    def _send(self, attempt: Attempt, do: str, what: JsonObject) -> None:
        """Have the writer process do something. Raises CheckpointError."""
        self.outcome = None
        self.background.start()
        where = {"root": str(self.root), "folder": str(attempt.folder)}
        self.background.send({"do": do, "iteration": attempt.iteration} | where | what)

    def before_update(self) -> None:
        """The tensors are about to change: the current stream waits for the copies of a save under
        way.
        """
        if self.pending is not None and self.staging is not None:
            self.staging.before_update()

    # ---- from step to step

    def ready(self) -> list[float]:
        """1 for each phase of a save under way that this rank has done its part of, to be summed
        for `advance`. Empty where nothing is ever in the background.
        """
        if self.pending is None:
            return [] if self.background is None else [0.0, 0.0]
        self._look(wait=False)
        done = float(self.outcome is not None)
        return [done, 0.0] if self.phase == 0 else [1.0, done]

    def advance(self, sums: Sequence[float]) -> None:
        """All ranks call this after the same step: go on to the next phase when every one is ready
        for it.
        """
        if self.pending is not None and sums[self.phase] == self.ranks.world.size:
            self._next_phase()

    def finalize(self) -> bool:
        """Wait for the save under way; whether the last one went well. All ranks call it
        together.
        """
        began = time.perf_counter()
        while self.pending is not None:
            self._look(wait=True)
            now = time.perf_counter()
            self.stall += now - began
            began = now
            self._next_phase()
        return self.went_well

    def close(self) -> None:
        """End the writer process, if there is one, whatever it does."""
        if self.background is not None:
            self.background.close()
        self.opened.close()

    def _look(self, *, wait: bool) -> None:
        """See what has become of this rank's part of the phase."""
        staging = self.staging
        if self.outcome is not None or (staging and staging.end and not (wait or staging.is_here)):
            return
        try:
            if staging and staging.end:
                staging.hand_over()
            self.outcome = self.background.answer(wait=wait)
        except CheckpointError as error:
            self.outcome = {"error": not_saved(self.root, self.iteration, error)}

    def _next_phase(self) -> None:
        """All ranks call this when every one has done its part of the phase."""
        # a generator that an error has ended would look like one that went well
        saving, self.pending = self.pending, None
        try:
            next(saving)
            self.pending, self.phase = saving, self.phase + 1
        except StopIteration:
            self._end()
        except UserError as error:
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        self.opened.close()
        self.pending = None
        self.went_well = error is None
        if error is not None:
            logger.warning(f"iteration {self.iteration} was NOT saved. {error}")
        elif self.ranks.first:
            self._log_saved()

    def _log_saved(self) -> None:
        folder = self.root / iteration_folder(self.iteration)
        size = sum(shard["bytes"] for shard in read_manifest(folder)["shards"])
        saved = Saved(size, time.perf_counter() - self.began, self.stall)
        logger.info(
            f" saved checkpoint {folder}: {size / GB:.2f} GB in {saved.seconds:.1f} s, "
            f"{size / GB / saved.seconds:.2f} GB/s; training waited {self.stall:.1f} s"
        )
        self.report(self.iteration, saved)
