"""Evaluation: always the same batches, the same forward pass, sums divided by the count of valid tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.config.groups import Config
from megatron.data.loader import Source
from megatron.model.block import BlockWrapper
from megatron.model.gpt import GPTModel


@torch.no_grad()
def evaluate(model: GPTModel, wrapper: BlockWrapper, source: Source, config: Config, device: torch.device, *,
             stop: Callable[[], bool] = lambda: False, progress: Callable[[int, int], None] = lambda done, total: None) -> float | None:
    """Mean loss per valid token over the first eval-iters x global-batch-size samples of a source.

    None when `stop()` turned true on the way. NaN when no token is valid.
    """
    size = config.training.micro_batch_size
    samples = config.evaluation.eval_iters * config.training.global_batch_size
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, tokens
    for first in range(0, samples, size):
        if stop():
            return None
        batch = source.batch(first, size).to(device)
        micro = model.micro_batch(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.sample_ids,
                                  batch.document_starts, training=False)
        sums, _ = model(micro, wrapper)
        total += torch.stack([sums[1].double(), batch.loss_mask.sum().double()])
        progress(first + size, samples)
    loss, tokens = total.tolist()
    return loss / tokens if tokens else float("nan")
