"""Files that a user names, JSON and YAML among them, read so that nothing in them can hang the
program, crash it, or be taken for something else.

The errors name what is wrong with a file and leave its name to the caller, who knows the flag
that gave it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from megatron.config.errors import UserError

DEEPEST = 64  # levels of lists and objects in each other; the formats here have fewer than 10
SETTINGS_LIMIT = 1 << 20  # bytes of a configuration file, some hundred times what one needs
JSON_LIMIT = 1 << 28  # bytes of other JSON files
NAME_BYTES = 255  # the longest name of a file or folder that Linux takes
PATH_BYTES = 3900  # Linux takes 4,095, of which names of files in a folder need some

JsonObject = dict[str, Any]  # as Python reads it

KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
INTEGER = re.compile(r"[-+]?(0|[1-9]\d*)")
DECIMAL = re.compile(r"[-+]?((0|[1-9]\d*)\.\d*|\.\d+)([eE][-+]?\d+)?")
LEADING_ZERO = re.compile(r"[-+]?0[\d_]+")


class InputError(UserError):
    """A file cannot be used: the text is the reason."""


class NotJson(InputError):
    """The text of a file is not JSON at all, so that it may be something else."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, without ever waiting for a pipe or a device. Raises InputError."""
    try:
        # Without O_NONBLOCK the kernel waits until somebody writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(error.strerror) from error
    except ValueError as error:
        raise InputError("a path cannot hold this character") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError("is not a regular file")
    return open(descriptor, "rb")


def read_bytes(path: str | Path, most: int) -> bytes:
    """All bytes of a regular file. Raises InputError, also when it has more than `most`."""
    with open_regular(path) as file:
        try:
            raw = file.read(most + 1)
        except OSError as error:
            raise InputError(error.strerror) from error
    if len(raw) > most:
        raise InputError(f"has more than {most:,} bytes")
    return raw


def decode(raw: bytes) -> str:
    """UTF-8 text, without a byte-order mark. Raises InputError."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} ({error.reason})") from error


# ---------------------------------------------------------------- JSON


def read_json(path: str | Path, kind: type = dict, most: int = JSON_LIMIT) -> Any:
    return parse_json(read_bytes(path, most), kind)


def parse_json(raw: bytes, kind: type = dict) -> Any:
    """The value of type `kind` in JSON text. Raises InputError, or NotJson."""
    try:
        value = json.loads(decode(raw), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise NotJson(f"not JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"not usable: nested deeper than {DEEPEST} levels") from error
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"not usable: {error}") from error
    check_tree(value)
    expect(value, kind)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InputError(f"the key {twice[:60]!r} occurs twice; keep one")
    return result


def read_settings(raw: bytes) -> Any:
    """The value of JSON text, or of YAML text where it is no JSON. Raises InputError."""
    try:
        return parse_json(raw)
    except NotJson:
        return parse_yaml(decode(raw))


# ---------------------------------------------------------------- YAML


def parse_yaml(text: str) -> Any:
    """The value of YAML text: maps, lists, and outside of quotation marks null, true, false and
    decimal numbers. All else is text, such as 1:30, 0x10 and dates, which versions of YAML read
    differently. Raises InputError for numbers like 010, aliases, keys twice, values nested too
    deep.
    """
    try:
        import yaml
    except ImportError:
        raise InputError("it is not JSON, and PyYAML is not installed to read it as YAML") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        value = None if node is None else _yaml_value(node, set())
    except RecursionError:
        raise InputError("nested too deep") from None
    # ValueError: a number of thousands of digits, a character outside Unicode
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(" ".join(str(error).split())) from None
    check_tree(value)
    return value


def _yaml_value(node: Any, seen: set[int]) -> Any:
    where, text = f"line {node.start_mark.line + 1}", node.value
    if id(node) in seen:
        raise InputError(f"{where}: aliases are not read here; write the value out")
    seen.add(id(node))
    if node.id == "sequence":
        return [_yaml_value(item, seen) for item in node.value]
    if node.id == "mapping":
        if any(key.id != "scalar" for key, _ in node.value):
            raise InputError(f"{where}: a key is not text")
        return _unique_keys([(key.value, _yaml_value(value, seen)) for key, value in node.value])
    if node.style is not None:  # in quotation marks, or a block of lines
        return text
    if LEADING_ZERO.fullmatch(text):
        raise InputError(f"{where}: {text} is octal in some versions of YAML; drop leading zeros")
    if INTEGER.fullmatch(text):
        return int(text)
    if DECIMAL.fullmatch(text):
        return float(text)
    if node.tag.endswith(":bool"):
        return text.lower() in ("true", "yes", "on")
    return None if node.tag.endswith(":null") else text


# ---------------------------------------------------------------- values


def expect(value: Any, kind: type) -> None:
    """Raises InputError unless the value is of this type; true and false are no numbers."""
    if type(value) is not kind:
        found = KINDS.get(type(value), type(value).__name__)
        raise InputError(f"not usable: expected {KINDS[kind]}, found {found}")


def check_tree(value: Any, depth: int = 0) -> None:
    """Refuses lists and dictionaries nested too deep, and text that UTF-8 cannot hold."""
    if depth == DEEPEST:
        raise InputError(f"not usable: nested deeper than {DEEPEST} levels")
    if isinstance(value, str) and not is_text(value):
        raise InputError(
            f"not usable: {value[:40]!r} holds half of a surrogate pair, which is no text"
        )
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for each in value if isinstance(value, list) else ():
        check_tree(each, depth + 1)


def is_text(value: str) -> bool:
    """False for a lone surrogate, as JSON can write one: it cannot be stored or printed."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_fault(path: str) -> str:
    """What no file can be called; empty for a path that one can have."""
    if not is_text(path) or "\0" in path:
        return "holds a character that a path cannot hold"
    if re.search(r"\$\{|(^|/)\$[A-Za-z_]", path):
        return "holds a shell variable that was not replaced; write its value"
    if max(len(name.encode()) for name in path.split("/")) > NAME_BYTES or len(path) > PATH_BYTES:
        return f"is too long: Linux takes {PATH_BYTES:,} bytes, {NAME_BYTES} for each name"
    return ""
