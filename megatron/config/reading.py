"""Settings as they are read from a command line and from the file of --config, one flag after the
other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron.config import compatibility
from megatron.config.errors import UserError, collected, did_you_mean, shortened
from megatron.config.groups import GROUPS, Config
from megatron.config.help import COMMANDS, TAKES_FILE
from megatron.config.input_files import SETTINGS_LIMIT, path_fault, read_bytes, read_settings
from megatron.config.options import FIELDS, Option, Words, as_word, key, options_by_flag, shown

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

    `set_by`: the fields that have been given a value, and what the user wrote on the command line
    to do so, empty where a file did. `unsure`: flags of ours whose value is unknown, so that rules
    about them are skipped. `foreign`: flags of other programs, answered when all is known.
    """

    config: Config = Config()
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

    def take(self, name: str, value: Any, written: str = "") -> None:
        """Set a field that is chosen, by what the user wrote where that is known."""
        self.put(name, value)
        self.set_by[name] = written or self.set_by.get(name, "")

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
            self.commands[flag] = "".join(words)

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
        self.take(option.field, value, written)


# ---------------------------------------------------------------- the file of --config

# Sections of flat names, of Megatron-LM's --yaml-cfg.
SECTIONS = ("language_model", "model_parallel")


def read_config(path: str) -> Reading:
    """What a JSON or YAML file holds, in our groups or as flat names of flags, its faults among it.
    The command line wins without a note, and a default, which --print-config writes too, is not
    given.
    """
    reading, where = Reading(), f"--config {path}"
    with collected(reading.faults, "cannot be read"):
        content = read_settings(read_bytes(path, SETTINGS_LIMIT))
        if isinstance(content, dict):  # functional tests of Megatron-LM have their flags there
            content = content.get("MODEL_ARGS", content)
        if not isinstance(content, dict):
            raise UserError("expected groups with settings, as --print-config writes them")
        compatibility.check_program(content)
        is_flat = content and not any(
            isinstance(value, dict) and name not in SECTIONS for name, value in content.items()
        )
        (_read_flat if is_flat else _read_groups)(reading, content)
    reading.faults = [f"{where}: {fault}" for fault in reading.faults]
    given = [name for name in reading.set_by if reading.value(name) != FIELDS[name].default]
    reading.set_by = dict.fromkeys(given, "")
    return reading


def _read_groups(reading: Reading, content: dict[str, Any]) -> None:
    for group, fields in content.items():
        if group not in GROUPS or not isinstance(fields, dict):
            groups = f"the groups are {', '.join(GROUPS)}"
            reading.faults.append(f"{_short(group)} is not a group of settings; {groups}")
            continue
        names = [name for name, option in FIELDS.items() if option.group == group]
        for field_name, value in fields.items():
            if field_name in names:
                with collected(reading.faults, f"{group}.{field_name} = {_short(value)}"):
                    reading.take(field_name, FIELDS[field_name].load(value))
            else:
                meant = did_you_mean(str(field_name), names)
                reading.faults.append(f"{group} has no setting {_short(field_name)}{meant}")


def _short(value: Any) -> str:
    return shortened(repr(value), 60)


def _read_flat(reading: Reading, content: dict[str, Any]) -> None:
    """Take in a file of flags; nulls, false switches of other programs, and true ones that are on
    without --no-X or --disable-X, are not given.
    """
    known = {*compatibility.rows(), *map(key, COMMANDS)}
    for name, value in content.items():
        flag = key("--" + name.lstrip("-"))
        option, on = options_by_flag().get(flag, (None, True))
        opposites = {f"--no-{flag[2:]}", f"--disable-{flag[2:]}"} & known
        if name in SECTIONS and isinstance(value, dict):
            _read_flat(reading, value)
        elif isinstance(value, bool) and option is None and (flag in known or opposites):
            if value == (flag in known):
                reading.read(flag if value else min(opposites), [])
        elif value is False and option is not None:
            if option.kind is bool:
                reading.read(option.off[0] if on else option.names[0], [])
        elif isinstance(value, bool):
            reading.read(flag, [])
        elif value is not None:
            reading.read(flag, _words(option, value))


def _words(option: Option | None, value: Any) -> list[str]:
    """The words that a command line would have: a text is several, unless the flag takes one."""
    is_text = isinstance(value, str)
    if option is not None and not option.many and (is_text or option.kind is str):
        return [as_word(value)]
    if option is not None and option.many and is_text:
        value = re.sub(r"^\[(.*)\]$", r"\1", value.strip())  # as Megatron-LM's functional tests
    items = value if isinstance(value, list) else [value]
    return [word for item in items for word in as_word(item).split() or [""]]
