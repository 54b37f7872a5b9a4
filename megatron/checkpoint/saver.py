"""Saves of a run, one at a time, on all ranks together: at once, or in the background while
training goes on (docs/checkpoint.md).

A background save holds the training up for a copy of this rank's shard into host memory
(`Staging`); a process beside it writes the file (background.py). How far all have come travels in
the sum that ends every training step: no collective is added to it but two small ones when the
shards are written and when the checkpoint stands.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.background import Background
from megatron.checkpoint.commit import Attempt, not_saved
from megatron.checkpoint.progress import Saved
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.retention import Policy, retire
from megatron.checkpoint.writer import in_file_order, save_checkpoint, shard_bytes, shard_header
from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.local.tiers import Tiers
    from megatron.checkpoint.replicas import Replicas
    from megatron.layers.spec import Box

GIB = 1 << 30


def staging_bytes(pairs: Sequence[tuple[Box, Tensor]], limit: float | None) -> int:
    """Host memory for the background save of these (box, tensor) pairs: their shard's file, or
    `limit` GiB where that is less.
    """
    header = len(shard_header(list(pairs), 0, 1, 0)) + m.ALIGN  # with longer numbers
    chunks = math.inf if limit is None else max(1, int(limit * GIB) // m.CHUNK)
    return header + min(-(-shard_bytes(pairs) // m.CHUNK), chunks) * m.CHUNK


class Staging:
    """The copy of a shard's file in memory that the writer process sees; persistent, for fresh
    memory is many times slower. Copies from a GPU run on a stream of their own. Never run on a
    GPU.
    """

    def __init__(self, background: Background, device: torch.device):
        self.background = background
        self.memory = torch.frombuffer(background.memory, dtype=torch.uint8)
        self.memory.zero_()  # the pages are there before the first save
        self.stream, self.copied = None, None
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
        self.at = len(header)
        self.memory[: self.at].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self.room = self.at + (len(self.memory) - self.at) // m.CHUNK * m.CHUNK
        if self.stream is None:
            for view in views:
                self._place(view)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for view in views:
                self._place(view)
            self.copied = self.stream.record_event()

    def _place(self, view: Tensor) -> None:
        while len(view):
            if self.at == self.room:
                self.hand_over()
                taken = self.background.answer(wait=True)
                if "error" in taken:
                    raise m.CheckpointError(taken["error"])
                # a wave ends with a chunk
                self.at, self.room = 0, len(self.memory) // m.CHUNK * m.CHUNK
            row = view[0].numel() * view.element_size()
            rows = min(len(view), (self.room - self.at) // row)
            if rows:
                part = view[:rows]
                self.memory[self.at : self.at + rows * row].view(view.dtype).view(part.shape).copy_(
                    part, non_blocking=True
                )
                self.at += rows * row
            else:
                rows = 1
                self._place(view[0])
            view = view[rows:]

    def hand_over(self) -> None:
        """What has been copied since the last time is the writer's."""
        if self.stream is not None:
            self.stream.synchronize()
        self.background.send({"bytes": self.at})

    @property
    def is_here(self) -> bool:
        """Whether the copies are over."""
        return self.copied is None or self.copied.query()


@dataclass
class UnderWay:
    """A save that has not ended."""

    attempt: Attempt
    state: dict[str, Any]
    began: float
    takes_part: bool
    handed_over: bool = False
    # this rank's shard in the local tier, open: it may be removed there before it has been copied
    local: BinaryIO | None = None
    replicas: Replicas | None = None  # to be compared when the shards are written
    outcome: dict[str, Any] | None = None  # of this rank's part of the phase
    records: list[dict[str, Any]] | None = None  # of all shards, once they are written


