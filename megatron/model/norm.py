"""LayerNorm and RMSNorm over the last dimension; statistics in fp32 (fp64 in a float64 run),
gradients into `main_grad`.

Computed by PyTorch, by NVIDIA's apex (never run), or by kernels/norm.py, which also takes the
residual addition in front and the sum of two gradients behind. s sequence, b batch, h hidden.
Called from model/block.py, and from model/attention/attention.py for queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.kernels import apex
from megatron.kernels.norm import add_norm, norm, norm_backward
from megatron.model.opaque import add_gradient
from megatron.model.spec import ONES, ParameterSpec, vector
from megatron.model.tensor_parallel import DENSE, TensorParallel


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy,
            x,
            x.shape[-1:],
            mean,
            rstd,
            ctx.weight,
            ctx.bias,
            [True, *ctx.needs_input_grad[1:3]],
        )
        if ctx.needs_input_grad[1]:  # else it is frozen
            add_gradient(ctx.weight, dweight, dx)
            add_gradient(ctx.bias, dbias, dx)
        return dx, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, rstd = ctx.saved_tensors
        normed = x * rstd  # rstd is wide, so is the product
        dweight = None
        if ctx.needs_input_grad[1]:  # else it is frozen
            dweight = (dy * normed).flatten(0, -2).sum(0)
        dnormed = dy * ctx.weight.to(rstd.dtype)
        projection = torch.linalg.vecdot(dnormed, normed).div_(x.shape[-1]).unsqueeze(-1)
        dx = dnormed.addcmul_(normed, projection, value=-1).mul_(rstd).to(x.dtype)
        if dweight is not None:
            add_gradient(ctx.weight, dweight, dx)
        return dx, None, None


class _ApexNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> Tensor:
        y, *statistics = (
            apex.rms_norm(x, weight, eps) if bias is None else apex.layer_norm(x, weight, bias, eps)
        )
        ctx.save_for_backward(x, *statistics)
        ctx.weight, ctx.bias, ctx.eps = weight, bias, eps
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        parameters = [ctx.weight] if ctx.bias is None else [ctx.weight, ctx.bias]
        differentiate = apex.rms_norm_backward if ctx.bias is None else apex.layer_norm_backward
        dx, *gradients = differentiate(dy, *ctx.saved_tensors, *parameters, ctx.eps)
        if ctx.needs_input_grad[1]:  # else it is frozen
            for parameter, gradient in zip(parameters, gradients, strict=True):
                add_gradient(parameter, gradient, dx)
        return dx, None, None, None


class _TritonNorm(torch.autograd.Function):
    """(norm of x + residual, x + residual); the second of x alone where there is no residual."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            total, (y, statistics) = x.view_as(x), norm(x, weight, bias, eps)
        else:
            y, total, statistics = add_norm(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, statistics)
        ctx.weight, ctx.bias = weight, bias
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, dy: Tensor, dtotal: Tensor | None):
        total, statistics = ctx.saved_tensors
        dx, gradients = norm_backward(dy, total, ctx.weight, statistics, dtotal)
        if ctx.needs_input_grad[2]:  # else it is frozen
            add_gradient(ctx.weight, gradients[0], dx)
            if ctx.bias is not None:
                add_gradient(ctx.bias, gradients[1], dx)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None, None


class NormKind(NamedTuple):
    """One choice of --normalization. A backend other than torch computes it if `kernels`."""

    function: type[torch.autograd.Function]  # of (x, weight, bias if there is one, eps)
    bias: bool
    kernels: bool  # kernels/norm.py and apex compute it


NORMS = {
    "LayerNorm": NormKind(_LayerNorm, bias=True, kernels=True),
    "RMSNorm": NormKind(_RMSNorm, bias=False, kernels=True),
}


def norm_parameters(
    kind: str, size: int, name: str, grad_sum: tuple[str, ...] = ()
) -> dict[str, ParameterSpec]:
    """The scale [size] and, where the kind has one, the bias [size] of a norm. Every
    tensor-parallel rank holds them whole.
    """
    scale = vector(f"{name}.weight", size, ONES, copies="tp", grad_sum=grad_sum)
    bias = vector(f"{name}.bias", size, copies="tp", grad_sum=grad_sum)
    return {"weight": ParameterSpec((scale,))} | (
        {"bias": ParameterSpec((bias,))} if NORMS[kind].bias else {}
    )


class Norm(nn.Module):
    """The norm over the last dimension that `config` names, of NORMS."""

    def __init__(
        self, parameters: dict[str, ParameterSpec], config: ModelConfig, tp: TensorParallel = DENSE
    ):
        super().__init__()
        kind = NORMS[config.normalization]
        self.function, self.eps = kind.function, config.norm_epsilon
        self.backend = config.norm_backend if kind.kernels else "torch"
        self.weight = parameters["weight"].parameter(tp)
        self.bias = parameters["bias"].parameter(tp) if "bias" in parameters else None

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "triton":
            return _TritonNorm.apply(x, None, self.weight, self.bias, self.eps)[0]
        if self.backend == "apex":
            return _ApexNorm.apply(x, self.weight, self.bias, self.eps)
        weights = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return self.function.apply(x, *weights, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of x and a residual, or of x alone: the caller that uses both
        has their gradients added in the norm's backward.
        """
        if self.backend == "triton":
            return _TritonNorm.apply(x, residual, self.weight, self.bias, self.eps)
        total = x if residual is None else residual + x
        return self(total), total
