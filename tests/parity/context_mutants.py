"""What other programs got wrong in context parallelism, put into this one: patches of worker.py,
each of which must be found by a comparison with one process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
from megatron.kernels import attention as kernels_attention

from megatron.model import gpt
from megatron.model.attention import attention, context_parallel, ring_attention
from megatron.model.attention.attention import CoreAttention
from megatron.model.attention.context_parallel import Places
from megatron.model.attention.ring_attention import BlockAttention
from megatron.parallel.pipeline import Pipeline
from megatron.training import passes

Patch = contextlib.AbstractContextManager


def _batch(change: Callable) -> Patch:
    """Change what a rank holds of a batch, given (that, the whole batch, the axis)."""
    real = passes.share_positions

    def shared(batch, cp, window):
        return change(real(batch, cp, window), batch, cp)

    return mock.patch.object(passes, "share_positions", shared)


def local_positions() -> Patch:
    """Positions that count 0, 1, 2, ... on each rank."""
    return _batch(
        lambda own, whole, cp: replace(
            own, position_ids=torch.arange(own.tokens.shape[1]).expand_as(own.tokens)
        )
    )


def labels_of_the_slice() -> Patch:
    """Labels that are the next tokens of what the rank holds."""
    return _batch(lambda own, whole, cp: replace(own, labels=own.tokens.roll(-1, 1)))


def whole_loss_mask() -> Patch:
    """Each rank counts the valid tokens of the first positions."""
    return _batch(
        lambda own, whole, cp: replace(
            own, loss_mask=whole.loss_mask[:, : own.tokens.shape[1]].contiguous()
        )
    )


def factor_of_ranks() -> Patch:
    """An objective that is multiplied by the number of context-parallel ranks."""
    real = Pipeline.run

    def run(self, schedule, micro_batch, scale, *others, **named):
        return real(self, schedule, micro_batch, scale * self.groups.cp.size, *others, **named)

    return mock.patch.object(Pipeline, "run", run)


def order_of_ranks() -> Patch:
    """Sequences that stay in the order in which ranks hold them."""
    real = Places.of

    def of(places, cp):
        made = real(places, cp)
        return made._replace(inverse=torch.arange(len(made.order), device=made.order.device))

    return mock.patch.object(Places, "of", of)


def order_of_exchanged_parts() -> Patch:
    """Parts of the sequence that ranks exchange for heads, in the wrong order."""
    real = context_parallel._to_sequence

    def exchanged(x, axis):
        return real(x, axis).unflatten(0, (axis.size, -1)).flip(0).flatten(0, 1)

    return mock.patch.object(context_parallel, "_to_sequence", exchanged)


def no_sum_of_key_gradients() -> Patch:
    """Each rank keeps the gradients of keys and values that its own queries gave."""
    return mock.patch.object(
        ring_attention, "reduce_scatter", lambda x, axis: x.chunk(axis.size)[axis.rank].clone()
    )


def first_queries() -> Patch:
    """A mask as if the rank's queries were the first of the sequence."""
    real = gpt.mask_of

    def mask_of(config, length, starts, own=None):
        return real(config, length, starts, None if own is None else torch.arange(len(own)))

    return mock.patch.object(gpt, "mask_of", mask_of)


def heads_of_the_first_rank() -> Patch:
    """Dropout of attention that counts heads from the first on every rank."""
    real = CoreAttention._over_ranks

    def over_ranks(self, core, qkv, places):
        first = self.first_head
        return real(self, lambda *own, first_head: core(*own, first_head=first), qkv, places)

    return mock.patch.object(CoreAttention, "_over_ranks", over_ranks)


def key_heads_of_the_first_ranks() -> Patch:
    """Key/value heads repeated in turn (0, 1, 0, 1), not each for its queries (0, 0, 1, 1)."""
    real = attention.heads_for_sequence

    def exchanged(q, k, v, axis):
        times = axis.size // k.shape[2]
        if times > 1:
            k, v = (x.repeat(1, 1, times, 1) for x in (k, v))
        return real(q, k, v, axis)

    return mock.patch.object(attention, "heads_for_sequence", exchanged)


def _hop(change: Callable) -> Patch:
    """Change what comes with a hop, given (that, whether it is a gradient)."""
    real = ring_attention.start_ring_hop

    class Changed:
        def __init__(self, hop, is_gradient):
            self.hop, self.is_gradient = hop, is_gradient

        def wait(self):
            return change(self.hop.wait(), self.is_gradient)

    def start(x, axis):
        caller = sys._getframe(1).f_locals
        return Changed(real(x, axis), caller.get("gradient") is x)

    return mock.patch.object(ring_attention, "start_ring_hop", start)


def lost_hop_of_gradients() -> Patch:
    """What other ranks gave to the gradients of keys and values does not come."""
    return _hop(lambda x, is_gradient: torch.zeros_like(x) if is_gradient else x)


def values_of_this_rank() -> Patch:
    """Keys go round the ring, and values lag behind by one hop."""
    held = []

    def change(x, is_gradient):
        if is_gradient:
            return x
        held.append(x.clone())
        return torch.stack((x[0], held[-2][1])) if len(held) > 1 else x

    return _hop(change)


def other_chunk() -> Patch:
    """Of an earlier rank's keys the second half is taken."""
    real = attention.ring_steps

    def steps(places, rank, window, starts, *, by_positions):
        second = slice(places.shape[1] // 2, None)
        return tuple(
            step._replace(keys=second) if step.keys != slice(None) else step
            for step in real(places, rank, window, starts, by_positions=by_positions)
        )

    return mock.patch.object(attention, "ring_steps", steps)


def narrow_log_sum_exp() -> Patch:
    """The log-sum-exp of the parts that are joined is rounded to bf16."""
    real = ring_attention._join

    def join(out, lse, part, part_lse):
        return real(out, lse, part, part_lse.bfloat16().to(part_lse.dtype))

    return mock.patch.object(ring_attention, "_join", join)


def parts_of_equal_weight() -> Patch:
    """Blocks are joined without the sums of their exponentials."""

    def join(out, lse, part, part_lse):
        out.add_(part).div_(2)
        lse.copy_(torch.logaddexp(lse, part_lse))

    return mock.patch.object(ring_attention, "_join", join)


def log_sum_exp_of_the_block() -> Patch:
    """The backward pass normalises each block by itself."""
    real = BlockAttention.backward

    def backward(self, dout, out, lse, q, k, v, mask):
        _, own = self.forward(q, k, v, mask)
        own = torch.where(own.isinf(), lse, own)
        return real(self, dout, out, own, q, k, v, mask)

    return mock.patch.object(BlockAttention, "backward", backward)


def keys_count_from_0() -> Patch:
    """Dropout of attention that counts the keys of each block from 0."""
    real = kernels_attention.keep_mask

    def keep_mask(key, samples, heads, queries, keys, drop, k_positions=None):
        return real(key, samples, heads, queries, keys, drop)

    return mock.patch.object(kernels_attention, "keep_mask", keep_mask)


PATCHES: dict[str, Callable[[], Patch]] = {
    made.__name__: made
    for made in (
        local_positions,
        labels_of_the_slice,
        whole_loss_mask,
        factor_of_ranks,
        order_of_ranks,
        no_sum_of_key_gradients,
        first_queries,
        heads_of_the_first_rank,
        key_heads_of_the_first_ranks,
        order_of_exchanged_parts,
        lost_hop_of_gradients,
        values_of_this_rank,
        other_chunk,
        narrow_log_sum_exp,
        parts_of_equal_weight,
        log_sum_exp_of_the_block,
        keys_count_from_0,
    )
}
