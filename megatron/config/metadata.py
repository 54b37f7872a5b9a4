"""What a field of the configuration declares in addition to its type: bounds, what it has no effect
without, what a change at a resume means. The rules of every field follow from this (`rules.py`,
`training/resume.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Bound:
    """The values that a number may have: `--flag 0: must be TEXT`."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Bound("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Bound("0 or more", lambda value: value >= 0)
BELOW_ONE = Bound("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_ONE = Bound("from 0 to 1", lambda value: 0 <= value <= 1)
SHARE = Bound("above 0 and at most 1", lambda value: 0 < value <= 1)
# Loss scales multiply and divide numbers in fp32.
LOSS_SCALE = Bound("from 2**-126 to 2**127", lambda value: 2.0**-126 <= value <= 2.0**127)
UP_TO_A_YEAR = Bound(
    "greater than 0 and at most 525600 (a year)", lambda value: 0 < value <= 525600
)


def flag_name(field: str) -> str:
    """`--lr-decay-style` of `lr_decay_style`."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class ChangeRule:
    """What it means when a run resumes from a checkpoint of one with another value.

    `refused`: it would be another model. `accept`: refused without this value of --accept-changed,
    because `what` would change. `logged`: the steps to come would be others on purpose, which is
    a line of the banner. `bits`: the resume is not bit-exact. `kernel`: so, but which
    implementation was taken counts, not the flag. `taken`: --use-checkpoint-args takes the
    checkpoint's value where the flag is not given; `file`: it names a file, which may lie elsewhere
    now and is compared by its content. `weightless`: a setting of the model without weights, which
    --finetune takes from the command line.
    """

    refused: bool = False
    accept: str | None = None
    what: str = ""
    logged: bool = False
    bits: bool = False
    kernel: bool = False
    taken: bool = False
    file: bool = False
    weightless: bool = False


NOTHING = ChangeRule()
MODEL = ChangeRule(refused=True, bits=True, taken=True)
# Rotary positions hold no weights: a later stage of pretraining changes them.
POSITIONS = ChangeRule(
    accept="positions", what="what the weights compute", bits=True, taken=True, weightless=True
)
TOKENIZER = ChangeRule(taken=True)
TOKENIZER_FILE = ChangeRule(taken=True, file=True)
LENGTH = ChangeRule(accept="data", what="the data order", taken=True)
STEPS = ChangeRule(logged=True, bits=True)
STEPS_ALONE = ChangeRule(logged=True)
# An imported model was trained without, which is not our default.
DROPOUT = ChangeRule(logged=True, bits=True, taken=True)
ROUNDING = ChangeRule(bits=True)
KERNEL = ChangeRule(bits=True, kernel=True)
ORDER = ChangeRule(accept="data", what="the data order")
OBJECTIVE = ChangeRule(accept="data", what="the objective", bits=True)
SEED = ChangeRule(accept="seed", what="the data order")
BATCHES = ChangeRule(accept="batch", what="the steps' batches")


def flag(
    default: Any = None,
    *names: str,
    off: str = "",
    bound: Bound | None = None,
    needs: str = "",
    idle_without: str = "",
    change: ChangeRule = NOTHING,
) -> Any:
    """A field with further option strings `names`, an option `off` (by default --no- and the name)
    that sets a boolean False, and its rules. A number must be greater than 0 unless it has another
    bound. Its names in other programs are in compatibility.toml.

    `needs` and `idle_without` are conditions (see `derive.RunView.holds`) with spaces between them.
    A value other than the default is a fault without what the field needs: the run would have
    another model, other numbers, less safety or more memory than the flag asks for. Without what
    the field is `idle_without` it is a remark: launch scripts give such flags in every run, and the
    same line of flags should run in every layout. Where both fail it is a remark that names both.
    """
    metadata = {"names": names, "off": off, "bound": bound, "change": change}
    metadata |= {"needs": tuple(needs.split()), "idle_without": tuple(idle_without.split())}
    return field(default=default, metadata=metadata)


model_flag = partial(flag, change=MODEL)
position_flag = partial(flag, change=POSITIONS)
