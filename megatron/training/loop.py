"""The training loop: straight-line, from the first line to the last.

Called from training/pretrain.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron.config.groups import Config
from megatron.data.loader import Source
from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import PEERS
from megatron.model.arithmetic import flops_per_iteration, global_batch_size_at, iterations_for
from megatron.observe.console import evaluation_lines, training_line
from megatron.observe.metrics import (
    eta_seconds,
    evaluation_metrics,
    memory_metrics,
    rates,
    timer_metrics,
)
from megatron.optimizer.lr_schedule import LearningRates
from megatron.parallel.pipeline import Recording
from megatron.training.checkpointing import finalize, save, save_local
from megatron.training.evaluate import evaluate
from megatron.training.exit import Exit
from megatron.training.passes import schedule_of
from megatron.training.run import Progress, Run
from megatron.training.step import (
    Report,
    StepHandle,
    forward_backward,
    non_finite_micro_batches,
    update,
)
from megatron.training.timing import rows_of_ranks

logger = logging.getLogger(__name__)

COMPLETE = "training is complete"


class NonFiniteError(RuntimeError):
    """A NaN or Inf loss or gradient under --nan-policy stop."""


@dataclass
class Interval:
    """What this process knows of the time since the last console line; sums of losses are in
    Progress, which checkpoints keep.
    """

    started: float
    iterations: int = 0
    outside: float = 0.0  # seconds of evaluation and checkpoints, which are no part of an iteration
    last: Report | None = None


def finished(config: Config, progress: Progress, more: tuple[int, int] = (0, 0)) -> bool:
    """Whether the run has reached --train-iters or --train-samples, or will have after so many
    more iterations and samples.
    """
    iterations, samples = more
    if config.training.train_iters is not None:
        return progress.iteration + iterations >= config.training.train_iters
    return progress.consumed_samples + samples >= config.training.train_samples


def last_iteration(config: Config, progress: Progress) -> int:
    """The iteration at which the run ends; under --train-samples counted through the batch-size
    ramp-up.
    """
    if config.training.train_iters is not None:
        return config.training.train_iters
    return progress.iteration + iterations_for(
        config.training.train_samples, config, progress.consumed_samples
    )


def finish_step(run: Run, pending: StepHandle | None, interval: Interval) -> None:
    """Read the last step's verdict, which the next step's learning rate and loss scale depend on,
    and act on it.

    Raises NonFiniteError under --nan-policy stop.
    """
    if pending is None:
        return
    report, progress = pending.read(), run.progress
    count = len(run.exits.agreed)
    run.exits.agreed = report.requests[:count]
    if run.checkpoints is not None:
        run.checkpoints.advance(report.requests[count:])
    interval.last = report
    interval.iterations += 1
    overflow = report.skipped and sum(report.tokens) > 0
    real = overflow and run.scaler.at_minimum()
    run.scaler.update(overflow)
    if not report.skipped:
        progress.scheduled_samples += report.batch_size
        progress.open_loss += report.loss
        progress.open_steps += 1
        return
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


def _count_skipped(run: Run, report: Report) -> None:
    run.progress.skipped_samples += report.batch_size
    run.progress.open_skipped += 1
    run.timing.events.skipped += 1


def _samples(report: Report) -> str:
    return f"{report.first_sample}..{report.first_sample + report.batch_size - 1}"


def _blame(run: Run, report: Report) -> str:
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


def pipeline_metrics(run: Run, recording: Recording, batch_size: int) -> dict[str, float]:
    """The idle share of this rank's pipeline in the step just recorded; rank 0 writes
    --pipeline-timeline.
    """
    timeline = run.pipeline.timeline(
        schedule_of(run, batch_size // run.chunk, training=True), recording
    )
    if run.config.logging.pipeline_timeline is not None and run.groups.rank == 0:
        Path(run.config.logging.pipeline_timeline).write_text(timeline.to_json() + "\n")
    return {"pipeline-bubble-fraction": timeline.bubble}


def log(
    run: Run, interval: Interval, learning_rates: LearningRates, recording: Recording | None
) -> Interval:
    """Log and track one line; the next interval."""
    progress = run.progress
    now = time.perf_counter()
    seconds = (now - interval.started - interval.outside) / interval.iterations
    metrics = _metrics(run, interval, seconds) | _rate_metrics(run, learning_rates)
    if recording is not None and run.groups.pp.size > 1:
        metrics |= pipeline_metrics(run, recording, interval.last.batch_size)
    metrics |= _weight_metrics(run)
    if run.config.checkpoint.save is not None:
        metrics |= run.timing.events.goodput(progress.iteration)
    end = last_iteration(run.config, progress)
    watch = run.timing.stragglers
    if watch is not None:
        metrics |= watch.add(rows_of_ranks(interval.last.own_times, run.groups.world.size))
    line = training_line(
        progress.iteration,
        end,
        metrics,
        skipped=progress.open_skipped,
        nan=progress.open_nan,
        eta_seconds=eta_seconds(progress.iteration, end, seconds),
        more=[] if watch is None else watch.fields(metrics),
    )
    logger.info(line)
    if run.tracker is not None:
        run.tracker.log(progress.iteration, metrics)
    progress.open_loss, progress.open_steps, progress.open_skipped, progress.open_nan = 0.0, 0, 0, 0
    return Interval(time.perf_counter())


def _metrics(run: Run, interval: Interval, seconds: float) -> dict[str, float]:
    """The row of an interval of so many seconds an iteration (names and units: metrics.py)."""
    config, progress, report = run.config, run.progress, interval.last
    seq, batch, tokens = config.data.seq_length, report.batch_size, sum(report.tokens)
    loss = progress.open_loss / progress.open_steps if progress.open_steps else report.loss
    scalars = {name: value / tokens for name, value in report.scalars.items()} if tokens else {}
    return {
        "consumed_samples": progress.consumed_samples,
        "consumed-tokens": progress.consumed_samples * seq,
        "lm loss": loss,
        **scalars,
        "batch-size": batch,
        "loss-scale": report.loss_scale,
        "grad-norm": report.grad_norm,
        "skipped-train-samples": progress.skipped_samples,
        "world-size": run.groups.world.size,
        **rates(
            seconds=seconds,
            tokens=batch * seq,
            flops=flops_per_iteration(config.model, batch, seq, run.vocab_size),
            padded_flops=flops_per_iteration(config.model, batch, seq, run.padded_vocab),
            world_size=run.groups.world.size,
            peak_tflops=run.peak_tflops,
        ),
        **memory_metrics(run.device),
        **timer_metrics(
            run.timers.take(),
            iterations=interval.iterations,
            elapsed=seconds * interval.iterations,
            timing_log_level=config.logging.timing_log_level,
        ),
    }


def _rate_metrics(run: Run, learning_rates: LearningRates) -> dict[str, float]:
    """The learning rates of the last step; that of --decoupled-lr where there is one."""
    metrics = {"learning-rate": learning_rates.base}
    if run.schedule.decoupled_max_lr is not None:
        metrics["decoupled-learning-rate"] = learning_rates.decoupled
    return metrics


def _weight_metrics(run: Run) -> dict[str, float]:
    """What --log-num-zeros-in-grad and --log-params-norm ask for; all ranks take part."""
    metrics: dict[str, float] = {}
    if run.config.logging.log_num_zeros_in_grad:
        zeros = all_reduce(run.optimizer.zero_gradients(), run.groups.world)
        metrics["num-zeros"] = int(zeros.item())
    if run.config.logging.log_params_norm:
        run.zero.wait_for_weights()
        total = all_reduce(run.optimizer.squared_weight_norm(), run.groups.world)
        metrics["params-norm"] = math.sqrt(total.item())
    return metrics


def evaluate_all(run: Run, split: str) -> dict[str, float] | None:
    """Evaluate every source of a split, log and track; None when a signal cut it short."""
    sources = run.data.valid if split == "validation" else run.data.test
    losses = {}

    def tell(loss: float, bytes_per_token: float | None, label: str | None) -> None:
        logger.info(evaluation_lines(run.progress.iteration, loss, split=split, source=label))
        if run.tracker is not None:
            measured = evaluation_metrics(
                loss, split=split, source=label, bytes_per_token=bytes_per_token
            )
            run.tracker.log(
                run.progress.iteration,
                {"consumed_samples": run.progress.consumed_samples, **measured},
            )

    for name, source in sources.items():
        with (
            run.timing.events.during("evaluation", run.progress.iteration),
            run.timers("evaluation"),
        ):
            loss = evaluate(run, source, _progress_line(f"{split} {name}"))
        if loss is None:
            return None
        losses[name] = loss
        tell(loss, source.bytes_per_token, name if len(sources) > 1 else None)
    if len(sources) > 1:
        sizes = [source.bytes_per_token for source in sources.values()]
        tell(
            blended(sources, list(losses.values())),
            None if None in sizes else blended(sources, sizes),
            None,
        )
    return losses


def blended(sources: dict[str, Source], values: list[float]) -> float:
    """The mean per token of a split's blend, of values per token of its sources."""
    return sum(
        source.weight * value for source, value in zip(sources.values(), values, strict=True)
    )


