"""The words of --data-path and --split, and files of such words."""

from __future__ import annotations

import os
import re
from fractions import Fraction

from megatron.config.errors import UserError
from megatron.config.input_files import JSON_LIMIT, decode, parse_json, read_bytes

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # a weight of a blend
Weighted = tuple[float | None, str]  # a weight and the prefix of a dataset's files
# Flags of other programs whose file has these words.
DATA_LISTS = ("--data-args-path", "--data-file-list", "--per-split-data-args-path")
SPLITS = ("train", "valid", "test")


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


def read_data_list(flag: str, words: list[str]) -> list[tuple[str, list[str]]]:
    """Our flags and their words, which the file after one of DATA_LISTS holds. Raises UserError."""
    if len(words) != 1:
        raise UserError("takes one file")
    raw = read_bytes(words[0], JSON_LIMIT)
    if flag == "--data-args-path":
        return [("--data-path", decode(raw).split())]
    if flag == "--data-file-list":
        # weight and prefix of each line; a corpus may follow
        lines = [line.split() for line in decode(raw).splitlines()]
        for number, line in enumerate(lines, 1):
            if len(line) not in (0, 2, 3):
                raise UserError(f"line {number}: expected a weight, a prefix and a corpus")
        return [("--data-path", [word for line in lines for word in line[:2]])]
    # words under the name of each split, as a list or as one text
    found = []
    for split, value in parse_json(raw).items():
        each = value.split() if isinstance(value, str) else value
        if split not in SPLITS or not isinstance(each, list):
            known = ", ".join(SPLITS)
            raise UserError(f"expected words under {known}, found {split!r}: {value!r}")
        found.append((f"--{split}-data-path", list(map(str, each))))
    return found
