"""The JSON state of a checkpoint: types and ranges of every value, checked before any is used. A
manifest carries a digest, not a signature: whatever can write to the folder can write any state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from typing import Any, TypeVar

from megatron.config.groups import Config
from megatron.config.input_files import InputError, JsonObject
from megatron.config.model import FORMER_ROPE, without_former_defaults
from megatron.config.options import FIELDS, Option

Schema = dict[str, Any] | list[Any] | type | Callable[[Any], bool]
HUGE = 1e300  # numbers that are no float, or nearly none, are no number of a run
LARGEST = 2**62  # sums of two counts still fit 64 bits
PATTERN = 65536  # shares of a blend add up to this
WEIGHTS = ("config", "vocab_size")  # what a checkpoint of weights alone has
COUNTS = ("iteration", "consumed_samples", "scheduled_samples", "skipped_samples")
RUN = (
    *WEIGHTS,
    *COUNTS,
    *"evaluation_due optimizer_steps scaler schedule ledger tokenizer versions".split(),
)


def check_run_state(state: JsonObject) -> None:
    """Raises InputError for a value that is there and is not of its type or in its range. A state
    without a configuration is not of a run, and holds anything.
    """
    if "config" not in state:
        return
    wrong = [name for name in STATE if name in state and not fits(state[name], STATE[name])]
    wrong = wrong or _wrong_options(state["config"])
    if wrong:
        raise InputError(f"state.{wrong[0]} is not what a run writes there")


def require(state: JsonObject, names: Iterable[str]) -> None:
    """Raises InputError naming what is missing."""
    missing = [name for name in names if name not in state]
    if missing:
        raise InputError(f"its state lacks {', '.join(missing)}")


T = TypeVar("T")


def from_saved(kind: type[T], saved: JsonObject, what: str) -> T:
    """The dataclass `kind` from its saved fields; one that an earlier version did not save takes
    its default. Raises InputError naming fields that are unknown, or that have no default.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    unknown = saved.keys() - {field.name for field in fields}
    lacking = [
        field.name
        for field in fields
        if field.name not in saved and field.default is MISSING and field.default_factory is MISSING
    ]
    wrong = f"{what} is not what a run writes there"
    if unknown:
        raise InputError(
            f"{wrong}: this version does not know {', '.join(sorted(unknown))}; load it with the "
            "version that saved it"
        )
    if lacking:
        raise InputError(f"{wrong}: it lacks {', '.join(lacking)}")
    return kind(**saved)


def config_of(state: JsonObject) -> Config:
    """The configuration in a checkpoint's state. A field that an earlier version did not have takes
    its default, one of a later version that does not concern the model is ignored.

    Raises InputError where there is none, and for an unknown field of the model that is set.
    """
    require(state, ["config"])
    saved = state["config"]
    known = Config().to_dict()
    unknown = [
        f"{name} {value!r}"
        for name, value in saved.get("model", {}).items()
        if name not in known["model"] and value not in (None, False)
    ]
    if unknown:
        raise InputError(
            f"state.config.model has {', '.join(unknown)}, which this version does not know; load "
            "it with the version that saved it"
        )
    kept = {
        group: {name: value for name, value in saved.get(group, {}).items() if name in fields}
        for group, fields in known.items()
    }
    kept["model"] = without_former_defaults(FORMER_ROPE | kept["model"])
    return Config.from_dict(kept)


# ---- one function a kind of value ----------------------------------------------------------------


def integer(value: Any) -> bool:
    return type(value) is int and abs(value) < LARGEST


def count(value: Any) -> bool:
    """A natural number."""
    return integer(value) and value >= 0


def number(value: Any) -> bool:
    """A finite number; true and false are none."""
    return type(value) in (int, float) and -HUGE < value < HUGE


def texts(value: Any) -> bool:
    """An object of texts."""
    return type(value) is dict and all(type(each) is str for each in value.values())


def fits(value: Any, schema: Schema) -> bool:
    """Whether JSON is as a schema specifies: of a type, accepted by a function, a list of such
    values, or an object with at least these fields.
    """
    if isinstance(schema, dict):
        return type(value) is dict and all(
            name in value and fits(value[name], field) for name, field in schema.items()
        )
    if isinstance(schema, list):
        return type(value) is list and all(fits(each, schema[0]) for each in value)
    return type(value) is schema if isinstance(schema, type) else bool(schema(value))


STYLES = {
    "style": "lr_decay_style",
    "wsd_style": "lr_wsd_decay_style",
    "weight_decay_style": "weight_decay_incr_style",
}


def _schedule(value: Any) -> bool:
    return type(value) is dict and all(
        each in FIELDS[STYLES[name]].choices
        if name in STYLES
        else number(each) or type(each) is bool or name.endswith("style")
        for name, each in value.items()
    )


SOURCE = {"id": str, "name": str, "share": count, "first_index": count}
HISTORY = {"segments": [{"first_sample": count, "sources": [SOURCE]}]}


def _data_history(value: Any) -> bool:
    """Segments that begin one after the other, each of whole blends."""
    if not fits(value, HISTORY):
        return False
    begins = [segment["first_sample"] for segment in value["segments"]]
    sources = [segment["sources"] for segment in value["segments"]]
    shares = {sum(source["share"] for source in each) for each in sources}
    contents = [source.get("content", "") for each in sources for source in each]
    return begins == sorted(begins) and shares <= {PATTERN} and fits(contents, [str])


def _wrong_options(config: JsonObject) -> list[str]:
    """The fields of a configuration that are of another type."""
    return [
        f"config.{group}.{name}"
        for group, fields in config.items()
        for name, value in fields.items()
        if name in FIELDS and FIELDS[name].group == group and not _is_of(FIELDS[name], value)
    ]


KINDS: dict[type, Schema] = {
    float: number,
    int: lambda value: type(value) is int and abs(value) < 2**63,
}


def _is_of(option: Option, value: Any) -> bool:
    """Whether a value has the type of a field. Another version may have other choices."""
    kind = KINDS.get(option.kind, option.kind)
    return option.optional if value is None else fits(value, [kind] if option.many else kind)


STATE: dict[str, Schema] = {
    **dict.fromkeys((*COUNTS, "open_steps", "open_skipped", "open_nan"), count),
    "open_loss": number,
    "evaluation_due": bool,
    "optimizer_steps": lambda value: number(value) and 0 <= value,
    "vocab_size": lambda value: count(value) and value > 0,
    "tokenizer": lambda value: value is None or type(value) is str,
    "layout": str,
    "device": str,
    "versions": texts,
    "kernels": texts,
    "scaler": {
        "scale": lambda value: number(value) and 0 < value <= 2.0**127,
        "clean_steps": count,
        "hysteresis": integer,
    },
    "schedule": _schedule,
    "ledger": _data_history,
    "config": lambda value: type(value) is dict and fits([*value.values()], [dict]),
}
