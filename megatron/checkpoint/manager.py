"""The checkpoints that a run writes, one at a time, on all ranks together (docs/checkpoint.md).

How a save is carried out is a strategy's: `synchronous.py` while training waits, `staged.py` in the
background while it goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.index import read_manifest
from megatron.checkpoint.manifest import (
    iteration_folder,
    list_iterations,
)
from megatron.checkpoint.progress import Saved
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.retention import Policy
from megatron.checkpoint.save_plan import not_empty
from megatron.checkpoint.staged import StagedSave, StagedStrategy
from megatron.checkpoint.synchronous import Destination, SaveRequest, SynchronousStrategy
from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.local.checkpoints import LocalCheckpoints
    from megatron.checkpoint.save_plan import BoxTensor

logger = logging.getLogger(__name__)


class CheckpointManager:
    """`save` a run's checkpoints under `root`: synchronously, or with `memory`, bytes of host
    memory for this rank's shard, in the background, at most at `rate` MB/s. With
    `local_checkpoints` every save begins with one there; one in the background is copied from
    there.

    `ready` and `advance` carry a background save on from step to step; `finalize` waits for its
    end. A failed save is logged, and stops nothing. `report` is called with each save that
    went well and its iteration; `retention` says which older ones go then.
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
        self.ranks = ranks
        self.local_checkpoints = local_checkpoints
        self.report = report
        before = list_iterations(Path(root)) if ranks.first else []
        to = Destination(Path(root), ranks, retention, verify, rate, before)
        self.strategy: SynchronousStrategy | StagedStrategy
        self.strategy = (
            SynchronousStrategy(to)
            if memory is None
            else StagedStrategy(to, memory, local_checkpoints)
        )
        self.pending: StagedSave | None = None
        self.went_well = True  # the last save
        self.stall = 0.0  # seconds that the last one has held training up

    def save(
        self,
        iteration: int,
        pairs: Iterable[BoxTensor],
        state: dict[str, Any],
        replicas: DesyncCheck | None = None,
    ) -> None:
        """Save, or begin to: a save that is still under way is waited for before. All ranks call it
        together. `replicas` are compared before anything is written, in the background before the
        checkpoint counts.
        """
        began = time.perf_counter()
        if self.pending is not None:
            self.finalize()
            logger.info(
                f" the save before was not over: waited {time.perf_counter() - began:.1f} s "
                "for it; a longer --save-interval avoids that"
            )
        try:
            if replicas is not None and not self.strategy.compares_later:
                replicas.check(self.ranks)
            pairs = not_empty(pairs)
            local = self.local_checkpoints is not None and self.local_checkpoints.save(
                iteration, pairs, state
            )
            request = SaveRequest(iteration, pairs, state, replicas, local, began)
            self.pending = self.strategy.start(request)
        except (UserError, OSError) as error:
            self.strategy.close()  # its process may wait for the rest of a shard
            self._failed(iteration, error)
            return
        self.stall = time.perf_counter() - began
        if self.pending is None:
            self._committed(request)

    def before_update(self) -> None:
        """The tensors are about to change: wait for what a save under way still reads of them."""
        if self.pending is not None:
            self.stall += self.pending.before_update()

    # ---- from step to step

    def ready(self) -> list[float]:
        """1 for each phase of a save under way that this rank has done its part of. Their sums over
        all ranks go to `advance`. Empty where nothing is ever in the background.
        """
        return [0.0] * self.strategy.phases if self.pending is None else self.pending.ready()

    def advance(self, sums: Sequence[float]) -> None:
        """All ranks call this after the same step: go on to the next phase when every one is ready
        for it.
        """
        if self.pending is not None and sums[self.pending.phase] == self.ranks.world.size:
            self._next_phase(self.pending)

    def finalize(self) -> bool:
        """Wait for the save under way; whether the last one went well. All ranks call it
        together.
        """
        began = time.perf_counter()
        while self.pending is not None:
            self.stall += time.perf_counter() - began
            began = time.perf_counter()
            self.pending.look(wait=True)
            self._next_phase(self.pending)
        return self.went_well

    def close(self) -> None:
        """End what runs beside the training, whatever it does."""
        self.strategy.close()

    def _next_phase(self, save: StagedSave) -> None:
        try:
            if not save.next_phase():
                return
        except UserError as error:
            self._end(save)
            self._failed(save.request.iteration, error)
            return
        self._end(save)
        self._committed(save.request)

    def _end(self, save: StagedSave) -> None:
        save.close()
        self.pending = None

    def _failed(self, iteration: int, error: Exception) -> None:
        self.went_well = False
        logger.warning(
            f"iteration {iteration} was NOT saved; older checkpoints are untouched. {error}"
        )

    def _committed(self, request: SaveRequest) -> None:
        self.went_well = True
        if not self.ranks.first:
            return
        folder = self.strategy.destination.root / iteration_folder(request.iteration)
        manifest, _ = read_manifest(folder)
        size = sum(shard["bytes"] for shard in manifest["shards"])
        seconds = time.perf_counter() - request.began
        saved = Saved(str(folder), size, seconds, self.stall)
        logger.info(str(saved))
        self.report(request.iteration, saved)
