"""Tables of command lines as text:

    # a comment
    name: WORD --flag value
            --further-flag, which continues the line
        field: what else is known of it

A dictionary gives the flags that replace a word in capitals; they may hold such words in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """An entry of a table: its name, its flags, and its further fields in their order."""

    name: str
    flags: str
    fields: list[tuple[str, str]]


def expand(text: str, words: Mapping[str, str]) -> str:
    """The text with the flags of each word."""
    return " ".join(expand(words[word], words) if word in words else word for word in text.split())


def read_table(table: str, words: Mapping[str, str]) -> list[Entry]:
    """The entries of a table."""
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\n" + 8 * " ", " ")
    found: list[Entry] = []
    for line in text.splitlines():
        key, _, given = line.partition(":")
        flags = expand(given, words)
        if key.startswith(" "):
            found[-1].fields.append((key.strip(), flags))
        else:
            found.append(Entry(key, flags, []))
    return found
