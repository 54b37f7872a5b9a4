"""What other programs got wrong in context parallelism, put into this one: patches of worker.py,
each of which must be found by a comparison with one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from megatron.layers import attention, context_parallel
from megatron.layers.attention import SelfAttention
from megatron.layers.context_parallel import Places
from megatron.model import gpt
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

    def run(self, schedule, micro_batch, scale, recording=None):
        return real(self, schedule, micro_batch, scale * self.groups.cp.size, recording)

    return mock.patch.object(Pipeline, "run", run)


def order_of_ranks() -> Patch:
    """Sequences that stay in the order in which ranks hold them."""
    real = Places.of

    def of(places, axis):
        made = real(places, axis)
        return made._replace(inverse=torch.arange(len(made.order), device=made.order.device))

    return mock.patch.object(Places, "of", of)


def no_sum_of_key_gradients() -> Patch:
    """Each rank keeps the gradients of keys and values that its own queries gave."""
    return mock.patch.object(
        context_parallel, "reduce_scatter", lambda x, axis: x.chunk(axis.size)[axis.rank].clone()
    )


def first_queries() -> Patch:
    """A mask as if the rank's queries were the first of the sequence."""
    real = gpt.mask_of

    def mask_of(config, length, starts, own=None):
        return real(config, length, starts, None if own is None else torch.arange(len(own)))

    return mock.patch.object(gpt, "mask_of", mask_of)


def heads_of_the_first_rank() -> Patch:
    """Dropout of attention that counts heads from the first on every rank."""
    real = SelfAttention._over_ranks

    def over_ranks(self, core, parts, places):
        first = self.first_head
        return real(self, lambda *qkv, first_head: core(*qkv, first_head=first), parts, places)

    return mock.patch.object(SelfAttention, "_over_ranks", over_ranks)


def key_heads_of_the_first_ranks() -> Patch:
    """Key/value heads repeated in turn (0, 1, 0, 1), not each for its queries (0, 0, 1, 1)."""
    real = attention.heads_for_sequence

    def exchanged(q, k, v, places, axis):
        times = axis.size // k.shape[2]
        if times > 1:
            k, v = (x.repeat(1, 1, times, 1) for x in (k, v))
        return real(q, k, v, places, axis)

    return mock.patch.object(attention, "heads_for_sequence", exchanged)


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
    )
}
