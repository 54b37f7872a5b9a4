"""Answers flags and values of Megatron-LM (2026-08) and Megatron-DeepSpeed (2025-07) that are not
fields here.

The answers are data, in `compatibility.toml`, which specifies what its tables mean; a row's verdict
is the name of its table. The names of other programs' flags are there too, so that a flag that no
program has is unknown.
"""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.derive import GROUP_OF
from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.options import Words, key

Occurrence = tuple[str, Words]
Condition = list[dict[str, list[Any]]]  # alternatives: the values that fields may have

PAIRS = ("equals", "at_least")  # tables of flags = what they mean
TABLES = (*PAIRS, "choice", "file", "together", "note", "not_done", "only", "refused")


@dataclass(frozen=True, eq=False)
class CompatibilityRow:
    """The flags that share an answer: a row of the data file."""

    verdict: str
    flags: tuple[str, ...]
    text: str  # of `equals` and `at_least`: the flags of ours that they mean
    values: tuple[str, ...] = ()
    choices: dict[str, str] | None = None  # value -> flags of ours; "" is no value
    when: Condition | None = None
    unless: Condition | None = None
    otherwise: str = ""

    @property
    def is_conditional(self) -> bool:
        return self.when is not None or self.unless is not None

    def holds(self, config: Config) -> bool:
        """Whether the settings fulfil the row's condition."""
        if self.when is not None:
            return _is_met(self.when, config)
        return self.unless is None or not _is_met(self.unless, config)

    def rewrite(self, words: Words) -> list[Occurrence]:
        """The occurrences of our own flags that the row means. Raises UserError for a value that
        is none of the choices.
        """
        text = self.text
        if self.choices is not None:
            value = " ".join(words).lower()
            if value not in self.choices:
                known = ", ".join(name or "no value" for name in self.choices)
                raise UserError(f"{self.text} (accepted: {known})")
            text = self.choices[value]
        result: list[Occurrence] = []
        for word in text.split():
            if word.startswith("--"):
                result.append((word, []))
            else:
                result[-1][1].extend(words if word == "$" else [word])
        return result


def _is_met(condition: Condition, config: Config) -> bool:
    def value(field: str) -> Any:
        found = getattr(getattr(config, GROUP_OF[field]), field)
        return "None" if found is None else found

    return any(
        all(value(field) in values for field, values in alternative.items())
        for alternative in condition
    )


@functools.cache
def data() -> dict[str, Any]:
    """The data file."""
    return tomllib.loads(Path(__file__).with_name("compatibility.toml").read_text("utf-8"))


@functools.cache
def table() -> tuple[CompatibilityRow, ...]:
    """Every row, in the order of TABLES."""
    found: list[CompatibilityRow] = []
    for verdict in TABLES:
        entries = data()[verdict]
        if verdict in PAIRS:
            entries = [{"flags": flags, "text": text} for flags, text in entries.items()]
        found += [_row(verdict, **entry) for entry in entries]
    return tuple(found)


def _row(verdict: str, flags: str, values: str = "", **rest: Any) -> CompatibilityRow:
    if "choices" in rest:
        rest["choices"] = {
            "" if value == "none" else value: ours
            for values_of, ours in rest["choices"].items()
            for value in values_of.split()
        }
    return CompatibilityRow(verdict, tuple(flags.split()), values=tuple(values.split()), **rest)


@functools.cache
def recorded_names() -> tuple[str, ...]:
    """Every flag that another program has, as it is written there."""
    return tuple(name for text in data()["names"].values() for name in text.split())


@functools.cache
def rows() -> dict[str, CompatibilityRow]:
    """Row by exact name, with families spelled out. A name in two rows is an error of the table."""
    result: dict[str, CompatibilityRow] = {}
    families: dict[str, CompatibilityRow] = {}
    for row in table():
        for flag in row.flags:
            where, name = (families, flag[:-1]) if flag.endswith("*") else (result, key(flag))
            assert name not in where, f"{flag} is twice in the table"
            where[name] = row
    for name in map(key, recorded_names()):
        beginnings = [family for family in families if name.startswith(family)]
        if beginnings:
            result.setdefault(name, families[max(beginnings, key=len)])
    return result


def find(flag: str) -> CompatibilityRow | None:
    """The row that answers a flag, or None."""
    return rows().get(flag)


# ---------------------------------------------------------------- values of our own flags


