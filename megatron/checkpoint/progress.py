"""What a save says of itself: how far it is, and what it took. Nothing here imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

GB = 1e9
QUIET = 10.0  # seconds between two lines


@dataclass
class WriteProgress:
    """Called with the bytes of a shard as they are written; logs how far it is, at most every QUIET
    seconds.
    """

    iteration: int
    total: int
    clock: Callable[[], float] = time.monotonic
    done: int = 0

    def __post_init__(self) -> None:
        self.start = self.last = self.clock()

    def __call__(self, count: int) -> None:
        self.done += count
        now = self.clock()
        if now - self.last >= QUIET and self.done < self.total:
            self.last = now
            logger.info(progress_line(self.iteration, self.done, self.total, now - self.start))


def progress_line(iteration: int, done: int, total: int, seconds: float) -> str:
    """After `done` of `total` bytes of this rank's shard in `seconds`."""
    rate = done / seconds
    return (
        f" saving iteration {iteration}: {done / GB:.2f} of {total / GB:.2f} GB of this "
        f"rank, {rate / GB:.2f} GB/s, ETA {(total - done) / rate:.0f} s"
    )


@dataclass(frozen=True)
class Saved:
    """A save that has gone well: `bytes` of all ranks in `seconds`, for `stall` of which training
    stood still.
    """

    folder: str
    bytes: int
    seconds: float
    stall: float

    def __str__(self) -> str:
        return (
            f" saved checkpoint {self.folder}: {self.bytes / GB:.2f} GB in "
            f"{self.seconds:.1f} s, {self.bytes / GB / self.seconds:.2f} GB/s; "
            f"training waited {self.stall:.1f} s"
        )
