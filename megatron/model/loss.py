"""Token cross-entropy over the real vocabulary, its gradient formed in the logits' own storage; or
the output matrix and the loss together, tokens in chunks, so that the logits are never whole.

n tokens, s sequence, b batch, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts
from megatron.model.linear import accumulate_weight_grad, linear
from megatron.model.model_parallel import NO_TP, TensorParallel

# Logits widened and exponentiated at once: a CPU core's cache; a GPU wants few launches.
LOSS_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
# Logits made at once: hundreds of tokens on a CPU, thousands on a GPU, so that the weight and its
# gradient, which are read and written for each chunk, cost little compared with the GEMMs.
HEAD_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def _wide_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """In fp32 or wider, capped to cap tanh(z / cap)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else (wide / softcap).tanh_().mul_(softcap)


@dataclass(frozen=True)
class ShardedCrossEntropy:
    """Cross-entropy of logits of which this rank holds some columns, [n, padded v / size]; labels
    [n] are counted from its first column. By torch; the subclass takes kernels/cross_entropy.py.
    """

    first: int  # the first column's number in the vocabulary
    count: int  # that are no padding
    softcap: float | None
    tp: TensorParallel

    def reduce(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[3, n]: (m, s, t) with m + log s the log-sum-exp of this rank's columns, and t the logit
        of the label where it is here, else 0. Here s = 1, as log_softmax is one pass over a chunk
        in cache; the kernel gives maximum and sum.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        parts = torch.zeros((3, *labels.shape), dtype=wide, device=logits.device)
        m, s, t = parts
        if self.count == 0:  # this rank holds nothing but padding
            m.fill_(torch.finfo(wide).min)
            return parts

        # With several ranks a label may be in another's columns: any column is read instead, and
        # its logit does not count. On one rank a label out of range is a fault, and raises.
        alone = self.tp.size == 1
        index = labels if alone else labels.clamp(0, self.count - 1)
        s.fill_(1)
        # By chunks of rows that stay in cache: all logits in fp32 would double their memory.
        step = max(1, LOSS_CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))
        for start in range(0, len(labels), step):
            rows = slice(start, start + step)
            z = _wide_logits(logits[rows, : self.count], self.softcap)
            at_label = z.gather(-1, index[rows, None])
            log_probability = torch.log_softmax(z, -1).gather(-1, index[rows, None])
            m[rows] = (at_label - log_probability).squeeze(-1)
            t[rows] = at_label.squeeze(-1)
            del z  # before the next one is made
        if not alone:
            t.mul_((labels >= 0) & (labels < self.count))
        return parts

    def combine(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, log-sum-exp) [n] of the ranks' numbers, which are overwritten. One all-gather."""
        m, s, t = parts
        if self.tp.size == 1:
            lse = s.log_().add_(m)
        else:
            # log-sum-exp over all columns: m + log sum_r e^(m_r - m) s_r, with m = max_r m_r
            m_r, s_r, t_r = all_gather(parts[None], self.tp.axis).unbind(1)  # [ranks, tokens]
            m = m_r.amax(0)
            lse = (s_r * (m_r - m).exp_()).sum(0).log_().add_(m)
            t = t_r.sum(0)
        return lse - t, lse

    def into_gradient(
        self, logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, dlse: Tensor
    ) -> None:
        """Overwrite the logits with their gradient."""
        # d loss / d z_j = softmax_j - [j is the label]; d lse / d z_j = softmax_j
        alone = self.tp.size == 1
        index, of_label, of_all = labels, -dloss, dloss + dlse
        if not alone:  # a label in another rank's columns gives nothing here
            index = labels.clamp(0, max(self.count - 1, 0))
            of_label = of_label * ((labels >= 0) & (labels < self.count))
        step = max(1, LOSS_CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))
        for start in range(0, len(labels) if self.count else 0, step):
            rows = slice(start, start + step)
            part = logits[rows, : self.count]
            z = _wide_logits(part, self.softcap)
            # one rank's softmax is exp(z - lse) in one pass
            dz = torch.softmax(z, -1) if alone else (z - lse[rows, None]).exp_()
            dz.mul_(of_all[rows, None])
            dz.scatter_add_(-1, index[rows, None], of_label[rows, None])
            if self.softcap is not None:  # the derivative of the cap is 1 - tanh^2
                dz.mul_(z.div_(self.softcap).square_().neg_().add_(1))
            part.copy_(dz)
            del z, dz  # before the next ones are made
        logits[:, self.count :] = 0  # padding


