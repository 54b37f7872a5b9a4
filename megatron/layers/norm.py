"""LayerNorm and RMSNorm over the last dimension; statistics in fp32 (fp64 in a float64 run), gradients into `main_grad`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
            dy, x, x.shape[-1:], mean, rstd, ctx.weight, ctx.bias, [True, *ctx.needs_input_grad[1:3]]
        )
        if ctx.needs_input_grad[1]:  # else it is frozen
            ctx.weight.main_grad.add_(dweight)
            ctx.bias.main_grad.add_(dbias)
        return dx, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, rstd = ctx.saved_tensors
        normed = x * rstd  # rstd is wide, so is the product
        if ctx.needs_input_grad[1]:  # else it is frozen
            ctx.weight.main_grad.add_((dy * normed).flatten(0, -2).sum(0))
        dnormed = dy * ctx.weight.to(rstd.dtype)
        projection = torch.linalg.vecdot(dnormed, normed).div_(x.shape[-1]).unsqueeze(-1)
        return dnormed.addcmul_(normed, projection, value=-1).mul_(rstd).to(x.dtype), None, None


class Norm(nn.Module):
    """LayerNorm (weight and bias) or RMSNorm (weight) over the last dimension of width `size`."""

    def __init__(self, kind: str, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.bias = nn.Parameter(torch.empty(size, device="meta")) if kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return _RMSNorm.apply(x, self.weight, self.eps)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)
