"""Attention by blocks of keys, one of each rank of an axis. In a ring keys and values go round the
ranks, one hop while the block that has arrived is computed (Liu et al., "Ring Attention with
Blockwise Transformers", 2023); where all were gathered, blocks are computed alike, without hops.

In step i rank r has the keys and values of rank j = (r - i) mod C. Each step gives the attention of
the rank's queries over that block and the logarithm of each row's sum of exponentials, lse. The
parts are joined in fp32 (in fp64 for float64): with L = log(e^l + e^l')

    out <- e^(l - L) out + e^(l' - L) out' = out - sigmoid(l' - l) (out - out')
    l   <- L                               = l - log sigmoid(l - l')

The backward pass of a block takes the final out and L, with which exp(scores - L) are the
probabilities of the whole row, so that the blocks' gradients add up. dq stays; in a ring dk and dv
go round behind the keys, in fp32, from the first rank that is not the owner on, and come home
after C - 1 hops. At most three blocks of keys and values live on a rank: its own, one that leaves
and one that arrives.

Where a sample is one document, and nothing but causality hides keys, ranks hold one chunk from the
front of the sequence and one from the back (context_parallel.py). Then the first step is causal, a
step with an earlier rank's block takes that block's first half, one with a later rank's the second
half of the queries, and all see every key: no mask is read. Otherwise masks know positions.

s positions of this rank, b batch, n query heads, g key/value heads, d head dim, C ranks. Called
from model/attention/attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.distributed.collectives import (
    Handle,
    reduce_scatter,
    start_all_gather,
    start_ring_hop,
)
from megatron.distributed.groups import Axis
from megatron.kernels.attention import (
    attention_reference,
    attention_reference_backward,
    flash_attention,
    flash_attention_backward,
)
from megatron.kernels.attention_launch import Options
from megatron.kernels.attention_masks import AttentionMask, attention_mask

ALL = slice(None)


class AttentionStep(NamedTuple):
    """Which queries of this rank attend to which keys of the block of rank `of`."""

    of: int
    mask: AttentionMask
    queries: slice = ALL
    keys: slice = ALL


AttentionSteps = tuple[AttentionStep, ...]


def ring_steps(
    places: Tensor,
    rank: int,
    window: int | None,
    document_starts: Tensor | None,
    *,
    by_positions: bool,
) -> AttentionSteps:
    """The steps of a rank, its own block first, where ranks hold the positions `places` [C, s] of
    samples of length C s. document_starts [b, C s], where attention ends at them. `by_positions`:
    masks are to know positions where they need not, for dropout.
    """
    size, length = places.shape
    blocks = [(rank - step) % size for step in range(size)]  # in the order of the hops

    # Zig-zag: a rank holds a chunk from the front and its mirror image from the back. Of an earlier
    # rank's block all queries see the front chunk, of a later rank's the back queries see all.
    if window is None and document_starts is None and not by_positions:
        first, second = slice(length // 2), slice(length // 2, None)
        whole = AttentionMask(causal=False)
        return (
            AttentionStep(rank, AttentionMask()),
            *(
                AttentionStep(block, whole, keys=first)
                if block < rank
                else AttentionStep(block, whole, queries=second)
                for block in blocks[1:]
            ),
        )

    # Documents, windows and dropout: masks by positions, for all queries and keys.
    own = places[rank]
    starts = None if document_starts is None else document_starts[:, own]
    return tuple(
        AttentionStep(
            block,
            attention_mask(
                length,
                length,
                window=window,
                q_positions=own,
                k_positions=places[block],
                document_starts=starts,
            ),
        )
        for block in blocks
    )


@dataclass(frozen=True)
class BlockAttention:
    """The attention core over all keys, or one block of them forward and backward: q, out
    [s, b, n, d], k and v [t, b, g, d], lse [b, n, s]. `backend`: one of OURS (our kernels), sdpa
    (torch's kernel for CPUs) or plain.
    """

    backend: str
    options: dict[str, Any]  # fields of Options

    def forward(self, *qkv: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """(out, lse) of q, k and v, or of the fused projection, over these keys alone; of rows that
        see none of them 0 and -inf.
        """
        if self.backend == "plain":
            return attention_reference(*qkv, mask=mask, **self.options)
        if self.backend != "sdpa":
            return flash_attention(*qkv, mask=mask, backend=self.backend, **self.options)

        # on CPUs alone: on a GPU torch's kernels return no lse
        q, k, v = _by_head(*qkv)
        arguments = _mask_arguments(mask, q, k)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, **arguments, scale=self.options["scale"]
        )
        addend = arguments["attn_mask"]
        if addend is not None:  # a row without a key here must not count when blocks are joined
            lse = lse.masked_fill(addend.isinf().all(-1), float("-inf"))  # torch's is 0
        return out.permute(2, 0, 1, 3), lse

    def backward(
        self,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What this block gives to (dq, dk, dv); out and lse are those of all blocks."""
        if self.backend == "sdpa":
            # with lse of all blocks exp(scores - lse) are the probabilities of the whole row
            dout, q, k, v, out = _by_head(dout, q, k, v, out)
            arguments = _mask_arguments(mask, q, k)
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, **arguments, scale=self.options["scale"]
            )
            dq, dk, dv = (x.permute(2, 0, 1, 3) for x in gradients)
            return dq, dk, dv
        # Dropout masks are functions of positions: the backward pass draws them again.
        given = dout, out, lse, q, k, v, mask, Options(**self.options)
        if self.backend == "plain":
            return attention_reference_backward(*given)
        return flash_attention_backward(*given, backend=self.backend)


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """[b, heads, length, d] in fp32 or wider: in bf16 the kernel takes three times as long."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.permute(1, 2, 0, 3).to(wide) for x in tensors]


def _mask_arguments(mask: AttentionMask, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments of torch's kernel; a mask of positions is added to scores [b or 1, 1, s, t]."""
    if mask.q_positions is None:
        return {"is_causal": mask.causal, "attn_mask": None}
    seen = mask.dense(q.shape[2], k.shape[2], q.device)
    addend = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    return {"is_causal": False, "attn_mask": addend}


