"""The training loop: `train` first, then what it calls."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron.config.groups import Config
from megatron.data.loader import Source
from megatron.distributed.collectives import all_reduce
from megatron.observe.console import evaluation_lines
from megatron.observe.metrics import evaluation_metrics
from megatron.optimizer.lr_schedule import finished
from megatron.training.checkpointing import finalize, save
from megatron.training.exit import Exit
from megatron.training.reporting import Interval, consumed, log
from megatron.training.run import Run
from megatron.training.step import (
    StepMetrics,
    non_finite_micro_batches,
    run_micro_batches,
    train_step,
)

logger = logging.getLogger(__name__)

COMPLETE = "training is complete"


class NonFiniteError(RuntimeError):
    """A NaN or Inf loss or gradient under --nan-policy stop."""


def train(run: Run) -> Exit:
    """Train until the run ends or an exit condition holds; a checkpoint is written before returning
    (with --save), or the exit code is 1.
    """
    config, progress = run.config, run.progress
    interval = Interval(time.perf_counter())
    with manual_collection(config):
        run.timing.begin()
        while not finished(config, progress.iteration, progress.consumed_samples):
            # 1. One step. It reads the last one's outcome late, after queueing its own passes.
            if run.profiler is not None:
                run.profiler.next_step(progress.iteration, interval.paused)
            step = train_step(run, partial(finish_step, run, interval))
            interval.pending, iteration, due = step, progress.iteration, step.batch.due

            # 2. The outcome is read now on a CPU, or if something below needs it, which a garbage
            # collection does not. All ranks do the same: what is due follows from the iteration,
            # and exits are agreed upon.
            needs_outcome = any(due._replace(collect_garbage=False))
            if needs_outcome or step.copy.is_synchronous or run.exits.check(iteration):
                finish_step(run, interval)
            run.timing.events.step(iteration)

            # 3. What comes between two steps: no part of a rank's compute time, and only the
            # console line is part of an iteration's.
            with run.timing.outside():
                if due.log:
                    interval = log(run, interval)
                # Requests are those of the last step that was read: on a GPU the one before, so
                # that a signal is seen one iteration late, by all ranks in the same one.
                exit_now = run.exits.check(iteration)
                if due.evaluate:
                    with paused_for_evaluation(interval, config):
                        evaluate_all(run, "validation")
                    exit_now = run.exits.check(iteration)  # a signal takes precedence
                # After the evaluation, so that its outcome is in the checkpoint.
                save_global = due.save or due.end or exit_now
                if save_global or due.save_local:
                    with interval.paused():
                        save(run, local_only=not save_global)
                if due.collect_garbage:
                    gc.collect()
            # A request at the last iteration changes nothing, unless it cut the evaluation short.
            if exit_now and (progress.evaluation_due or not due.end):
                return _after_last_save(run, exit_now)
        return _after_last_save(run, Exit(COMPLETE, 0))


def _after_last_save(run: Run, ended: Exit) -> Exit:
    """Wait for a save in the background; the exit, with code 1 when it failed."""
    if finalize(run):
        return ended
    why = "" if ended.reason == COMPLETE else ", but the last save failed"
    return Exit(ended.reason + why, 1)


def finish_step(run: Run, interval: Interval) -> None:
    """Act on the outcome of the last step, once: on a CPU right after it, on a GPU while the next
    one is queued, whose learning rate and loss scale depend on it.

    Raises NonFiniteError under --nan-policy stop, CheckpointError when another run has taken --save
    over.
    """
    if interval.pending is None:
        return
    metrics, progress = interval.pending.read(), run.progress
    interval.pending, batch = None, metrics.batch
    if run.lease is not None:
        run.lease.check()
    run.exits.agreed = metrics.exit_requests
    if run.checkpoints is not None:
        run.checkpoints.advance(metrics.save_requests)
    interval.last = metrics
    interval.iterations += 1
    interval.samples += batch.size
    # A batch without a valid token is skipped too, although its loss and gradient are finite.
    has_tokens = sum(metrics.valid_tokens) > 0
    non_finite = metrics.skipped and has_tokens
    is_nan = non_finite and not run.scaler.can_lower()
    if run.scaler.dynamic:
        run.scaler.update(overflow=non_finite)
    if metrics.skipped:
        _account_for_skipped(run, metrics, has_tokens, is_nan)
        return
    # The clock of the learning rate runs only with steps that changed the weights.
    progress.scheduled_samples += batch.size
    progress.open_loss += metrics.loss
    progress.open_steps += 1


def _account_for_skipped(run: Run, metrics: StepMetrics, has_tokens: bool, is_nan: bool) -> None:
    """Count and log a skipped step. Raises NonFiniteError under --nan-policy stop."""
    progress, batch = run.progress, metrics.batch
    progress.skipped_samples += batch.size
    progress.open_skipped += 1
    run.timing.events.skipped += 1
    samples = f"{batch.first_sample}..{batch.first_sample + batch.size - 1}"
    if not has_tokens:
        logger.warning(
            f"iteration {batch.iteration}: no valid token in samples {samples}; the step is skipped"
        )
    elif is_nan and run.config.training.nan_policy == "stop":
        scale = "a lower --loss-scale, " if run.config.precision.loss_scale is not None else ""
        # The step is computed again, micro-batch by micro-batch: all ranks do it together.
        lines = [
            f"iteration {batch.iteration}: NaN or Inf; the weights are those of the iteration "
            "before, nothing was saved",
            *non_finite_micro_batches(run, metrics),
            f"resume from the last checkpoint with {scale}a lower --lr and "
            "--override-opt-param-scheduler, or with --nan-policy skip to pass over such steps",
        ]
        raise NonFiniteError("\n".join(lines))
    elif is_nan:
        progress.open_nan += 1
        where = [i for i, loss in enumerate(metrics.losses) if not math.isfinite(loss)]
        what = f"loss in micro-batches {where}" if where else "gradient"
        logger.warning(
            f"iteration {batch.iteration}: NaN or Inf {what}, samples {samples}; "
            "the step is skipped (--nan-policy skip)"
        )


def evaluate_all(run: Run, split: str) -> bool:
    """Evaluate every source of a split, log and track; whether no signal cut it short."""
    # 1. Each source by itself. All ranks leave the loop together: a signal is agreed upon.
    sources = run.data.valid if split == "validation" else run.data.test
    iteration = run.progress.iteration
    if split == "validation":
        run.progress.evaluation_due = False
    several, losses = len(sources) > 1, []
    for name, source in sources.items():
        with run.timing.events.during("evaluation", iteration), run.timers("evaluation"):
            loss = evaluate(run, source)
        if loss is None:
            run.progress.evaluation_due = split == "validation"  # evaluate again after a resume
            return False
        losses.append(loss)
        _log_evaluation(run, split, name if several else None, loss, source.bytes_per_token)
    if several:
        # 2. The blend, weighted as training is.
        sizes = [source.bytes_per_token for source in sources.values()]
        size = None if None in sizes else blended(sources, sizes)
        _log_evaluation(run, split, None, blended(sources, losses), size)
    return True


@torch.no_grad()
def evaluate(run: Run, source: Source) -> float | None:
    """Mean loss per valid token over the first eval-iters x global-batch-size samples of a source.
    None after a signal to any rank; NaN when no token is valid. All ranks take part.
    """
    # The same samples in every layout and at every evaluation, so that losses can be compared.
    batch = run.config.training.global_batch_size
    samples = run.config.evaluation.eval_iters * batch
    # a pipeline needs many micro-batches in flight
    chunk = run.global_micro_batch_size if run.groups.pp.size == 1 else batch
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss sum, tokens
    earlier = None
    for first in range(0, samples, chunk):
        # on a GPU signals are read one turn late, so that this turn is queued right after the last
        earlier = run.exits.exchange(run.groups.world, run.device, earlier)
        if run.exits.has_signal():  # perhaps already at the last step
            return None
        sums = run_micro_batches(run, source, first, chunk, training=False)
        total += torch.stack([sums["losses"].sum(), sums["valid_tokens"].sum()])
    loss, tokens = all_reduce(total, run.groups.world).tolist()
    return loss / tokens if tokens else float("nan")


def _log_evaluation(
    run: Run, split: str, source: str | None, loss: float, bytes_per_token: float | None
) -> None:
    """Log and track the loss of a split, or of one of its sources."""
    iteration = run.progress.iteration
    logger.info(evaluation_lines(iteration, loss, split=split, source=source))
    measured = evaluation_metrics(loss, split=split, source=source, bytes_per_token=bytes_per_token)
    run.tracker.log(iteration, {**consumed(run), **measured})


def blended(sources: dict[str, Source], values: list[float]) -> float:
    """The mean per token of a split's blend, of values per token of its sources."""
    return sum(
        source.weight * value for source, value in zip(sources.values(), values, strict=True)
    )


# ---- --manual-gc: Python's collector runs after the same iterations on all ranks, so that no rank
# waits for the collection of another


@contextmanager
def manual_collection(config: Config) -> Iterator[None]:
    """Switches the automatic collector off under --manual-gc. What exists before the first step is
    not looked at again: a collection then takes milliseconds in place of tenths of a second.
    """
    if not config.training.manual_gc:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()  # what building the run has left is not carried along
    # the caller may have frozen its own objects, and unfreeze would undo that
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:  # a report of memory that ran out looks for tensors among all objects
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def paused_for_evaluation(interval: Interval, config: Config) -> Iterator[None]:
    """Excludes an evaluation from the time of iterations; under --manual-gc-eval collects garbage
    before and after it.
    """
    collects = config.training.manual_gc and config.training.manual_gc_eval
    with interval.paused():
        if collects:
            gc.collect()
        yield
        if collects:
            # The youngest generation is enough for what one evaluation has made.
            gc.collect(generation=0)