class TritonCrossEntropy(ShardedCrossEntropy):
    """The same by our kernels, which read the logits once in either pass."""

    def reduce(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_parts(logits, labels, self.count, self.softcap)

    def into_gradient(
        self, logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, dlse: Tensor
    ) -> None:
        cross_entropy_backward_(logits, labels, lse, dloss, dlse, self.count, self.softcap)


def sharded_cross_entropy(
    width: int,
    vocab_size: int,
    softcap: float | None = None,
    tp: TensorParallel = NO_TP,
    backend: str = "torch",
) -> ShardedCrossEntropy:
    """Of this rank's columns, `width` on each. Vocabulary entries from vocab_size on are padding:
    no probability mass, no gradient.
    """
    first = tp.axis.rank * width
    count = min(max(vocab_size - first, 0), width)
    implementation = TritonCrossEntropy if backend == "triton" else ShardedCrossEntropy
    return implementation(first, count, softcap, tp)


class _CrossEntropy(torch.autograd.Function):
    """(loss, log-sum-exp) per token [s, b] in fp32 (fp64 for fp64) from this rank's logits
    [s, b, padded v / size] and labels [s, b]. The backward pass overwrites the logits.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, labels: Tensor, sharded: ShardedCrossEntropy
    ) -> tuple[Tensor, Tensor]:
        # Labels are counted from this rank's first column; those outside are another rank's.
        own = labels.flatten() - sharded.first
        loss, lse = sharded.combine(sharded.reduce(logits.view(-1, logits.shape[-1]), own))
        ctx.logits, ctx.sharded = logits.detach(), sharded
        ctx.save_for_backward(lse, own)
        return loss.view(labels.shape), lse.view(labels.shape)

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        lse, own = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None  # consumed: the gradient takes the logits' storage
        rows = logits.view(-1, logits.shape[-1])  # never a copy
        ctx.sharded.into_gradient(rows, own, lse, dloss.flatten(), dlse.flatten())
        return logits, None, None


# (logits, labels, sharded) -> (loss, log-sum-exp)
cross_entropy = _CrossEntropy.apply


# ---- the output matrix and the loss together


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """The tokens whose logits are made at once."""
    step = max(1, HEAD_CHUNK_BYTES[x.device.type] // (weight.shape[0] * weight.element_size()))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


class _LinearCrossEntropy(torch.autograd.Function):
    """`cross_entropy` of the logits of a column-parallel layer, from x [s, b, h] (under SP this
    rank's s / size), this rank's rows of the weight [padded v / size, h], and labels [s, b].

    The forward pass makes the logits of one chunk after the other and keeps of each token the
    log-sum-exp; the backward pass makes them again, turns them into their gradient where they are,
    and forms of that the input's and the weight's. That takes 8 s b h v FLOPs a micro-batch instead
    of 6. Gradients formed in the forward pass would make it 6, but would need an exchange of the
    log-sum-exp for each chunk and the scale of the z-loss before it is known, and would be kept
    until the backward pass in the place of the logits.

    Collectives: under SP an all-gather of x in each pass and a reduce-scatter of dx, else an
    all-reduce of dx; one all-gather of three numbers a token. They overlap with nothing.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, labels: Tensor, sharded: ShardedCrossEntropy
    ) -> tuple[Tensor, Tensor]:
        # A chunk of logits is reduced to three numbers a token; all go in one all-gather.
        rows = _whole(x, sharded.tp).flatten(0, 1)
        own = labels.flatten() - sharded.first
        parts = [
            sharded.reduce(linear(rows[piece], weight), own[piece])
            for piece in _chunks(rows, weight)
        ]
        loss, lse = sharded.combine(torch.cat(parts, 1))
        ctx.weight, ctx.sharded = weight, sharded
        ctx.save_for_backward(x, lse, own)
        return loss.view(labels.shape), lse.view(labels.shape)

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        (x, lse, own), weight, tp = ctx.saved_tensors, ctx.weight, ctx.sharded.tp
        dloss, dlse = dloss.flatten(), dlse.flatten()
        whole = _whole(x, tp)
        # Chunks write their rows of dx, and one collective sums it over the ranks.
        dx = torch.empty_like(whole, memory_format=torch.contiguous_format)
        for piece in _chunks(rows := whole.flatten(0, 1), weight):
            # The chunk's logits once more, turned into their gradient where they are.
            dlogits = linear(rows[piece], weight)
            ctx.sharded.into_gradient(dlogits, own[piece], lse[piece], dloss[piece], dlse[piece])
            # dgrad, then wgrad into main_grad: the first chunk may overwrite, the others add.
            torch.mm(dlogits, weight, out=dx.flatten(0, 1)[piece])
            if ctx.needs_input_grad[1]:
                accumulate_weight_grad(dlogits, rows[piece], weight)
            del dlogits  # before the next ones are made
        dx = reduce_scatter(dx, tp.axis) if tp.sequence else all_reduce(dx, tp.axis)
        return dx, None, None, None


def _whole(x: Tensor, tp: TensorParallel) -> Tensor:
    return all_gather(x, tp.axis) if tp.sequence else x


# (x, weight, labels, sharded) -> (loss, log-sum-exp)
linear_cross_entropy = _LinearCrossEntropy.apply
