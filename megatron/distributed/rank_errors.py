"""One outcome for all ranks: what fails on one ends all of them, and soon, with a message that
leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.errors import UserError
from megatron.distributed.collectives import gather_bytes
from megatron.distributed.groups import Axis

NAMED = 8  # most ranks that a message lists


class RankError(UserError):
    """What went wrong on some ranks, raised on all of them; `rank` is the one that raises it
    here.
    """

    def __init__(self, text: str, rank: int):
        super().__init__(text)
        self.rank = rank


@contextmanager
def raise_on_all_ranks(axis: Axis, device: torch.device) -> Iterator[None]:
    """Leave the block on every rank of the axis, or raise RankError on every one when a UserError
    was raised inside on any.

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
    texts = [
        text.decode()
        for text in gather_bytes(
            b"" if fault is None else str(fault).encode() or b"?", axis, device
        )
    ]
    raise_rank_error(texts, axis, fault)


def raise_rank_error(texts: list[str], axis: Axis, fault: UserError | None) -> None:
    """Raise RankError, the same on every rank, when `texts` has what went wrong on any (by rank;
    empty where nothing did); `fault` is this rank's.
    """
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        same = [rank for rank in failed if texts[rank] == texts[failed[0]]]
        shown = ", ".join(map(str, same[:NAMED])) + (
            f" and {len(same) - NAMED} more" if len(same) > NAMED else ""
        )
        who = "" if len(same) == axis.size else f"rank{'s' * (len(same) > 1)} {shown}: "
        raise RankError(who + texts[failed[0]], axis.rank) from fault
