"""One optimizer step.

What it yields, in order: BackwardResult is of this rank, after its passes. Totals are of all ranks,
on the device. PendingStep is the step once it is queued, its numbers on their way to the host.
StepMetrics are these numbers, read one step later. Called from training/loop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import waiting
from megatron.model.arithmetic import global_batch_size_at
from megatron.model.layer import ScalarSpec
from megatron.optimizer.lr_schedule import LearningRates
from megatron.parallel.recording import Recording
from megatron.training.host_copy import AsyncHostCopy, to_device
from megatron.training.passes import MicroBatchSums, run_micro_batches
from megatron.training.run import Progress, Run, is_logged


@dataclass(frozen=True)
class BackwardResult:
    """The sums of this rank's micro-batches; their gradients are in the gradient buffers."""

    first_sample: int
    batch_size: int
    loss_scale: float
    sums: MicroBatchSums
    recording: Recording | None = None


class Totals(NamedTuple):
    """What all ranks have in common after the all-reduce of a step, on the device (float64)."""

    grad_sq_sum: Tensor  # of the accumulated gradient
    sums: MicroBatchSums
    exit_requests: Tensor  # ranks that ask for an exit
    save_requests: Tensor  # ranks that are ready for the next part of a save
    rank_times: Tensor  # RankTimer.table of all ranks; empty unless this step logs it


@dataclass(frozen=True)
class StepMetrics:
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
    scalars: dict[str, float]  # auxiliary outputs of layers: sums over tokens
    counts: dict[str, list[float]]  # the same, of those that are several numbers
    exit_requests: list[float]  # ranks that ask for an exit: ExitConditions.requests
    save_requests: list[float]  # ranks that are ready for more of a save: CheckpointManager.ready
    rank_times: list[float]  # RankTimer.table's rows; empty unless the step is logged
    loss: float  # the mean per valid token; NaN without one
    # This rank's share of the gradient's squares by layer, as of `grad_norm` (--log-layer-norms in
    # a step that is logged): the only field that is on the device and differs between ranks.
    layer_grad_sq_sums: Tensor | None


@dataclass(frozen=True)
class PendingStep:
    """A step whose scalars are on their way to the host, which reads them one step later."""

    result: BackwardResult
    totals: Totals
    specs: tuple[ScalarSpec, ...]  # of the layers' scalars
    learning_rates: LearningRates
    scalars: AsyncHostCopy  # norm, skipped, and of the totals what `read` takes apart
    layer_grad_sq_sums: Tensor | None

    def read(self) -> StepMetrics:
        """Wait for the scalars (not for work queued after them)."""
        result, sums = self.result, self.totals.sums
        sizes = [
            *(1, 1, len(sums.losses), len(sums.tokens)),
            *(spec.size for spec in self.specs),
            *(len(each) for each in self.totals[2:]),
        ]
        values = iter(self.scalars.read())
        parts = [[next(values) for _ in range(size)] for size in sizes]
        (norm,), (skipped,), losses, tokens, *auxiliary, exits, saves, rank_times = parts
        named = list(zip(self.specs, auxiliary, strict=True))
        return StepMetrics(
            first_sample=result.first_sample,
            batch_size=result.batch_size,
            loss_scale=result.loss_scale,
            grad_norm=norm,
            skipped=bool(skipped),
            losses=losses,
            tokens=tokens,
            scalars={spec.name: values[0] for spec, values in named if spec.size == 1},
            counts={spec.name: values for spec, values in named if spec.size > 1},
            exit_requests=exits,
            save_requests=saves,
            rank_times=rank_times,
            loss=sum(losses) / sum(tokens) if sum(tokens) else float("nan"),
            layer_grad_sq_sums=self.layer_grad_sq_sums,
        )


def train_step(run: Run, finish_pending: Callable[[], None]) -> PendingStep:
    """Forward and backward passes over a global batch, one small sum over all ranks, update.

    `finish_pending` acts on the outcome of the step before. It is called as late as possible, so
    that the host queues this step's work while the device still computes.
    """
    config, progress, timer = run.config, run.progress, run.timing.rank_timer
    batch_size = global_batch_size_at(progress.consumed_samples, config)
    if run.scaler.dynamic:  # the loss scale depends on that outcome
        finish_pending()

    # 1. Forward and backward passes. Layers are gathered and reduced as they run.
    result = forward_backward(
        run,
        first_sample=progress.consumed_samples,
        batch_size=batch_size,
        loss_scale=run.scaler.scale,
        recording=Recording(run.device) if run.groups.pp.size > 1 or timer is not None else None,
    )
    finish_pending()
    if timer is not None:
        timer.end_lap(result.recording)
        timer.begin_update()
    # what only a console line shows is not computed in other steps
    after = Progress(progress.iteration + 1, progress.consumed_samples + batch_size)
    wanted = timer is not None or config.logging.log_layer_norms
    logged = wanted and is_logged(config, after)

    with run.timers("optimizer"):
        # 2. Gradients are summed already. One all-reduce sums the few numbers that ranks must
        # agree on: norm, losses, tokens, requests to exit or save.
        totals = all_reduce_totals(run, result, rank_times=timer is not None and logged)

        # 3. Update the shards that this rank owns. Their weights reach the other ranks while the
        # next forward pass runs. Schedules count the samples of steps that were not skipped.
        samples = progress.scheduled_samples + batch_size
        pending = update(
            run,
            result,
            totals,
            rates=run.schedule.learning_rates(samples),
            weight_decay=run.schedule.weight_decay(samples),
            layer_norms=config.logging.log_layer_norms and logged,
        )
    if timer is not None:
        timer.end_update()
    progress.iteration, progress.consumed_samples = after.iteration, after.consumed_samples
    return pending


