"""Settings files in another program's layout: flat names of Megatron's flags, and files of programs
that are recognized and refused in one sentence.
"""

from __future__ import annotations

from typing import Any

from megatron.config.compatibility import data
from megatron.config.errors import UserError

Flag = tuple[str, Any]  # a flag and the value that a file gives it

GUIDE = "docs/launching.md#settings-of-other-programs"
# Sections of flat names: of Megatron-LM's --yaml-cfg, and of its functional tests.
SECTIONS = ("language_model", "model_parallel", "MODEL_ARGS")


def check_program(content: dict[str, Any]) -> None:
    """Raises UserError for a file of another training program."""
    keys = {key.replace("-", "_") for key in content}
    for program, signs in data()["programs"].items():
        if any(keys.issuperset(sign.split()) for sign in signs):
            raise UserError(
                f"this is a configuration of {program}, which is not read; {GUIDE} lists the flags "
                "that mean the same"
            )


def flat_flags(content: dict[str, Any], groups: set[str]) -> list[Flag] | None:
    """The flags of a file that gives values to names of flags, in its own order; None for one with
    our groups. Names may have leading hyphens; empty values and shell variables are left out.
    """
    found: list[Flag] = []
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, dict):
            found += flat_flags(value, set()) or []
        elif isinstance(value, dict) or key in groups:
            return None
        elif value is not None:
            found.append(("--" + key.lstrip("-").replace("_", "-"), value))
    return found