class Saver:
    """`save` a run's checkpoints under `root`. With `memory`, bytes of host memory for this rank's
    shard, in the background, at most at `rate` MB/s. With `tiers` every save begins with one there;
    one in the background is copied from there.

    `ready` and `advance` carry a background save on from step to step; `drain` waits for its end. A
    failed save is said, and stops nothing. A save that went well is told to `report`, with its
    iteration; `retention` says which older ones go then.
    """

    def __init__(
        self,
        root: str | Path,
        ranks: Ranks,
        memory: int | None = None,
        *,
        retention: Policy = Policy(),
        verify: bool = False,
        tiers: Tiers | None = None,
        rate: float | None = None,
        report: Callable[[int, Saved], None] = lambda iteration, saved: None,
        say: Callable[[str], None] = partial(print, flush=True),
    ):
        self.root, self.ranks, self.retention, self.verify, self.report, self.say = (
            Path(root),
            ranks,
            retention,
            verify,
            report,
            say,
        )
        self.tiers, self.rate = tiers, rate
        # what was there before this run
        self.before = m.list_iterations(self.root) if ranks.first else []
        self.under_way: UnderWay | None = None
        self.went_well = True  # the last save
        self.stall = 0.0  # seconds that the last one has held training up
        self.background = self.staging = None
        if memory is not None:
            self.background = Background(memory if tiers is None else mmap.PAGESIZE, say)
            ranks.agree(self.background.start)
            self.staging = Staging(self.background, ranks.device) if tiers is None else None

    def save(
        self,
        iteration: int,
        pairs: Iterable[tuple[Box, Tensor]],
        state: dict[str, Any],
        replicas: Replicas | None = None,
    ) -> None:
        """Save, or begin to: a save that is still under way is waited for before. All ranks call it
        together. `replicas` are compared before anything is written, in the background before the
        checkpoint counts.
        """
        began = time.perf_counter()
        if self.under_way is not None:
            self.drain()
            self.say(
                f" the save before was not over: waited {time.perf_counter() - began:.1f} s "
                "for it; a longer --save-interval avoids that"
            )
        try:
            if self.staging is None and replicas is not None:
                replicas.check(self.ranks)
            pairs = [(box, tensor) for box, tensor in pairs if math.prod(box.extent)]
            local = self.tiers is not None and self.tiers.save(iteration, pairs, state)
            at_once = self.background is None or (self.staging is None and not local)
            if at_once:
                save_checkpoint(
                    self.root,
                    iteration,
                    pairs,
                    state,
                    self.say,
                    self.ranks,
                    verify=self.verify,
                    before=self.before,
                )
            else:
                self._begin(iteration, pairs, state, began)
                self.under_way.replicas = replicas if self.staging is not None else None
        except (UserError, OSError) as error:
            if self.background is not None:
                self.background.close()  # it may wait for the rest of a shard
            self._failed(iteration, error)
            return
        self.stall = time.perf_counter() - began
        if at_once:
            if self.ranks.first:
                retire(self.root, self.retention, iteration, self.say)
            self._stands(iteration, began)

    def _begin(
        self, iteration: int, pairs: list[tuple[Box, Tensor]], state: dict[str, Any], began: float
    ) -> None:
        attempt = Attempt(
            self.root,
            iteration,
            self.ranks,
            partial(not_saved, self.root, iteration),
            state,
            int(bool(pairs)),
        )
        with attempt.kept():
            index = attempt.index
            save = UnderWay(attempt, state, began, bool(pairs), handed_over=self.staging is None)

            def hand_over() -> None:
                if index is not None and self.staging is None:
                    save.local = self._copy(attempt, index)
                elif index is not None:
                    self._stage(attempt, in_file_order(pairs))

            attempt.agree(hand_over)
            self.under_way = save

    def _stage(self, attempt: Attempt, pairs: list[tuple[Box, Tensor]]) -> None:
        header = shard_header(pairs, attempt.index, attempt.shards, attempt.iteration)
        self.background.start()
        self.background.send(
            self._command("write", attempt)
            | {
                "index": attempt.index,
                "header": len(header),
                "bytes": len(header) + shard_bytes(pairs),
                "verify": self.verify,
                "rate": self.rate,
            }
        )
        self.staging.fill(header, (box.view(tensor.detach()) for box, tensor in pairs))

    def _copy(self, attempt: Attempt, index: int) -> BinaryIO:
        path, record = self.tiers.shard(attempt.iteration, index)
        file = open(path, "rb")  # noqa: SIM115  # closed when the save is over
        self.background.start()
        self.background.send(
            self._command("copy", attempt)
            | {
                "source": f"/proc/{os.getpid()}/fd/{file.fileno()}",
                "index": index,
                "record": record,
                "verify": self.verify,
                "rate": self.rate,
            }
        )
        return file

    def _command(self, what: str, attempt: Attempt) -> dict[str, Any]:
        return {
            "do": what,
            "root": str(self.root),
            "iteration": attempt.iteration,
            "folder": str(attempt.folder),
        }

    def before_update(self) -> None:
        """The tensors are about to change: wait until they have been digested; on a GPU the current
        stream waits for the copies.
        """
        if self.under_way is None or self.staging is None:
            return
        if self.under_way.replicas is not None:
            began = time.perf_counter()
            self.under_way.replicas.wait()
            self.stall += time.perf_counter() - began
        if self.staging.copied is not None:
            torch.cuda.current_stream().wait_event(self.staging.copied)

    # ---- from step to step

    def ready(self) -> list[float]:
        """1 for each phase that this rank has done its part of: shards, commit. Their sums over all
        ranks go to `advance`. Empty where nothing is ever in the background.
        """
        save = self.under_way
        if save is None:
            return [] if self.background is None else [0.0, 0.0]
        self._look(wait=False)
        done = float(save.outcome is not None)
        return [1.0, done] if save.records is not None else [done, 0.0]

    def advance(self, sums: Sequence[float]) -> None:
        """All ranks call this after the same step: go on to the next phase when every one is ready
        for it.
        """
        if (
            self.under_way is not None
            and sums[self.under_way.records is not None] == self.ranks.world.size
        ):
            self._next_phase()

    def drain(self) -> bool:
        """Wait for the save under way; whether the last one went well. All ranks call it
        together.
        """
        began = time.perf_counter()
        while self.under_way is not None:
            self.stall += time.perf_counter() - began
            began = time.perf_counter()
            self._look(wait=True)
            self._next_phase()
        return self.went_well

    def close(self) -> None:
        """End the writer process, whatever it does."""
        if self.background is not None:
            self.background.close()

    def _look(self, *, wait: bool) -> None:
        """See what has become of this rank's part."""
        save = self.under_way
        if save.outcome is not None:
            return
        if not (save.takes_part if save.records is None else self.ranks.first):
            save.outcome = {"result": None}
            return
        try:
            if not save.handed_over and (wait or self.staging.is_here):
                self.staging.hand_over()
                save.handed_over = True
            if save.handed_over:
                save.outcome = self.background.answer(wait=wait)
        except m.CheckpointError as error:
            save.outcome = {
                "error": (
                    f"{self.root}: the checkpoint of iteration {save.attempt.iteration} was "
                    f"not saved: {error}"
                )
            }

    def _next_phase(self) -> None:
        save, outcome = self.under_way, self.under_way.outcome

        def result() -> Any:
            if "error" in outcome:
                raise m.CheckpointError(outcome["error"])
            return outcome["result"], self.ranks.who

        iteration = save.attempt.iteration
        try:
            results = save.attempt.agree(result)
            if save.records is None and save.replicas is not None:
                save.replicas.check(self.ranks)
        except UserError as error:
            self._over()
            self._failed(iteration, error)
            return
        if save.records is None:
            save.records = [record | who for record, who in results if record is not None]
            save.outcome, save.handed_over = None, True
            if self.ranks.first:
                self._commit(save)
            return
        self._over()
        self._stands(iteration, save.began)

    def _commit(self, save: UnderWay) -> None:
        try:
            self.background.start()
            self.background.send(
                self._command("commit", save.attempt)
                | {
                    "attempt": save.attempt.name,
                    "shards": save.records,
                    "state": save.state,
                    "before": self.before,
                    "retention": asdict(self.retention),
                }
            )
        except m.CheckpointError as error:
            save.outcome = {"error": str(error)}

    def _over(self) -> None:
        self.under_way.attempt.__exit__()
        if self.under_way.local is not None:
            self.under_way.local.close()
        self.under_way = None

    def _failed(self, iteration: int, error: Exception) -> None:
        self.went_well = False
        self.say(
            f"warning: iteration {iteration} was NOT saved; older checkpoints are untouched. "
            f"{error}"
        )

    def _stands(self, iteration: int, began: float) -> None:
        self.went_well = True
        if self.ranks.first:
            folder = self.root / m.iteration_folder(iteration)
            shards = m.decode_manifest((folder / m.MANIFEST).read_bytes(), folder / m.MANIFEST)[
                "shards"
            ]
            saved = Saved(
                str(folder),
                sum(shard["bytes"] for shard in shards),
                time.perf_counter() - began,
                self.stall,
            )
            self.say(str(saved))
            self.report(iteration, saved)
