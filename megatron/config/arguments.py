"""The command line, read so that every fault is reported at once.

Python's argparse formats `--help`, but does not read the line: it stops at the first fault, and an
unset shell variable (`--lr $LR`) makes it blame the next flag. Here a flag owns every word up to
the next flag; what follows is checked per flag. Flags of Megatron-LM and Megatron-DeepSpeed that
are not fields are answered by the table in `compatibility.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from megatron.config import compatibility
from megatron.config.compatibility import Occurrence
from megatron.config.deepspeed import compare_with_deepspeed
from megatron.config.derive import DEFAULTS, GROUP_OF
from megatron.config.errors import ArgumentErrors, UserError, first_faults, shortened
from megatron.config.groups import Config
from megatron.config.help import COMMANDS, HELP, TAKES_FILE, help_text
from megatron.config.input_files import (
    SETTINGS_LIMIT,
    NotJson,
    decode,
    parse_json,
    path_fault,
    read_bytes,
)
from megatron.config.megatron_deepspeed import translate
from megatron.config.named_files import data_flags, extended_vocabulary
from megatron.config.options import (
    Place,
    Words,
    as_word,
    key,
    options_by_field,
    options_by_flag,
)
from megatron.config.settings_files import check_program, flat_flags
from megatron.config.spelling import did_you_mean, one_edit, same_meaning
from megatron.config.validate import cross_field_faults
from megatron.config.yaml_text import parse_yaml

Values = dict[Place, Any]


@dataclass(frozen=True)
class Parsed:
    """The content of a command line: settings, notes for the banner, and what to do instead of
    training.
    """

    config: Config
    notes: list[str]
    not_done: list[str]  # services that were asked for and do not exist here
    dry_run: bool
    print_config: bool


@functools.cache
def _known_flags() -> list[str]:
    """Every known flag, ours first."""
    ours = [*options_by_flag(), *map(key, COMMANDS), *HELP]
    return list(dict.fromkeys([*ours, *compatibility.rows()]))


def suggestions(flag: str) -> list[str]:
    """Known flags that an unknown one may have been meant to be; ours come first."""
    word = key(flag)
    near = [other for other in _known_flags() if one_edit(word, other)]
    near.sort(key=lambda other: (other not in options_by_flag(), len(other)))
    if compatibility.habit(word):
        near.insert(0, compatibility.habit(word))
    if near:
        return near
    alike = difflib.get_close_matches(word, _known_flags(), n=10, cutoff=0.7)
    return [other for other in alike if same_meaning(word, other)][:1]


def split_words(argv: list[str]) -> tuple[list[Occurrence], list[str]]:
    """Cut a command line into (flag, its words); returns them and the faults (words before any
    flag, one-dash flags).
    """
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
class _Reading:
    """What has been read so far; `set_by` remembers what the user wrote to give each field its
    value.
    """

    values: Values = dataclasses.field(default_factory=dict)
    set_by: dict[Place, str] = dataclasses.field(default_factory=dict)
    commands: dict[str, str] = dataclasses.field(default_factory=dict)
    foreign: list[compatibility.Answered] = dataclasses.field(default_factory=list)
    together: dict[str, Words] = dataclasses.field(default_factory=dict)
    least: list[tuple[str, compatibility.CompatibilityRow]] = dataclasses.field(
        default_factory=list
    )
    notes: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    # flags whose value is unknown: rules about them are skipped
    unsure: set[str] = dataclasses.field(default_factory=set)

    def read(self, flag: str, words: Words, written: str = "") -> None:
        """Take in one occurrence; `written` is what the user wrote when the table rewrote it."""
        if key(flag) in map(key, COMMANDS):
            self._command(key(flag), words)
        elif key(flag) in options_by_flag():
            self._field(flag, words, written or _shown(flag, words))
        elif (row := compatibility.find(key(flag))) is None:
            self._unknown(flag, words)
        elif row.verdict in ("equals", "at_least") and words and "$" not in row.text:
            self.faults.append(f"{_shown(flag, words)}: it takes no value")
        elif row.verdict in ("equals", "choice", "file"):
            self._rewritten(flag, words, row)
        elif row.verdict == "together":
            self.together[key(flag)] = words
        elif row.verdict == "at_least":
            self.least.append((flag, row))
        else:
            self.foreign.append((flag, words, row))

    def _rewritten(self, flag: str, words: Words, row: compatibility.CompatibilityRow) -> None:
        try:
            by_file = row.verdict == "file"
            occurrences = data_flags(key(flag), words) if by_file else row.rewrite(words)
        except UserError as problem:
            self.faults.append(f"{_shown(flag, words)}: {problem}")
            return
        for ours, values in occurrences:
            self.read(ours, values, written=_shown(flag, words))

    def _unknown(self, flag: str, words: Words) -> None:
        if advice := compatibility.follows(key(flag)):
            self.faults.append(f"{_shown(flag, words)}: unknown flag; {advice}")
            return
        near = suggestions(flag)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        wrong = (
            "unknown flag" if flag.startswith("--") else "unexpected argument; flags begin with --"
        )
        self.faults.append(f"{_shown(flag, words)}: {wrong}{meant}")
        self.unsure.update(near)

    def raised(self, config: Config, given: set[str]) -> Config:
        """The configuration with the settings that are below what some flag asks for at least;
        their fields are added to `given`.
        """
        for flag, (ours, words) in [(flag, row.rewrite([])[0]) for flag, row in self.least]:
            option, _ = options_by_flag()[key(ours)]
            place, value = (option.group, option.field), option.parse(words)
            given.add(option.field)
            below = getattr(getattr(config, option.group), option.field) < value
            if below and option.names[0] not in self.unsure:
                if place in self.values:
                    self.faults.append(
                        f"{flag}: contradicts {self.set_by[place]}; drop one of them"
                    )
                else:
                    config = _with_values(config, {place: value})
        return config

    def foreign_settings(self, config: Config, given: set[str]) -> Config:
        """The configuration with what flags of other programs mean together; `given` are the
        fields that flags of ours or a file set, and those set here are added.
        """
        by_patch = self.set_by.get(("data", "tokenizer_type"), "").startswith("--patch-")
        if by_patch and config.data.tokenizer_model is None and config.checkpoint.load:
            folder = config.checkpoint.load
            config = config.with_fields("data", tokenizer_model=folder)
            self.notes.append(f"--patch-tokenizer-type: the tokenizer is read from --load {folder}")
        extra = self.together.pop("--extra-vocab-size", ["0"])
        try:
            rows = extended_vocabulary(extra, config.data.tokenizer_model)
        except UserError as problem:
            self.faults.append(f"{_shown('--extra-vocab-size', extra)}: {problem}")
            rows = None
        if rows is not None:
            config = config.with_fields("model", padded_vocab_size=rows)
        is_deepspeed = any(key(flag) == "--deepspeed" for flag, _, _ in self.foreign)
        found = translate(self.together, config, given, is_deepspeed=is_deepspeed)
        self.notes += found.notes
        self.faults += found.faults
        given |= found.values.keys()
        return _with_values(
            config, {(GROUP_OF[field], field): value for field, value in found.values.items()}
        )

    def settings(self) -> Config:
        """The configuration of the line and the files that it names."""
        config = Config()
        given: set[str] = {field for _, field in self.values}
        if "--config" in self.commands:
            file = load_config(self.commands["--config"])
            self._add(file)
            # a file of --print-config holds every default
            values = file.values.items()
            given |= {field for (_, field), value in values if value != DEFAULTS[field]}
            config = _with_values(config, file.values)
        config = self.raised(_with_values(config, self.values), given)
        config = self.foreign_settings(config, given)
        if "--deepspeed-config" not in self.commands:
            return config
        compared = compare_with_deepspeed(self.commands["--deepspeed-config"], config, given, _load)
        self.notes += compared.notes
        self.faults += compared.faults
        return compared.config

    def _add(self, file: _Reading) -> None:
        """Take in what a file holds besides values; the command line wins."""
        self.foreign = [*file.foreign, *self.foreign]
        self.together = {**file.together, **self.together}
        self.least = [*file.least, *self.least]
        self.notes += file.notes
        self.faults += file.faults
        self.unsure |= file.unsure
        self.commands = {**file.commands, **self.commands}

    def _command(self, flag: str, words: Words) -> None:
        takes_file = flag in TAKES_FILE
        if len(words) != takes_file or "" in words:
            self.faults.append(
                f"{_shown(flag, words)}: takes {'one file' if takes_file else 'no value'}"
            )
        elif fault := path_fault("".join(words)):
            self.faults.append(f"{_shown(flag, words)}: {fault}")
        else:
            self.commands[flag] = words[0] if takes_file else ""

    def _field(self, flag: str, words: Words, written: str) -> None:
        option, on = options_by_flag()[key(flag)]
        place = (option.group, option.field)
        try:
            asked = compatibility.asks().get((option.names[0], " ".join(words)))
            if asked is not None:
                self.foreign.append((written, [], asked))
            words, note = compatibility.translate_value(option.names[0], words)
            value = option.parse(words)
            if option.kind is bool:
                value = value == on
        except UserError as problem:
            self.faults.append(f"{written}: {problem}")
            self.unsure.add(option.names[0])
            return
        if note:
            self.notes.append(note)
        if place in self.values and self.values[place] != value:
            before = self.set_by[place]
            own = [key(text.split()[0]) in options_by_flag() for text in (before, written)]
            if all(own) or before.split()[0] == written.split()[0]:
                self.notes.append(f"{before} is overridden by the later {written}")
            else:
                self.faults.append(f"{written}: contradicts {before}; drop one of them")
        self.values[place] = value
        self.set_by[place] = written


def _shown(flag: str, words: Words) -> str:
    """A flag and its words in a message, not longer than a line."""
    return shortened(" ".join([flag, *(word or "''" for word in words)]), 80)


def load_config(path: str) -> _Reading:
    """What a configuration file holds, its faults among it."""
    reading, where = _Reading(), f"--config {path}"
    try:
        content = _read_json_or_yaml(read_bytes(path, SETTINGS_LIMIT))
        if not isinstance(content, dict):
            raise UserError("expected groups with settings, as --print-config writes them")
        check_program(content)
    except UserError as problem:
        reading.faults.append(f"{where}: cannot be read: {problem}")
        return reading
    flags = flat_flags(content, set(Config().to_dict())) if content else None
    if flags is None:
        _read_groups(reading, content)
    else:
        for flag, value in flags:
            _read_flat(reading, flag, value)
    reading.faults = first_faults([f"{where}: {fault}" for fault in reading.faults], where)
    return reading


def _read_groups(reading: _Reading, content: dict[str, Any]) -> None:
    """Take in a file with our groups."""
    names = dataclasses.asdict(Config())
    for group, fields in content.items():
        if group not in names or not isinstance(fields, dict):
            known = ", ".join(names)
            reading.faults.append(
                f"{_short(group)} is not a group of settings; the groups are {known}"
            )
            continue
        for field, value in fields.items():
            option = options_by_field().get((group, field))
            if option is None:
                meant = did_you_mean(str(field), names[group])
                reading.faults.append(f"{group} has no setting {_short(field)}{meant}")
                continue
            try:
                reading.values[group, field] = option.load(value)
            except UserError as problem:
                reading.faults.append(f"{group}.{field} = {_short(value)}: {problem}")


def _read_flat(reading: _Reading, flag: str, value: Any) -> None:
    """Take in a flag of a flat file. A switch of another program that is false is not given."""
    if value is False:
        if key(flag) in options_by_flag() and options_by_flag()[key(flag)][0].kind is bool:
            option, on = options_by_flag()[key(flag)]
            reading.read(option.off[0] if on else option.names[0], [])
        elif key(flag) not in options_by_flag() and compatibility.find(key(flag)) is None:
            reading.read(flag, [])
        return
    values = value if isinstance(value, list) else [value]
    words = [] if value is True else [word for item in values for word in _flat_words(item)]
    reading.read(flag, words)


def _flat_words(item: Any) -> list[str]:
    """The words that a command line would have: a text of several numbers or paths is several."""
    return item.split() if isinstance(item, str) and item else [as_word(item)]


def _load(field: str, value: Any) -> Any:
    """The value of a field from one of a DeepSpeed file; raises UserError."""
    return options_by_field()[GROUP_OF[field], field].load(value)


def _short(value: Any) -> str:
    """A value of a configuration file in a message."""
    return shortened(repr(value), 60)


def _read_json_or_yaml(raw: bytes) -> Any:
    text = decode(raw)
    try:
        return parse_json(raw)
    except NotJson:
        return parse_yaml(text)


def dump_config(config: Config) -> str:
    """The text that --print-config prints and --config reads back."""
    return json.dumps(config.to_dict(), indent=2)


def _with_values(config: Config, values: Values) -> Config:
    for group in {group for group, _ in values}:
        changes = {field: value for (other, field), value in values.items() if other == group}
        config = config.with_fields(group, **changes)
    return config


def _rule_faults(config: Config, unsure: set[str]) -> list[str]:
    """Faults of the rules between fields, but those about the flags `unsure`."""
    distributed = config.distributed
    tensor = max(1, distributed.tensor_model_parallel_size)
    pipeline = max(1, distributed.pipeline_model_parallel_size)
    # the launcher's ranks are not known here
    world = distributed.world_size or tensor * pipeline
    return [
        fault
        for fault in cross_field_faults(config, world, None)
        if not any(re.search(rf"{flag}(?![\w-])", fault) for flag in unsure)
    ]


def parse_arguments(argv: list[str]) -> Parsed:
    """Settings of a command line. Raises one `ArgumentErrors` with every fault; `--help` prints and
    exits.

    Rules between fields are the business of `resolve`; when there are faults already, theirs are
    added, so that nothing waits behind the first mistake (but those about a flag whose value could
    not be read).
    """
    if text := help_text(argv):
        print(text)
        raise SystemExit(0)
    occurrences, faults = split_words(argv)
    reading = _Reading(faults=faults)
    for flag, words in occurrences:
        reading.read(flag, words)
    config = reading.settings()
    answers = compatibility.answer(reading.foreign, config)
    reading.notes += answers.notes
    reading.faults += answers.faults
    if config.distributed.world_size is not None and "--dry-run" not in reading.commands:
        reading.faults.append(
            f"--world-size {config.distributed.world_size}: only with --dry-run; a launcher "
            "sets the size of a real run"
        )
    if reading.faults:
        raise ArgumentErrors([*reading.faults, *_rule_faults(config, reading.unsure)])
    return Parsed(
        config,
        reading.notes,
        answers.not_done,
        "--dry-run" in reading.commands,
        "--print-config" in reading.commands,
    )
