"""One optimizer step: `train_step` first, then its phases, then what they hand to each other. The
loop reads the numbers of a step on the host one step later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.layers import widest_window
from megatron.data.loader import Batch, Source
from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import PEERS, idle
from megatron.model.attention.context_parallel import places_of_ranks
from megatron.model.layer import REPORTED_SUM, MicroBatch, ScalarSpec
from megatron.model.model_parallel import ContextParallel
from megatron.optimizer.lr_schedule import StepRates, finished, global_batch_size_at
from megatron.optimizer.optimizer import sum_of_squares
from megatron.parallel.blocks import Block
from megatron.parallel.schedule import forward_only
from megatron.parallel.timeline import Recording
from megatron.training.run import Run

# of a batch, [b, s], of which a context-parallel rank reads its own positions alone
OF_POSITIONS = ("tokens", "labels", "loss_mask", "position_ids")


def train_step(run: Run, finish_pending: Callable[[], None]) -> PendingStep:
    """Forward and backward passes over a global batch, one small sum over all ranks, update.

    `finish_pending` acts on the outcome of the step before. It is called as late as possible, so
    that the host queues this step's work while the device still computes.
    """
    progress = run.progress
    if run.scaler.dynamic:  # the loss scale depends on that outcome
        finish_pending()
    batch = next_batch(run)
    PEERS.iteration = batch.iteration

    # 1. Forward and backward passes. Layers are gathered and reduced as they run.
    sums = forward_backward(run, batch)
    # Nothing, if done above. The last step's outcome sets this step's learning rate: it advances
    # `scheduled_samples`, unless that step was skipped.
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
    """The samples of the next step, and what the loop does after it."""
    config, progress = run.config, run.progress
    iteration, first = progress.iteration + 1, progress.consumed_samples
    size = global_batch_size_at(first, config)
    is_last = finished(config, iteration, first + size)
    intervals = (
        config.logging.log_interval,
        config.evaluation.eval_interval,
        config.checkpoint.save_interval,
        config.checkpoint.local_save_interval,
        config.training.manual_gc and config.training.manual_gc_interval,
    )
    log, evaluate, save, save_local, collect_garbage = (
        bool(interval) and iteration % interval == 0 for interval in intervals
    )
    due = Due(
        log=log or is_last,
        evaluate=(evaluate or is_last) and bool(run.data.valid),
        save=save,
        save_local=save_local,
        end=is_last,
        collect_garbage=collect_garbage,
    )
    nominal_tokens = size * config.data.seq_length
    return GlobalBatch(iteration, first, size, nominal_tokens, run.scaler.scale, due)


def forward_backward(run: Run, batch: GlobalBatch) -> dict[str, Tensor]:
    """Fill the gradient buffers with the gradient of loss sum x loss scale / nominal tokens of a
    batch; the sums of `run_micro_batches`.

    Of every global micro-batch, one micro-batch of each data-parallel rank, this rank runs its own;
    afterwards the `grad_shard` of each block is summed over the ranks that hold its parameters.
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
        with run.waiting_for_all():
            run.zero.finish_gradients()
    return sums


