"""What the backward pass of each layer of a stage computes again, and which tensors wait for it on
the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.groups import ModelConfig, TrainingConfig
from megatron.config.recompute import FULL, INSIDE, LAYER_INPUT, NONE, layer_words


def always_rebuilt(model: ModelConfig) -> frozenset[str]:
    """Modules of `RecomputeContext` that a layer makes again whatever else it recomputes: the MLP
    in pieces and, as large as all the rest alongside attention, the outputs of norms.
    """
    return frozenset({"layernorm", "mlp"} if model.tiled_mlp > 1 else ())


@dataclass(frozen=True)
class LayerRecompute:
    """What is computed again of one layer: these modules inside, or the whole layer with its group.

    Of a group of consecutive layers the first keeps its input and the others nothing. The graphs of
    all of them are built again before the last one's backward pass.
    """

    modules: frozenset[str] = frozenset()
    whole: bool = False
    first: bool = False  # of its group
    last: bool = False


NO_RECOMPUTE = LayerRecompute()
WHOLE = LayerRecompute(whole=True, first=True, last=True)


def group_of(size: int) -> list[LayerRecompute]:
    """Layers that share one saved input."""
    return [
        LayerRecompute(whole=True, first=index == 0, last=index == size - 1)
        for index in range(size)
    ]


def choice_of(what: str) -> LayerRecompute:
    """The choice that a word of --recompute-layers names."""
    if what == FULL:
        return WHOLE
    return NO_RECOMPUTE if what == NONE else LayerRecompute(frozenset(what.split("+")))


def stage_recompute(training: TrainingConfig, stage: range) -> list[LayerRecompute]:
    """The choice for each layer of a stage, in order. Full: `uniform` cuts the stage into groups of
    --recompute-num-layers (the last may be smaller), `block` takes that number of its first layers,
    each by itself.
    """
    layers = len(stage)
    if training.recompute_layers is not None:
        words = layer_words(training.recompute_layers)
        return [choice_of(words[layer]) for layer in stage]
    if training.recompute_granularity == "selective":
        return [LayerRecompute(frozenset(training.recompute_modules or ("core_attn",)))] * layers
    if training.recompute_granularity is None:
        return [NO_RECOMPUTE] * layers
    size = training.recompute_num_layers or 1
    if training.recompute_method == "block":
        return [WHOLE if index < size else NO_RECOMPUTE for index in range(layers)]
    # uniform: groups of this size
    starts = range(0, layers, size)
    return [choice for start in starts for choice in group_of(min(size, layers - start))]


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
        *(["core_attn"] if "core_attn" in again and again & {"qkv", "mla_up_proj"} else []),
        *(["attn_proj"] if "core_attn" in again else []),
        *(["mlp_act"] if "mlp" in again else []),
        *(["mlp_fc2"] if again & {"mlp", "mlp_act"} else []),
    }


def recompute_text(training: TrainingConfig) -> str:
    """The choice as text."""
    if training.recompute_layers is not None:
        return f"by layers ({' '.join(training.recompute_layers)})"
    granularity, count = training.recompute_granularity, training.recompute_num_layers or 1
    if granularity is None:
        return "none"
    if granularity == "selective":
        return f"selective ({', '.join(training.recompute_modules or ('core_attn',))})"
    return f"full ({training.recompute_method or 'uniform'} {count})"
