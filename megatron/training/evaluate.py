"""Evaluation: always the same batches, the same forward pass, sums divided by the count of valid
tokens.

Called from training/loop.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.data.loader import Source
from megatron.distributed.collectives import all_reduce
from megatron.training.passes import run_micro_batches
from megatron.training.run import Run


@torch.no_grad()
def evaluate(
    run: Run, source: Source, progress: Callable[[int, int], None] = lambda done, total: None
) -> float | None:
    """Mean loss per valid token over the first eval-iters x global-batch-size samples of a source,
    on every rank.

    None when a signal came to any rank on the way. NaN when no token is valid.
    """
    batch = run.config.training.global_batch_size
    samples = run.config.evaluation.eval_iters * batch
    # a pipeline needs many at once to be full
    step = run.chunk if run.groups.pp.size == 1 else batch
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss sum, tokens
    earlier = None
    for first in range(0, samples, step):
        asked = run.exits.ask(run.groups.world, run.device)
        # on a GPU a signal is seen one turn late, so that this turn is queued behind the last one
        seen = asked if asked.is_here else earlier
        if seen is not None and run.exits.take(seen):
            return None
        earlier = asked
        sums = run_micro_batches(run, source, first, step)
        total += torch.stack([sums.losses.sum(), sums.tokens.sum()])
        progress(first + step, samples)
    loss, tokens = all_reduce(total, run.groups.world).tolist()
    return loss / tokens if tokens else float("nan")
