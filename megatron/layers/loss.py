"""Token cross-entropy over the real vocabulary, its gradient formed in the logits' own storage."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits widened and exponentiated at once, in bytes: a CPU core's cache; a GPU wants few launches.
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


def _chunks(logits: Tensor):
    rows = max(1, CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _wide_logits(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else (wide / softcap).tanh_().mul_(softcap)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab_size: int, softcap: float | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.empty(labels.shape, dtype=wide, device=logits.device)
        lse = torch.empty_like(loss)
        for rows in _chunks(logits):
            z = _wide_logits(logits[rows, :vocab_size], softcap)
            top = z.amax(-1, keepdim=True)
            lse[rows] = (z - top).exp_().sum(-1).log_().add_(top.squeeze(-1))
            loss[rows] = lse[rows] - z.gather(-1, labels[rows, None]).squeeze(-1)
        ctx.logits, ctx.vocab_size, ctx.softcap = logits, vocab_size, softcap
        ctx.save_for_backward(labels, lse)
        return loss, lse

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        labels, lse = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None  # consumed: the gradient takes the logits' storage
        for rows in _chunks(logits):
            part = logits[rows, : ctx.vocab_size]
            z = _wide_logits(part, ctx.softcap)
            dz = (z.sub_(lse[rows, None]) if ctx.softcap is None else z - lse[rows, None]).exp_().mul_((dloss + dlse)[rows, None])
            dz.scatter_add_(-1, labels[rows, None], -dloss[rows, None])
            if ctx.softcap is not None:
                dz.mul_(1 - (z / ctx.softcap).square_())
            part.copy_(dz)
        logits[:, ctx.vocab_size :] = 0
        return logits, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp) per token [s, b] in fp32 (fp64 for fp64) from logits [s, b, padded v] and labels [s, b].

    Columns from vocab_size on are padding: no probability mass, no gradient. The backward pass overwrites the logits.
    """
    loss, lse = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), vocab_size, softcap)
    return loss.view(labels.shape), lse.view(labels.shape)