@functools.cache
def by_value(section: str) -> dict[tuple[str, str], str]:
    """(flag, word) -> text, of a table whose keys are a flag and words of it."""
    found: dict[tuple[str, str], str] = {}
    for flag_and_words, text in data()[section].items():
        flag, *words = flag_and_words.split()
        found |= {(flag, word): text.replace("{}", word) for word in words}
    return found


@functools.cache
def asks() -> dict[tuple[str, str], CompatibilityRow]:
    """(flag, word) -> the row that answers what a word asks for in addition to our value."""
    answered = {pair: rows()[flag] for pair, flag in by_value("value_asks").items()}
    return answered | {
        pair: CompatibilityRow("not_done", (), text)
        for pair, text in by_value("value_not_done").items()
    }


def translate_value(flag: str, words: Words) -> tuple[Words, str]:
    """Our words for another codebase's values of our own flag, and a note; raises UserError for
    values that cannot act.
    """
    if flag == "--num-experts" and len(words) > 1:  # of each layer, in Megatron-DeepSpeed
        if len(set(words)) > 1:
            raise UserError("must be the same in every layer that has experts; give one number")
        return words[:1], ""
    if flag == "--window-size" and len(words) == 1 and "," in words[0]:
        return _window(words[0])
    for word in words:
        if (flag, word) in by_value("refused_values"):
            raise UserError(by_value("refused_values")[flag, word])
    if len(words) != 1:
        return words, ""
    pair = flag, words[0]
    return [by_value("values").get(pair, words[0])], by_value("value_notes").get(pair, "")


def _window(pair: str) -> tuple[Words, str]:
    """Megatron-LM's pair of --window-size as one number."""
    left, right = (part.strip() for part in pair.strip("()").split(",", 1))
    if not left.isdigit() or right != "0":
        raise UserError(
            "Megatron's pair must be W-1,0 here: W latest tokens, itself included, none after it"
        )
    size = str(int(left) + 1)
    return [size], f"--window-size {pair} is a window of {size} tokens, itself included"


def habit(flag: str) -> str:
    """Our flag that a short name represents, or an empty string."""
    meant = (ours for ours, names in data()["habits"].items() if flag in names.split())
    return next(meant, "")


def follows(flag: str) -> str:
    """What to do about a short name whose setting follows from others, or an empty string."""
    advice = (text for names, text in data()["follows"].items() if flag in names.split())
    return next(advice, "")


# ---------------------------------------------------------------- answers


Answered = tuple[str, Words, CompatibilityRow]  # a flag as written, its words, its row
Lines = dict[tuple[CompatibilityRow, str], list[str]]  # the flags that share a row and a text


@dataclass
class Answers:
    """What is reported about flags that are not ours; those that share a row share its line."""

    notes: list[str]
    not_done: list[str]
    faults: list[str]


def _fault(flag: str, words: Words, row: CompatibilityRow, config: Config) -> str:
    """Why a row refuses its flag with these words and settings; empty when it does not."""
    shown = " ".join([flag, *words])
    if row.verdict == "only" and not words:
        return f"{flag}: no value follows it (is a shell variable unset?)"
    if row.verdict == "only" and not set(words) <= set(row.values):
        return f"{shown}: {row.text} (accepted: {', '.join(row.values)})"
    if row.verdict == "refused":
        return f"{shown}: {row.text}"
    if row.verdict == "note" and not row.holds(config):
        return f"{shown}: {row.otherwise}"
    return ""


def answer(occurrences: list[Answered], config: Config) -> Answers:
    """Notes, missing services and faults of other programs' flags."""
    notes: Lines = defaultdict(list)
    missing: Lines = defaultdict(list)
    faults = []
    for flag, words, row in occurrences:
        asks_nothing = bool(words) and set(words) <= set(row.values)
        if fault := _fault(flag, words, row, config):
            faults.append(fault)
        elif row.verdict == "note":
            notes[row, row.text].append(flag)
        elif row.verdict == "not_done" and row.is_conditional and row.holds(config):
            notes[row, row.otherwise].append(flag)
        elif row.verdict == "not_done" and not asks_nothing:
            missing[row, row.text].append(flag)
    return Answers(_lines(notes), _lines(missing), faults)


def _lines(groups: Lines) -> list[str]:
    return [f"{', '.join(dict.fromkeys(flags))}: {text}" for (_, text), flags in groups.items()]
