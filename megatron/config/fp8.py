"""Which linear layers compute with 8-bit floats; validate.py has the rules of their sizes."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.groups import PrecisionConfig
from megatron.config.model import GATED, ModelConfig

BLOCK = 128  # consecutive elements of a row that share a scale under --fp8-recipe blockwise
# torch._scaled_mm requires sizes that are multiples of this
MULTIPLE = 16


class LinearShape(NamedTuple):
    """A linear layer of the whole model: its name in a transformer layer, outputs and inputs.
    `split`: the dimension of its weight [outputs, inputs] that tensor-parallel ranks share;
    `parts`: of its outputs, each shared by itself.
    """

    name: str
    outputs: int
    inputs: int
    split: int
    parts: int = 1

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Outputs and inputs that one of `tp` tensor-parallel ranks holds."""
        sizes = [self.outputs, self.inputs]
        sizes[self.split] //= tp
        return sizes[0], sizes[1]


def linear_shapes(model: ModelConfig) -> tuple[LinearShape, ...]:
    """Those of a transformer layer."""
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    q = d * model.num_attention_heads
    parts = 2 if model.activation in GATED else 1  # gate and up
    return (
        LinearShape("attention.qkv", q + 2 * d * model.num_query_groups, h, 0),
        LinearShape("attention.proj", h, q, 1),
        LinearShape("mlp.fc1", parts * f, h, 0, parts),
        LinearShape("mlp.fc2", h, f, 1),
    )


def wide_linears(model: ModelConfig, precision: PrecisionConfig) -> tuple[LinearShape, ...]:
    """Those that compute with 8-bit floats, in the layers that do."""
    if precision.fp8_format is None:
        return ()
    least = precision.fp8_min_width
    return tuple(each for each in linear_shapes(model) if min(each.outputs, each.inputs) >= least)


def layer_in_fp8(precision: PrecisionConfig, index: int, layers: int) -> bool:
    if precision.fp8_format is None:
        return False
    if not precision.first_last_layers_bf16:
        return True
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return first <= index < layers - last
