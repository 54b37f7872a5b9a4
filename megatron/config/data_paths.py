"""The words of --data-path and --split."""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction

from megatron.config.errors import UserError

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # a weight of a blend
Weighted = tuple[float | None, str]  # a weight and the prefix of a dataset's files
SPLITS = ("train", "valid", "test")


def parse_blend(words: tuple[str, ...], flag: str) -> list[Weighted]:
    """`weight prefix weight prefix ...`, or prefixes without weights (None). Raises UserError."""
    if len(words) < 2:
        return [(None, word) for word in words]
    given = f"{flag} {' '.join(words)}"
    numbers = [word for word in words if NUMBER.fullmatch(word)]
    # the files of a dataset may have a number for a name
    are_files = any(os.path.isfile(f"{word}.idx") for word in numbers)
    weights, prefixes = words[::2], words[1::2]
    is_even = len(weights) == len(prefixes) and all(map(NUMBER.fullmatch, weights))
    if is_even and (are_files or not any(map(NUMBER.fullmatch, prefixes))):
        shares = [float(weight) for weight in weights]
        if min(shares) < 0 or not 0 < sum(shares) < math.inf:
            raise UserError(f"{given}: weights must be 0 or more, and not all 0")
        return list(zip(shares, prefixes, strict=True))
    if numbers and not are_files:
        fix = "give a weight before each prefix, as in 0.3 A 0.7 B, or before none"
        raise UserError(f"{given}: {fix}")
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
