"""A save that training waits for: the strategy without --async-save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.retention import Policy, retire
from megatron.checkpoint.writer import save_checkpoint

if TYPE_CHECKING:
    from megatron.checkpoint.desync import DesyncCheck
    from megatron.checkpoint.save_plan import Pairs


@dataclass(frozen=True)
class Destination:
    """Where a run's checkpoints go, and how. `rate`: the most MB/s of a rank in the background;
    `before`: iterations that were there before this run, on the first rank.
    """

    root: Path
    ranks: Ranks
    retention: Policy
    verify: bool
    rate: float | None
    before: list[int]


@dataclass(frozen=True)
class SaveRequest:
    """What one save consists of: the (box, tensor) `pairs` that this rank writes, and the `state`
    that is saved beside tensors. `local`: the shards are whole in the local tier; `began`: the time
    of its start by time.perf_counter.
    """

    iteration: int
    pairs: Pairs
    state: dict[str, Any]
    replicas: DesyncCheck | None
    local: bool
    began: float


class SynchronousStrategy:
    """Writes and commits before it returns."""

    phases = 0  # numbers that a save adds to the sums of a training step
    compares_later = False  # whether replicas are compared while a save is under way

    def __init__(self, destination: Destination):
        self.destination = destination

    def start(self, request: SaveRequest) -> None:
        """Raises UserError on every rank where anything prevents the save on one."""
        to = self.destination
        save_checkpoint(
            to.root,
            request.iteration,
            request.pairs,
            request.state,
            to.ranks,
            verify=to.verify,
            before=to.before,
        )
        if to.ranks.first:
            retire(to.root, to.retention, request.iteration)

    def close(self) -> None:
        """Nothing runs beside the training."""