# ---- steps


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a block's part [s, b, n, d] and its lse [b, n, s] into out and lse, which are of blocks
    before it. Each row has seen a key before, itself.
    """
    # sigmoid(l' - l) is e^(l' - L), and L - l is -log sigmoid(l - l'); see the module's docstring
    weight = torch.sigmoid(part_lse - lse).permute(2, 0, 1).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), weight)
    lse.sub_(F.logsigmoid(lse - part_lse))


def _attend(
    block: BlockAttention, q: Tensor, steps: Iterable[tuple[AttentionStep, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse) of these steps, each with its keys and values [2, t, b, g, d]. The
    first step is of all queries.
    """
    # fp32 also in a bf16 run: the parts of all steps are added up in it
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = None, None
    for step, held in steps:
        at, (k, v) = step.queries, held
        part, part_lse = block.forward(q[at], k[step.keys], v[step.keys], mask=step.mask)
        del held, k, v  # three blocks live at most: own, leaving, arriving
        if out is None:
            out, lse = part.to(wide), part_lse
        else:
            _join(out[at], lse[..., at], part, part_lse)
        del part, part_lse  # not held while the next block is computed
    return out.to(q.dtype), lse


def _around_ring(
    own: Tensor, steps: AttentionSteps, axis: Axis
) -> Iterator[tuple[AttentionStep, Tensor]]:
    """The steps with the keys and values that have arrived: the next ones are on their way while a
    step is computed.
    """
    held = own
    for step in steps[:-1]:
        coming = start_ring_hop(held, axis)
        yield step, held
        held = coming.wait()
    yield steps[-1], held


