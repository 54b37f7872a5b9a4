"""Embedding lookup whose weight gradient accumulates into `main_grad`.

s sequence, b batch, h hidden, v rows of the table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.model.linear import SCRATCH_BYTES
from megatron.model.model_parallel import NO_TP, TensorParallel
from megatron.model.spec import ParameterSpec


def accumulate_embedding_grad(dy: Tensor, ids: Tensor, main_grad: Tensor) -> None:
    """main_grad [v, h] += dy [s, b, h] at rows ids [s, b]: deterministic, no dense matrix."""
    ids, dy = ids.flatten(), dy.flatten(0, -2)
    if main_grad.itemsize < 4:
        # a frequent token's rows are summed in fp32, at the place of one of them, and rounded once
        places = torch.arange(len(ids), device=ids.device)
        place = ids.new_empty(len(main_grad)).index_put_((ids,), places)[ids]
        step = max(1, SCRATCH_BYTES // (4 * len(ids)))
        for grad, columns in zip(main_grad.split(step, 1), dy.split(step, 1), strict=True):
            sums = torch.zeros_like(columns, dtype=torch.float32)
            accumulate_embedding_grad(columns, place, sums)
            grad[ids] = (grad[ids] + sums[place]).to(grad.dtype)
        return
    if main_grad.is_cuda:
        # sorts the ids and adds in order, where index_add_ adds atomically
        main_grad.index_put_((ids,), dy.to(main_grad.dtype), accumulate=True)
        return
    step = max(1, SCRATCH_BYTES // (dy.shape[1] * main_grad.element_size()))
    for row in range(0, ids.shape[0], step):
        # goes row by row here, where index_put_ adds from all threads at once
        rows = dy[row : row + step].to(main_grad.dtype)
        main_grad.index_add_(0, ids[row : row + step], rows)


class _Embedding(torch.autograd.Function):
    """Rows of the table by ids. Under TP of this rank's part, zeros elsewhere, summed over the axis
    (under SP each rank keeps its part of the sequence); the backward pass gathers dy under SP.
    """

    @staticmethod
    def forward(ctx, ids: Tensor, weight: nn.Parameter, tp: TensorParallel) -> Tensor:
        ctx.weight, ctx.tp = weight, tp
        if tp.size == 1:
            ctx.save_for_backward(ids)
            return F.embedding(ids, weight)
        # This rank's rows of the table. Ids of other ranks' rows read some row and are masked:
        # not all the same one, since a GPU adds the gradients of equal ids one after another.
        local = ids - tp.axis.rank * weight.shape[0]
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local.remainder_(weight.shape[0])
        ctx.save_for_backward(local, elsewhere)
        y = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        # One rank has the row of an id and the others zeros, so the sum does not round.
        return reduce_scatter(y, tp.axis) if tp.sequence else all_reduce(y, tp.axis)

    @staticmethod
    def backward(ctx, dy: Tensor):
        ids, *elsewhere = ctx.saved_tensors
        assert not getattr(ctx.weight, "overwrite_main_grad", False), (
            "of a tied matrix the head's GEMM comes first"
        )
        # Under SP each rank has the gradient of its part of the sequence, and its rows need all.
        dy = all_gather(dy, ctx.tp.axis) if ctx.tp.size > 1 and ctx.tp.sequence else dy
        if elsewhere:
            dy = dy.masked_fill(elsewhere[0].unsqueeze(-1), 0)
        accumulate_embedding_grad(dy, ids, ctx.weight.main_grad)
        return None, None, None


class Embedding(nn.Module):
    """Rows of a table [v, h] by ids [s, b] -> [s, b, h] (under SP this rank's s / size). With `tp`
    each tensor-parallel rank holds v / size rows.
    """

    def __init__(self, weight: ParameterSpec, tp: TensorParallel = NO_TP):
        super().__init__()
        self.tp = tp
        self.weight = weight.parameter(tp)

    def forward(self, ids: Tensor) -> Tensor:
        return _Embedding.apply(ids, self.weight, self.tp)
