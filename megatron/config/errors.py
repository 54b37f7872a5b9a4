"""Mistakes of the user's: one class, and the error of the command line, which lists all faults
together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something that the user can correct: its text names the file, flag or value and the fix.

    Programs print it without a traceback and exit with code 2. Every other exception is a fault of
    the program: it keeps its traceback and the exit code is 1.
    """


class ArgumentErrors(UserError):
    """Every fault of a command line or configuration, one line each: flag, value, problem, fix."""

    def __init__(self, faults: list[str]):
        self.faults = list(dict.fromkeys(faults))
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n  ".join([f"{count} in the settings:", *self.faults]))


@contextmanager
def about(what: str) -> Iterator[None]:
    """Puts before the text of a UserError what it is about."""
    try:
        yield
    except UserError as problem:
        raise UserError(f"{what}: {problem}") from None


@contextmanager
def collected(faults: list[str], what: str) -> Iterator[None]:
    """Adds the text of a UserError to faults, with what it is about before it."""
    try:
        yield
    except UserError as problem:
        faults.append(f"{what}: {problem}")


def some(words: list[str], most: int, between: str = ", ") -> str:
    """The first of several words, and how many more there are."""
    more = f"{between.strip(' ,')} and {len(words) - most} more" if len(words) > most else ""
    return between.join(words[:most]) + more


def shortened(text: str, most: int) -> str:
    """A value in a message: at most `most` characters of it."""
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest_word(word: str, known: Iterable[str]) -> str:
    """The known word that an unknown one may have been meant to be, or an empty string."""
    alike = [each for each in known if each.lstrip("-")[:1] == word.lstrip("-")[:1]]
    return next(iter(difflib.get_close_matches(word, alike, n=1, cutoff=0.75)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, if any is near."""
    near = nearest_word(word, known)
    return f"; did you mean {near}?" if near else ""


def nearest(value: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to a value, above 0."""
    return max(unit, (value + unit // 2) // unit * unit)
