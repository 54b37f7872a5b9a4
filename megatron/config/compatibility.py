"""Answers flags and values of Megatron-LM (2026-08) and Megatron-DeepSpeed (2025-07) that are not
fields here.

The answers are data, in `compatibility.toml`, which specifies what its tables mean; a row's verdict
is the name of its table. The names of other programs' flags are there too, so that a flag that no
program has is unknown. A command line of our flags does not read the file.
"""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.derive import RunView
from megatron.config.errors import UserError, collected, nearest_word
from megatron.config.help import COMMANDS, HELP
from megatron.config.options import Words, key, options_by_flag, shown

if TYPE_CHECKING:
    from megatron.config.reading import Occurrence, Reading

TABLES = ("equals", "choice", "together", "note", "not_done", "only", "refused")
GUIDE = "docs/launching.md#settings-of-other-programs"


@dataclass(frozen=True, eq=False)
class CompatibilityRow:
    """A row of the data file: the flags that share an answer."""

    verdict: str
    flags: tuple[str, ...]
    text: str  # of `equals`: the flags of ours that they mean
    values: tuple[str, ...] = ()
    choices: dict[str, str] | None = None  # value -> flags of ours; "" is no value
    when: Sequence[str] = ()  # alternatives: conditions that all hold, see derive.RunView.holds
    otherwise: str = ""

    def answer(self, run: RunView, words: Words) -> tuple[str, str]:
        """The kind of answer (fault, note, missing; empty: none is printed), and its text."""
        holds = not self.when or any(map(run.holds_all, self.when))
        is_accepted = bool(words) and set(words) <= set(self.values)
        if self.verdict == "refused":
            return "fault", self.text
        if self.verdict == "only" and not words:
            return "fault", "no value follows it (is a shell variable unset?)"
        if self.verdict == "only" and not is_accepted:
            return "fault", f"{self.text} (accepted: {', '.join(self.values)})"
        if self.verdict == "note":
            return ("note", self.text) if holds else ("fault", self.otherwise)
        if self.verdict == "not_done" and self.when and holds:
            return "note", self.otherwise
        if self.verdict == "not_done" and not is_accepted:
            return "missing", self.text
        return "", ""

    def rewrite(self, words: Words) -> list[Occurrence]:
        """The occurrences of our own flags that the row means. Raises UserError."""
        text = self.text
        if self.choices is not None:
            value = " ".join(words).lower()
            if value not in self.choices:
                known = ", ".join(name or "no value" for name in self.choices)
                raise UserError(f"{self.text} (accepted: {known})")
            text = self.choices[value]
        elif words and "$" not in text:
            raise UserError("it takes no value")
        result: list[Occurrence] = []
        for word in text.split():
            if word.startswith("--"):
                result.append((word, []))
            else:
                result[-1][1].extend(words if word == "$" else [word])
        return result


# ---------------------------------------------------------------- the data file


@functools.cache
def data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("compatibility.toml").read_text("utf-8"))


@functools.cache
def table() -> tuple[CompatibilityRow, ...]:
    equal = [{"flags": flags, "text": text} for flags, text in data()["equals"].items()]
    rows = data() | {"equals": equal}
    return tuple(_row(verdict, **entry) for verdict in TABLES for entry in rows[verdict])


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
    return tuple(name for text in data()["names"].values() for name in text.split())


@functools.cache
def rows() -> dict[str, CompatibilityRow]:
    """Row by exact name, with families spelled out: a longer beginning wins."""
    exact = {key(flag): row for row in table() for flag in row.flags if not flag.endswith("*")}
    families = {flag[:-1]: row for row in table() for flag in row.flags if flag.endswith("*")}
    for name in map(key, recorded_names()):
        beginnings = [family for family in families if name.startswith(family)]
        if beginnings:
            exact.setdefault(name, families[max(beginnings, key=len)])
    return exact


@functools.cache
def by_value(section: str) -> dict[tuple[str, str], str]:
    """(flag, word) -> text, of a table whose keys are a flag and words of it."""
    found = {}
    for key_of_row, text in data()[section].items():
        flag, *words = key_of_row.split()
        for word in words:
            found[flag, word] = text.replace("{}", word)
    return found


def check_program(content: dict[str, Any]) -> None:
    keys = {key.replace("-", "_") for key in content}
    for program, signs in data()["programs"].items():
        if any(keys.issuperset(sign.split()) for sign in signs):
            raise UserError(
                f"this is a configuration of {program}, which is not read; {GUIDE} lists the flags "
                "that mean the same"
            )


# ---------------------------------------------------------------- reading


def read(reading: Reading, flag: str, words: Words) -> None:
    """Take in a flag that is not ours: rewritten to ours, kept for `answer`, or unknown."""
    row, written = rows().get(key(flag)), shown(flag, words)
    with collected(reading.faults, written):
        if row is None:
            raise UserError(_unknown(reading, flag))
        if row.verdict not in ("equals", "choice"):
            reading.foreign.append((flag, words, row))
            return
        for ours, values in row.rewrite(words):
            reading.read(ours, values, written=written)


def translate_value(flag: str, words: Words) -> tuple[Words, str]:
    """Our words for another program's values of our own flag, and a note. Raises UserError."""
    if flag == "--num-experts" and len(words) > 1:  # of each layer, in Megatron-DeepSpeed
        if len(set(words)) > 1:
            raise UserError("must be the same in every layer that has experts; give one number")
        return words[:1], ""
    if flag == "--window-size" and len(words) == 1 and "," in words[0]:
        # Megatron-LM's pair: keys before the query, keys after it
        left, right = (part.strip() for part in words[0].strip("()").split(",", 1))
        if not left.isdigit() or right != "0":
            raise UserError("Megatron's pair must be W-1,0: W latest tokens; for -1 drop the flag")
        size = str(int(left) + 1)
        return [size], f"{flag} {words[0]} is a window of {size} tokens, itself included"
    for word in words:
        if (flag, word) in by_value("refused_values"):
            raise UserError(by_value("refused_values")[flag, word])
    if len(words) != 1:
        return words, ""
    pair = flag, words[0]
    return [by_value("values").get(pair, words[0])], by_value("value_notes").get(pair, "")


def _unknown(reading: Reading, flag: str) -> str:
    word = key(flag)
    for names, advice in data()["follows"].items():  # short names of what follows from others
        if word in names.split():
            return f"unknown flag; {advice}"
    # short names of our flags that people are used to
    habits = [ours for ours, names in data()["habits"].items() if word in names.split()]
    known = [*options_by_flag(), *map(key, COMMANDS), *HELP, *rows()]
    near = next(iter(habits), nearest_word(word, known))
    reading.unsure |= {near} if near else set()
    wrong = "unknown flag" if flag.startswith("--") else "unexpected argument; flags begin with --"
    return wrong + (f"; did you mean {near}?" if near else "")


# ---------------------------------------------------------------- answers


def answer(reading: Reading) -> list[str]:
    """Add notes and faults about other programs' flags; returns the services that do not exist."""
    run = RunView(reading.config, 1, None)
    answers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for flag, words, row in reading.foreign:
        kind, text = row.answer(run, words)
        if kind == "fault":
            reading.faults.append(f"{' '.join([flag, *words])}: {text}")
        else:
            answers[kind, text].append(flag)
    lines: dict[str, list[str]] = defaultdict(list)
    for (kind, text), flags in answers.items():
        lines[kind].append(f"{', '.join(dict.fromkeys(flags))}: {text}")
    reading.notes += lines["note"]
    return lines["missing"]
