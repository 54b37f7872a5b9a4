"""Which implementation computes each operator of a model: the one place where flags, device and precision meet the dispatch table."""

from __future__ import annotations

import dataclasses

import torch

from megatron.config.groups import ModelConfig
from megatron.kernels.attention import unfit
from megatron.kernels.dispatch import OPERATORS, Choice, choose
from megatron.layers.attention import beyond_sdpa


def choose_kernels(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Choice]]:
    """The configuration that the layers are built from, in which no backend but attention's is `auto`, and for the banner what trains.

    Attention that is not ours stays a matter of the layer, which takes another implementation for evaluation than for training with dropout.
    Raises ValueError when a --*-backend flag asks for what this device, precision or model cannot have.
    """
    needs = ", ".join(beyond_sdpa(model, training=True))
    unable = {"attention": {"sdpa": f"cannot compute {needs}"} if needs else {}}
    if model.kv_channels is not None and (reason := unfit(model.kv_channels)):
        unable["attention"]["triton"] = reason
    choices = {operator: choose(operator, getattr(model, _field(operator)), device, dtype, unable.get(operator)) for operator in OPERATORS}
    fields = {_field(operator): choice.implementation for operator, choice in choices.items() if operator != "attention"}
    if choices["attention"].implementation == "triton":
        fields["attention_backend"] = "triton"
    return dataclasses.replace(model, **fields), choices


def passed_over(choices: dict[str, Choice]) -> list[str]:
    """For the banner: why something else is not taken, a line for each reason."""
    reasons = sorted({choice.because for choice in choices.values() if choice.because})
    return [f"{', '.join(operator for operator, choice in choices.items() if choice.because == reason)}: {reason}" for reason in reasons]


def _field(operator: str) -> str:
    return f"{operator.replace('-', '_')}_backend"