def forward_backward(
    run: Run,
    *,
    first_sample: int,
    batch_size: int,
    loss_scale: float,
    recording: Recording | None = None,
) -> BackwardResult:
    """Fill the gradient buffers with the gradient of loss sum x loss_scale / nominal tokens of
    samples [first, first + batch_size).

    Of every chunk of samples, one micro-batch of each data-parallel rank, this rank runs its own;
    the gradients are summed over all ranks.
    """
    # The number of valid tokens is known after the passes: until then the gradient is divided by
    # that of all tokens, which `update` corrects.
    scale = loss_scale / (batch_size * run.config.data.seq_length)
    run.optimizer.drop_gradients()
    with run.timers("forward-backward"):
        sums = run_micro_batches(
            run, run.data.train, first_sample, batch_size, scale=scale, recording=recording
        )
        with waiting(partial(_waited_for_all, run)):
            run.zero.end_step()
    return BackwardResult(first_sample, batch_size, loss_scale, sums, recording)


def all_reduce_totals(run: Run, result: BackwardResult, *, rank_times: bool = False) -> Totals:
    """Sum over all ranks what the update and the loop depend on, in one message."""
    timer = run.timing.rank_timer
    # A save in the background continues when all ranks are ready for its next part.
    ready = run.checkpoints.ready() if run.checkpoints is not None else ()
    exits = run.exits.requests()
    requests = to_device([*exits, *ready], run.device)
    parts = [
        run.optimizer.grad_sq_sum().reshape(1),
        *result.sums,
        requests[: len(exits)],
        requests[len(exits) :],
        timer.table().flatten() if rank_times else requests[:0],
    ]
    with waiting(partial(_waited_for_all, run)):
        summed = all_reduce(torch.cat(parts), run.groups.world)
    grad_sq_sum, *sums, exit_sum, save_sum, times = summed.split(list(map(len, parts)))
    return Totals(grad_sq_sum[0], MicroBatchSums(*sums), exit_sum, save_sum, times)


def update(
    run: Run,
    result: BackwardResult,
    totals: Totals,
    *,
    rates: LearningRates,
    weight_decay: float,
    layer_norms: bool = False,
) -> PendingStep:
    """Step the optimizer; the gradient becomes that of the mean loss per valid token.
    `layer_norms`: take the squares by layer, too.
    """
    _, tokens, scalars = totals.sums
    nominal = result.batch_size * run.config.data.seq_length
    # a non-finite loss makes the scale, so the step, non-finite
    grad_scale = nominal / (tokens.sum() * result.loss_scale) + 0 * totals.sums.losses.sum()
    # before the step, which changes gradients
    by_layer = run.optimizer.layer_grad_sq_sums() * grad_scale.square() if layer_norms else None
    if run.checkpoints is not None:  # a save in the background may still read the weights
        with run.timers("save-checkpoint"):
            run.checkpoints.before_update()
    outcome = run.optimizer.step(
        rates=rates,
        weight_decay=weight_decay,
        grad_sq_sum=totals.grad_sq_sum,
        grad_scale=grad_scale,
    )
    run.model.update_routers(scalars, outcome.skipped)
    # One copy to the host for all of it, started here and read one step later.
    verdict = torch.stack([outcome.grad_norm, outcome.skipped.double()])
    copy = AsyncHostCopy(torch.cat([verdict, *totals.sums, *totals[2:]]))
    return PendingStep(result, totals, run.model.scalars, rates, copy, by_layer)


def _waited_for_all(run: Run, seconds: float) -> str:
    """The message when a sum at the end of the step fails."""
    return (
        f"rank {run.groups.rank} had done its part of the step and waited {seconds:.1f} s "
        "for all others to do theirs. The rank whose output lacks this message"
    )


@dataclass(frozen=True)
class NonFinite:
    """A micro-batch with a NaN or Inf."""

    index: int
    dp_rank: int
    in_loss: bool  # else in a gradient only


def non_finite_micro_batches(run: Run, metrics: StepMetrics) -> list[NonFinite]:
    """Run a skipped step's micro-batches again, one by one, and name those with a non-finite loss
    or gradient, whichever rank they ran on.

    The weights have not moved and a step is a pure function, so the same ones fail. The gradient
    buffers are overwritten.
    """
    scale = metrics.loss_scale / (metrics.batch_size * run.config.data.seq_length)
    found = torch.zeros(
        len(metrics.losses), run.groups.dp.size, 2, dtype=torch.float64, device=run.device
    )
    for index in range(len(metrics.losses)):
        run.optimizer.drop_gradients()
        # Each rank runs its part of the chunk; no gradient is sent, so a NaN stays where it arose.
        first = metrics.first_sample + index * run.chunk
        with run.zero.watching() as grad_sq_sum:
            sums = run_micro_batches(run, run.data.train, first, run.chunk, scale=scale)
        found[index, run.groups.dp.rank] = torch.stack(
            [~torch.isfinite(sums.losses[0]), ~torch.isfinite(grad_sq_sum)]
        ).double()
    all_reduce(found, run.groups.world)
    return [
        NonFinite(index, rank, bool(found[index, rank, 0]))
        for index, rank in found.sum(-1).nonzero().tolist()
    ]
