"""One optimizer step: `train_step` first, then its three phases, then what they hand to each other.

Called from training/loop.py, which reads the numbers of a step on the host one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import waiting
from megatron.model.arithmetic import finished, global_batch_size_at
from megatron.model.layer import ScalarSpec
from megatron.optimizer.lr_schedule import StepRates
from megatron.optimizer.optimizer import sum_of_squares
from megatron.parallel.blocks import Block
from megatron.parallel.recording import Recording
from megatron.training.host_copy import AsyncHostCopy, to_device
from megatron.training.passes import MicroBatchSums, run_micro_batches
from megatron.training.run import Run


def train_step(run: Run, finish_pending: Callable[[], None]) -> PendingStep:
    """Forward and backward passes over a global batch, one small sum over all ranks, update.

    `finish_pending` acts on the outcome of the step before. It is called as late as possible, so
    that the host queues this step's work while the device still computes.
    """
    progress = run.progress
    if run.scaler.dynamic:  # the loss scale depends on that outcome
        finish_pending()
    batch = next_batch(run)

    # 1. Forward and backward passes. Layers are gathered and reduced as they run.
    sums = forward_backward(run, batch)
    # The last step's outcome sets this step's learning rate: it counts `scheduled_samples`.
    finish_pending()

    # 2. Gradients are summed already. One all-reduce sums the few numbers that ranks must agree
    # on: norm, losses, tokens, requests to exit or save.
    totals = all_reduce_totals(run, batch, sums)

    # 3. Update the shards that this rank owns. Their weights reach the other ranks while the next
    # forward pass runs. Schedules count the samples of steps that were not skipped.
    rates = run.schedule.rates(progress.scheduled_samples + batch.size)
    pending = update(run, batch, totals, rates)
    progress.iteration = batch.iteration
    progress.consumed_samples += batch.size
    return pending


def next_batch(run: Run) -> GlobalBatch:
    """The samples of the next step."""
    config, progress = run.config, run.progress
    iteration, first = progress.iteration + 1, progress.consumed_samples
    size = global_batch_size_at(first, config)
    is_last = finished(config, iteration, first + size)
    return GlobalBatch(
        iteration=iteration,
        first_sample=first,
        size=size,
        nominal_tokens=size * config.data.seq_length,
        loss_scale=run.scaler.scale,
        is_last=is_last,
        is_logged=is_last or iteration % config.logging.log_interval == 0,
    )


def forward_backward(run: Run, batch: GlobalBatch) -> MicroBatchSums:
    """Fill the gradient buffers with the gradient of loss sum x loss scale / nominal tokens of a
    batch; the sums of this rank's micro-batches.

    Of every global micro-batch, one micro-batch of each data-parallel rank, this rank runs its own;
    the gradients are summed over all ranks.
    """
    recording = run.timing.recording = Recording(run.device) if run.timing.records else None
    run.optimizer.drop_gradients()
    with run.timers("forward-backward"):
        sums = run_micro_batches(
            run,
            run.data.train,
            batch.first_sample,
            batch.size,
            training=True,
            # The number of valid tokens is known after the passes: until then the gradient is
            # divided by that of all tokens, which `update` corrects.
            scale=batch.loss_scale / batch.nominal_tokens,
            recording=recording,
        )
        with waiting(partial(_waited_for_all, run)):
            run.zero.finish_gradients()
    return sums


def all_reduce_totals(run: Run, batch: GlobalBatch, sums: MicroBatchSums) -> dict[str, Tensor]:
    """Sum over all ranks what the update and the loop depend on, in one message: by the names of
    StepMetrics, on the device (float64), and the gradient's sum of squares.
    """
    timer = run.timing.rank_timer
    if timer is not None:
        timer.end_lap(run.timing.recording)
    with run.timers("optimizer"):
        # A save in the background continues when all ranks are ready for its next part.
        ready = run.checkpoints.ready() if run.checkpoints is not None else ()
        exits = run.exits.requests()
        requests = to_device([*exits, *ready], run.device)
        # empty unless a console line will show them
        rank_times = timer.table().flatten() if timer and batch.is_logged else requests[:0]
        own = Packed(
            {
                "grad_sq_sum": run.optimizer.grad_sq_sum().reshape(1),
                "losses": sums.losses,
                "valid_tokens": sums.valid_tokens,
                **sums.scalars,
                "exit_requests": requests[: len(exits)],
                "save_requests": requests[len(exits) :],
                "rank_times": rank_times,
            }
        )
        with waiting(partial(_waited_for_all, run)):
            return own.unpack(all_reduce(own.vector, run.groups.world))


def update(
    run: Run, batch: GlobalBatch, totals: dict[str, Tensor], rates: StepRates
) -> PendingStep:
    """Step the optimizer; the gradient becomes that of the mean loss per valid token."""
    with run.timers("optimizer"):
        # a non-finite loss makes the scale, so the step, non-finite
        nan_if_not_finite = 0 * totals["losses"].sum()
        valid_tokens, grad_sq_sum = totals["valid_tokens"].sum(), totals.pop("grad_sq_sum")[0]
        grad_scale = batch.nominal_tokens / (valid_tokens * batch.loss_scale) + nan_if_not_finite
        by_layer = None
        if run.config.logging.log_layer_norms and batch.is_logged:
            # before the step, which changes gradients
            by_layer = run.optimizer.layer_grad_sq_sums() * grad_scale.square()
        if run.checkpoints is not None:  # a save in the background may still read the weights
            with run.timers("save-checkpoint"):
                run.checkpoints.before_update()
        outcome = run.optimizer.step(
            rates=rates,
            grad_sq_sum=grad_sq_sum,
            grad_scale=grad_scale,
        )
        run.model.update_routers(totals, outcome.skipped)
        # One copy to the host for all of it, started here and read one step later.
        outcome_numbers = {
            "grad_norm": outcome.grad_norm.reshape(1),
            "skipped": outcome.skipped.double().reshape(1),
        }
        numbers = Packed(outcome_numbers | totals)
        copy = AsyncHostCopy(numbers.vector)
    if run.timing.rank_timer is not None:
        run.timing.rank_timer.end_update()
    return PendingStep(batch, rates, numbers, copy, run.model.scalars, by_layer)


def _waited_for_all(run: Run, seconds: float) -> str:
    """The message when a sum at the end of the step fails."""
    return (
        f"rank {run.groups.rank} had done its part of the step and waited {seconds:.1f} s "
        "for all others to do theirs. The rank whose output lacks this message"
    )


# ---- what the phases hand to each other


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of a step, and what is known before it begins."""

    iteration: int  # of this step; the first is 1
    first_sample: int
    size: int  # samples
    nominal_tokens: int  # of all samples, whether the loss counts them or not
    loss_scale: float
    is_last: bool  # of the run
    is_logged: bool  # the step ends with a console line


