"""Token cross-entropy over the real vocabulary, its gradient formed in the logits' own storage."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.dist.collectives import all_gather
from megatron.layers.tensor_parallel import DENSE, TensorParallel

# Logits widened and exponentiated at once, in bytes: a CPU core's cache; a GPU wants few launches.
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


def _chunks(logits: Tensor):
    rows = max(1, CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _wide_logits(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else (wide / softcap).tanh_().mul_(softcap)


def _label_columns(labels: Tensor, columns: int, tp: TensorParallel) -> tuple[Tensor | None, Tensor]:
    """(whether this rank holds a token's label, the label's column here). Not asked on one rank, where a label out of range is a fault."""
    if tp.size == 1:
        return None, labels
    return (labels >= 0) & (labels < columns), labels.clamp(0, max(columns - 1, 0))


class _CrossEntropy(torch.autograd.Function):
    """Each rank reduces its columns to three numbers a token; one all-gather of them gives the loss on every rank."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, columns: int, softcap: float | None, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        parts = torch.empty((3, *labels.shape), dtype=wide, device=logits.device)  # maximum, sum of exponentials, logit of the label
        top, exponentials, target = parts
        here, index = _label_columns(labels, columns, tp)
        for rows in _chunks(logits) if columns else ():
            z = _wide_logits(logits[rows, :columns], softcap)
            top[rows] = z.amax(-1)
            target[rows] = z.gather(-1, index[rows, None]).squeeze(-1)
            exponentials[rows] = (z - top[rows, None]).exp_().sum(-1)
        if tp.size == 1:
            lse = exponentials.log_().add_(top)
        else:
            if columns == 0:  # this rank holds nothing but padding
                top.fill_(torch.finfo(wide).min), exponentials.zero_(), target.zero_()
            target.mul_(here)
            tops, sums, targets = all_gather(parts[None], tp.axis).unbind(1)  # [ranks, tokens]
            top = tops.amax(0)
            lse = (sums * (tops - top).exp_()).sum(0).log_().add_(top)
            target = targets.sum(0)
        ctx.logits, ctx.columns, ctx.softcap = logits, columns, softcap
        ctx.save_for_backward(lse, index, here)
        return lse - target, lse

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        lse, index, here = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None  # consumed: the gradient takes the logits' storage
        for rows in _chunks(logits) if ctx.columns else ():
            part = logits[rows, : ctx.columns]
            z = _wide_logits(part, ctx.softcap)
            dz = (z.sub_(lse[rows, None]) if ctx.softcap is None else z - lse[rows, None]).exp_().mul_((dloss + dlse)[rows, None])
            dz.scatter_add_(-1, index[rows, None], -dloss[rows, None] if here is None else -(dloss * here)[rows, None])
            if ctx.softcap is not None:
                dz.mul_(1 - (z / ctx.softcap).square_())
            part.copy_(dz)
        logits[:, ctx.columns :] = 0
        return logits, None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, softcap: float | None = None, tp: TensorParallel = DENSE) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp) per token [s, b] in fp32 (fp64 for fp64) from this rank's logits [s, b, padded v / size] and labels [s, b].

    Vocabulary entries from vocab_size on are padding: no probability mass, no gradient. The backward pass overwrites the logits.
    """
    first = tp.axis.rank * logits.shape[-1]
    columns = min(max(vocab_size - first, 0), logits.shape[-1])
    loss, lse = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten() - first, columns, softcap, tp)
    return loss.view(labels.shape), lse.view(labels.shape)
