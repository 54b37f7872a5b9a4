"""One optimizer step: forward and backward over the micro-batches, update, and the report that the host reads when it must."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.groups import Config
from megatron.data.loader import Source
from megatron.model.block import BlockWrapper
from megatron.model.gpt import GPTModel
from megatron.observe.metrics import Timers
from megatron.optimizer.clip import sum_of_squares
from megatron.optimizer.optimizer import Optimizer, StepOutcome


@dataclass(frozen=True)
class Gradients:
    """What the backward passes of one global batch left behind, beside the gradient buffers."""

    first_sample: int
    batch_size: int
    loss_scale: float
    losses: Tensor  # [micro-batches] loss sums over valid tokens
    tokens: Tensor  # [micro-batches] valid tokens


@dataclass(frozen=True)
class Report:
    """One step, read on the host. Losses are sums over tokens."""

    first_sample: int
    batch_size: int
    loss_scale: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    losses: list[float]
    tokens: list[float]

    @property
    def loss(self) -> float:
        """Mean loss per valid token (NaN without one)."""
        return sum(self.losses) / sum(self.tokens) if sum(self.tokens) else float("nan")


class Pending:
    """A step whose scalars are on their way to the host."""

    def __init__(self, gradients: Gradients, outcome: StepOutcome, learning_rate: float):
        self.gradients, self.learning_rate = gradients, learning_rate
        scalars = torch.cat([torch.stack([outcome.grad_norm, outcome.skipped.double()]), gradients.losses.double(), gradients.tokens.double()])
        self.event = None
        if scalars.is_cuda:
            self.scalars = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self.scalars.copy_(scalars, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.scalars = scalars

    def read(self) -> Report:
        """Wait for the scalars (not for work queued after them)."""
        if self.event is not None:
            self.event.synchronize()
        norm, skipped, *rest = self.scalars.tolist()
        count = len(rest) // 2
        g = self.gradients
        return Report(g.first_sample, g.batch_size, g.loss_scale, self.learning_rate, norm, bool(skipped), rest[:count], rest[count:])


def forward_backward(model: GPTModel, wrapper: BlockWrapper, optimizer: Optimizer, source: Source, config: Config, device: torch.device, *,
                     first_sample: int, batch_size: int, loss_scale: float, timers: Timers) -> Gradients:
    """Fill the gradient buffers with the gradient of loss sum x loss_scale / nominal tokens of samples [first, first + batch_size)."""
    size = config.training.micro_batch_size
    scale = loss_scale / (batch_size * config.data.seq_length)
    losses, tokens = [], []
    optimizer.zero_grad()
    for first in range(first_sample, first_sample + batch_size, size):
        with timers("data"):
            batch = source.batch(first, size).to(device)
        with timers("forward-backward"):
            micro = model.micro_batch(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.sample_ids,
                                      batch.document_starts, training=True)
            sums, saved = model(micro, wrapper)
            model.backward(saved, scale, wrapper)
        losses.append(sums[1])
        tokens.append(batch.loss_mask.sum())
    return Gradients(first_sample, batch_size, loss_scale, torch.stack(losses), torch.stack(tokens))


def update(optimizer: Optimizer, gradients: Gradients, config: Config, *, learning_rate: float, weight_decay: float) -> Pending:
    """Step the optimizer; the gradient becomes that of the mean loss per valid token."""
    nominal = gradients.batch_size * config.data.seq_length
    valid, loss = gradients.tokens.double().sum(), gradients.losses.double().sum()
    factor = nominal / (valid * gradients.loss_scale) + 0 * loss  # a non-finite loss makes the factor, so the step, non-finite
    outcome = optimizer.step(lr=learning_rate, weight_decay=weight_decay, grad_factor=factor)
    return Pending(gradients, outcome, learning_rate)


def non_finite_micro_batches(model: GPTModel, wrapper: BlockWrapper, optimizer: Optimizer, source: Source, config: Config,
                             device: torch.device, report: Report) -> list[int]:
    """Run a skipped step's micro-batches again, one by one, and name those with a non-finite loss or gradient.

    The weights have not moved and a step is a pure function, so the same ones fail. The gradient buffers are overwritten.
    """
    size = config.training.micro_batch_size
    failed = []
    for index in range(len(report.losses)):
        gradients = forward_backward(
            model, wrapper, optimizer, source, config, device, first_sample=report.first_sample + index * size, batch_size=size,
            loss_scale=report.loss_scale, timers=Timers(),
        )
        squares = sum_of_squares(block.grad for block in optimizer.blocks)
        if not torch.isfinite(squares + gradients.losses.double().sum()).item():
            failed.append(index)
    return failed
