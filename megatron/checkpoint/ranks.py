"""What the ranks of a job do together around a checkpoint: one outcome for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.manifest import CheckpointError
from megatron.dist.collectives import gather_bytes
from megatron.dist.groups import ALONE, Axis

NAMED = 8  # most failed ranks that a message lists


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job as one of them sees them; by default it is alone. `device` is where their messages travel."""

    world: Axis = ALONE
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    def agree(self, part: Callable[[], Any]) -> list[Any]:
        """Carry out this rank's part and wait for the others'; every rank gets what all have returned (JSON), in rank order.

        When the part of any rank raises, every rank raises the same CheckpointError, which names that rank. A rank that dies instead
        ends in the collective's own error. A process that is alone raises what its part raises.
        """
        if self.world.size == 1:
            return [part()]
        cause = None
        try:
            message = json.dumps([part(), None])
        except Exception as error:  # whatever it is, the others are waiting for word of it
            cause, kind = error, "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            message = json.dumps([None, f"{kind}{error}"])
        told = [json.loads(line) for line in gather_bytes(message.encode(), self.world, self.device)]
        failed = [rank for rank, (_, error) in enumerate(told) if error is not None]
        if failed:
            more = f" (and {len(failed) - NAMED} more)" if len(failed) > NAMED else ""
            also = f"; failed as well: ranks {', '.join(map(str, failed[1:NAMED]))}{more}" if failed[1:] else ""
            raise CheckpointError(f"rank {failed[0]}: {told[failed[0]][1]}{also}") from cause
        return [value for value, _ in told]


ONE = Ranks()
