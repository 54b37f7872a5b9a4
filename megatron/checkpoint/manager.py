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
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.background import Background
from megatron.checkpoint.commit import Attempt, Policy, retire
from megatron.checkpoint.files import GB, GIB
from megatron.checkpoint.index import read_manifest
from megatron.checkpoint.local.nodes import RUN_FILE
from megatron.checkpoint.manifest import ALIGN, CheckpointError, iteration_folder, list_iterations
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.writer import (
    BoxTensor,
    Pairs,
    not_empty,
    save_checkpoint,
    shard_bytes,
    shard_content,
    shard_header,
)
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject
from megatron.distributed.peers import idle

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.local.checkpoints import LocalCheckpoints

logger = logging.getLogger(__name__)


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

    def __init__(self, background: Background, size: int, device: torch.device):
        self.background = background
        os.ftruncate(background.memory, size)
        self.memory = torch.frombuffer(mmap.mmap(background.memory, size), dtype=torch.uint8)
        self.memory.zero_()  # the pages are there before the first save
        self.end = 0  # of what has been copied and is not the writer's yet
        self.stream = None
        self.copied = None
        if device.type == "cuda":
            cudart = torch.cuda.cudart()
            code = cudart.cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)
            if int(code):
                raise RuntimeError(f"cudaHostRegister: error {int(code)}")
            self.stream = torch.cuda.Stream(device)

    def fill(self, file: Iterable[Tensor]) -> None:
        """Send the writer the bytes of a file in waves of what the memory holds; returns with the
        last one on its way into it.
        """
        self.end = 0  # a save before may have failed here
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for part in file:
                while len(part):
                    if self.end == len(self.memory):
                        self.hand_over()
                        self.background.result()
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

    def close(self) -> None:
        """Unpin the memory: other memory may get its address."""
        if self.stream is not None:
            stream, self.stream = self.stream, None
            with suppress(RuntimeError):  # the device may be what has failed
                stream.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


