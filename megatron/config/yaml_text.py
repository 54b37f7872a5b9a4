"""YAML settings in the part of YAML that every version reads alike: maps with text keys, lists,
text and decimal numbers.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.config.input_files import InputError, check_tree

TAG = "tag:yaml.org,2002:"  # of the values that YAML knows by itself
INTEGER = re.compile(r"[-+]?(0|[1-9]\d*)")
DECIMAL = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
LEADING_ZERO = re.compile(r"[-+]?0[\d_]+")
AMBIGUOUS = "is a number that versions of YAML read differently; write it"


def parse_yaml(text: str) -> Any:
    """The value of YAML text. Raises InputError, with the line, for what is not YAML or is not read
    here: a key twice in a map, numbers that versions of YAML read differently (010, 1:30, 0x10),
    dates, binary data, aliases, and values nested too deep.
    """
    try:
        import yaml
    except ImportError:
        raise InputError("it is not JSON, and PyYAML is not installed to read it as YAML") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise _refusal(event, "aliases are not read here; write the value out")
        value = None if node is None else _value(node)
    except RecursionError:
        raise InputError("nested too deep") from None
    # ValueError: a number of thousands of digits, a character outside Unicode
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(" ".join(str(error).split())) from None
    check_tree(value)
    return value


def _refusal(place: Any, what: str) -> InputError:
    return InputError(f"line {place.start_mark.line + 1}: {what}")


def _value(node: Any) -> Any:
    """What a node of the text means. Raises InputError."""
    kind, text = node.tag.removeprefix(TAG), node.value
    if kind == "map":
        return _map(node)
    if kind == "seq":
        return [_value(item) for item in text]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind in ("int", "float"):
        if not DECIMAL.fullmatch(text):
            raise _refusal(node, f"{text} {AMBIGUOUS} in decimal digits")
        return int(text) if INTEGER.fullmatch(text) else float(text)
    if kind != "str":
        what = f"a value of the kind {kind} is not read here; put text in quotation marks"
        raise _refusal(node, what)
    if node.style is None and LEADING_ZERO.fullmatch(text):
        raise _refusal(node, f"{text} {AMBIGUOUS} without leading zeros")
    return text


def _map(node: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _value(key_node)
        if not isinstance(key, str):
            raise _refusal(key_node, "a key is not text")
        if key in result:
            raise _refusal(key_node, f"the key {key[:60]!r} occurs twice; keep one")
        result[key] = _value(value_node)
    return result