def _progress_line(what: str, quiet_seconds: float = 5.0) -> Callable[[int, int], None]:
    """Reports `what: done/total, ETA` at most every quiet_seconds."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= quiet_seconds and done < total:
            last = now
            left = (now - start) / done * (total - done)
            logger.info(f" {what}: {done}/{total} samples, ETA {left:.0f} s")

    return report


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

    def every(interval: int | None) -> bool:
        return bool(interval) and iteration % interval == 0

    return Due(
        log=every(config.logging.log_interval) or end,
        evaluate=(every(config.evaluation.eval_interval) or end) and bool(run.data.valid),
        save=every(config.checkpoint.save_interval),
        save_local=every(config.checkpoint.local_save_interval),
        end=end,
    )


def _table_of_times(run: Run, batch_size: int) -> Tensor | None:
    """Of the interval that the step under way ends, for its reduction; None in all others."""
    progress, logging_config = run.progress, run.config.logging
    logs = (progress.iteration + 1) % logging_config.log_interval == 0
    if (
        not logging_config.log_straggler
        or run.groups.world.size == 1
        or not (logs or finished(run.config, progress, (1, batch_size)))
    ):
        return None
    return run.timing.own_times.table()


def train_step(
    run: Run, pending: StepHandle | None, interval: Interval
) -> tuple[StepHandle, LearningRates, Recording | None]:
    """One step: its report on its way, its learning rates, and the times of its passes where there
    is a pipeline. `pending`: the report of the step before, which is taken in on the way.
    """
    config, progress = run.config, run.progress
    batch_size = global_batch_size_at(progress.consumed_samples, config)
    if run.scaler.dynamic:  # this backward's scale depends on the last step's verdict
        finish_step(run, pending, interval)
        pending = None
    loss_scale = run.scaler.scale
    times_ranks = config.logging.log_straggler and run.groups.world.size > 1
    recording = Recording(run.device) if run.groups.pp.size > 1 or times_ranks else None
    gradients = forward_backward(
        run,
        first_sample=progress.consumed_samples,
        batch_size=batch_size,
        loss_scale=loss_scale,
        recording=recording,
    )
    finish_step(run, pending, interval)
    if times_ranks:
        run.timing.own_times.end_lap(recording)
    clock = progress.scheduled_samples + batch_size
    learning_rates = run.schedule.learning_rates(clock)
    with run.timers("optimizer"), run.timing.own_times.optimizer():
        pending = update(
            run,
            gradients,
            rates=learning_rates,
            weight_decay=run.schedule.weight_decay(clock),
            own_times=_table_of_times(run, batch_size),
        )
    progress.iteration += 1
    progress.consumed_samples += batch_size
    return pending, learning_rates, recording


def _pause(run: Run, due: Due, exit_now: Exit | None) -> Exit | None:
    """What comes between two steps: evaluation and checkpoint. The reason to stop, if there is one
    by now.
    """
    if due.evaluate:
        run.progress.evaluation_due = (
            run.exits.agree(run.groups.world, run.device) or evaluate_all(run, "validation") is None
        )
        exit_now = exit_now or run.exits.check(run.progress.iteration)
    if due.save or due.end or exit_now:
        save(run)
    elif due.save_local:
        save_local(run)
    return exit_now


def train(run: Run) -> Exit:
    """Train until the run ends or an exit condition holds; a checkpoint is written before returning
    (with --save), or the exit code is 1.
    """
    config, progress = run.config, run.progress
    interval, pending = Interval(time.perf_counter()), None
    run.timing.own_times.begin()
    while not finished(config, progress):
        PEERS.iteration = progress.iteration + 1
        pending, learning_rates, recording = train_step(run, pending, interval)
        iteration, due = progress.iteration, due_after(run)
        if any(due) or pending.is_here or run.exits.check(iteration):
            finish_step(run, pending, interval)
            pending = None
        # on a GPU a signal is seen one iteration late, by all ranks in the same one
        exit_now = run.exits.check(iteration)
        run.timing.events.step(iteration)
        if run.lease is not None:
            run.lease.check()
        with run.timing.own_times.outside():
            if due.log:
                interval = log(run, interval, learning_rates, recording)
            paused = time.perf_counter()
            exit_now = _pause(run, due, exit_now)
            interval.outside += time.perf_counter() - paused
        if exit_now and (progress.evaluation_due or not due.end):
            return (
                exit_now
                if finalize(run)
                else Exit(f"{exit_now.reason}, but the last save failed", 1)
            )
    return Exit(COMPLETE, 0 if finalize(run) else 1)
