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
    here:

    a key twice in a map, numbers that versions of YAML read differently (010, 1:30, 0x10), dates,
    binary data, aliases, and values nested too deep.
    """
    try:
        import yaml
    except ImportError:
        raise InputError("it is not JSON, and PyYAML is not installed to read it as YAML") from None
    try:
        value = _loader(yaml)(text).get_single_data()
    except yaml.YAMLError as error:
        raise InputError(" ".join(str(error).split())) from None
    except RecursionError:
        raise InputError("nested too deep") from None
    # a number of thousands of digits, a character outside Unicode
    except (ValueError, OverflowError) as error:
        raise InputError(str(error)) from None
    check_tree(value)
    return value


def _refusal(node: Any, what: str) -> Exception:
    """PyYAML's error for a node of the text; it gives the line."""
    from yaml.constructor import ConstructorError

    return ConstructorError(None, None, what, node.start_mark)


def _number(loader: Any, node: Any) -> int | float:
    text = loader.construct_scalar(node)
    if not DECIMAL.fullmatch(text):
        raise _refusal(node, f"{text} {AMBIGUOUS} in decimal digits")
    return int(text) if INTEGER.fullmatch(text) else float(text)


def _string(loader: Any, node: Any) -> str:
    text = loader.construct_scalar(node)
    if node.style is None and LEADING_ZERO.fullmatch(text):
        raise _refusal(node, f"{text} {AMBIGUOUS} without leading zeros")
    return text


def _unknown(loader: Any, node: Any) -> Any:
    kind = node.tag.removeprefix(TAG)
    raise _refusal(
        node, f"a value of the kind {kind} is not read here; put text in quotation marks"
    )


def _loader(yaml: Any) -> type:
    """PyYAML's safe loader, with errors (that give the line) for what is not read here."""

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                what = "aliases are not read here; write the value out"
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, what, mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise _refusal(key_node, "a key is not text")
                if key in result:
                    raise _refusal(key_node, f"the key {key[:60]!r} occurs twice; keep one")
                result[key] = self.construct_object(value_node, deep=deep)
            return result

    safe = yaml.SafeLoader.yaml_constructors
    Loader.yaml_constructors = {
        **{TAG + name: safe[TAG + name] for name in ("null", "bool", "seq", "map")},
        **{TAG + "int": _number, TAG + "float": _number, TAG + "str": _string, None: _unknown},
    }
    return Loader
