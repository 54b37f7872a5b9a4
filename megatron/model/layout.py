"""Where the logical tensors of a model lie in its parameters: one table for initialisation, weight decay and checkpoints.

A *logical tensor* is what a checkpoint names: q, k, v, gate and up apart, the real vocabulary, no parallelism. A parameter may fuse
several of them, hold padding, or be one rank's share; a `Box` says which rows of the parameter hold which part of which logical tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.dist.groups import ALONE, Axis, Groups
from megatron.layers.mlp import GATED
from megatron.layers.tensor_parallel import DENSE, PARTIAL_GRADIENTS, TensorParallel
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
    replicated: str | None = None  # who holds this very part: tp ("axis"), those that share a head ("kv"), both ends of a pipeline ("tied"); None: this rank

    def view(self, local: Tensor) -> Tensor:
        """[groups, rows, ...] of the local parameter: strided, C-order equal to `extent`."""
        rows = self.extent[0] // self.groups
        stride = local.shape[0] // self.groups
        return local[: stride * self.groups].view(self.groups, stride, *local.shape[1:])[:, self.start : self.start + rows]

    def partial(self, tp: TensorParallel) -> bool:
        """Whether this rank's gradient of it is only a part of the sum over the ranks that hold it."""
        if self.replicated == "tied":
            return True
        rows = (row for row in PARTIAL_GRADIENTS if row.axis == self.replicated and self.name.endswith(row.names))
        return any(tp.sequence or not row.sequence_only for row in rows)


class Holder(NamedTuple):
    """The place of a rank among those that hold the same part of a logical tensor."""

    rank: int
    size: int


def holders(box: Box, groups: Groups) -> Axis:
    """The ranks that hold the same box, data-parallel copies left out."""
    return {None: ALONE, "axis": groups.tp, "kv": groups.kv, "tied": groups.tied}[box.replicated]


def _split(dimension: int, name: str, local: tuple[int, ...], tp: TensorParallel, groups: int = 1, start: int = 0) -> Box:
    """This rank's part `local` of a tensor that is cut along one dimension into equal parts."""
    shape, offset = list(local), [0] * len(local)
    shape[dimension] *= tp.size
    offset[dimension] = local[dimension] * tp.axis.rank
    return Box(name, tuple(shape), tuple(offset), local, groups, start)


def _attention_boxes(config: ModelConfig, stem: str, kind: str, rest: tuple[int, ...], tp: TensorParallel) -> tuple[Box, ...]:
    """q, k and v of the fused projection; several ranks hold the same key/value head when there are fewer heads than ranks."""
    d, heads, groups = config.kv_channels, config.num_attention_heads // tp.size, max(1, config.num_query_groups // tp.size)
    per_group = heads // groups * d
    shape, extent = (config.num_query_groups * d, *rest), (groups * d, *rest)
    offset = (tp.axis.rank // tp.kv.size * groups * d, *(0 for _ in rest))
    shared = "kv" if tp.kv.size > 1 else None
    return (
        _split(0, f"{stem}q.{kind}", (heads * d, *rest), tp, groups),
        Box(f"{stem}k.{kind}", shape, offset, extent, groups, per_group, shared),
        Box(f"{stem}v.{kind}", shape, offset, extent, groups, per_group + d, shared),
    )


def boxes(config: ModelConfig, vocab_size: int, name: str, parameter: Tensor, tp: TensorParallel = DENSE) -> tuple[Box, ...]:
    """The parts of logical tensors in the parameter called `name` in the model (none where a rank's part of the vocabulary is all padding)."""
    unit, _, kind = name.rpartition(".")  # layers.3.attention.qkv, weight
    shape = tuple(parameter.shape)
    rest = shape[1:]
    if unit.endswith("attention.qkv"):
        return _attention_boxes(config, unit.removesuffix("qkv"), kind, rest, tp)
    if unit.endswith("mlp.fc1"):
        stem, f = unit.removesuffix("fc1"), config.ffn_hidden_size // tp.size
        names = ("gate", "up") if config.activation in GATED else ("up",)
        return tuple(_split(0, f"{stem}{part}.{kind}", (f, *rest), tp, start=i * f) for i, part in enumerate(names))
    if unit in ("embedding.word", "head"):
        first = tp.axis.rank * shape[0]
        rows = min(vocab_size - first, shape[0])
        tied = not config.untie_embeddings_and_output_weights
        logical = "embedding.word.weight" if tied else name
        return (Box(logical, (vocab_size, *rest), (first, 0), (rows, *rest), replicated="tied" if tied else None),) if rows > 0 else ()
    if kind == "weight" and unit.endswith(("attention.proj", "mlp.fc2")):
        return (_split(1, name.replace("mlp.fc2", "mlp.down"), shape, tp),)
    logical = name.replace("mlp.fc2", "mlp.down")
    if unit == "layers.0.position":
        logical = "embedding.position.weight"
    elif unit.endswith("final_norm"):
        logical = f"final_norm.{kind}"
    return (Box(logical, shape, (0,) * len(shape), shape, replicated="axis" if tp.size > 1 else None),)


def decays(parameter: Tensor) -> bool:
    """Weight decay applies to matrices; biases and norm weights have none."""
    return parameter.dim() > 1


def model_boxes(model: GPTModel) -> list[tuple[Box, str, nn.Parameter]]:
    """Every logical tensor of a model with the name and value of the parameter that holds it, in order; a tied head adds none."""
    return [
        (box, name, parameter)
        for name, parameter in model.named_parameters()
        for box in boxes(model.config, model.vocab_size, name, parameter, model.tp)
    ]
