"""Raises an error of one rank on all ranks, with the same message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.errors import UserError
from megatron.distributed.collectives import gather_bytes
from megatron.distributed.groups import Axis
from megatron.distributed.rendezvous import name_ranks


class RankError(UserError):
    """An error of some ranks, raised on all of them; `rank` is this rank."""

    def __init__(self, text: str, rank: int):
        super().__init__(text)
        self.rank = rank


@contextmanager
def raise_on_all_ranks(axis: Axis, device: torch.device) -> Iterator[None]:
    """Raise RankError on every rank of the axis when a UserError is raised in the block on any.

    No collective may run inside. Other exceptions pass: they are faults of the program, and the
    launcher ends the other ranks.
    """
    if axis.size == 1:
        yield
        return
    fault = None
    try:
        yield
    except UserError as error:
        fault = error
    text = "" if fault is None else str(fault) or "?"
    texts = [each.decode() for each in gather_bytes(text.encode(), axis, device)]
    raise_rank_error(texts, axis, fault)


def raise_rank_error(texts: list[str], axis: Axis, fault: UserError | None) -> None:
    """Raise RankError, the same on every rank, when any of `texts` (the error of each rank, or an
    empty string) is not empty. `fault`: this rank's error.
    """
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        same = [rank for rank in failed if texts[rank] == texts[failed[0]]]
        who = "" if len(same) == axis.size else f"{name_ranks(same)}: "
        raise RankError(who + texts[failed[0]], axis.rank) from fault
