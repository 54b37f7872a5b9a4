"""Which known word an unknown one may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Words of flags that carry no meaning by themselves.
FILLERS = {"num", "size", "use", "enable", "with", "n", "value"}


def one_edit(one: str, other: str) -> bool:
    """Whether one inserted, deleted, replaced or swapped letter lies between two words."""
    if one == other or abs(len(one) - len(other)) > 1:
        return False
    shortest = min(len(one), len(other))
    start = next((i for i in range(shortest) if one[i] != other[i]), shortest)
    rest = shortest - start
    end = next((i for i in range(rest) if one[-1 - i] != other[-1 - i]), rest)
    left = one[start : len(one) - end]
    right = other[start : len(other) - end]
    return max(len(left), len(right)) == 1 or (len(left) == 2 and left == right[::-1])


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    """What a word may have been meant to be: all that are one letter away, else the one that looks
    most alike, if any does.
    """
    known = list(known)
    return [other for other in known if one_edit(word, other)] or difflib.get_close_matches(
        word, known, n=1, cutoff=0.7
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known ones that are nearest, if any are."""
    near = _nearest(word, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _alike(one: str, other: str) -> bool:
    """Whether two words of flags may be the same: one abbreviates the other, or a letter is
    wrong in a word long enough to show it.
    """
    short, long = sorted((one, other), key=len)
    is_prefix = len(short) >= 3 and long.startswith(short)
    return one == other or is_prefix or (len(short) >= 5 and one_edit(one, other))


def same_meaning(one: str, other: str) -> bool:
    """Whether two flags consist of the same words in any order, but for typos, abbreviations and
    FILLERS. A word that only one of them has makes it another setting.
    """
    left = one.removeprefix("--").split("-")
    right = other.removeprefix("--").split("-")
    for word in list(left):
        match = next((candidate for candidate in right if _alike(word, candidate)), None)
        if match is not None:
            left.remove(word)
            right.remove(match)
    return not {*left, *right} - FILLERS
