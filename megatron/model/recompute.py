"""What the backward pass of each layer of a stage computes again."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.groups import TrainingConfig
from megatron.config.recompute import FULL, NONE, layer_words


@dataclass(frozen=True)
class LayerRecompute:
    """What is computed again of one layer: these modules inside, or the whole layer with its group.

    Of a group of consecutive layers the first keeps its input and the others nothing. Their
    backward passes begin when the graphs of all of them have been built again, the last one's in
    its own backward pass.
    """

    modules: frozenset[str] = frozenset()
    whole: bool = False
    first: bool = False  # of its group
    last: bool = False


KEPT = LayerRecompute()
WHOLE = LayerRecompute(whole=True, first=True, last=True)


def group_of(size: int) -> list[LayerRecompute]:
    """Layers that share one saved input."""
    return [
        LayerRecompute(whole=True, first=index == 0, last=index == size - 1)
        for index in range(size)
    ]


def choice_of(what: str) -> LayerRecompute:
    """The choice that a word of --recompute-layers names."""
    # full, none, or modules joined by +
    if what == FULL:
        return WHOLE
    return KEPT if what == NONE else LayerRecompute(frozenset(what.split("+")))


def stage_recompute(training: TrainingConfig, stage: range) -> list[LayerRecompute]:
    """The choice for each layer of a stage, in order. Full: `uniform` cuts the stage into groups of
    --recompute-num-layers (the last may be smaller), `block` takes that number of its first layers,
    each by itself.
    """
    layers = len(stage)
    if training.recompute_layers is not None:
        # --recompute-layers names every layer of the model.
        words = layer_words(training.recompute_layers)
        return [choice_of(words[layer]) for layer in stage]
    if training.recompute_granularity == "selective":
        return [LayerRecompute(frozenset(training.recompute_modules or ("core_attn",)))] * layers
    if training.recompute_granularity is None:
        return [KEPT] * layers
    size = training.recompute_num_layers or 1
    if training.recompute_method == "block":
        # block
        return [WHOLE if index < size else KEPT for index in range(layers)]
    # uniform
    starts = range(0, layers, size)
    return [choice for start in starts for choice in group_of(min(size, layers - start))]


def recompute_text(training: TrainingConfig) -> str:
    """The choice as text."""
    if training.recompute_layers is not None:
        return f"by layers ({' '.join(training.recompute_layers)})"
    granularity, count = training.recompute_granularity, training.recompute_num_layers or 1
    if granularity is None:
        return "none"
    if granularity == "selective":
        return f"selective ({', '.join(training.recompute_modules or ('core_attn',))})"
    how = (
        f"the first {count} layer(s) of each stage"
        if training.recompute_method == "block"
        else "every layer"
        if count == 1
        else f"groups of {count} layers"
    )
    shared = ", inputs shared by tensor-parallel ranks"
    return f"full ({how}{shared if training.distribute_saved_activations else ''})"
