"""The training loop: `train` first, then what it calls.

Called from training/pretrain.py.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from megatron.config.groups import TrainingConfig
from megatron.data.loader import Source
from megatron.distributed.peers import PEERS
from megatron.observe.console import evaluation_lines
from megatron.observe.metrics import evaluation_metrics
from megatron.training.checkpointing import finalize, save, save_local
from megatron.training.evaluate import evaluate, write_sample
from megatron.training.exit import Exit
from megatron.training.reporting import Interval, consumed, log
from megatron.training.run import Run, finished
from megatron.training.step import (
    PendingStep,
    StepMetrics,
    non_finite_micro_batches,
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
    config, progress, timer = run.config, run.progress, run.timing.rank_timer
    interval, pending = Interval(time.perf_counter()), None

    def finish_pending() -> None:
        """Act on the outcome of the last step, once: on a CPU right after it, on a GPU while the
        next one is queued.
        """
        nonlocal pending
        step, pending = pending, None
        finish_step(run, step, interval)

    with manual_collection(config.training):
        if timer is not None:
            timer.begin()
        while not finished(config, progress):
            # 1. One step, queued on the device before the outcome of the last one is read.
            PEERS.iteration = progress.iteration + 1
            if run.profiler is not None:
                interval.outside += run.profiler.next_step(progress.iteration)
            pending = step = train_step(run, finish_pending)
            iteration, due = progress.iteration, due_after(run)

            # 2. The outcome is read now, if it is here or something below needs it. All ranks do
            # the same: what is due follows from the iteration, and exits are agreed upon.
            if any(due) or step.scalars.is_here or run.exits.check(iteration):
                finish_pending()
            # Requests are those of the last step that was read: on a GPU the one before, so that a
            # signal is seen one iteration late, by all ranks in the same one.
            exit_now = run.exits.check(iteration)
            run.timing.events.step(iteration)
            if run.lease is not None:
                run.lease.check()

            # 3. Console line, evaluation and checkpoint: no part of a rank's compute time.
            with nullcontext() if timer is None else timer.outside():
                if any(due) or exit_now:
                    interval, exit_now = _between_steps(run, interval, step, due, exit_now)
                collect_after(iteration, config.training)
            # A request at the last iteration changes nothing, unless it cut the evaluation short.
            if exit_now and (progress.evaluation_due or not due.end):
                return _end(run, exit_now)
        return Exit(COMPLETE, 0 if finalize(run) else 1)


class Due(NamedTuple):
    """What the loop does after an iteration; `end`: it was the last one."""

    log: bool
    evaluate: bool
    save: bool
    save_local: bool
    end: bool


def due_after(run: Run) -> Due:
    """What is due after the iteration that run.progress has counted last."""
    config, iteration, end = run.config, run.progress.iteration, finished(run.config, run.progress)
    log, evaluate, save, save_local = (
        bool(interval) and iteration % interval == 0
        for interval in (
            config.logging.log_interval,
            config.evaluation.eval_interval,
            config.checkpoint.save_interval,
            config.checkpoint.local_save_interval,
        )
    )
    return Due(log or end, (evaluate or end) and bool(run.data.valid), save, save_local, end)


def _between_steps(
    run: Run, interval: Interval, step: PendingStep, due: Due, exit_now: Exit | None
) -> tuple[Interval, Exit | None]:
    """Log, evaluate and save what is due; the interval that continues, and the reason to stop, if
    there is one now.
    """
    if due.log:
        interval = log(run, interval, step.learning_rates, step.result.recording)

    # what follows is no part of an iteration's time
    paused = time.perf_counter()
    if due.evaluate:
        with collected_evaluation(run.config.training):
            run.progress.evaluation_due = (
                run.exits.agree(run.groups.world, run.device)
                or evaluate_all(run, "validation") is None
            )
        exit_now = exit_now or run.exits.check(run.progress.iteration)
    # After the evaluation, so that its outcome is in the checkpoint.
    if due.save or due.end or exit_now:
        save(run)
    elif due.save_local:
        save_local(run)
    interval.outside += time.perf_counter() - paused
    return interval, exit_now


def _end(run: Run, reason: Exit) -> Exit:
    """Wait for the last save; the reason to exit, with code 1 when it failed."""
    return reason if finalize(run) else Exit(f"{reason.reason}, but the last save failed", 1)


def finish_step(run: Run, pending: PendingStep | None, interval: Interval) -> None:
    """Read the last step's verdict, which the next step's learning rate and loss scale depend on,
    and act on it.

    Raises NonFiniteError under --nan-policy stop.
    """
    if pending is None:
        return
    report, progress = pending.read(), run.progress
    run.exits.agreed = report.exit_requests
    if run.checkpoints is not None:
        run.checkpoints.advance(report.save_requests)
    interval.last = report
    interval.iterations += 1
    # A batch without a valid token is skipped too, and is no overflow.
    overflow = report.skipped and sum(report.tokens) > 0
    real = overflow and run.scaler.at_minimum()
    run.scaler.update(overflow)
    if not report.skipped:
        # The clock of the learning rate runs only with steps that changed the weights.
        progress.scheduled_samples += report.batch_size
        progress.open_loss += report.loss
        progress.open_steps += 1
        return
    # Skipped: an overflow halves the scale; a real NaN or Inf is a matter of --nan-policy.
    _count_skipped(run, report)
    iteration = progress.iteration
    if sum(report.tokens) == 0:
        logger.warning(
            f"iteration {iteration}: no valid token in samples {_samples(report)}; "
            "the step is skipped"
        )
    elif real and run.config.training.nan_policy == "stop":
        raise NonFiniteError(_blame(run, report))
    elif real:
        progress.open_nan += 1
        where = [i for i, loss in enumerate(report.losses) if not math.isfinite(loss)]
        what = f"loss in micro-batches {where}" if where else "gradient"
        logger.warning(
            f"iteration {iteration}: NaN or Inf {what}, samples {_samples(report)}; "
            "the step is skipped (--nan-policy skip)"
        )


def _count_skipped(run: Run, report: StepMetrics) -> None:
    run.progress.skipped_samples += report.batch_size
    run.progress.open_skipped += 1
    run.timing.events.skipped += 1


def _samples(report: StepMetrics) -> str:
    return f"{report.first_sample}..{report.first_sample + report.batch_size - 1}"


def _blame(run: Run, report: StepMetrics) -> str:
    # The step is computed again, micro-batch by micro-batch: all ranks do it together.
    failed, size = non_finite_micro_batches(run, report), run.config.training.micro_batch_size
    lines = [
        (
            f"iteration {run.progress.iteration}: NaN or Inf; the weights are those of the "
            "iteration before, nothing was saved"
        )
    ]
    for each in failed:
        first = report.first_sample + each.index * run.chunk + each.dp_rank * size
        where = f" of data-parallel rank {each.dp_rank}" if run.groups.dp.size > 1 else ""
        lines.append(
            f"  micro-batch {each.index}{where}: {'loss' if each.in_loss else 'gradient'}, "
            f"samples {first}..{first + size - 1}"
        )
    lines.append(
        "resume from the last checkpoint with a lower --lr, or with --nan-policy skip to "
        "pass over such steps"
    )
    return "\n".join(lines)


def evaluate_all(run: Run, split: str) -> dict[str, float] | None:
    """Evaluate every source of a split, log and track; None when a signal cut it short."""
    # 1. Each source by itself. All ranks leave the loop together: a signal is agreed upon.
    sources = run.data.valid if split == "validation" else run.data.test
    losses = {}

    def log_sample(loss: float, bytes_per_token: float | None, label: str | None) -> None:
        logger.info(evaluation_lines(run.progress.iteration, loss, split=split, source=label))
        if run.tracker is not None:
            measured = evaluation_metrics(
                loss, split=split, source=label, bytes_per_token=bytes_per_token
            )
            run.tracker.log(run.progress.iteration, {**consumed(run), **measured})

    for name, source in sources.items():
        with (
            run.timing.events.during("evaluation", run.progress.iteration),
            run.timers("evaluation"),
        ):
            loss = evaluate(run, source, _progress_line(f"{split} {name}"))
        if loss is None:
            return None
        losses[name] = loss
        log_sample(loss, source.bytes_per_token, name if len(sources) > 1 else None)
    if len(sources) > 1:
        # 2. The blend, weighted as training is.
        sizes = [source.bytes_per_token for source in sources.values()]
        log_sample(
            blended(sources, list(losses.values())),
            None if None in sizes else blended(sources, sizes),
            None,
        )
    if split == "validation" and run.config.logging.log_sample_text:
        _show_sample(run)
    return losses


def _show_sample(run: Run) -> None:
    """What the model writes now; all ranks take part."""
    with (
        run.timing.events.during("evaluation", run.progress.iteration),
        run.timers("evaluation"),
    ):
        text = write_sample(run, next(iter(run.data.valid.values())))
    logger.info(
        f" sample text at iteration {run.progress.iteration}: {text.line(run.decode, run.data.eod)}"
    )
    if run.tracker is not None:
        page = partial(text.to_html, run.decode, run.data.eod)
        run.tracker.show("sample-text", page, last=True)


def blended(sources: dict[str, Source], values: list[float]) -> float:
    """The mean per token of a split's blend, of values per token of its sources."""
    return sum(
        source.weight * value for source, value in zip(sources.values(), values, strict=True)
    )


