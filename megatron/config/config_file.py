"""--config: a JSON or YAML file of settings, in our groups as --print-config writes them, or with
flat names of flags as other programs have them.
"""

from __future__ import annotations

from typing import Any

from megatron.config import compatibility
from megatron.config.errors import UserError, collected, did_you_mean, first_faults, shortened
from megatron.config.groups import GROUPS
from megatron.config.input_files import (
    SETTINGS_LIMIT,
    NotJson,
    decode,
    parse_json,
    parse_yaml,
    read_bytes,
)
from megatron.config.options import FIELDS, as_word, key, options_by_flag
from megatron.config.reading import Reading

# Sections of flat names: of Megatron-LM's --yaml-cfg, and of its functional tests.
SECTIONS = ("language_model", "model_parallel", "MODEL_ARGS")


def read_config(path: str) -> Reading:
    """What a file holds, its faults among it. No field of it is `set_by` the user, so that the
    command line wins without a note, and a default, which --print-config writes too, is not
    `chosen`.
    """
    reading, where = Reading(), f"--config {path}"
    with collected(reading.faults, "cannot be read"):
        content = _parse(read_bytes(path, SETTINGS_LIMIT))
        if not isinstance(content, dict):
            raise UserError("expected groups with settings, as --print-config writes them")
        compatibility.check_program(content)
        is_flat = content and not any(
            name in GROUPS or (isinstance(value, dict) and name not in SECTIONS)
            for name, value in content.items()
        )
        read = _read_flat if is_flat else _read_groups
        read(reading, content)
    reading.faults = first_faults([f"{where}: {fault}" for fault in reading.faults], where)
    reading.set_by.clear()
    reading.chosen = {
        name for name in reading.chosen if reading.value(name) != FIELDS[name].default
    }
    return reading


def _parse(raw: bytes) -> Any:
    text = decode(raw)
    try:
        return parse_json(raw)
    except NotJson:
        return parse_yaml(text)


def _read_groups(reading: Reading, content: dict[str, Any]) -> None:
    for group, fields in content.items():
        if group not in GROUPS or not isinstance(fields, dict):
            groups = f"the groups are {', '.join(GROUPS)}"
            reading.faults.append(f"{_short(group)} is not a group of settings; {groups}")
            continue
        names = [name for name, option in FIELDS.items() if option.group == group]
        for field, value in fields.items():
            if field in names:
                with collected(reading.faults, f"{group}.{field} = {_short(value)}"):
                    reading.take(field, FIELDS[field].load(value))
            else:
                meant = did_you_mean(str(field), names)
                reading.faults.append(f"{group} has no setting {_short(field)}{meant}")


def _short(value: Any) -> str:
    return shortened(repr(value), 60)


def _read_flat(reading: Reading, content: dict[str, Any]) -> None:
    """Take in a file of flags, whose names may have leading hyphens. Those without a value, and
    switches of another program that are false, are not given.
    """
    for name, value in content.items():
        flag = key("--" + name.lstrip("-"))
        option, on = options_by_flag().get(flag, (None, True))
        if name in SECTIONS and isinstance(value, dict):
            _read_flat(reading, value)
        elif value is False and option is not None:
            if option.kind is bool:
                reading.read(option.off[0] if on else option.names[0], [])
        elif value is False and flag in compatibility.rows():
            continue
        elif isinstance(value, bool):
            reading.read(flag, [])
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            reading.read(flag, [word for item in values for word in _words(item)])


def _words(item: Any) -> list[str]:
    """The words that a command line would have: a text of several numbers or paths is several."""
    return item.split() if isinstance(item, str) and item else [as_word(item)]