@dataclass
class CheckpointManager:
    """`save` a run's checkpoints under `root`: synchronously, or with `memory`, bytes of host
    memory for this rank's shard, in the background. With `local_checkpoints` every save begins with
    one there, of which a background save is a copy. `continues`: as `commit`'s.

    `ready` and `advance` carry a background save on from step to step; `finalize` waits for its
    end. A failed save is logged, and stops nothing. After each save that went well older ones go by
    `retention`, and `report(iteration, size=, seconds=, stall=)` is called: its bytes, and how long
    it took and training waited.
    """

    root: Path
    ranks: Ranks
    memory: int | None = None
    retention: Policy = Policy()
    verify: bool = False
    local_checkpoints: LocalCheckpoints | None = None
    continues: bool = False
    report: Callable[..., None] = lambda iteration, **saved: None

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        # iterations that were there before this run, on the first rank
        before = list_iterations(self.root) if self.ranks.first else []
        self.earlier: dict[str, Any] = {"before": before, "continues": self.continues}
        # the save in progress, which waits at each `yield` until all ranks have reached it
        self.pending: Generator[None] | None = None
        self.phase = -1  # of it: the number of the `yield`
        self.went_well = True  # the last save
        self.stall = 0.0  # seconds that the last one has held training up
        self.began = 0.0  # when it started, by time.perf_counter
        self.iteration = 0  # its
        # A process writes in the background; a shard of the local tier needs no memory.
        self.background: Background | None = None
        self.staging: Staging | None = None
        if self.memory is not None:
            self.background = Background()
            self.ranks.gather_or_raise(self._start)

    def _start(self) -> None:
        """Reserve the staging memory and start the writer process. Raises CheckpointError."""
        if self.local_checkpoints is None:
            try:
                self.staging = Staging(self.background, self.memory, self.ranks.device)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"--async-save: {self.memory / GIB:.3g} GiB of host memory for a copy of this "
                    f"rank's shard cannot be reserved: {error}; set --async-save-host-memory, or "
                    "remove --async-save"
                ) from error
        self.background.start()

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
        self.stall, self.phase = time.perf_counter() - began, -1
        self.pending = self._phases(iteration, not_empty(pairs), state, replicas)
        self._next_phase()

    def _phases(
        self, iteration: int, pairs: Pairs, state: JsonObject, replicas: DesyncCheck | None
    ) -> Generator[None]:
        """The phases of a save, during each of which training waits. Raises UserError on every rank
        when anything prevents the save on one.
        """
        # 1. What has diverged is not saved; the local tier comes first.
        if replicas is not None and self.staging is None:
            replicas.check(self.ranks)
        local = self.local_checkpoints
        if local is None and self.ranks.first:
            with suppress(OSError):  # what nodes hold is of a pass before this save
                (self.root / RUN_FILE).unlink(missing_ok=True)
        is_local = local is not None and local.save(iteration, pairs, state)

        # 2. Synchronously, where there is nothing that the writer processes could read.
        if self.background is None or not (self.staging or is_local):
            where = self.root, iteration, pairs, state, self.ranks
            save_checkpoint(*where, verify=self.verify, **self.earlier)
            if self.ranks.first:
                retire(self.root, self.retention, iteration)
            return
        saving = self._in_background(iteration, pairs, state, replicas)
        pairs = []  # tensors that were made for the save need not last until it is over
        yield from saving

    def _in_background(
        self, iteration: int, pairs: Pairs, state: JsonObject, replicas: DesyncCheck | None
    ) -> Generator[None]:
        background = self.background
        with (
            Attempt(self.root, iteration, self.ranks, state, int(bool(pairs))) as attempt,
            ExitStack() as opened,
            background.closed_on_error(),
        ):
            # 1. Every rank's process writes its shard.
            place = {"root": str(self.root), "folder": str(attempt.folder), "iteration": iteration}
            attempt.gather_or_raise(lambda: self._start_writing(attempt, place, pairs, opened))
            pairs = []
            yield
            written = attempt.gather_or_raise(lambda: (background.result(), self.ranks.who))
            shards = [record | who for record, who in written if record is not None]

            # 2. Shards of diverged replicas are written, and not committed.
            if replicas is not None and self.staging is not None:
                replicas.check(self.ranks)

            # 3. The first rank's process commits the checkpoint.
            if self.ranks.first:
                content = {"attempt": attempt.name, "shards": shards, "state": state}
                retention = asdict(self.retention)
                background.call("commit", **place, **content, **self.earlier, retention=retention)
            yield
            attempt.gather_or_raise(background.result)

    def _start_writing(
        self, attempt: Attempt, place: dict[str, object], pairs: Pairs, opened: ExitStack
    ) -> None:
        """Have the process write this rank's shard, if there is one."""
        number, iteration = attempt.index, attempt.iteration
        if number is None:
            return
        options = {**place, "index": number, "verify": self.verify}
        if self.staging is not None:
            header, data = shard_content(pairs, number, attempt.shards, iteration)
            size = len(header) + shard_bytes(pairs)
            source = f"/proc/self/fd/{self.background.memory}"
            self.background.call("write", **options, source=source, size=size)
            head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self.staging.fill(chain([head], data))
        else:
            path, record = self.local_checkpoints.shard(iteration, number)
            # open, for it may be removed in the local tier before it has been copied
            shard = opened.enter_context(open(path, "rb"))
            source, size = f"/proc/{os.getpid()}/fd/{shard.fileno()}", record["bytes"]
            self.background.call("write", **options, source=source, size=size, record=record)
            self.background.send({"bytes": size})

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
        done = float(self._is_done(wait=False))
        return [done, 0.0] if self.phase == 0 else [1.0, done]

    def advance(self, sums: Sequence[float]) -> None:
        """All ranks call this after the same step: go on to the next phase when every one is ready
        for it.
        """
        if self.pending is not None and sums[self.phase] == self.ranks.world.size:
            if self.ranks.device.type == "cuda" and self.ranks.world.size > 1:
                # The exchange would wait for the passes that are queued, which is no stall.
                with idle():
                    torch.cuda.current_stream().synchronize()
            self._next_phase()

    def finalize(self) -> bool:
        """Wait for the save under way; whether the last one went well. All ranks call it
        together.
        """
        while self.pending is not None:
            began = time.perf_counter()
            self._is_done(wait=True)
            self.stall += time.perf_counter() - began
            self._next_phase()
        return self.went_well

    def close(self) -> None:
        """Kill the writer process, if there is one, and abandon the save in progress."""
        if self.background is not None:
            self.background.close()
        if self.staging is not None:
            self.staging.close()
        saving, self.pending = self.pending, None
        if saving is not None:
            saving.close()
            self.went_well = False

    def _is_done(self, *, wait: bool) -> bool:
        """Whether this rank's part of the phase is over."""
        staging = self.staging
        if staging is not None and staging.end:
            if not (wait or staging.is_here):
                return False
            staging.hand_over()
        return self.background.is_done(wait=wait)

    def _next_phase(self) -> None:
        """All ranks call this when every one has done its part of the phase."""
        began = time.perf_counter()
        # a generator that an error has ended would look like one that went well
        saving, self.pending = self.pending, None
        fault: Exception | None = None
        try:
            next(saving)
            self.pending, self.phase = saving, self.phase + 1
        except StopIteration:
            pass
        except (UserError, OSError) as error:
            fault = error
        self.stall += time.perf_counter() - began
        if self.pending is None:
            self._end(fault)

    def _end(self, fault: Exception | None) -> None:
        self.went_well = fault is None
        if fault is not None:
            logger.warning(f"iteration {self.iteration} was NOT saved. {fault}")
            return
        if not self.ranks.first:
            return
        folder = self.root / iteration_folder(self.iteration)
        try:
            size = sum(shard["bytes"] for shard in read_manifest(folder)["shards"])
        except CheckpointError as error:
            logger.warning(f"iteration {self.iteration} was saved, but cannot be read: {error}")
            return
        seconds = time.perf_counter() - self.began
        logger.info(
            f" saved checkpoint {folder}: {size / GB:.2f} GB in {seconds:.1f} s, "
            f"{size / GB / seconds:.2f} GB/s; training waited {self.stall:.1f} s"
        )
        self.report(self.iteration, size=size, seconds=seconds, stall=self.stall)
