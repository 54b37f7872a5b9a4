"""The checkpoints that a run writes, one at a time, on all ranks together (docs/checkpoint.md):
while training waits, or in the background (`staged.py`).
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.background import Background
from megatron.checkpoint.files import GB
from megatron.checkpoint.index import read_manifest
from megatron.checkpoint.manifest import iteration_folder, list_iterations
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.retention import Policy, retire
from megatron.checkpoint.save_plan import not_empty
from megatron.checkpoint.staged import StagedSave, Staging
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.local.checkpoints import LocalCheckpoints
    from megatron.checkpoint.save_plan import BoxTensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A save that went well: `bytes` of all ranks in `seconds`, for `stall` of which training
    waited.
    """

    folder: str
    bytes: int
    seconds: float
    stall: float

    def __str__(self) -> str:
        return (
            f" saved checkpoint {self.folder}: {self.bytes / GB:.2f} GB in {self.seconds:.1f} s, "
            f"{self.bytes / GB / self.seconds:.2f} GB/s; training waited {self.stall:.1f} s"
        )


class CheckpointManager:
    """`save` a run's checkpoints under `root`: synchronously, or with `memory`, bytes of host
    memory for this rank's shard, in the background, at most at `rate` MB/s. With
    `local_checkpoints` every save begins with one there; one in the background is copied from
    there.

    `ready` and `advance` carry a background save on from step to step; `finalize` waits for its
    end. A failed save is logged, and stops nothing. `report` is called with each save that
    went well and its iteration; `retention` specifies which older ones go then.
    """

    def __init__(
        self,
        root: str | Path,
        ranks: Ranks,
        memory: int | None = None,
        *,
        retention: Policy = Policy(),
        verify: bool = False,
        local_checkpoints: LocalCheckpoints | None = None,
        rate: float | None = None,
        report: Callable[[int, Saved], None] = lambda iteration, saved: None,
    ):
        self.root = Path(root)
        self.ranks = ranks
        self.retention = retention
        self.verify = verify
        self.local_checkpoints = local_checkpoints
        self.rate = rate
        self.report = report
        # iterations that were there before this run, on the first rank
        self.before = list_iterations(self.root) if ranks.first else []
        self.pending: StagedSave | None = None
        self.went_well = True  # the last save
        self.stall = 0.0  # seconds that the last one has held training up
        self.began = 0.0  # when it started, by time.perf_counter
        # A process writes in the background; a shard of the local tier needs no memory.
        self.background: Background | None = None
        self.staging: Staging | None = None
        if memory is not None:
            size = memory if local_checkpoints is None else mmap.PAGESIZE
            self.background = Background(size)
            ranks.gather_or_raise(self.background.start)
            if local_checkpoints is None:
                self.staging = Staging(self.background, ranks.device)

    def save(
        self,
        iteration: int,
        pairs: Iterable[BoxTensor],
        state: dict[str, Any],
        replicas: DesyncCheck | None = None,
    ) -> None:
        """Save, or begin to: a save that is still under way is waited for before. All ranks call it
        together. `pairs`: the (box, tensor) pairs that this rank writes; `state`: JSON. `replicas`
        are compared before anything is written, in the background before the checkpoint counts.
        """
        began = time.perf_counter()
        if self.pending is not None:
            self.finalize()
            logger.info(
                f" the save before was not over: waited {time.perf_counter() - began:.1f} s "
                "for it; a longer --save-interval avoids that"
            )
        self.began = began
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
                self.pending = StagedSave(self, iteration, pairs, state, replicas)
            else:
                save_checkpoint(
                    self.root,
                    iteration,
                    pairs,
                    state,
                    self.ranks,
                    verify=self.verify,
                    before=self.before,
                )
                if self.ranks.first:
                    retire(self.root, self.retention, iteration)
        except (UserError, OSError) as error:
            self.close()  # its process may wait for the rest of a shard
            self._failed(iteration, error)
            return
        self.stall = time.perf_counter() - began
        if self.pending is None:
            self._committed(iteration)

    def before_update(self) -> None:
        """The tensors are about to change: wait for what a save under way still reads of them."""
        if self.pending is not None:
            self.pending.before_update()

    # ---- from step to step

    def ready(self) -> list[float]:
        """1 for each phase of a save under way that this rank has done its part of. Their sums over
        all ranks go to `advance`. Empty where nothing is ever in the background.
        """
        if self.pending is not None:
            return self.pending.ready()
        return [] if self.background is None else [0.0, 0.0]

    def advance(self, sums: Sequence[float]) -> None:
        """All ranks call this after the same step: go on to the next phase when every one is ready
        for it.
        """
        if self.pending is not None and sums[self.pending.phase] == self.ranks.world.size:
            self._next_phase()

    def finalize(self) -> bool:
        """Wait for the save under way; whether the last one went well. All ranks call it
        together.
        """
        began = time.perf_counter()
        while self.pending is not None:
            self.stall += time.perf_counter() - began
            began = time.perf_counter()
            self.pending.look(wait=True)
            self._next_phase()
        return self.went_well

    def close(self) -> None:
        """End the writer process, if there is one, whatever it does."""
        if self.background is not None:
            self.background.close()

    def _next_phase(self) -> None:
        save, fault = self.pending, None
        try:
            if not save.next_phase():
                return
        except UserError as error:
            fault = error
        save.close()
        self.pending = None
        if fault is None:
            self._committed(save.iteration)
        else:
            self._failed(save.iteration, fault)

    def _failed(self, iteration: int, error: Exception) -> None:
        self.went_well = False
        logger.warning(
            f"iteration {iteration} was NOT saved; older checkpoints are untouched. {error}"
        )

    def _committed(self, iteration: int) -> None:
        self.went_well = True
        if not self.ranks.first:
            return
        folder = self.root / iteration_folder(iteration)
        manifest, _ = read_manifest(folder)
        size = sum(shard["bytes"] for shard in manifest["shards"])
        saved = Saved(str(folder), size, time.perf_counter() - self.began, self.stall)
        logger.info(str(saved))
        self.report(iteration, saved)
