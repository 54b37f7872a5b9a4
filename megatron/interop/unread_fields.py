"""Refuses an export that would drop a setting of the model.

An exporter maps a field of ModelConfig by reading it. The reads are recorded, so that no exporter
keeps a list: a field that it did not read, and that changes the model, must be at its default.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron.config.derive import RunView
from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig
from megatron.config.metadata import KERNEL, ROUNDING, flag_name

P = ParamSpec("P")
R = TypeVar("R")

# Settings of a training run or of its padding. A trained model is the same function without them.
TRAINING_ONLY = frozenset(
    """z_loss_coeff hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by
    padded_vocab_size
    moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_input_jitter_eps moe_expert_capacity_factor moe_token_drop_policy""".split()
)


def refuse_unread_fields(
    formats: str, *, implied: tuple[str, ...]
) -> Callable[[Callable[Concatenate[ModelConfig, P], R]], Callable[Concatenate[ModelConfig, P], R]]:
    """Decorates an exporter whose first argument is the resolved model. The exporter then raises
    UserError, naming the flags, when it did not read a field that changes the model.

    `formats` names what the exporter writes, for the message. `implied` lists fields whose value
    follows from others in a resolved model that the exporter can express. The exporter must not
    hash, copy or compare the model as a whole, which would read every field.
    """

    def decorate(
        export: Callable[Concatenate[ModelConfig, P], R],
    ) -> Callable[Concatenate[ModelConfig, P], R]:
        @functools.wraps(export)
        def checked(model: ModelConfig, *args: P.args, **kwargs: P.kwargs) -> R:
            recorder, read = _record_reads(model)
            result = export(recorder, *args, **kwargs)
            dropped = _dropped_flags(model, read.union(implied))
            if dropped:
                raise UserError(f"{formats} cannot express: {'; '.join(dropped)}")
            return result

        return checked

    return decorate


def _record_reads(model: ModelConfig) -> tuple[ModelConfig, set[str]]:
    """A copy of the model, and the names of all attributes that are read from the copy."""
    read: set[str] = set()

    def record(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    recorder: Any = type("Recorder", (type(model),), {"__getattribute__": record})
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    copy = recorder(**values)
    read.clear()
    return copy, read


def _dropped_flags(model: ModelConfig, read: set[str]) -> list[str]:
    """Each flag with its value that changes the model and was not read."""
    run = RunView(Config(model=model), world=1, vocabulary=None)
    dropped = []
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name in read | TRAINING_ONLY or value == field.default:
            continue
        # A field whose condition is not met does not act.
        needs = field.metadata.get("needs", ())
        if field.metadata.get("change") in (KERNEL, ROUNDING) or not all(
            need.is_met(run) for need in needs
        ):
            continue
        name = flag_name(field.name)
        dropped.append(name if isinstance(value, bool) else f"{name} {value}")
    return dropped
