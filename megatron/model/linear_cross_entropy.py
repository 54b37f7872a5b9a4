"""The output matrix and the loss together, tokens in chunks, so that the logits are never whole in
memory. s sequence, b batch, h hidden, v vocabulary.

The forward pass makes the logits of one chunk after the other and keeps of each token the
log-sum-exp; the backward pass makes them again, turns them into their gradient where they are, and
forms of that the input's and the weight's. That takes 8 s b h v FLOPs a micro-batch instead of 6,
for s b v / size bytes times 2 in bf16 that need not exist. Gradients formed in the forward pass
already would make it 6, but

- the gradient of a chunk needs the log-sum-exp over all ranks: an exchange for each chunk where one
  for all is enough;
- of the z-loss, it needs what the loss is multiplied by, which is not known yet;
- a pipeline's forward passes run ahead of its backward passes: the input's gradient would be kept
  from one to the other, in the place of the logits,
  and the weight's would have to be where at ZeRO 2 and 3 nothing is.

Collectives are those of model/linear.py and model/loss.py, whole: under SP an all-gather of x in
each pass and a reduce-scatter of dx, else an all-reduce of dx; one all-gather of three numbers a
token. dx is summed when its last chunk is there, overlapped with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.workspace import HEAD_CHUNK_BYTES
from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.model.loss import ShardedCrossEntropy
from megatron.model.main_grad import accumulate_weight_grad
from megatron.model.tensor_parallel import TensorParallel


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """The tokens whose logits are made at once."""
    step = max(1, HEAD_CHUNK_BYTES[x.device.type] // (weight.shape[0] * weight.element_size()))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, labels: Tensor, sharded: ShardedCrossEntropy
    ) -> tuple[Tensor, Tensor]:
        # Logits of a chunk live until they are reduced to three numbers a token; the numbers of all
        # chunks go in one all-gather.
        rows = _whole(x, sharded.tp).flatten(0, 1)
        parts = [
            sharded.reduce(F.linear(rows[piece], weight), labels[piece])
            for piece in _chunks(rows, weight)
        ]
        loss, lse = sharded.combine(torch.cat(parts, 1))
        ctx.weight, ctx.sharded = weight, sharded
        ctx.save_for_backward(x, lse, labels)
        return loss, lse

    @staticmethod
    def backward(ctx, dloss: Tensor, dlse: Tensor):
        (x, lse, labels), weight, tp = ctx.saved_tensors, ctx.weight, ctx.sharded.tp
        whole = _whole(x, tp)
        # dx of the whole sequence: chunks write their rows, and one collective sums them over the
        # ranks.
        dx = torch.empty_like(whole, memory_format=torch.contiguous_format)
        for piece in _chunks(rows := whole.flatten(0, 1), weight):
            # The chunk's logits once more, turned into their gradient where they are.
            dlogits = F.linear(rows[piece], weight)
            ctx.sharded.into_gradient(dlogits, labels[piece], lse[piece], dloss[piece], dlse[piece])
            # dgrad, then wgrad into main_grad: the first chunk may overwrite, the others add.
            torch.mm(dlogits, weight, out=dx.flatten(0, 1)[piece])
            if ctx.needs_input_grad[1]:
                accumulate_weight_grad(dlogits, rows[piece], weight)
            del dlogits  # before the next ones are made
        return (
            reduce_scatter(dx, tp.axis) if tp.sequence else all_reduce(dx, tp.axis),
            None,
            None,
            None,
        )


def _whole(x: Tensor, tp: TensorParallel) -> Tensor:
    return all_gather(x, tp.axis) if tp.sequence else x


def linear_cross_entropy(
    x: Tensor, weight: nn.Parameter, labels: Tensor, sharded: ShardedCrossEntropy
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of `column_linear(x, weight)`: (loss, log-sum-exp) per token [s, b] from x
    [s, b, h] (under SP this rank's s / size), this rank's rows of the weight [padded v / size, h],
    and labels [s, b]. The weight's gradient is added in its main_grad, chunk by chunk in order.
    """
    loss, lse = _LinearCrossEntropy.apply(x, weight, labels.flatten() - sharded.first, sharded)
    return loss.view(labels.shape), lse.view(labels.shape)
