"""Where the logical tensors of a model lie in its parameters: one table for initialisation, weight decay and checkpoints.

A *logical tensor* is what a checkpoint names: q, k, v, gate and up apart, the real vocabulary, no parallelism. A parameter may fuse
several of them or hold padding; a `Box` says which rows of the parameter hold which part of which logical tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.layers.mlp import GATED
from megatron.model.gpt import GPTModel


@dataclass(frozen=True)
class Box:
    """Part of a logical tensor held by a local parameter: rows [start, start + rows) of each of `groups` equal row groups."""

    name: str
    shape: tuple[int, ...]  # the whole logical tensor
    offset: tuple[int, ...]  # where the part begins
    extent: tuple[int, ...]  # its size
    groups: int = 1
    start: int = 0
    replicated: str | None = None  # which tensor-parallel ranks hold this same box: all of the "axis", those of one "kv" head, or no other

    def view(self, local: Tensor) -> Tensor:
        """[groups, rows, ...] of the local parameter: strided, C-order equal to `extent`."""
        rows = self.extent[0] // self.groups
        stride = local.shape[0] // self.groups
        return local[: stride * self.groups].view(self.groups, stride, *local.shape[1:])[:, self.start : self.start + rows]


def _whole(name: str, shape: tuple[int, ...], groups: int = 1, start: int = 0) -> Box:
    return Box(name, shape, (0,) * len(shape), shape, groups, start)


def boxes(config: ModelConfig, vocab_size: int, name: str, parameter: Tensor) -> tuple[Box, ...]:
    """The logical tensors in the parameter called `name` in the model."""
    unit, _, kind = name.rpartition(".")  # layers.3.attention.qkv, weight
    rest = tuple(parameter.shape[1:])
    if unit.endswith("attention.qkv"):
        stem, d, g, n = unit.removesuffix("qkv"), config.kv_channels, config.num_query_groups, config.num_attention_heads
        per_group = n // g * d
        return (
            _whole(f"{stem}q.{kind}", (n * d, *rest), g, 0),
            _whole(f"{stem}k.{kind}", (g * d, *rest), g, per_group),
            _whole(f"{stem}v.{kind}", (g * d, *rest), g, per_group + d),
        )
    if unit.endswith("mlp.fc1"):
        stem, f = unit.removesuffix("fc1"), config.ffn_hidden_size
        if config.activation in GATED:
            return _whole(f"{stem}gate.{kind}", (f, *rest)), _whole(f"{stem}up.{kind}", (f, *rest), start=f)
        return (_whole(f"{stem}up.{kind}", (f, *rest)),)
    if unit in ("embedding.word", "head"):
        return (_whole(name, (vocab_size, *rest)),)
    if unit == "layers.0.position":
        return (_whole("embedding.position.weight", tuple(parameter.shape)),)
    if unit.endswith("final_norm"):
        return (_whole(f"final_norm.{kind}", tuple(parameter.shape)),)
    return (_whole(name.replace("mlp.fc2", "mlp.down"), tuple(parameter.shape)),)


def decays(parameter: Tensor) -> bool:
    """Weight decay applies to matrices; biases and norm weights have none."""
    return parameter.dim() > 1


def model_boxes(model: GPTModel) -> list[tuple[Box, str, nn.Parameter]]:
    """Every logical tensor of a model with the name and value of the parameter that holds it, in order; a tied head adds none."""
    return [
        (box, name, parameter)
        for name, parameter in model.named_parameters()
        for box in boxes(model.config, model.vocab_size, name, parameter)
    ]
