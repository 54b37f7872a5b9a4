"""Settings as they are read from a command line or a file, one flag after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron.config import compatibility
from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.help import COMMANDS, TAKES_FILE
from megatron.config.input_files import path_fault
from megatron.config.options import FIELDS, Option, Words, key, options_by_flag, shown

Occurrence = tuple[str, Words]


def split_words(argv: list[str]) -> tuple[list[Occurrence], list[str]]:
    """(flag, its words) of a command line, and faults: words before any flag, one-dash flags."""
    occurrences: list[Occurrence] = []
    faults = []
    for word in argv:
        if re.match(r"--?[^-\d.]|--.", word):  # not a negative number
            flag, equals, value = word.partition("=")
            if re.search(r"\s", flag):
                faults.append(
                    f"{word!r}: flag and value are quoted together as one word; separate them"
                )
                occurrences.append((word.split()[0], word.split()[1:]))
            else:
                occurrences.append((flag, [_unquote(value)] if equals else []))
        elif not occurrences or word == "--":
            faults.append(f"{word}: unexpected argument; flags begin with --")
        else:
            occurrences[-1][1].append(_unquote(word))
    return occurrences, faults


def _unquote(word: str) -> str:
    """Drop quotation marks that a shell array left inside a word: '99,1,0' with its quotes."""
    return word[1:-1] if len(word) >= 2 and word[0] == word[-1] and word[0] in "'\"" else word


@dataclass
class Reading:
    """The settings so far, with notes for the banner and faults.

    `chosen`: the fields that flags or a file give a value; `set_by`: what the user wrote on the
    command line to do so. `unsure`: flags of ours whose value is unknown, so that rules about them
    are skipped. `foreign`: flags of other programs, answered when all settings are known.
    """

    config: Config = Config()
    chosen: set[str] = field(default_factory=set)
    set_by: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    foreign: list[tuple[str, Words, compatibility.CompatibilityRow]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)

    def value(self, name: str) -> Any:
        return getattr(getattr(self.config, FIELDS[name].group), name)

    def put(self, name: str, value: Any) -> None:
        """Set a field that no flag of ours chooses."""
        self.config = self.config.with_fields(FIELDS[name].group, **{name: value})

    def take(self, name: str, value: Any) -> None:
        """Set a field that is chosen."""
        self.put(name, value)
        self.chosen.add(name)

    def read(self, flag: str, words: Words, written: str = "") -> None:
        """Take in one occurrence; `written` is what the user wrote in place of the flag."""
        if key(flag) in map(key, COMMANDS):
            self._command(key(flag), words)
        elif key(flag) in options_by_flag():
            self._field(flag, words, written or shown(flag, words))
        else:
            compatibility.read(self, flag, words)

    def _command(self, flag: str, words: Words) -> None:
        takes_file = flag in TAKES_FILE
        if len(words) != takes_file or "" in words:
            takes = "one file" if takes_file else "no value"
            self.faults.append(f"{shown(flag, words)}: takes {takes}")
        elif fault := path_fault("".join(words)):
            self.faults.append(f"{shown(flag, words)}: {fault}")
        else:
            self.commands[flag] = words[0] if takes_file else ""

    def _parse(self, option: Option, words: Words) -> Any:
        try:
            return option.parse(words)
        except UserError:  # perhaps a value of another program
            words, note = compatibility.translate_value(option.names[0], words)
            value = option.parse(words)
            if note:
                self.notes.append(note)
            return value

    def _field(self, flag: str, words: Words, written: str) -> None:
        option, on = options_by_flag()[key(flag)]
        try:
            value = self._parse(option, words)
        except UserError as problem:
            self.faults.append(f"{written}: {problem}")
            self.unsure.add(option.names[0])
            return
        if option.kind is bool:
            value = value == on
        before = self.set_by.get(option.field, "")
        if before and self.value(option.field) != value:
            # a flag that is given twice is overridden on purpose; two that mean the same are not
            flags = {key(text.split()[0]) for text in (before, written)}
            if len(flags) == 1 or options_by_flag().keys() >= flags:
                self.notes.append(f"{before} is overridden by the later {written}")
            else:
                self.faults.append(f"{written}: contradicts {before}; drop one of them")
        self.take(option.field, value)
        self.set_by[option.field] = written