def _gathered(
    own: Tensor, steps: AttentionSteps, coming: Handle
) -> Iterator[tuple[AttentionStep, Tensor]]:
    """The steps with the keys and values of an all-gather that runs while the first, of the rank's
    own block, is computed.
    """
    yield steps[0], own
    blocks = coming.wait().unflatten(0, (-1, 2))  # [C, 2, s, b, g, d]
    for step in steps[1:]:
        yield step, blocks[step.of]


def _step_gradients(
    block: BlockAttention,
    dout: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    step: AttentionStep,
    held: Tensor,
    dq: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """(the gradient of all queries with this step's part, what the step gives to those of its keys
    and values). `saved`: q, out and lse; `dq`: of the steps before, in fp32 where it is narrower.
    """
    at, (k, v), (q, out, lse) = step.queries, held, saved
    part, *parts = block.backward(
        dout[at], out[at], lse[..., at], q[at], k[step.keys], v[step.keys], step.mask
    )
    if dq is None:
        return part.to(torch.promote_types(part.dtype, torch.float32)), parts
    dq[at] += part
    return dq, parts


class RingAttention(torch.autograd.Function):
    """Attention of q [s, b, n, d], this rank's positions, over k and v [s, b, g, d] of all ranks ->
    [s, b, n, d], by steps of a `block`: the keys and values go round the ring of an `axis`.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: AttentionSteps,
        block: BlockAttention,
        axis: Axis,
    ) -> Tensor:
        own = torch.stack((k, v))  # one message a hop
        out, lse = _attend(block, q, _around_ring(own, steps, axis))
        ctx.save_for_backward(q, own, out, lse)  # other ranks' keys come round again
        ctx.others = steps, block, axis
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, own, out, lse = ctx.saved_tensors
        steps, block, axis = ctx.others
        wide = torch.promote_types(q.dtype, torch.float32)
        # of the block that is held: what ranks before this one gave, on its way here
        arriving: Handle | None = None
        own_gradient, dq = None, None
        for step, held in _around_ring(own, steps, axis):
            dq, parts = _step_gradients(block, dout, (q, out, lse), step, held, dq)
            del held  # as in the forward pass

            # The gradient of a block follows the block, one hop behind it.
            gradient = torch.zeros_like(own, dtype=wide) if arriving is None else arriving.wait()
            for index in (1, 0):  # of values and keys; each goes when it has been added
                gradient[index, step.keys] += parts.pop()
            if own_gradient is None:  # the first step is of the rank's own block
                own_gradient = gradient
            else:
                arriving = start_ring_hop(gradient, axis)
        if arriving is not None:  # what the other ranks gave to the own block comes home
            own_gradient += arriving.wait()
        dk, dv = own_gradient.to(own.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


class GatheredAttention(torch.autograd.Function):
    """As RingAttention, with the blocks of all ranks at once."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, steps: Any, block: BlockAttention, axis: Axis
    ) -> Tensor:
        own = torch.stack((k, v))
        coming = start_all_gather(own, axis)
        out, lse = _attend(block, q, _gathered(own, steps, coming))
        # the steps have waited for the blocks: this returns at once
        blocks = coming.wait().unflatten(0, (-1, 2))
        ctx.save_for_backward(q, blocks, out, lse)
        ctx.others = steps, block, axis
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, blocks, out, lse = ctx.saved_tensors
        steps, block, axis = ctx.others
        gradient, dq = torch.zeros_like(blocks), None
        for step in steps:
            held = blocks[step.of]
            dq, parts = _step_gradients(block, dout, (q, out, lse), step, held, dq)
            for index in (1, 0):
                gradient[step.of, index, step.keys] = parts.pop()
        # each rank gets the sum of what all gave to its block
        dk, dv = reduce_scatter(gradient.flatten(0, 1), axis)
        return dq.to(q.dtype), dk, dv, None, None, None
