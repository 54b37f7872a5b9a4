"""Evaluation: the loss on a fixed set of batches, and --log-sample-text. Every rank takes part."""

from __future__ import annotations

import html
import logging
import time
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from megatron.data.loader import Source
from megatron.data.tokenizer import Tokenizer
from megatron.distributed.collectives import all_gather, all_reduce
from megatron.kernels import philox
from megatron.model.layer import HeadLayer, MicroBatch
from megatron.training.run import Run
from megatron.training.step import run_micro_batches

logger = logging.getLogger(__name__)

QUIET_SECONDS = 5.0  # of an evaluation, then a line of its progress
LONGEST_PROMPT = 32  # tokens
END = "<end of document>"


@torch.no_grad()
def evaluate(run: Run, source: Source, name: str) -> float | None:
    """Mean loss per valid token over the first eval-iters x global-batch-size samples of a source.
    None after a signal to any rank; NaN when no token is valid. A long one logs its progress.
    """
    # The same samples in every layout and at every evaluation, so that losses can be compared.
    batch = run.config.training.global_batch_size
    samples = run.config.evaluation.eval_iters * batch
    # a pipeline needs many micro-batches in flight
    step = run.global_micro_batch_size if run.groups.pp.size == 1 else batch
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss sum, tokens
    earlier = None
    start = shown = time.monotonic()
    for first in range(0, samples, step):
        # on a GPU signals are read one turn late, so that this turn is queued right after the last
        earlier = run.exits.exchange(run.groups.world, run.device, earlier)
        if run.exits.has_signal():  # perhaps already at the last step
            return None
        sums = run_micro_batches(run, source, first, step, training=False)
        total += torch.stack([sums["losses"].sum(), sums["valid_tokens"].sum()])
        done, now = first + step, time.monotonic()
        if now - shown >= QUIET_SECONDS and done < samples:
            shown = now
            left = (now - start) / done * (samples - done)
            logger.info(f" {name}: {done}/{samples} samples, ETA {left:.0f} s")
    loss, tokens = all_reduce(total, run.groups.world).tolist()
    return loss / tokens if tokens else float("nan")


def readable(ids: list[int], tokenizer: Tokenizer) -> str:
    """Token ids as text, each end of document spelled out on a separate line."""
    parts = []
    for is_end, group in groupby(ids, tokenizer.eod.__eq__):
        same = list(group)
        parts.append(f"\n{END}\n" * len(same) if is_end else tokenizer.decode(same))
    return "".join(parts)


def sample_page(prompt: str, written: str) -> str:
    """HTML with the prompt in a pale color, the continuation in a dark one."""
    return (
        '<pre style="white-space:pre-wrap;font:15px/1.5 sans-serif">'
        f'<span style="color:#94a3b8">{html.escape(prompt)}</span>{html.escape(written)}</pre>'
    )


@dataclass(frozen=True)
class _OneWindow:
    """A reader that returns one window for every sample number."""

    window: np.ndarray  # [s + 1] int64

    def windows(self, sample: np.ndarray) -> np.ndarray:
        return np.tile(self.window, (len(sample), 1))


@torch.no_grad()
def write_sample(run: Run, source: Source) -> tuple[list[int], list[int]]:
    """Continue the start of a source's first sample by up to --log-sample-text tokens, one forward
    pass of a micro-batch for each: token ids of the prompt and of its continuation, the same on
    every rank and in every layout.

    Each token is drawn with a random number of its position, the same at every evaluation, so that
    the texts of a run differ by the weights alone.
    """
    # 1. A prompt: the first sample's first tokens, the same on every rank.
    start = source.batch(0, 1).tokens[0].numpy()
    length = min(LONGEST_PROMPT, (len(start) + 1) // 2)
    count = min(run.config.logging.log_sample_text, len(start) + 1 - length)
    window = np.zeros(len(start) + 1, np.int64)
    window[:length] = start[:length]
    # 2. One token at a time, without a cache of keys and values: few tokens, and every layout has
    # this path already.
    key = philox.key(run.config.training.seed, "sample-text")
    for place in range(length, length + count):
        word = philox.philox4x32([torch.tensor([c]) for c in (place, 0, 0, 0)], key)[0].item()
        window[place] = _next_token(run, source, window, place - 1, word / 2**32)
    return window[:length].tolist(), window[length : length + count].tolist()


def _next_token(run: Run, source: Source, window: np.ndarray, position: int, uniform: float) -> int:
    """The token after a position, drawn on the last stage by the context-parallel rank that holds
    the position, and sent to all ranks.
    """
    drawn = torch.zeros(1, dtype=torch.float64, device=run.device)

    def look(head: nn.Module, arguments: tuple[Tensor, MicroBatch]) -> None:
        assert isinstance(head, HeadLayer)
        logits, held = _logits_at(head, *arguments, position)
        if held and run.groups.dp.rank == run.groups.tp.rank == 0:
            # deterministic mode has no cumulative sum of floating-point numbers on a GPU
            drawn[0] = _draw(logits.cpu(), uniform)

    # All ranks run the pass; the head's input is seen on the last stage alone.
    hook = run.model.head.register_forward_pre_hook(look) if run.pipeline.has_head else None
    try:
        prompt = replace(source, reader=_OneWindow(window))
        run_micro_batches(run, prompt, 0, run.global_micro_batch_size, training=False)
    finally:
        if hook is not None:
            hook.remove()
    return int(all_reduce(drawn, run.groups.world).item())


def _logits_at(head: HeadLayer, x: Tensor, micro: MicroBatch, position: int) -> tuple[Tensor, bool]:
    """(logits [v] of the first sample at a position, whether this context-parallel rank holds it).

    x [s, b, h]: the head's input at this rank's positions. All tensor-parallel ranks of the last
    stage take part; the GEMM has one row.
    """
    tp, places = head.tp, micro.places
    place, held = position, True
    if places is not None:
        here = places.own.cpu() == position
        place, held = int(here.int().argmax()), bool(here.any())
    part = x.shape[0]  # with sequence parallelism the positions of one rank
    row = place % part
    z = head.project(x[row : row + 1, :1], head.weight, None, tp)  # [1 or ranks, 1, v / size]
    z = z[place // part if tp.sequence else 0, 0].double()
    z = all_gather(z[None], tp.axis).flatten()[: head.vocab_size]
    cap = head.config.final_logit_softcapping
    return z if cap is None else cap * torch.tanh(z / cap), held


def _draw(logits: Tensor, uniform: float) -> int:
    """Sample from logits [v] by inverting the CDF at `uniform`, the most likely token first."""
    probabilities, order = torch.softmax(logits, dim=-1).sort(descending=True, stable=True)
    passed = int((probabilities.cumsum(0) <= uniform).sum())
    return int(order[min(passed, len(order) - 1)])
