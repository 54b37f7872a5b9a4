"""Differentiable functions that are linear: their backward pass is another such function, and saves
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TensorFunction = Callable[..., Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: TensorFunction, adjoint: TensorFunction, *args: Any
    ) -> Tensor:
        ctx.adjoint, ctx.args = adjoint, args
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy, *ctx.args), None, None, *[None] * len(ctx.args)


def linear_map(x: Tensor, function: TensorFunction, adjoint: TensorFunction, *args: Any) -> Tensor:
    """function(x, *args), whose gradient with respect to x is adjoint(dy, *args)."""
    return _LinearMap.apply(x, function, adjoint, *args)
