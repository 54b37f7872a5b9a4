"""Dropout whose mask is a pure function of (seed, layer, site, sample, position): equal under
recompute and in every layout.

s sequence, b batch, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels import philox
from megatron.kernels.dropout import dropout_add


@dataclass(frozen=True)
class DropoutState:
    """Sample numbers [b] within the run, and positions [s] within the samples."""

    sample_ids: Tensor
    token_index: Tensor

    def counters(self) -> list[Tensor]:
        """(sample, position) of each row of a tensor [s, b, ...]: [s b] each."""
        rows = torch.broadcast_tensors(self.sample_ids[None, :], self.token_index[:, None])
        return [word.flatten() for word in rows]


class _TritonDropout(torch.autograd.Function):
    """Dropout of x plus the residual, if there is one; keeps nothing of size s b h."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        state: DropoutState,
        key: philox.Key,
        probability: float,
    ) -> Tensor:
        ctx.mask = (state.sample_ids, state.token_index, *key, probability)
        return dropout_add(x, residual, *ctx.mask)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = dropout_add(dy, None, *ctx.mask)
        return dx, dy if ctx.needs_input_grad[1] else None, None, None, None


class _MaskedDropout(torch.autograd.Function):
    """x keep / (1 - p), keep as bytes, whose conversion torch vectorizes on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, keep: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.factor = 1 / (1 - probability)
        return x * keep.to(x.dtype) * ctx.factor

    @staticmethod
    def backward(ctx, dy: Tensor):
        (keep,) = ctx.saved_tensors
        return dy * keep.to(dy.dtype) * ctx.factor, None, None


class Dropout:
    """One dropout site: `names` name its random stream. Counter (sample, position, hidden // 8),
    lane hidden % 8. Backend (of hidden states) torch or triton.
    """

    def __init__(self, probability: float, seed: int, *names: object, backend: str = "torch"):
        self.probability, self.backend = probability, backend
        self.key = philox.key(seed, *names)
        self.words: philox.Key = self.key

    def keep_words_on(self, device: torch.device) -> None:
        """Keep the key in tensors: numbers would be constants of one compiled graph per layer."""
        k0, k1 = self.key
        self.words = torch.tensor(k0, device=device), torch.tensor(k1, device=device)

    def hidden(self, x: Tensor, state: DropoutState | None) -> Tensor:
        """Dropout of x [s, b, h]; the identity in evaluation (state None) or at probability 0."""
        if state is None or self.probability == 0:
            return x
        if self.backend == "triton":
            return _TritonDropout.apply(x, None, state, self.key, self.probability)
        # An element's counter holds its sample and position: the mask is the same in every layout.
        keep = philox.keep_mask_of_halves(
            self.words, state.counters(), x.shape[2], self.probability
        )
        return _MaskedDropout.apply(x, keep.view(torch.uint8).view(x.shape), self.probability)

    def add(self, x: Tensor, residual: Tensor, state: DropoutState) -> Tensor:
        """residual + hidden(x), at a probability above 0."""
        if self.backend == "triton":
            # One pass over x and the residual; the backward pass draws the mask again.
            return _TritonDropout.apply(x, residual, state, self.key, self.probability)
        return residual + self.hidden(x, state)
