"""The global batch size as a function of the samples consumed: constant, --rampup-batch-size, or
--step-batch-size-schedule. Every length of a run is computed from these steps.
"""

from __future__ import annotations

import functools
import re
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.config.groups import TrainingConfig

Step = tuple[int, int]  # samples consumed from which on a batch size holds, and that size
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_schedule(words: tuple[str, ...]) -> list[Step]:
    """The (tokens, batch size) pairs of `0:16 2.4B:320 ...`, in order of tokens.

    Spaces and commas divide entries; numbers may end in K, M, B or T (powers of 1000). Raises
    UserError unless the first threshold is 0 and sizes are above 0.
    """
    steps = sorted(map(_parse_step, " ".join(words).replace(",", " ").split()))
    if not steps or steps[0][0] != 0:
        raise UserError("the first step must be at 0 tokens, such as 0:16")
    return steps


def _parse_step(entry: str) -> Step:
    match = re.fullmatch(r"([\d._]+)([KMBT]?):([\d._]+)([KMBT]?)", entry.upper())
    try:
        if match is not None:
            tokens = Decimal(match[1]) * SUFFIXES[match[2]]
            size = Decimal(match[3]) * SUFFIXES[match[4]]
            if size == int(size) and 0 < size < 2**53 and tokens < 2**63:
                return int(tokens), int(size)
    except ArithmeticError:  # two points in a number
        pass
    raise UserError(
        f"{entry[:40]}: expected TOKENS:SAMPLES, such as 2.4B:320 for batches of 320 samples from "
        "2.4e9 tokens on"
    )


@functools.lru_cache(maxsize=64)
def batch_steps(training: TrainingConfig, seq_length: int) -> tuple[Step, ...]:
    """The steps of a resolved configuration, in order of samples.

    Ramp-up: start + floor(consumed x increments / samples) x increment until `samples` are
    consumed. A schedule's thresholds are in tokens, and are rounded down to samples. Raises
    UserError where two of them are the same number of samples.
    """
    if training.step_batch_size_schedule is not None:
        schedule = parse_schedule(training.step_batch_size_schedule)
        steps = [(tokens // seq_length, size) for tokens, size in schedule]
        for (first, _), (second, size) in pairwise(steps):
            if first == second:
                raise UserError(
                    f"two steps begin at {first} samples of --seq-length {seq_length} (one is of "
                    f"{size} samples); remove one"
                )
        return tuple(steps)
    batch = training.global_batch_size
    assert batch is not None
    if training.rampup_batch_size is None:
        return ((0, batch),)
    start, increment, samples = training.rampup_batch_size
    increments = (batch - start) // increment
    return tuple(
        (-(-count * samples // increments), start + count * increment)
        for count in range(increments + 1)
    )
