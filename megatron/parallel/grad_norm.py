"""The gradient's global norm and the one coefficient that unscales, normalises and clips it.

Called from optimizer/optimizer.py, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.kernels import apex, grad_norm

PIECE = 1 << 18  # elements widened to float64 at once on a CPU: two megabytes, in cache
PIECE_CUDA = 1 << 20


def sum_of_squares(
    buffers: Iterable[Tensor],
    device: torch.device = torch.device("cpu"),
    implementation: str = "torch",
) -> Tensor:
    """Sum of squares of flat buffers in float64 (an fp32 sum over 60M elements is off by thousands
    of ulp), finite exactly when all elements are:
    torch, triton for buffers up to fp32, or apex, which adds up in fp32 and makes the host wait for
    one word (never run).
    """
    if implementation != "torch" and (buffers := list(buffers)):
        if implementation == "triton":
            return grad_norm.sum_of_squares(buffers)
        squares = apex.l2_norm(buffers).squeeze().double().square()
        # else an element is not, or squares that fp32 cannot hold were added up
        if squares.isfinite():
            return squares
    # In one order on every rank and in every layout of the same slices: the norm's bits decide the
    # clipping of all ranks.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for buffer in buffers:
        for piece in buffer.split(PIECE_CUDA if buffer.is_cuda else PIECE):
            wide = piece.double()
            total = total + torch.dot(wide, wide)
    return total


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """min(1, clip / (norm + 1e-6)); 1 when clipping is off. The norm is float64."""
    return torch.ones_like(norm) if clip_grad == 0 else (clip_grad / (norm + 1e-6)).clamp(max=1.0)