class Packed:
    """Named float64 vectors, concatenated so that one all-reduce or one copy to the host carries
    all of them.
    """

    def __init__(self, parts: Mapping[str, Tensor]):
        self.sizes = {name: len(part) for name, part in parts.items()}
        self.vector = torch.cat([*parts.values()])

    def unpack(self, numbers: Any) -> dict[str, Any]:
        """The parts of a tensor, or of a list of the host, that has come back in this form."""
        found, at = {}, 0
        for name, size in self.sizes.items():
            found[name] = numbers[at : at + size]
            at += size
        return found


@dataclass(frozen=True)
class PendingStep:
    """A step that is queued, its numbers on their way to the host, which reads them one step
    later.
    """

    batch: GlobalBatch
    rates: StepRates
    numbers: Packed
    copy: AsyncHostCopy  # of `numbers`
    scalars: tuple[ScalarSpec, ...]  # of the model
    layer_grad_sq_sums: Tensor | None

    def read(self) -> StepMetrics:
        """Wait for the numbers (not for work queued after them)."""
        found = self.numbers.unpack(self.copy.read())
        tokens = sum(found["valid_tokens"])
        return StepMetrics(
            batch=self.batch,
            grad_norm=found["grad_norm"][0],
            skipped=bool(found["skipped"][0]),
            losses=found["losses"],
            valid_tokens=found["valid_tokens"],
            scalars={spec.name: found[spec.name] for spec in self.scalars},
            exit_requests=found["exit_requests"],
            save_requests=found["save_requests"],
            rank_times=found["rank_times"],
            loss=sum(found["losses"]) / tokens if tokens else float("nan"),
            layer_grad_sq_sums=self.layer_grad_sq_sums,
        )


@dataclass(frozen=True)
class StepMetrics:
    """One step, read on the host; the same on every rank. Losses are sums over tokens, of all
    ranks' i-th micro-batches.
    """

    batch: GlobalBatch
    grad_norm: float
    skipped: bool
    losses: list[float]
    valid_tokens: list[float]
    scalars: dict[str, list[float]]  # of layers: sums over tokens, or counts
    exit_requests: list[float]  # ranks that ask for an exit: ExitConditions.requests
    save_requests: list[float]  # ranks that are ready for more of a save: CheckpointManager.ready
    rank_times: list[float]  # RankTimer.table's rows; empty unless the step is logged
    loss: float  # the mean per valid token; NaN without one
    # This rank's share of the gradient's squares by layer, as of `grad_norm` (--log-layer-norms in
    # a step that is logged): the only field that is on the device and differs between ranks.
    layer_grad_sq_sums: Tensor | None


# ---- a step that failed


def non_finite_micro_batches(run: Run, metrics: StepMetrics) -> list[tuple[int, int, bool]]:
    """Run a skipped step's micro-batches again, one by one, and name those with a non-finite loss
    or gradient, whichever rank they ran on: (index, data-parallel rank, whether the loss is).

    The weights have not moved and a step is a pure function, so the same ones fail. The gradient
    buffers are overwritten.
    """
    batch, count, size = metrics.batch, len(metrics.losses), run.global_micro_batch_size
    found = torch.zeros(count, run.groups.dp.size, 2, dtype=torch.float64, device=run.device)
    grad_sq_sum = found.new_zeros(())

    def add_squares(block: Block) -> None:
        grad_sq_sum.add_(sum_of_squares([block.close()], run.device))

    for index in range(count):
        run.optimizer.drop_gradients()
        grad_sq_sum.zero_()
        # Each rank runs its own samples; no gradient is sent, so a NaN stays where it arose.
        first, scale = batch.first_sample + index * size, batch.loss_scale / batch.nominal_tokens
        with run.zero.completing(add_squares):
            sums = run_micro_batches(run, run.data.train, first, size, training=True, scale=scale)
        found[index, run.groups.dp.rank] = torch.stack(
            [~torch.isfinite(sums.losses[0]), ~torch.isfinite(grad_sq_sum)]
        ).double()
    all_reduce(found, run.groups.world)
    return [
        (index, rank, bool(found[index, rank, 0]))
        for index, rank in found.sum(-1).nonzero().tolist()
    ]
