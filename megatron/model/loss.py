"""Token cross-entropy over the real vocabulary, its gradient formed in the logits' own storage.

n tokens, s sequence, b batch, v vocabulary. Called from model/block.py and
model/linear_cross_entropy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.workspace import LOSS_CHUNK_BYTES
from megatron.distributed.collectives import all_gather
from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts
from megatron.model.tensor_parallel import DENSE, TensorParallel


def _chunks(logits: Tensor):
    rows = max(1, LOSS_CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _wide_logits(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else (wide / softcap).tanh_().mul_(softcap)


@dataclass(frozen=True)
class Columns:
    """The columns of the logits that this rank holds: how they are reduced to three numbers a
    token, and turned into their gradient.

    Logits are [n, padded v / size], labels [n] counted from this rank's first column. `backend`:
    torch, or triton (kernels/cross_entropy.py).
    """

    count: int  # that are no padding
    softcap: float | None
    tp: TensorParallel
    backend: str

    def reduce(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[3, n]: a maximum, the sum of exponentials after it is subtracted, and the logit of the
        label where it is here, else 0. With torch the maximum is the log-sum-exp of this rank's
        columns, and the sum is 1: log_softmax is one pass over a chunk in cache.
        """
        if self.backend == "triton":
            return cross_entropy_parts(logits, labels, self.count, self.softcap)
        parts = torch.empty(
            (3, *labels.shape),
            dtype=torch.promote_types(logits.dtype, torch.float32),
            device=logits.device,
        )
        top, exponentials, target = parts
        here, index = self._find(labels)
        exponentials.fill_(1)
        for rows in _chunks(logits) if self.count else ():
            z = _wide_logits(logits[rows, : self.count], self.softcap)
            at_label = z.gather(-1, index[rows, None])
            log_probability = torch.log_softmax(z, -1).gather(-1, index[rows, None])
            top[rows] = (at_label - log_probability).squeeze(-1)
            target[rows] = at_label.squeeze(-1)
            del z  # before the next one is made
        if self.count == 0:  # this rank holds nothing but padding
            top.fill_(torch.finfo(parts.dtype).min), exponentials.zero_(), target.zero_()
        if here is not None:
            target.mul_(here)
        return parts

    def combine(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, log-sum-exp) [n] from each rank's three numbers a token, which are overwritten.
        One all-gather.
        """
        top, exponentials, target = parts
        if self.tp.size == 1:
            lse = exponentials.log_().add_(top)
        else:
            tops, sums, targets = all_gather(parts[None], self.tp.axis).unbind(1)  # [ranks, tokens]
            top = tops.amax(0)
            lse = (sums * (tops - top).exp_()).sum(0).log_().add_(top)
            target = targets.sum(0)
        return lse - target, lse

    def into_gradient(
        self, logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, dlse: Tensor
    ) -> None:
        """Overwrite the logits with their gradient."""
        if self.backend == "triton":
            cross_entropy_backward_(logits, labels, lse, dloss, dlse, self.count, self.softcap)
            return
        here, index = self._find(labels)
        of_all = dloss + dlse
        of_label = -dloss if here is None else -(dloss * here)
        for rows in _chunks(logits) if self.count else ():
            part = logits[rows, : self.count]
            z = _wide_logits(part, self.softcap)
            # one rank's softmax is exp(z - lse) in one pass
            dz = torch.softmax(z, -1) if self.tp.size == 1 else (z - lse[rows, None]).exp_()
            dz.mul_(of_all[rows, None])
            dz.scatter_add_(-1, index[rows, None], of_label[rows, None])
            if self.softcap is not None:
                dz.mul_(z.div_(self.softcap).square_().neg_().add_(1))
            part.copy_(dz)
            del z, dz  # before the next ones are made
        logits[:, self.count :] = 0

    def _find(self, labels: Tensor) -> tuple[Tensor | None, Tensor]:
        """(whether a label is here, its column here). Not asked on one rank, where a label out of
        range is a fault.
        """
        if self.tp.size == 1:
            return None, labels
        return (labels >= 0) & (labels < self.count), labels.clamp(0, max(self.count - 1, 0))


def own_columns(
    width: int, vocab_size: int, softcap: float | None, tp: TensorParallel, backend: str
) -> tuple[int, Columns]:
    """(the first of this rank's columns, `width` on each rank, what is done with them)."""
    first = tp.axis.rank * width
    columns = min(max(vocab_size - first, 0), width)
    return first, Columns(columns, softcap, tp, backend)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        loss, lse = columns.combine(columns.reduce(logits, labels))
        ctx.logits, ctx.columns = logits, columns
        ctx.save_for_backward(lse, labels)
        return loss, lse

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        lse, labels = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None  # consumed: the gradient takes the logits' storage
        ctx.columns.into_gradient(logits, labels, lse, dloss, dlse)
        return logits, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    softcap: float | None = None,
    tp: TensorParallel = DENSE,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp) per token [s, b] in fp32 (fp64 for fp64) from this rank's logits [s, b,
    padded v / size] and labels [s, b].

    Vocabulary entries from vocab_size on are padding: no probability mass, no gradient. The
    backward pass overwrites the logits.
    """
    first, columns = own_columns(logits.shape[-1], vocab_size, softcap, tp, backend)
    loss, lse = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten() - first, columns)
    return loss.view(labels.shape), lse.view(labels.shape)
