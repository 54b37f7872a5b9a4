"""Raises an error of one rank on all ranks, with the same message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.config.errors import UserError
from megatron.distributed.collectives import gather_objects
from megatron.distributed.groups import Axis
from megatron.distributed.rendezvous import name_ranks


class RankError(UserError):
    """An error of some ranks, raised on all of them; `rank` is this rank."""

    def __init__(self, text: str, rank: int):
        super().__init__(text)
        self.rank = rank


@contextmanager
def raise_on_all_ranks(axis: Axis) -> Iterator[None]:
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
    gather_or_raise(None, fault, axis)


def gather_or_raise(value: Any, fault: UserError | None, axis: Axis) -> list[Any]:
    """Every rank's value. Raise RankError, the same on every rank, when any has a `fault`."""
    text = None if fault is None else str(fault)
    values, faults = zip(*gather_objects((value, text), axis))
    failed = [rank for rank, each in enumerate(faults) if each is not None]
    if failed:
        first = faults[failed[0]]
        same = [rank for rank in failed if faults[rank] == first]
        who = "" if len(same) == axis.size else f"{name_ranks(same)}: "
        raise RankError(who + (first or "?"), axis.rank) from fault
    return list(values)
