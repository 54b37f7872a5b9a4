"""What the ranks of a job do together around a checkpoint: one outcome for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.errors import UserError
from megatron.distributed.groups import ALONE, Axis
from megatron.distributed.rank_errors import gather_or_raise, raise_on_all_ranks


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job as one of them sees them; by default it is alone."""

    world: Axis = ALONE
    device: torch.device = torch.device("cpu")
    stage: int = 0  # this rank's place in the pipeline: for those who read manifests

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    @property
    def who(self) -> dict[str, int]:
        """For the entry of this rank's shard in the manifest."""
        return {"rank": self.world.rank, "pp": self.stage}

    def gather_or_raise(self, part: Callable[[], Any]) -> list[Any]:
        """Carry out this rank's part and wait for the others'; every rank gets what all have
        returned (JSON), in rank order.

        When the part of any rank raises UserError, every rank raises the same RankError, which
        names that rank.
        """
        if self.world.size == 1:
            return [json.loads(json.dumps(part()))]
        text = ""
        fault = None
        try:
            text = json.dumps(part())
        except UserError as error:
            fault = error
        texts = gather_or_raise(text, fault, self.world)
        return [json.loads(each) for each in texts]

    def from_first(self, part: Callable[[], Any]) -> Any:
        """What the first rank's part returns, on every rank; errors as of `gather_or_raise`."""
        return self.gather_or_raise(lambda: part() if self.first else None)[0]

    def refuse(self, error: UserError) -> None:
        """Raise it, on every rank the same."""
        with raise_on_all_ranks(self.world):
            raise error


SINGLE_RANK = Ranks()
