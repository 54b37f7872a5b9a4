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
    gather_texts("", fault, axis, device)


def gather_texts(text: str, fault: UserError | None, axis: Axis, device: torch.device) -> list[str]:
    """Every rank's text. Raise RankError, the same on every rank, when any has a `fault`."""
    line = f"+{text}" if fault is None else f"-{str(fault) or '?'}"
    lines = [each.decode() for each in gather_bytes(line.encode(), axis, device)]
    failed = [rank for rank, each in enumerate(lines) if each[0] == "-"]
    if failed:
        first = lines[failed[0]]
        same = [rank for rank in failed if lines[rank] == first]
        who = "" if len(same) == axis.size else f"{name_ranks(same)}: "
        raise RankError(who + first[1:], axis.rank) from fault
    return [each[1:] for each in lines]
