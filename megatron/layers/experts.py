"""The experts of a layer that one rank holds: MLPs whose products are made over rows that lie in
the order of the experts.

How they are made is --grouped-gemm-backend: by a loop of products, one an expert (torch), by one
call of torch's grouped product (grouped-mm), or of our kernels (triton), which read on the device
where each expert's rows end.

A rank's weights are one parameter a product, its experts one behind the other, so that they lie
side by side in a flat buffer; in checkpoints each expert's matrices have names of their own. A
gradient adds up in the expert's part of main_grad: torch's grouped product cannot, and would round
it before, so that with it, too, weight gradients are a loop. An expert without a row has none: its
part is cleared where it is to be overwritten.

The weight of an expert for a token enters before fc2's product: then the way back saves nothing,
and the gradient of the weight is a sum over f of what is there anyway. N rows, E experts of this
rank, h hidden, f width of an expert on this rank. Called from layers/moe.py, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.derive import GATED
from megatron.config.groups import ModelConfig
from megatron.kernels.grouped_gemm import grouped_gemm, grouped_weight_grad_
from megatron.layers.linear import DEFERRED, linear_weight_grad
from megatron.layers.mlp import activate_by, weighed_gated_gradients
from megatron.layers.recompute import Rebuilder
from megatron.layers.spec import ParameterSpec, Shard, TensorSpec, normal
from megatron.layers.tensor_parallel import TensorParallel


class RowCounts(NamedTuple):
    """How many rows each of E experts of this rank has: on the host, and where they end, [E] in
    int32 on the device. None: nothing that this run calls needs them there.
    """

    experts: int
    numbers: tuple[int, ...] | None
    ends: Tensor | None

    @classmethod
    def of(cls, backend: str, counts: Tensor, numbers: Iterable[int] | None = None) -> RowCounts:
        """What products by `backend` need of counts [E], or [sources, E] of rows that are put in
        order; `numbers`: how many each expert has, on the host.
        """
        ends = None
        if backend != LOOP:
            total = counts.sum(0) if counts.dim() == 2 else counts
            ends = total.cumsum(0, dtype=torch.int32)
        return cls(counts.shape[-1], None if numbers is None else tuple(numbers), ends)


LOOP, TORCH_GROUPED, TRITON = "torch", "grouped-mm", "triton"  # of --grouped-gemm-backend


def expert_parameters(config: ModelConfig, name: str) -> dict[str, ParameterSpec]:
    """fc1 [f or 2f, h] of each expert, of a gated activation [gate; up], and fc2 [h, f], each kind
    one behind the other.
    """
    fc1, fc2 = _expert_specs(config, name)
    return {"fc1": fc1, "fc2": fc2}


@lru_cache(maxsize=32)  # a search asks for those of hundreds of experts thousands of times
def _expert_specs(config: ModelConfig, name: str) -> tuple[ParameterSpec, ParameterSpec]:
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
    return ParameterSpec(tuple(fc1), product=True), ParameterSpec(tuple(fc2), product=True)


def _of_experts(counts: RowCounts) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and these."""
    assert counts.numbers is not None
    start = 0
    for expert, count in enumerate(counts.numbers):
        if count:
            yield expert, slice(start, start + count)
        start += count


def expert_products(
    rows: Tensor, weight: Tensor, counts: RowCounts, backend: str, *, turned: bool
) -> Tensor:
    """Rows [N, i] times the matrix [o, i] of each row's expert `turned`: [N, o]. Or rows [N, o]
    times it as it is: [N, i]. `weight` [E o, i] is all of them.
    """
    matrices = weight.view(counts.experts, -1, weight.shape[1])
    if backend == TRITON:
        assert counts.ends is not None
        return grouped_gemm(rows.contiguous(), matrices, counts.ends, turned)
    if turned:
        matrices = matrices.mT
    if backend == TORCH_GROUPED:
        return F.grouped_mm(rows, matrices, offs=counts.ends)
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    each = matrices.unbind()
    for expert, part in _of_experts(counts):
        torch.mm(rows[part], each[expert], out=out[part])
    return out


def add_expert_weight_grads(
    dy: Tensor, x: Tensor, weight: nn.Parameter, counts: RowCounts, backend: str
) -> None:
    """main_grad of each expert [o, i] += dy^T x over its rows, with dy [N, o] and x [N, i]; = where
    the weight's main_grad is to be overwritten.
    """
    overwrite = getattr(weight, "overwrite_main_grad", False)
    weight.overwrite_main_grad = False
    of_experts = weight.main_grad.view(counts.experts, -1, weight.shape[1])
    if backend == TRITON:
        assert counts.ends is not None
        grouped_weight_grad_(of_experts, dy, x.contiguous(), counts.ends, overwrite)
        # by which a layer's backward pass sees that the gradient has come
        torch.autograd.graph.increment_version(of_experts)
        return
    assert counts.numbers is not None
    if overwrite:
        for expert, count in enumerate(counts.numbers):
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
    counts: RowCounts
    backend: str
    overlap: bool = True

    def start(self) -> Callable[[], None]:
        """Nothing is communicated; what it returns adds the gradients."""
        return lambda: add_expert_weight_grads(
            self.dy, self.x, self.weight, self.counts, self.backend
        )


class _ExpertLinear(torch.autograd.Function):
    """Rows [N, i] -> [N, o] by the matrix [o, i] of each row's expert."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, counts: RowCounts, backend: str
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.counts, ctx.backend = weight, counts, backend
        return expert_products(rows, weight, counts, backend, turned=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,), weight = ctx.saved_tensors, ctx.weight
        how = ctx.counts, ctx.backend
        dy = dy.contiguous()
        if ctx.needs_input_grad[1]:
            deferred = getattr(weight, DEFERRED, None)
            if deferred is None:
                add_expert_weight_grads(dy, rows, weight, *how)
            else:
                deferred.append(ExpertWeightGrad(weight, dy, rows.detach(), *how))
        return expert_products(dy, weight, *how, turned=False), None, None, None


class _WeighedActivation(torch.autograd.Function):
    """activation(x [N, f or 2f]) times a weight for each row [N], -> [N, f]. Saves these two.
    `gated`: its name where it is torch's of a gate.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        activation: Callable[[Tensor], Tensor],
        gated: str | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation, ctx.gated = activation, gated
        return (activation(x) * weights.unsqueeze(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weights = ctx.saved_tensors
        if ctx.gated is not None:
            return *weighed_gated_gradients(dy, x, weights, ctx.gated), None, None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = ctx.activation(leaf)
        dweights = (dy * y.detach()).sum(1, dtype=weights.dtype)
        (dx,) = torch.autograd.grad(y, leaf, (dy * weights.unsqueeze(1)).to(x.dtype))
        return dx, dweights, None, None


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
        self.backend = config.grouped_gemm_backend
        self.rebuilder = rebuilder
        by_torch = config.activation_backend == "torch" and config.activation in GATED
        self.gated = config.activation if by_torch else None
        self.activation = partial(
            activate_by, config.activation_backend, activation=config.activation
        )

    def forward(self, rows: Tensor, weights: Tensor, counts: RowCounts) -> Tensor:
        fused = _ExpertLinear.apply(rows, self.fc1, counts, self.backend)
        inner = self.rebuilder("moe_act", self._weighed, fused, weights)
        return _ExpertLinear.apply(inner, self.fc2, counts, self.backend)

    def _weighed(self, fused: Tensor, weights: Tensor) -> Tensor:
        return _WeighedActivation.apply(fused, weights, self.activation, self.gated)
