"""The words of --data-path and --split."""

from __future__ import annotations

import os
import re
from fractions import Fraction

from megatron.config.errors import UserError

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # a weight of a blend
Weighted = tuple[float | None, str]  # a weight and the prefix of a dataset's files


def parse_blend(words: tuple[str, ...], flag: str) -> list[Weighted]:
    """`weight prefix weight prefix ...`, or prefixes without weights (None). Raises UserError."""
    numbers = [NUMBER.fullmatch(word) is not None for word in words]
    are_files = any(n and os.path.isfile(word + ".idx") for word, n in zip(words, numbers))
    is_even = len(words) % 2 == 0 and all(numbers[::2])
    if len(words) > 1 and is_even and (are_files or not any(numbers[1::2])):
        weights = [float(word) for word in words[::2]]
        if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise UserError(f"{flag} {' '.join(words)}: weights must be 0 or more, and not all 0")
        return list(zip(weights, words[1::2], strict=True))
    if len(words) > 1 and any(numbers) and not are_files:
        raise UserError(
            f"{flag} {' '.join(words)}: give a weight before each prefix, as in 0.3 A 0.7 B, or "
            "before none"
        )
    return [(None, word) for word in words]


def parse_split(text: str) -> list[Fraction]:
    """`969,30,1` -> the shares of train, valid and test, exactly. Raises UserError."""
    try:
        parts = [Fraction(part) for part in re.split(r"[,/ ]+", text.strip())]
    except (ValueError, ZeroDivisionError):
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or sum(parts) == 0:
        raise UserError(
            f"--split {text}: expected up to three shares like 969,30,1 with a sum above 0"
        )
    parts += [Fraction(0)] * (3 - len(parts))
    return [part / sum(parts) for part in parts]
