"""Files that flags of other programs name: lists of data files, and the tokenizer whose vocabulary
--extra-vocab-size adds to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError
from megatron.config.input_files import (
    JSON_LIMIT,
    InputError,
    decode,
    parse_json,
    read_bytes,
    read_json,
)

Words = list[str]
SPLITS = ("train", "valid", "test")


def data_flags(flag: str, words: Words) -> list[tuple[str, Words]]:
    """The flags of data that the file of such a flag means, with their words. Raises UserError."""
    if len(words) != 1:
        raise UserError("takes one file")
    raw = read_bytes(words[0], JSON_LIMIT)
    if flag == "--per-split-data-args-path":
        return _by_split(parse_json(raw))
    if flag == "--data-file-list":
        return [("--data-path", _listed(decode(raw)))]
    return [("--data-path", decode(raw).split())]


def _by_split(content: dict[str, Any]) -> list[tuple[str, Words]]:
    """Words under the name of each split, as a list or as one text."""
    found = []
    for split, value in content.items():
        words = value.split() if isinstance(value, str) else value
        if split not in SPLITS or not isinstance(words, list):
            raise InputError(
                f"expected words of data under {', '.join(SPLITS)}, found {split!r}: {value!r}"
            )
        found.append((f"--{split}-data-path", list(map(str, words))))
    return found


def _listed(text: str) -> Words:
    """Weight and prefix of each line; a corpus may follow."""
    words: Words = []
    for number, line in enumerate(text.splitlines(), 1):
        each = line.split()
        if len(each) not in (0, 2, 3):
            raise InputError(f"line {number}: expected a weight, a prefix and a corpus")
        words += each[:2]
    return words


def extended_vocabulary(words: Words, tokenizer: str | None) -> int | None:
    """Rows of an embedding with `words` rows more than the vocabulary of a tokenizer.json (or its
    folder) has without added tokens; None for 0. Raises UserError.
    """
    if len(words) != 1 or not words[0].isdigit():
        raise UserError("expected a whole number of 0 or more")
    if int(words[0]) == 0:
        return None
    path = Path(tokenizer or "")
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    try:
        vocabulary = read_json(path)["model"]["vocab"]
        return len(vocabulary) + int(words[0])
    except (InputError, KeyError, TypeError) as error:
        raise UserError(
            f"adds to the vocabulary of --tokenizer-model {tokenizer}, which is not a "
            f"tokenizer.json ({error}); give --padded-vocab-size with all rows of the embedding"
        ) from None
