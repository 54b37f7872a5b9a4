"""Forward passes, and backward passes with them, over a number of samples: what training and
evaluation share.

Called from training/step.py and training/evaluate.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.layers import widest_window
from megatron.data.loader import Batch, Source
from megatron.model.attention.context_parallel import ContextParallel, places_of_ranks
from megatron.model.layer import MicroBatch
from megatron.parallel.recording import Recording
from megatron.parallel.schedule import Schedule, build_schedule, forward_only
from megatron.training.run import Run

# of a batch, [b, s], of which a context-parallel rank reads its own positions alone
OF_POSITIONS = ("tokens", "labels", "loss_mask", "position_ids")


class MicroBatchSums(NamedTuple):
    """Sums of the forward passes of this rank's micro-batches (float64)."""

    # [micro-batches] loss sums over this rank's valid tokens; 0 where another rank counts them
    # (`Run.counts`)
    losses: Tensor
    tokens: Tensor  # [micro-batches] its valid tokens; as the losses
    # auxiliary outputs of layers over all micro-batches: those of GPTModel.scalars, concatenated
    scalars: Tensor


def schedule_of(run: Run, micro_batches: int, *, training: bool) -> Schedule:
    """What the pipeline ranks do for this number of micro-batches."""
    ranks, distributed = run.groups.pp.size, run.config.distributed
    if not training:
        return forward_only(run.pipeline.placement, micro_batches)
    return build_schedule(
        distributed.pipeline_schedule,
        ranks,
        distributed.num_virtual_stages_per_pipeline_rank,
        micro_batches,
        distributed.overlap_moe_expert_parallel_comm,
    )


def run_micro_batches(
    run: Run,
    source: Source,
    first: int,
    samples: int,
    *,
    scale: float | None = None,
    recording: Recording | None = None,
) -> MicroBatchSums:
    """Run this rank's micro-batches of samples [first, first + samples).

    With a `scale` gradients of scale x objective are added to every main_grad; without one it is an
    evaluation: no dropout, no gradients.
    """
    # Tokens are counted as micro-batches are read, by the iterator below; losses come from the
    # head.
    training, count = scale is not None, samples // run.chunk
    sums = torch.zeros(2, count, dtype=torch.float64, device=run.device)
    aux_scale = scale
    if scale is not None and run.pipeline.runner.objectives and source.eod_mask_loss:
        aux_scale = _aux_scale(run, source, first, samples, scale)
    with torch.set_grad_enabled(training):
        found = run.pipeline.run(
            schedule_of(run, count, training=training),
            micro_batches_of(run, source, first, sums[1], training=training),
            scale or 0.0,
            recording,
            aux_scale=aux_scale,
        )
    if run.counts:
        for index, each in found.losses.items():
            sums[0, index] = each[1]
    scalars = _scalars(run, found.scalars) if run.model.scalars else sums.new_zeros(0)
    return MicroBatchSums(sums[0], sums[1], scalars)


def micro_batches_of(
    run: Run, source: Source, first: int, tokens: Tensor, *, training: bool
) -> Iterator[MicroBatch]:
    """This rank's micro-batches from sample `first` on, one for each element of `tokens`, which
    gets its number of valid tokens. No batch outlives its micro-batch. Every tensor- and
    pipeline-parallel rank reads the batch itself: nothing is broadcast.
    """

    def micro_batch(index: int) -> MicroBatch:
        with run.timers("data") if training else contextlib.nullcontext():
            batch = source.batch(
                run.own_samples(first + index * run.chunk), run.config.training.micro_batch_size
            )
            if run.model.cp.size > 1:
                batch = share_positions(batch, run.model.cp, widest_window(run.config.model))
            batch = batch.to(run.device)
        if run.counts:
            tokens[index] = batch.loss_mask.sum()
        return run.model.micro_batch(**vars(batch), training=training)

    return map(micro_batch, range(len(tokens)))


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


def _scalars(run: Run, found: dict[str, Tensor]) -> Tensor:
    """Scalars in the order of GPTModel.scalars, such that the sum over all ranks counts each part
    once.
    """
    # Tensor-parallel ranks compute the same scalar, unless it declares that each has a part of it.
    specs = run.model.scalars
    scalars = torch.zeros(sum(spec.size for spec in specs), dtype=torch.float64, device=run.device)
    for spec, place in zip(specs, scalars.split([spec.size for spec in specs]), strict=True):
        if spec.name in found and (run.groups.tp.rank == 0 or "tp" in spec.parts):
            place.copy_(found[spec.name])
    return scalars
