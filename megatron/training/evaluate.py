"""Evaluation: always the same batches, the same forward pass, sums divided by the count of valid tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.data.loader import Source
from megatron.dist.collectives import all_reduce
from megatron.training.run import Run


@torch.no_grad()
def evaluate(run: Run, source: Source, progress: Callable[[int, int], None] = lambda done, total: None) -> float | None:
    """Mean loss per valid token over the first eval-iters x global-batch-size samples of a source, on every rank.

    None when a signal came to any rank on the way. NaN when no token is valid.
    """
    samples = run.config.evaluation.eval_iters * run.config.training.global_batch_size
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss sum, tokens
    for first in range(0, samples, run.chunk):
        if run.exits.agree(run.groups.world, run.device):
            return None
        batch = source.batch(run.own_samples(first), run.config.training.micro_batch_size).to(run.device)
        micro = run.model.micro_batch(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.sample_ids,
                                      batch.document_starts, training=False)
        sums, _ = run.model(micro, run.wrapper)
        total += torch.stack([sums[1].double(), batch.loss_mask.sum().double()])
        progress(first + run.chunk, samples)
    loss, tokens = all_reduce(total, run.groups.dp).tolist()
    return loss / tokens if tokens else float("nan")
