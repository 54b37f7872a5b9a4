"""The pipeline schedules: what each is called, how its stages lie on the ranks, how many a rank
takes. parallel/schedule.py has their actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def round_and_round(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage -> pipeline rank: 0, 1, ..., 0, 1, ..."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def down_and_up(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage -> pipeline rank: 0, 1, ..., 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class StageRule:
    """What a schedule asks of the stages."""

    virtual: int | None = 1  # stages on each pipeline rank; None: two or more
    place: Callable[[int, int], tuple[int, ...]] = round_and_round
    pairs: bool = False  # a backward pass can overlap a forward pass of a later micro-batch


SCHEDULES = {
    "gpipe": StageRule(),
    "1f1b": StageRule(pairs=True),
    "interleaved": StageRule(virtual=None, pairs=True),
    "zero-bubble": StageRule(),
    "zero-bubble-v": StageRule(virtual=2, place=down_and_up),
}

IN_PAIRS = tuple(name for name, rule in SCHEDULES.items() if rule.pairs)
