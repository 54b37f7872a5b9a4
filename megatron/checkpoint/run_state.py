"""The JSON state of a checkpoint. Its values are what a run wrote, as the manifest's digest proves;
another version may have written other fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import MISSING
from typing import TypeVar

from megatron.config.groups import Config
from megatron.config.input_files import InputError, JsonObject
from megatron.config.model import FORMER_ROPE, without_former_defaults

WEIGHTS = ("config", "vocab_size")  # what a checkpoint of weights alone has
FORMER_MODEL_FIELDS = {"init_backend", "moe_token_dispatcher_type"}  # of earlier versions; ignored
RUN = (
    *WEIGHTS,
    *"iteration consumed_samples scheduled_samples skipped_samples evaluation_due".split(),
    *"optimizer_steps scaler schedule ledger tokenizer versions".split(),
)


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
    readable = known["model"].keys() | FORMER_MODEL_FIELDS
    unknown = [
        f"{name} {value!r}"
        for name, value in saved.get("model", {}).items()
        if name not in readable and value not in (None, False)
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
