"""Which tensors of each layer of a stage wait on the host for their backward pass."""

from __future__ import annotations

from megatron.config.groups import ModelConfig, TrainingConfig
from megatron.config.offload import INSIDE, LAYER_INPUT
from megatron.model.mlp import always_rebuilt
from megatron.model.recompute import LayerRecompute, stage_recompute


def stage_offload(
    training: TrainingConfig, model: ModelConfig, stage: range
) -> list[frozenset[str]]:
    """For each layer of a stage, in order, the modules whose inputs go to the host. Of the layers
    that keep any of the chosen ones the first go, which wait the longest: the share
    --activation-offload-fraction of them, rounded to the nearest.
    """
    choices = stage_recompute(training, stage)
    if not training.activation_offload:
        return [frozenset()] * len(choices)
    chosen = frozenset(training.offload_modules or (LAYER_INPUT, *INSIDE))
    kept = [chosen & kept_inputs(choice, model) for choice in choices]
    # The first layers' tensors wait the longest between forward and backward: theirs go.
    eligible = [index for index, modules in enumerate(kept) if modules]
    going = eligible[: round(training.activation_offload_fraction * len(eligible))]
    return [modules if index in going else frozenset() for index, modules in enumerate(kept)]


def kept_inputs(choice: LayerRecompute, model: ModelConfig) -> frozenset[str]:
    """The modules whose inputs a layer keeps with this recomputation."""
    if choice.whole:
        return frozenset([LAYER_INPUT] if choice.first else [])
    # A module whose input is recomputed keeps nothing that could go.
    again = choice.modules | always_rebuilt(model)
    return frozenset(INSIDE) - {
        *(["qkv_linear", "mlp_fc1"] if "layernorm" in again else []),
        *(["core_attn"] if {"qkv", "core_attn"} <= again else []),
        *(["attn_proj"] if "core_attn" in again else []),
        *(["mlp_act"] if "mlp" in again else []),
        *(["mlp_fc2"] if again & {"mlp", "mlp_act"} else []),
    }
