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
    # what is alive grows with the micro-batches of a step, or needs a multiple of the ranks: a plan
    # runs all of them
    grows: bool = False
    pairs: bool = False  # a backward pass can overlap a forward pass of a later micro-batch


SCHEDULES = {
    "gpipe": StageRule(grows=True),
    "1f1b": StageRule(pairs=True),
    "interleaved": StageRule(virtual=None, grows=True, pairs=True),
    "zero-bubble": StageRule(),
    "zero-bubble-v": StageRule(virtual=2, place=down_and_up),
}

IN_PAIRS = tuple(name for name, rule in SCHEDULES.items() if rule.pairs)
STEADY = 4  # micro-batches for each pipeline rank after which a step repeats itself


def planned_micro_batches(schedule: str | None, ranks: int, count: int) -> int:
    """How many of a step's micro-batches hold what all of them would."""
    grows = schedule is not None and SCHEDULES[schedule].grows
    return count if grows else min(count, STEADY * ranks)


def place(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage -> pipeline rank."""
    return SCHEDULES[schedule].place(ranks, virtual)
