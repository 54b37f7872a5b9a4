"""One optimizer step: forward and backward over the micro-batches, update, and the report that the
host reads when it must.

Called from training/loop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import waiting
from megatron.model.block import ScalarSpec
from megatron.optimizer.lr_schedule import LearningRates
from megatron.optimizer.optimizer import StepOutcome
from megatron.parallel.pipeline import Recording
from megatron.training.arriving import Arriving, sent
from megatron.training.passes import MicroBatchSums, run_micro_batches
from megatron.training.run import Run


@dataclass(frozen=True)
class Gradients:
    """What the backward passes of one global batch left behind on this rank, beside the gradient
    buffers.
    """

    first_sample: int
    batch_size: int
    loss_scale: float
    sums: MicroBatchSums


@dataclass(frozen=True)
class Report:
    """One step, read on the host; the same on every rank. Losses are sums over tokens, of all
    ranks' i-th micro-batches.
    """

    first_sample: int
    batch_size: int
    loss_scale: float
    grad_norm: float
    skipped: bool
    losses: list[float]
    tokens: list[float]
    scalars: dict[str, float]  # what layers returned beside their output: sums over tokens
    counts: dict[str, list[float]]  # the same, of those that are several numbers
    # ranks that asked for an end (ExitConditions.requests), then those that are ready for more of a
    # save (CheckpointManager.ready)
    requests: list[float]
    own_times: list[float]  # of all ranks, OwnTimes.table's rows; empty but at a log line
    loss: float  # the mean per valid token; NaN without one
    # This rank's share of the gradient's squares by layer, as of `grad_norm` (--log-layer-norms in
    # a step that is logged): the one thing here that is on the device and not the same everywhere.
    layer_grad_sq_sums: Tensor | None


class StepHandle:
    """A step whose scalars are on their way to the host."""

    def __init__(
        self,
        gradients: Gradients,
        outcome: StepOutcome,
        specs: tuple[ScalarSpec, ...],
        sums: MicroBatchSums,
        requests: Tensor,
        own_times: Tensor,
        layer_grad_sq_sums: Tensor | None = None,
    ):
        self.gradients, self.specs = gradients, specs  # of the layers' scalars
        self.layer_grad_sq_sums = layer_grad_sq_sums
        self.ranks_asked = len(requests)
        verdict = torch.stack([outcome.grad_norm, outcome.skipped.double()])
        self.scalars = Arriving(torch.cat([verdict, *sums, requests, own_times]))
        self.is_here = self.scalars.is_here

    def read(self) -> Report:
        """Wait for the scalars (not for work queued after them)."""
        norm, skipped, *rest = self.scalars.read()
        g = self.gradients
        count = g.sums.losses.numel()
        losses, tokens, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
        named: dict[str, list[float]] = {}
        for spec in self.specs:
            named[spec.name], rest = rest[: spec.size], rest[spec.size :]
        single = {spec.name for spec in self.specs if spec.size == 1}
        return Report(
            g.first_sample,
            g.batch_size,
            g.loss_scale,
            norm,
            bool(skipped),
            losses,
            tokens,
            {name: values[0] for name, values in named.items() if name in single},
            {name: values for name, values in named.items() if name not in single},
            rest[: self.ranks_asked],
            rest[self.ranks_asked :],
            sum(losses) / sum(tokens) if sum(tokens) else float("nan"),
            self.layer_grad_sq_sums,
        )


def forward_backward(
    run: Run,
    *,
    first_sample: int,
    batch_size: int,
    loss_scale: float,
    recording: Recording | None = None,
) -> Gradients:
    """Fill the gradient buffers with the gradient of loss sum x loss_scale / nominal tokens of
    samples [first, first + batch_size).

    Of every chunk of samples, one micro-batch of each data-parallel rank, this rank runs its own;
    the gradients are summed over all ranks.
    """
    scale = loss_scale / (batch_size * run.config.data.seq_length)
    run.optimizer.zero_grad()
    with run.timers("forward-backward"):
        sums = run_micro_batches(
            run, run.data.train, first_sample, batch_size, scale=scale, recording=recording
        )
        with waiting(_for_all(run)):
            run.zero.end_step()
    return Gradients(first_sample, batch_size, loss_scale, sums)


def update(
    run: Run,
    gradients: Gradients,
    *,
    rates: LearningRates,
    weight_decay: float,
    own_times: Tensor | None = None,
    layer_norms: bool = False,
) -> StepHandle:
    """Step the optimizer; the gradient becomes that of the mean loss per valid token. All that
    ranks must agree on travels in one sum, and so does `own_times`, a table of all ranks.
    `layer_norms`: take the squares by layer, too.
    """
    ready = run.checkpoints.ready() if run.checkpoints is not None else ()
    requests = sent([*run.exits.requests(), *ready], run.device)
    grad_sq_sum = run.optimizer.grad_sq_sum().reshape(1)
    with waiting(_for_all(run)):
        table = requests[:0] if own_times is None else own_times.flatten()
        parts = [grad_sq_sum, *gradients.sums, requests, table]
        totals = all_reduce(torch.cat(parts), run.groups.world)
    grad_sq_sum, losses, tokens, scalars, requests, table = totals.split(list(map(len, parts)))
    nominal = gradients.batch_size * run.config.data.seq_length
    # a non-finite loss makes the factor, so the step, non-finite
    factor = nominal / (tokens.sum() * gradients.loss_scale) + 0 * losses.sum()
    # before the step, which changes gradients
    by_layer = run.optimizer.layer_grad_sq_sums() * factor.square() if layer_norms else None
    _before_update(run)
    outcome = run.optimizer.step(
        rates=rates, weight_decay=weight_decay, grad_sq_sum=grad_sq_sum[0], grad_factor=factor
    )
    _after_update(run, outcome, scalars)
    sums = MicroBatchSums(losses, tokens, scalars)
    return StepHandle(gradients, outcome, run.model.scalars, sums, requests, table, by_layer)


def _after_update(run: Run, outcome: StepOutcome, scalars: Tensor) -> None:
    """Let ZeRO have the steps that are left to do, and routers the counts of this one."""
    for block, step_on_host in outcome.deferred.items():
        # carried out while the next forward pass computes the block before
        run.zero.defer(block, step_on_host)
    run.model.update_routers(scalars, outcome.skipped)


def _before_update(run: Run) -> None:
    """Wait for what a save in the background still reads."""
    if run.checkpoints is not None:
        with run.timers("save-checkpoint"):
            run.checkpoints.before_update()


def _for_all(run: Run) -> Callable[[float], str]:
    """What is said when a sum at the end of the step fails."""
    return lambda seconds: (
        f"rank {run.groups.rank} had done its part of the step and waited {seconds:.1f} s "
        "for all others to do theirs. The rank whose output lacks this message"
    )


@dataclass(frozen=True)
class NonFinite:
    """A micro-batch with a NaN or Inf."""

    index: int
    dp_rank: int
    in_loss: bool  # else in a gradient only


def non_finite_micro_batches(run: Run, report: Report) -> list[NonFinite]:
    """Run a skipped step's micro-batches again, one by one, and name those with a non-finite loss
    or gradient, whichever rank they ran on.

    The weights have not moved and a step is a pure function, so the same ones fail. The gradient
    buffers are overwritten.
    """
    scale = report.loss_scale / (report.batch_size * run.config.data.seq_length)
    found = torch.zeros(
        len(report.losses), run.groups.dp.size, 2, dtype=torch.float64, device=run.device
    )
    for index in range(len(report.losses)):
        run.optimizer.zero_grad()
        with run.zero.watching() as grad_sq_sum:
            sums = run_micro_batches(
                run, run.data.train, report.first_sample + index * run.chunk, run.chunk, scale=scale
            )
        found[index, run.groups.dp.rank] = torch.stack(
            [~torch.isfinite(sums.losses[0]), ~torch.isfinite(grad_sq_sum)]
        ).double()
    all_reduce(found, run.groups.world)
    return [
        NonFinite(index, rank, bool(found[index, rank, 0]))
        for index, rank in found.sum(-1).nonzero().tolist()
    ]
