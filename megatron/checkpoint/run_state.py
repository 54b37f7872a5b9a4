"""The JSON state of a checkpoint: types and ranges of every value, checked before any is used. A
manifest carries a digest, not a signature: whatever can write to the folder can write any state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from megatron.checkpoint.boxes import shapes_of
from megatron.config.groups import Config, ModelConfig
from megatron.config.input_files import InputError, JsonObject, expect
from megatron.config.options import FIELDS, Option

Check = Callable[[Any], bool]
HUGE = 1e300  # numbers that are no float, or nearly none, are no number of a run
LARGEST = 2**62  # sums of two counts still fit 64 bits
PATTERN = 65536  # shares of a blend add up to this
WEIGHTS = ("config", "vocab_size")  # what a checkpoint of weights alone has
RUN = (
    *WEIGHTS,
    *"""iteration consumed_samples scheduled_samples skipped_samples evaluation_due optimizer_steps
    scaler schedule ledger tokenizer versions""".split(),
)


def check_run_state(state: JsonObject) -> None:
    """Raises InputError for a value that is there and is not of its type or in its range. A state
    without a configuration is not of a run, and holds anything.
    """
    for name, holds in CHECKS.items() if "config" in state else ():
        if name in state:
            try:
                good = holds(state[name])
            except InputError as error:
                raise InputError(f"state.{name}: {error}") from error
            if not good:
                raise InputError(f"state.{name} is not what a run writes there")


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
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in saved if name not in fields]
    missing = [
        name
        for name, field in fields.items()
        if name not in saved
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    fault = f"{what} is not what a run writes there:"
    if unknown:
        raise InputError(
            f"{fault} this version does not know {', '.join(unknown)}; load it with the version "
            "that saved it"
        )
    if missing:
        raise InputError(f"{fault} it lacks {', '.join(missing)}")
    return kind(**saved)


# Defaults before YaRN took Megatron-LM's. Earlier versions wrote them for every model.
_FORMER_ROPE = {"rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 8192}


def config_of(state: JsonObject) -> Config:
    """The configuration in a checkpoint's state. A field that an earlier version did not have takes
    its default, one of a later version that does not concern the model is ignored.

    Raises InputError where there is none, and for an unknown field of the model that is set.
    """
    require(state, ["config"])
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = [
        f"{name} {value!r}"
        for name, value in state["config"].get("model", {}).items()
        if name not in known and value not in (None, False)
    ]
    if unknown:
        raise InputError(
            f"state.config.model has {', '.join(unknown)}, which this version does not know; load "
            "it with the version that saved it"
        )
    kept = {
        group: {
            name: value for name, value in state["config"].get(group, {}).items() if name in fields
        }
        for group, fields in Config().to_dict().items()
    }
    model = kept["model"]
    scaled = model.get("position_embedding_type") == "yarn" or model.get("use_rope_scaling")
    for name, former in _FORMER_ROPE.items():
        if scaled:
            model.setdefault(name, former)
        elif model.get(name) == former:
            model[name] = None
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


def text(value: Any) -> bool:
    return type(value) is str


def texts(value: Any) -> bool:
    """An object of texts."""
    return type(value) is dict and all(map(text, value.values()))


def has(**fields: Check) -> Check:
    """An object with these fields, and maybe others."""

    def check(value: Any) -> bool:
        expect(value, dict)
        return all(name in value and holds(value[name]) for name, holds in fields.items())

    return check


def _schedule(value: Any) -> bool:
    # imports torch, which a process that commits a checkpoint must not wait for
    from megatron.optimizer.lr_schedule import ParamSchedule

    expect(value, dict)
    styles = {
        "style": "lr_decay_style",
        "wsd_style": "lr_wsd_decay_style",
        "weight_decay_style": "weight_decay_incr_style",
    }
    kinds = {field.name: str(field.type) for field in dataclasses.fields(ParamSchedule)}
    return all(
        each in FIELDS[styles[name]].choices
        if name in styles
        else number(each) or kinds.get(name, type(each).__name__) == type(each).__name__
        for name, each in value.items()
    )


SOURCE = has(id=text, name=text, share=count, first_index=count)


def _data_history(value: Any) -> bool:
    expect(value, dict)
    expect(value.get("segments"), list)
    first = -1
    for segment in value["segments"]:
        expect(segment, dict)
        expect(segment.get("sources"), list)
        begins = segment.get("first_sample")
        if not count(begins) or begins < first or not segment["sources"]:
            raise InputError(
                "a segment has no sources, or does not begin at a sample after the one before"
            )
        first = begins
        sources = segment["sources"]
        if not all(SOURCE(source) and text(source.get("content", "")) for source in sources):
            raise InputError("a source has no id, name, share or first index")
        if sum(source["share"] for source in sources) != PATTERN:
            raise InputError(f"the shares of a segment do not add up to {PATTERN}")
    return True


def _config(value: Any) -> bool:
    expect(value, dict)
    for group, fields in value.items():
        expect(fields, dict)
        for name, each in fields.items():
            option = FIELDS.get(name)
            if option is not None and option.group == group and not _fits(option, each):
                raise InputError(f"{group}.{name} is of another type")
    return True


def _fits(option: Option, value: Any) -> bool:
    """Whether a value has the type of a field. Another version may have other choices."""
    if value is None:
        return option.optional
    if option.many:
        return type(value) is list and all(_is_one(option, each) for each in value)
    return _is_one(option, value)


def _is_one(option: Option, value: Any) -> bool:
    if option.kind is float:
        return number(value)
    if option.kind is int:
        return type(value) is int and abs(value) < 2**63
    return type(value) is option.kind


CHECKS: dict[str, Check] = {
    **dict.fromkeys(
        ("iteration", "consumed_samples", "scheduled_samples", "skipped_samples"), count
    ),
    **dict.fromkeys(("open_steps", "open_skipped", "open_nan"), count),
    "open_loss": number,
    "evaluation_due": lambda value: type(value) is bool,
    "optimizer_steps": lambda value: number(value) and 0 <= value,
    "vocab_size": lambda value: count(value) and value > 0,
    "tokenizer": lambda value: value is None or text(value),
    "layout": text,
    "device": text,
    "versions": texts,
    "kernels": texts,
    "tensors": lambda value: shapes_of(value) is not None,
    "scaler": has(
        scale=lambda value: number(value) and 0 < value <= 2.0**127,
        clean_steps=count,
        hysteresis=integer,
    ),
    "schedule": _schedule,
    "ledger": _data_history,
    "config": _config,
}
