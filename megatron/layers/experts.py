"""The experts of a layer that one rank holds: MLPs whose products are made expert by expert over
rows that lie in the order of the experts.

A rank's weights are one parameter a product, its experts one behind the other, so that they lie
side by side in a flat buffer; in checkpoints each expert's matrices have names of their own. A
gradient is one product an expert, which adds up in the expert's part of main_grad. An expert
without a row has none: its part is cleared where it is to be overwritten.

The weight of an expert for a token enters before fc2's product: then the way back saves nothing,
and the gradient of the weight is a sum over f of what is there anyway. N rows, E experts of this
rank, h hidden, f width of an expert on this rank. Called from layers/moe.py, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.derive import GATED
from megatron.config.groups import ModelConfig
from megatron.layers.linear import DEFERRED, linear_weight_grad
from megatron.layers.mlp import activate_by
from megatron.layers.recompute import Rebuilder
from megatron.layers.spec import ParameterSpec, Shard, TensorSpec, normal
from megatron.layers.tensor_parallel import TensorParallel

Counts = tuple[int, ...]  # rows of each expert


def expert_parameters(config: ModelConfig, name: str) -> dict[str, ParameterSpec]:
    """fc1 [f or 2f, h] of each expert, of a gated activation [gate; up], and fc2 [h, f], each kind
    one behind the other.
    """
    h, f, count = config.hidden_size, config.moe_ffn_hidden_size, config.num_experts
    assert count is not None and f is not None
    parts = ("gate", "up") if config.activation in GATED else ("up",)

    def matrix(expert: int, part: str, shape: tuple[int, int], shard: int) -> TensorSpec:
        return TensorSpec(
            f"{name}.{expert}.{part}.weight",
            shape,
            normal(config, residual_output=part == "down"),
            "matrix",
            shard=Shard(shard),
            group="expert",
            expert=(expert, count),
        )

    fc1 = (matrix(expert, part, (f, h), 0) for expert in range(count) for part in parts)
    fc2 = (matrix(expert, "down", (h, f), 1) for expert in range(count))
    return {
        "fc1": ParameterSpec(tuple(fc1), product=True),
        "fc2": ParameterSpec(tuple(fc2), product=True),
    }


def _of_experts(counts: Counts) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and these."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def expert_products(rows: Tensor, matrices: Sequence[Tensor], counts: Counts, out: Tensor) -> None:
    """out [N, o] = rows [N, i] times the matrix [i, o] of each row's expert."""
    for expert, part in _of_experts(counts):
        torch.mm(rows[part], matrices[expert], out=out[part])


def add_expert_weight_grads(dy: Tensor, x: Tensor, weight: nn.Parameter, counts: Counts) -> None:
    """main_grad of each expert [o, i] += dy^T x over its rows, with dy [N, o] and x [N, i]; = where
    the weight's main_grad is to be overwritten.
    """
    overwrite = getattr(weight, "overwrite_main_grad", False)
    weight.overwrite_main_grad = False
    of_experts = weight.main_grad.view(len(counts), -1, weight.shape[1])
    if overwrite:
        for expert, count in enumerate(counts):
            if not count:
                of_experts[expert].zero_()
    for expert, part in _of_experts(counts):
        linear_weight_grad(
            dy[part], x[part], of_experts[expert], overwrite, getattr(weight, "by_apex", False)
        )


class ExpertWeightGrad(NamedTuple):
    """The weight gradients of experts, left for later: dy [N, o] and x [N, i]."""

    weight: nn.Parameter
    dy: Tensor
    x: Tensor
    counts: Counts
    overlap: bool = True

    def start(self) -> Callable[[], None]:
        """Nothing is communicated; what it returns adds the gradients."""
        return lambda: add_expert_weight_grads(self.dy, self.x, self.weight, self.counts)


class _ExpertLinear(torch.autograd.Function):
    """Rows [N, i] -> [N, o] by the matrix [o, i] of each row's expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: nn.Parameter, counts: Counts) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.counts = weight, counts
        matrices = weight.view(len(counts), -1, weight.shape[1])
        out = rows.new_empty((rows.shape[0], matrices.shape[1]))
        expert_products(rows, matrices.mT.unbind(), counts, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        dy = dy.contiguous()
        if ctx.needs_input_grad[1]:
            deferred = getattr(weight, DEFERRED, None)
            if deferred is None:
                add_expert_weight_grads(dy, rows, weight, counts)
            else:
                deferred.append(ExpertWeightGrad(weight, dy, rows.detach(), counts))
        dx = torch.empty_like(rows)
        matrices = weight.view(len(counts), -1, weight.shape[1])
        expert_products(dy, matrices.unbind(), counts, dx)
        return dx, None, None


class _WeighedActivation(torch.autograd.Function):
    """activation(x [N, f or 2f]) times a weight for each row [N], -> [N, f]. Saves these two."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, activation: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation = activation
        return (activation(x) * weights.unsqueeze(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = ctx.activation(leaf)
        dweights = (dy * y.detach()).sum(1, dtype=weights.dtype)
        (dx,) = torch.autograd.grad(y, leaf, (dy * weights.unsqueeze(1)).to(x.dtype))
        return dx, dweights, None


class Experts(nn.Module):
    """Rows [N, h] in the order of their experts, and the weight [N] of each -> [N, h]: under
    expert-tensor parallelism a part of the sum over its ranks. `grid`: the ranks that share each
    matrix, and those that hold other experts.
    """

    def __init__(self, config: ModelConfig, name: str, grid: TensorParallel, rebuilder: Rebuilder):
        super().__init__()
        parameters = expert_parameters(config, name)
        self.fc1 = parameters["fc1"].parameter(grid)
        self.fc2 = parameters["fc2"].parameter(grid)
        self.rebuilder = rebuilder
        self.activation = partial(
            activate_by, config.activation_backend, activation=config.activation
        )

    def forward(self, rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
        fused = _ExpertLinear.apply(rows, self.fc1, counts)
        inner = self.rebuilder("moe_act", self._weighed, fused, weights)
        return _ExpertLinear.apply(inner, self.fc2, counts)

    def _weighed(self, fused: Tensor, weights: Tensor) -> Tensor:
        return _WeighedActivation.apply(fused, weights, self.activation)
