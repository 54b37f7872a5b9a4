"""Layers of given sizes for tests: each declares tensors that no model has."""

from __future__ import annotations

from megatron.config.groups import ModelConfig
from megatron.model.embedding import Embedding
from megatron.model.linear import ColumnLinear, Linear, RowLinear
from megatron.model.model_parallel import NO_TP, TensorParallel
from megatron.model.norm import Norm
from megatron.model.spec import Init, ParameterSpec, Shard, TensorSpec, vector

DRAWN = Init(std=0.02)


def linear(
    i: int,
    o: int,
    bias: bool,
    tp: TensorParallel = NO_TP,
    kind: type[Linear] = Linear,
    name: str = "linear",
) -> Linear:
    """A linear layer from i to o features, over all ranks."""
    weight_shard = {ColumnLinear: Shard(0), RowLinear: Shard(1)}.get(kind)
    bias_shard = Shard(0) if kind is ColumnLinear else None
    matrix = TensorSpec(f"{name}.weight", (o, i), DRAWN, shard=weight_shard)
    offsets = vector(f"{name}.bias", o, shard=bias_shard) if bias else None
    return kind(ParameterSpec((matrix,), is_gemm=True), offsets, tp)


def norm(
    kind: str,
    size: int,
    eps: float = 1e-5,
    backend: str = "torch",
    name: str = "norm",
    layer: type[Norm] = Norm,
) -> Norm:
    """A norm of this width."""
    config = ModelConfig(normalization=kind, norm_epsilon=eps, norm_backend=backend)
    return layer(config, name, size)


def table(
    rows: int, width: int, tp: TensorParallel = NO_TP, name: str = "table.weight"
) -> Embedding:
    """An embedding of `rows` rows, over all ranks."""
    matrix = TensorSpec(name, (rows, width), DRAWN, shard=Shard(0))
    return Embedding(ParameterSpec((matrix,)), tp)