def all_reduce_totals(run: Run, batch: GlobalBatch, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks what the update and the loop depend on, in one message: by the names of
    StepMetrics, on the device (float64), and the gradient's sum of squares.
    """
    timer = run.timing.rank_timer
    if timer is not None:
        timer.end_lap(run.timing.recording)
    with run.timers("optimizer"):
        # A save in the background continues when all ranks are ready for its next part.
        ready = run.checkpoints.ready() if run.checkpoints is not None else ()
        of_host = {
            "exit_requests": run.exits.requests(),
            "save_requests": ready,
            # empty unless a console line will show them
            "rank_times": timer.table() if timer and batch.due.log else (),
        }
        numbers = to_device([*chain(*of_host.values())], run.device)
        own = {"grad_sq_sum": run.optimizer.grad_sq_sum().reshape(1), **sums}
        own |= zip(of_host, numbers.split([*map(len, of_host.values())]))
        vector = torch.cat([*own.values()])
        with run.waiting_for_all():
            totals = all_reduce(vector, run.groups.world)
        return dict(zip(own, totals.split([*map(len, own.values())])))


def update(
    run: Run, batch: GlobalBatch, totals: dict[str, Tensor], rates: StepRates
) -> PendingStep:
    """Step the optimizer; the gradient becomes that of the mean loss per valid token."""
    with run.timers("optimizer"):
        nan_if_not_finite = 0 * totals["losses"].sum()
        valid_tokens, grad_sq_sum = totals["valid_tokens"].sum(), totals.pop("grad_sq_sum")[0]
        # Non-finite with a non-finite loss or no valid token (division by 0): the step is skipped.
        grad_scale = batch.nominal_tokens / (valid_tokens * batch.loss_scale) + nan_if_not_finite
        by_layer = None
        if run.config.logging.log_layer_norms and batch.due.log:
            # before the step, which changes gradients
            by_layer = run.optimizer.layer_grad_sq_sums() * grad_scale.square()
        if run.checkpoints is not None:  # a save in the background may still read the weights
            with run.timers("save-checkpoint"):
                run.checkpoints.before_update()
        outcome = run.optimizer.step(rates=rates, grad_sq_sum=grad_sq_sum, grad_scale=grad_scale)
        if run.model.scalars:  # only models with experts have scalars
            run.model.update_routers(totals, outcome.skipped)
        # One copy to the host for all of it, started here and read one step later.
        totals["grad_norm"] = outcome.grad_norm.reshape(1)
        totals["skipped"] = outcome.skipped.double().reshape(1)
        copy = AsyncHostCopy(totals)
    if run.timing.rank_timer is not None:
        run.timing.rank_timer.end_update()
    return PendingStep(batch, rates, copy, run.model.scalars, by_layer)


# ---- passes, of training and of evaluation


def run_micro_batches(
    run: Run,
    source: Source,
    first: int,
    samples: int,
    *,
    training: bool,
    scale: float = 0.0,
    recording: Recording | None = None,
) -> dict[str, Tensor]:
    """Run this rank's micro-batches of samples [first, first + samples): the sums of their forward
    passes (float64). `losses` [micro-batches] are over this rank's valid tokens, `valid_tokens`
    their number; both are 0 where another rank counts them (`Run.reports_loss`). Those of layers
    over all micro-batches have the names of GPTModel.scalars.

    In training gradients of scale x objective are added to every main_grad; an evaluation has no
    dropout and no gradients.
    """
    count = samples // run.global_micro_batch_size
    losses, valid_tokens = torch.zeros(2, count, dtype=torch.float64, device=run.device)
    aux_scale = scale
    if training and run.pipeline.runner.aux_losses and source.config.eod_mask_loss:
        # What layers add to the objective are means over all tokens, and gradients are divided by
        # the valid ones afterwards. Those of the whole batch are counted on every rank: the first
        # backward pass comes before the last batch is read.
        with run.timers("data"):
            valid = source.valid_tokens(first, samples)
            aux_scale = scale * valid / (samples * source.config.seq_length)
    schedule = run.schedule_of(count) if training else forward_only(run.pipeline.placement, count)
    if recording is not None:
        recording.schedule = schedule
    read = partial(read_micro_batch, run, source, first, valid_tokens, training)
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
        if spec.name in found.scalars and (run.groups.tp.rank == 0 or spec.is_part)
        else losses.new_zeros(spec.size)
        for spec in run.model.scalars
    }
    return {"losses": losses, "valid_tokens": valid_tokens, **scalars}


def read_micro_batch(
    run: Run, source: Source, first: int, valid_tokens: Tensor, training: bool, index: int
) -> MicroBatch:
    """This rank's part of global micro-batch `index` of the samples from `first` on, whose valid
    tokens are counted. Every tensor- and pipeline-parallel rank reads it itself: nothing is
    broadcast.
    """
    size = run.config.training.micro_batch_size
    first = first + index * run.global_micro_batch_size
    with run.timers("data") if training else contextlib.nullcontext():
        batch = source.batch(first + size * run.groups.dp.rank, size)
        if run.model.cp.size > 1:
            batch = share_positions(batch, run.model.cp, widest_window(run.config.model))
        batch = batch.to(run.device)
    micro_batch = run.model.micro_batch(**vars(batch), training=training)
    if run.reports_loss:
        valid_tokens[index] = micro_batch.loss_mask.sum()
    return micro_batch


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


# ---- what the phases hand to each other


class Due(NamedTuple):
    """What the loop does after an iteration; `end`: it was the last one."""

    log: bool
    evaluate: bool
    save: bool  # by --save-interval; the last iteration is saved in any case
    save_local: bool
    end: bool
    collect_garbage: bool


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of a step, and what is known before it begins."""

    iteration: int  # of this step; the first is 1
    first_sample: int
    size: int  # samples
    nominal_tokens: int  # of all samples, whether the loss counts them or not
    loss_scale: float
    due: Due


@dataclass(frozen=True)
class PendingStep:
    """A step that is queued, its numbers on their way to the host, which reads them one step
    later.
    """

    batch: GlobalBatch
    rates: StepRates
    copy: AsyncHostCopy
    scalars: tuple[ScalarSpec, ...]  # of the model
    layer_grad_sq_sums: Tensor | None

    def read(self) -> StepMetrics:
        """The step's metrics, on the host; waits for the copy."""
        found = self.copy.read()
        tokens = sum(found["valid_tokens"])
        return StepMetrics(
            batch=self.batch,
            rates=self.rates,
            loss=sum(found["losses"]) / tokens if tokens else float("nan"),
            grad_norm=found.pop("grad_norm")[0],
            skipped=bool(found.pop("skipped")[0]),
            scalars={spec.name: found.pop(spec.name) for spec in self.scalars},
            layer_grad_sq_sums=self.layer_grad_sq_sums,
            **found,  # the fields that were not popped
        )


@dataclass(frozen=True)
class StepMetrics:
    """One step, read on the host; the same on every rank. Losses are sums over tokens, of all
    ranks' i-th micro-batches.
    """

    batch: GlobalBatch
    rates: StepRates
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


# ---- a few numbers between the host and the device, for which neither waits


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Float64 numbers of the host, on the device: from pinned memory, so that nothing waits."""
    # A copy from pageable memory would make the host wait until the GPU has caught up.
    host = torch.tensor(numbers, dtype=torch.float64)
    if device.type == "cuda":
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    return target.copy_(host, non_blocking=True)


class AsyncHostCopy:
    """Float64 vectors of the device, by name, copied to pinned host memory in one piece."""

    def __init__(self, parts: Mapping[str, Tensor]):
        self.sizes = {name: len(part) for name, part in parts.items()}
        self.event = None
        self.numbers = numbers = torch.cat([*parts.values()])
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        # on a CPU: `read` never waits; the same on every rank
        self.is_synchronous = self.event is None

    def read(self) -> dict[str, list[float]]:
        """Wait for the numbers (not for work queued after them)."""
        if self.event is not None:
            with idle():
                self.event.synchronize()
        numbers = iter(self.numbers.tolist())
        return {name: [*islice(numbers, size)] for name, size in self.sizes.items()}


# ---- a step that failed


def non_finite_micro_batches(run: Run, metrics: StepMetrics) -> list[str]:
    """Run a skipped step's micro-batches again, one by one: a line for each with a non-finite loss
    or gradient, whichever rank it ran on.

    The weights have not moved and a step is a pure function, so the same ones fail. The gradient
    buffers are overwritten.
    """
    batch, size = metrics.batch, run.global_micro_batch_size
    shape = len(metrics.losses), run.groups.dp.size, 3
    found = torch.zeros(shape, dtype=torch.float64, device=run.device)
    for index in range(len(found)):
        found[index, run.groups.dp.rank] = _is_non_finite(run, batch, index).double()
    losses, gradients, of_experts = all_reduce(found, run.groups.world).unbind(-1)
    lines = [
        _describe_failed(run, batch, index, rank, "loss" if losses[index, rank] else "gradient")
        for index, rank in (losses + gradients).nonzero().tolist()
    ]
    begin = batch.first_sample
    return lines or [
        f"  micro-batch {i}: gradient of experts, samples {begin + i * size}.."
        f"{begin + (i + 1) * size - 1}"
        for (i,) in of_experts.sum(1).nonzero().tolist()
    ]


def _is_non_finite(run: Run, batch: GlobalBatch, index: int) -> Tensor:
    """Run this rank's part of a micro-batch again: whether its loss is not finite, its gradient,
    and that of experts which have tokens of other ranks' samples, too.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=run.device)
    experts = run.groups.ep.size * run.groups.etp.size
    is_mixed = run.groups.tp_cp.size % experts > 0

    def add_squares(block: Block) -> None:
        of_others = is_mixed and block.layout.group == "expert"
        squares[int(of_others)] += sum_of_squares([block.close()], run.device)

    run.optimizer.drop_gradients()
    # Each rank runs its own samples; no gradient is sent, so a NaN stays where it arose, or goes
    # with a token to its experts.
    size = run.global_micro_batch_size
    first, scale = batch.first_sample + index * size, batch.loss_scale / batch.nominal_tokens
    with run.zero.completing(add_squares):
        sums = run_micro_batches(run, run.data.train, first, size, training=True, scale=scale)
    return ~torch.isfinite(torch.cat([sums["losses"], squares]))


def _describe_failed(run: Run, batch: GlobalBatch, index: int, rank: int, what: str) -> str:
    """Names micro-batch `index` of a data-parallel rank and its samples."""
    size = run.config.training.micro_batch_size
    first = batch.first_sample + index * run.global_micro_batch_size + rank * size
    where = f" of data-parallel rank {rank}" if run.groups.dp.size > 1 else ""
    return f"  micro-batch {index}{where}: {what}, samples {first}..{first + size - 1}"
