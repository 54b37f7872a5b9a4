"""Linear layers with separate input- and weight-gradient functions.

Weight gradients never appear as `.grad`: each parameter carries `main_grad`, a view of its block's gradient buffer (fp32, or fp64 in a
float64 run), and the functions below add into it. s sequence, b batch, i in, o out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Largest temporary that forming a weight gradient may take, in bytes.
SCRATCH_BYTES = 8 << 20


def linear_input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """dL/dx [s, b, i] from dL/dy [s, b, o] and the weight [o, i]."""
    return dy.matmul(weight)


def linear_weight_grad(dy: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad [o, i] += dy^T x, with dy [s, b, o] and x [s, b, i]; no temporary above SCRATCH_BYTES."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy.t(), x)  # the product is added by the GEMM itself
        return
    if dy.is_cuda:
        step = max(1, SCRATCH_BYTES // (x.shape[1] * main_grad.element_size()))
        for row in range(0, main_grad.shape[0], step):
            main_grad[row : row + step].add_(torch.mm(dy[:, row : row + step].t(), x, out_dtype=main_grad.dtype))
        return
    step = max(1, SCRATCH_BYTES // (main_grad.element_size() * max(x.shape[1], dy.shape[1])))  # no bf16 x bf16 -> fp32 product here
    for token in range(0, x.shape[0], step):
        main_grad.addmm_(dy[token : token + step].t().to(main_grad.dtype), x[token : token + step].to(main_grad.dtype))


def bias_grad(dy: Tensor, main_grad: Tensor) -> None:
    """main_grad [o] += the sum of dy [s, b, o] over tokens, accumulated in main_grad's precision."""
    main_grad.add_(dy.flatten(0, -2).sum(0, dtype=main_grad.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        dx = linear_input_grad(dy, ctx.weight)
        linear_weight_grad(dy, x, ctx.weight.main_grad)
        if ctx.bias is not None:
            bias_grad(dy, ctx.bias.main_grad)
        return dx, None, None


def linear(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Tensor:
    """x [s, b, i] times weight [o, i] transposed, plus bias [o]: bit-equal to torch.nn.functional.linear."""
    return _Linear.apply(x, weight, bias)


class Linear(nn.Module):
    """torch.nn.Linear whose gradients accumulate into `main_grad`."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"))
        self.bias = nn.Parameter(torch.empty(out_features, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