def _progress_line(what: str, quiet_seconds: float = 5.0) -> Callable[[int, int], None]:
    """Reports `what: done/total, ETA` at most every quiet_seconds."""
    # Quiet for short evaluations.
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= quiet_seconds and done < total:
            last = now
            left = (now - start) / done * (total - done)
            logger.info(f" {what}: {done}/{total} samples, ETA {left:.0f} s")

    return report


# ---- --manual-gc: Python's collector runs after the same iterations on all ranks, so that no rank
# waits for the collection of another


@contextmanager
def manual_collection(config: TrainingConfig) -> Iterator[None]:
    """Switches the automatic collector off under --manual-gc. Nothing is frozen: reports of live
    tensors find them among the collector's objects.
    """
    if not config.manual_gc:
        yield
        return
    # One collection now: what building the run has left is not carried along.
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_after(iteration: int, config: TrainingConfig) -> None:
    """Collects after every --manual-gc-interval iterations."""
    interval = config.manual_gc_interval
    if config.manual_gc and interval and iteration % interval == 0:
        gc.collect()


@contextmanager
def collected_evaluation(config: TrainingConfig) -> Iterator[None]:
    """Collects before an evaluation, and what the evaluation has made after it."""
    collects = config.manual_gc and config.manual_gc_eval
    if collects:
        gc.collect()
    yield
    if collects:
        # The youngest generation is enough for what one evaluation has made.
        gc.collect(generation=0)
