"""How the units of a model are cut into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.groups import Config, ModelConfig


@dataclass(frozen=True)
class Stage:
    """Consecutive units: the embedding, layers, the head."""

    embedding: bool
    layers: range
    head: bool


def whole(model: ModelConfig) -> tuple[Stage, ...]:
    """The model as one stage."""
    return (Stage(True, range(model.num_layers), True),)


def pipeline_stages(config: Config, padded_vocab: int) -> tuple[Stage, ...]:
    """The stages of a resolved configuration along the forward pass: pipeline ranks x virtual stages of them."""
    count = config.distributed.pipeline_model_parallel_size * config.distributed.num_virtual_stages_per_pipeline_rank
    layers = config.model.num_layers // count
    return tuple(Stage(k == 0, range(k * layers, (k + 1) * layers), k == count - 1) for k in range(count))
