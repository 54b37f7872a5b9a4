"""Dropout whose mask is a pure function of (seed, layer, site, sample, position): equal under recompute and in every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels import philox


@dataclass(frozen=True)
class DropoutState:
    """Where a micro-batch stands: sample_ids [b] are the run's sample numbers, token_index [s] positions within the sample."""

    sample_ids: Tensor
    token_index: Tensor


def _apply(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    return x * keep * (1 / (1 - probability))


class Dropout:
    """One dropout site: `names` name its random stream. Counter (sample, position, hidden // 4), lane hidden % 4."""

    def __init__(self, probability: float, seed: int, *names: object):
        self.probability = probability
        self.key = philox.key(seed, *names)

    def hidden(self, x: Tensor, state: DropoutState | None) -> Tensor:
        """Drop elements of x [s, b, h]; the identity when state is None (evaluation) or the probability is 0."""
        if self.probability == 0 or state is None:
            return x
        s, b, h = x.shape
        rows = torch.broadcast_tensors(state.sample_ids[None, :], state.token_index[:, None])  # [s, b]
        keep = philox.keep_mask(self.key, [word.flatten() for word in rows], h, self.probability)
        return _apply(x, keep.view(s, b, h), self.probability)

    def attention(self, p: Tensor, state: DropoutState | None, first_head: int = 0) -> Tensor:
        """Drop attention probabilities p [b, n, s, t] of heads first_head, first_head + 1, ...: counter (sample, head, query, key // 4), lane key % 4."""
        if self.probability == 0 or state is None:
            return p
        b, n, s, t = p.shape
        heads = torch.arange(first_head, first_head + n, device=p.device)
        rows = torch.broadcast_tensors(state.sample_ids[:, None, None], heads[None, :, None], state.token_index[None, None, :])
        keep = philox.keep_mask(self.key, [word.flatten() for word in rows], t, self.probability)
        return _apply(p, keep.view(b, n, s, t), self.probability)
