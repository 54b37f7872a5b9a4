"""Every field of `Config` by its name: what it declares, and as a flag its spellings, the type of
its value and its help, from the dataclasses of `groups.py` and `model.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import re
import typing
from dataclasses import dataclass
from typing import Any

from megatron.config.errors import UserError, did_you_mean, shortened
from megatron.config.groups import GROUPS
from megatron.config.input_files import KINDS, is_text, path_fault
from megatron.config.metadata import POSITIVE, Bound, ChangeRule, flag, flag_name

# Text that names no file.
NO_PATHS = set(
    "split freeze recompute_layers pipeline_model_parallel_layout step_batch_size_schedule "
    "wandb_project wandb_exp_name wandb_group wandb_entity".split()
)
Words = list[str]  # that follow a flag


def key(flag: str) -> str:
    """The spelling that a flag is looked up by: DeepSpeed's flags mix underscores and hyphens."""
    return flag[:2] + flag[2:].replace("_", "-")


def shown(flag: str, words: Words) -> str:
    """A flag and its words in a message, not longer than a line."""
    return shortened(" ".join([flag, *(word or "''" for word in words)]), 80)


@functools.cache
def read_table(table: str) -> dict[str, str]:
    """The rows `KEY: TEXT` of a table, which indented lines continue; # begins a comment."""
    without_comments = re.sub(r"(?m)^#.*\n", "", table.strip())
    lines = (" ".join(row.split()) for row in re.split(r"\n(?! )", without_comments))
    return {name: text for name, _, text in (row.partition(": ") for row in lines)}


@dataclass(frozen=True)
class Option:
    """One field as a flag: `names` set it (messages have the first), `off` set a boolean False."""

    group: str
    field: str
    names: tuple[str, ...]
    off: tuple[str, ...]
    kind: type
    choices: tuple[Any, ...]
    many: bool
    optional: bool
    default: Any
    bound: Bound | None
    needs: tuple[str, ...]
    idle_without: tuple[str, ...]
    change: ChangeRule

    @property
    def spellings(self) -> tuple[str, ...]:
        """Those that set it and those that set it to False."""
        return (*self.names, *self.off)

    @property
    def help(self) -> str:
        return _helps()[self.field]

    def convert(self, text: str) -> Any:
        """The value of one word; raises UserError with what was expected."""
        known = [str(choice) for choice in self.choices]
        if known and text not in known:
            raise UserError(f"choose from {', '.join(known)}{did_you_mean(text, known)}")
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise UserError("it takes no value")
            return text.lower() == "true"
        if self.kind is str:
            fault = "" if self.field in NO_PATHS else path_fault(text)
            if fault or not is_text(text):
                raise UserError(fault or "holds a character that UTF-8 text cannot hold")
            return text
        return self._number(text)

    def _number(self, text: str) -> int | float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UserError("expected a number")
        if self.kind is float:
            return number
        is_exact = re.fullmatch(r"[-+]?\d[\d_]*", text) is not None
        whole = int(text) if is_exact else int(number)
        is_whole = is_exact or (whole == number and abs(whole) <= 2**53)
        if not is_whole or abs(whole) >= 2**63:
            raise UserError("expected a whole number of at most 64 bits")
        return whole

    def parse(self, words: Words) -> Any:
        """The value of a flag followed by `words`. Raises UserError."""
        if self.kind is bool and not words:
            return True
        if not words or any(word == "" for word in words):
            raise UserError("no value follows it (is a shell variable unset?)")
        if not self.many and len(words) > 1:
            raise UserError(
                f"takes {'no value' if self.kind is bool else 'one value'}; drop the others, "
                "or quote a value with spaces"
            )
        values = tuple(self.convert(word) for word in words)
        return values if self.many else values[0]

    def load(self, value: Any) -> Any:
        """The field's value from one read in a configuration file; raises UserError."""
        if value is None and self.optional:
            return None
        items = value if self.many and value and isinstance(value, list) else [value]
        is_strict = self.kind in (bool, str) and not self.many
        expected: tuple[type, ...] = (self.kind,) if is_strict else (str, int, float)
        if any(type(item) not in expected for item in items):
            listed = "a list of words or numbers" if self.many else KINDS[self.kind]
            raise UserError(f"expected {listed}")
        values = tuple(self.convert(as_word(item)) for item in items)
        return values if self.many else values[0]


def as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@functools.cache
def _helps() -> dict[str, str]:
    """The string literal under each field."""
    found: dict[str, str] = {}
    for group in GROUPS.values():
        cls: Any = ast.parse(inspect.getsource(group)).body[0]
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                found[field.target.id] = " ".join(text.value.value.split())  # type: ignore
    return found


def _option(group: str, field: dataclasses.Field, annotation: Any) -> Option:
    """A type is bool, int, float, str, Literal, tuple[X, ...], or one of them or None."""
    optional = type(None) in typing.get_args(annotation)
    inner = typing.get_args(annotation)[0] if optional else annotation
    many = typing.get_origin(inner) is tuple
    if many:
        inner = typing.get_args(inner)[0]
    choices = typing.get_args(inner)
    kind = type(choices[0]) if choices else inner
    declared = dict(field.metadata or flag(None).metadata)
    names = (flag_name(field.name), *declared.pop("names"))
    off = declared.pop("off") or flag_name("no_" + field.name)
    if declared["bound"] is None and kind in (int, float) and not (choices or many):
        declared["bound"] = POSITIVE
    return Option(
        group=group,
        field=field.name,
        names=names,
        off=(off,) if kind is bool else (),
        kind=kind,
        choices=choices,
        many=many,
        optional=optional,
        default=field.default,
        **declared,
    )


FIELDS = {  # in the order of groups.py
    field.name: _option(group, field, hints[field.name])
    for group, kind in GROUPS.items()
    for hints in [typing.get_type_hints(kind)]
    for field in dataclasses.fields(kind)
}


@functools.cache
def options_by_flag() -> dict[str, tuple[Option, bool]]:
    """Option, and whether it is switched on, for each spelling with hyphens."""
    table: dict[str, tuple[Option, bool]] = {}
    for option in FIELDS.values():
        for name in option.spellings:
            assert key(name) not in table, f"{name} belongs to two fields"
            table[key(name)] = (option, name not in option.off)
    return table
