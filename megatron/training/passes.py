"""Forward passes, and backward passes with them, over a number of samples: what training and
evaluation share.

Called from training/step.py and training/evaluate.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.layers import widest_window
from megatron.data.loader import Batch, Source
from megatron.model.attention.context_parallel import ContextParallel, places_of_ranks
from megatron.model.layer import REPORTED_SUM, MicroBatch
from megatron.parallel.recording import Recording
from megatron.parallel.schedule import forward_only
from megatron.training.run import Run

# of a batch, [b, s], of which a context-parallel rank reads its own positions alone
OF_POSITIONS = ("tokens", "labels", "loss_mask", "position_ids")


class MicroBatchSums(NamedTuple):
    """Sums of the forward passes of this rank's micro-batches (float64)."""

    # [micro-batches] loss sums over this rank's valid tokens; 0 where another rank counts them
    # (`Run.reports_loss`)
    losses: Tensor
    valid_tokens: Tensor  # [micro-batches] their number; as the losses
    # of layers over all micro-batches, by the names of GPTModel.scalars
    scalars: dict[str, Tensor]


def run_micro_batches(
    run: Run,
    source: Source,
    first: int,
    samples: int,
    *,
    training: bool,
    scale: float = 0.0,
    recording: Recording | None = None,
) -> MicroBatchSums:
    """Run this rank's micro-batches of samples [first, first + samples).

    In training gradients of scale x objective are added to every main_grad; an evaluation has no
    dropout and no gradients.
    """
    count = samples // run.global_micro_batch_size
    losses, valid_tokens = torch.zeros(2, count, dtype=torch.float64, device=run.device)

    def read(index: int) -> MicroBatch:
        start = first + index * run.global_micro_batch_size
        micro_batch = read_micro_batch(run, source, start, training=training)
        if run.reports_loss:
            valid_tokens[index] = micro_batch.loss_mask.sum()
        return micro_batch

    aux_scale = scale
    if training and run.pipeline.runner.aux_losses and source.eod_mask_loss:
        aux_scale = _aux_scale(run, source, first, samples, scale)
    schedule = run.schedule_of(count) if training else forward_only(run.pipeline.placement, count)
    if recording is not None:
        recording.schedule = schedule
    found = run.pipeline.run(
        schedule,
        map(read, range(count)),  # one by one, as their first computation on this rank begins
        scale,
        recording,
        aux_scale=aux_scale,
    )
    if run.reports_loss:
        for index, sums in found.losses.items():
            losses[index] = sums[REPORTED_SUM]
    # Tensor-parallel ranks compute the same scalar, unless it declares that each has a part of it:
    # the sum over all ranks counts each part once.
    scalars = {
        spec.name: found.scalars[spec.name].reshape(spec.size)
        if spec.name in found.scalars and (run.groups.tp.rank == 0 or "tp" in spec.parts)
        else losses.new_zeros(spec.size)
        for spec in run.model.scalars
    }
    return MicroBatchSums(losses, valid_tokens, scalars)


def read_micro_batch(run: Run, source: Source, first: int, *, training: bool) -> MicroBatch:
    """This rank's part of the global micro-batch whose samples begin with `first`. Every tensor-
    and pipeline-parallel rank reads it itself: nothing is broadcast.
    """
    size = run.config.training.micro_batch_size
    with run.timers("data") if training else contextlib.nullcontext():
        batch = source.batch(first + size * run.groups.dp.rank, size)
        if run.model.cp.size > 1:
            batch = share_positions(batch, run.model.cp, widest_window(run.config.model))
        batch = batch.to(run.device)
    return run.model.micro_batch(**vars(batch), training=training)


def _aux_scale(run: Run, source: Source, first: int, samples: int, scale: float) -> float:
    """The scale of what layers add to the objective, such as auxiliary losses of routers, where the
    loss leaves tokens out: those sums are means over all tokens, and gradients are divided by the
    valid tokens of the batch afterwards. Every rank counts the valid tokens of the whole batch, for
    the first backward pass comes before the last batch is read.
    """
    with run.timers("data"):
        return scale * source.valid_tokens(first, samples) / (samples * source.seq_length)


def share_positions(batch: Batch, cp: ContextParallel, window: int | None) -> Batch:
    """The positions that this rank of a context-parallel axis holds of whole samples, and what all
    of them hold. On the host, so that no GPU is waited for.
    """
    # Each rank of the axis takes the same number of positions, chosen so that attention is the same
    # work for all.
    starts = batch.document_starts
    length = batch.tokens.shape[1]
    places = places_of_ranks(length, cp, None if starts is None else starts.numpy(), window)
    own = torch.from_numpy(places[cp.axis.rank])
    return replace(
        batch,
        **{name: getattr(batch, name)[:, own] for name in OF_POSITIONS},
        places=torch.from_numpy(places),
    )
