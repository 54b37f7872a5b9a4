"""LayerNorm and RMSNorm over the last dimension; statistics in fp32 (fp64 in a float64 run),
gradients into `main_grad`.

Computed by PyTorch, by NVIDIA's apex (never run), or by our kernels, which also take the residual
addition in front and the sum of two gradients behind, or the rotation of queries and keys. s
sequence, b batch, h hidden, g key/value heads, q queries of each, d head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.kernels import apex
from megatron.kernels.norm import add_norm, norm, norm_backward
from megatron.kernels.qk_norm import qk_norm, qk_norm_backward
from megatron.model.linear import accumulate_gradients
from megatron.model.spec import ONES, vector


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> Tensor:
        # Mean and 1 / std [s, b, 1] are kept in place of the normed tensor.
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, mean, rstd = ctx.saved_tensors
        # One pass over dy and x gives all three.
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
        accumulate_gradients((ctx.weight, ctx.bias), (dweight, dbias), dx)
        return dx, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: None, eps: float) -> Tensor:
        # y = x / sqrt(mean(x^2) + eps) * weight, in fp32 or wider
        wide = x.float() if x.element_size() == 2 else x
        rstd = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        if wide is x:
            return wide * rstd * weight
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, rstd = ctx.saved_tensors
        normed = x * rstd  # rstd is wide, so is the product
        dweight = None
        if ctx.needs_input_grad[1]:  # else it is frozen
            dweight = (dy * normed).flatten(0, -2).sum(0)
        # dx = rstd (dn - n mean(dn n)), with n the normed x and dn = dy weight
        weight, narrow = ctx.weight, x.dtype != rstd.dtype
        dnormed = dy * (weight.to(rstd.dtype) if narrow else weight)
        projection = torch.linalg.vecdot(dnormed, normed).div_(x.shape[-1]).unsqueeze(-1)
        dx = dnormed.addcmul_(normed, projection, value=-1).mul_(rstd)
        dx = dx.to(x.dtype) if narrow else dx
        accumulate_gradients((ctx.weight,), (dweight,), dx)
        return dx, None, None, None


class _ApexNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> Tensor:
        parameters = (weight,) if bias is None else (weight, bias)
        y, *statistics = apex.norm(x, parameters, eps)
        ctx.save_for_backward(x, *statistics)
        ctx.parameters, ctx.eps = parameters, eps
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, *statistics = ctx.saved_tensors
        dx, *gradients = apex.norm_backward(dy, x, statistics, ctx.parameters, ctx.eps)
        accumulate_gradients(ctx.parameters, gradients, dx)
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
            # The stream is returned too, so that the kernel adds its gradient.
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
        # The kernel adds the residual stream's own gradient to dx, which is both inputs' gradient.
        dx, gradients = norm_backward(dy, total, ctx.weight, statistics, dtotal)
        parameters = (ctx.weight,) if ctx.bias is None else (ctx.weight, ctx.bias)
        accumulate_gradients(parameters, gradients, dx)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None, None


class NormKind(NamedTuple):
    """One choice of --normalization. A backend other than torch computes it if `kernels`."""

    function: type[torch.autograd.Function]  # of (x, weight, bias or None, eps)
    bias: bool
    kernels: bool  # kernels/norm.py and apex compute it


NORMS = {
    "LayerNorm": NormKind(_LayerNorm, bias=True, kernels=True),
    "RMSNorm": NormKind(_RMSNorm, bias=False, kernels=True),
}


class Norm(nn.Module):
    """The norm over the last dimension [size] that `config` names, of NORMS: a scale and, where the
    kind has one, a bias. `grad_sum`: over tensor-parallel ranks, which all hold them whole.
    """

    def __init__(self, config: ModelConfig, name: str, size: int, grad_sum: bool = False):
        super().__init__()
        kind, self.eps = NORMS[config.normalization], config.norm_epsilon
        self.backend = config.norm_backend if kind.kernels else "torch"
        self.function = _ApexNorm if self.backend == "apex" else kind.function
        held: dict[str, Any] = {"copies": "tp", "grad_sum": grad_sum}
        self.weight = vector(f"{name}.weight", size, ONES, **held).parameter()
        self.bias = vector(f"{name}.bias", size, **held).parameter() if kind.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "triton":
            return _TritonNorm.apply(x, None, self.weight, self.bias, self.eps)[0]
        return self.function.apply(x, self.weight, self.bias, self.eps)


class AddNorm(Norm):
    """(norm of x + residual, their sum), or of x alone, in front of a sublayer."""

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.backend == "triton":  # one kernel for both
            return _TritonNorm.apply(x, residual, self.weight, self.bias, self.eps)
        # torch adds the residual in a separate pass, and autograd adds its gradient in another.
        stream = x if residual is None else residual + x
        return self.function.apply(stream, self.weight, self.bias, self.eps), stream


class _QKNorm(torch.autograd.Function):
    """Norms of queries and keys, and their rotation, on the fused QKV projection
    [s, b, g, q + 2, d]; values stay as they are. Keeps the projection, not what is normed.
    """

    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        q_weight: nn.Parameter,
        k_weight: nn.Parameter,
        q_bias: nn.Parameter | None,
        k_bias: nn.Parameter | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
    ) -> Tensor:
        y, statistics = qk_norm(qkv, q_weight, k_weight, q_bias, k_bias, cos, sin, eps)
        ctx.save_for_backward(qkv, statistics, cos, sin)
        ctx.weights, ctx.biases = (q_weight, k_weight), (q_bias, k_bias)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        qkv, statistics, cos, sin = ctx.saved_tensors
        dx, gradients = qk_norm_backward(dy.contiguous(), qkv, *ctx.weights, cos, sin, statistics)
        parameters = [*ctx.weights, *(bias for bias in ctx.biases if bias is not None)]
        accumulate_gradients(parameters, gradients, dx)
        return dx, None, None, None, None, None, None, None


def normed_projection(
    qkv: Tensor, q_norm: Norm, k_norm: Norm, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    """qkv [s, b, g, q + 2, d] with its query and key heads normed and, with tables, turned."""
    # The two norms share one launch, so they share the epsilon.
    cos, sin = rotary or (None, None)
    return _QKNorm.apply(
        qkv, q_norm.weight, k_norm.weight, q_norm.bias, k_norm.bias, cos, sin, q_norm.eps
    )
