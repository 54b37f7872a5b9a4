"""Norms of queries and keys, and their rotation, on the fused QKV projection by kernels/qk_norm.py:
what attention reads next is again one tensor of the projection's shape.

s sequence, b batch, g key/value heads, q queries of each, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.kernels.qk_norm import qk_norm, qk_norm_backward
from megatron.model.attention.rotary import Rotary
from megatron.model.main_grad import accumulate_gradients
from megatron.model.norm import Norm


class _QKNorm(torch.autograd.Function):
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
        # The kernel normed the query and key heads and left the values as they are.
        ctx.weights, ctx.biases = (q_weight, k_weight), (q_bias, k_bias)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        qkv, statistics, cos, sin = ctx.saved_tensors
        # Statistics of the forward pass are read, the normed projection is not kept.
        dx, gradients = qk_norm_backward(dy.contiguous(), qkv, *ctx.weights, cos, sin, statistics)
        if ctx.needs_input_grad[1]:  # else they are frozen
            parameters = [*ctx.weights, *(bias for bias in ctx.biases if bias is not None)]
            accumulate_gradients(parameters, gradients, dx)
        return dx, None, None, None, None, None, None, None


def normed_projection(qkv: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Tensor:
    """qkv [s, b, g, q + 2, d] with its query and key heads normed and, with tables, turned."""
    # The two norms share one launch, so they share the epsilon.
    cos, sin = rotary or (None, None)
    return _QKNorm.apply(
        qkv, q_norm.weight, k_norm.weight, q_norm.bias, k_norm.bias, cos, sin, q_norm.eps
    )
