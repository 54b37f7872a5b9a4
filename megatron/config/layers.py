"""What each layer of a model is made of: one record a layer, which everything else reads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.experts import read_pattern

if TYPE_CHECKING:
    from megatron.config.groups import ModelConfig


class LayerRecord(NamedTuple):
    """One transformer layer. Layers with equal records compute the same function of their weights.

    `window`: latest keys that a query sees, itself included; None: all earlier ones. `first` has
    the table of learned positions and the embedding's dropout, `last` the final norm.
    """

    latent: bool  # multi-head latent attention
    window: int | None
    rotary: bool
    experts: bool  # in place of the MLP
    first: bool
    last: bool


@functools.lru_cache(maxsize=256)
def layer_records(model: ModelConfig) -> tuple[LayerRecord, ...]:
    """The record of each layer. Of a resolved configuration."""
    layers = model.num_layers or 0
    windowed, rotary = windowed_layers(model), rotary_layers(model)
    return tuple(
        LayerRecord(
            model.multi_latent_attention,
            model.window_size if windowed[index] else None,
            rotary[index],
            experts,
            index == 0,
            index == layers - 1,
        )
        for index, experts in enumerate(model.expert_layers())
    )


def windowed_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether --window-size acts in each layer. Raises UserError."""
    layers = model.num_layers or 0
    if model.window_size is None:
        return (False,) * layers
    if model.window_attn_skip_freq is None:
        return (True,) * layers
    return tuple(not full for full in _marked(model.window_attn_skip_freq, layers, ones=False))


def rotary_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether positions rotate queries and keys in each layer. Raises UserError."""
    layers = model.num_layers or 0
    if model.position_embedding_type not in ("rope", "yarn"):
        return (False,) * layers
    if model.no_rope_freq is None:
        return (True,) * layers
    return tuple(not skipped for skipped in _marked(model.no_rope_freq, layers, ones=True))


def _marked(text: str, layers: int, *, ones: bool) -> tuple[bool, ...]:
    """Layers that a pattern leaves out: every N-th one, counted from 1; of a list those with a 1,
    or if not `ones` those with a 0. Raises UserError.
    """
    found = read_pattern(text, layers)
    if isinstance(found, int):
        return tuple((index + 1) % found == 0 for index in range(layers))
    return tuple(bool(entry) is ones for entry in found)


def windows_of(model: ModelConfig) -> tuple[int | None, ...]:
    """The different windows of a model's layers, in the order of the layers."""
    return tuple(dict.fromkeys(record.window for record in layer_records(model)))


def window_index(model: ModelConfig, record: LayerRecord) -> int:
    """Which of these a layer has."""
    return windows_of(model).index(record.window)


def widest_window(model: ModelConfig) -> int | None:
    """The window that every layer has; None where a layer sees all earlier keys."""
    windows = windows_of(model)
    return None if None in windows else model.window_size
