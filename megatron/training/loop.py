"""The training loop: straight-line, from the first line to the last.

Called from training/pretrain.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.config.groups import Config
from megatron.config.stages import frozen_units
from megatron.data.loader import Source
from megatron.distributed.collectives import all_reduce
from megatron.distributed.peers import PEERS
from megatron.model.arithmetic import flops_per_iteration, iterations_for
from megatron.model.gpt import layer_names
from megatron.observe.console import evaluation_lines, training_line
from megatron.observe.expert_load import load_metrics
from megatron.observe.metrics import (
    eta_seconds,
    evaluation_metrics,
    memory_metrics,
    rates,
    timer_metrics,
)
from megatron.optimizer.lr_schedule import LearningRates
from megatron.parallel.recording import Recording
from megatron.parallel.timeline import Timeline
from megatron.training.checkpointing import finalize, save, save_local
from megatron.training.evaluate import evaluate, write_sample
from megatron.training.exit import Exit
from megatron.training.garbage import collect_after, collected_evaluation, manual_collection
from megatron.training.passes import schedule_of
from megatron.training.run import Progress, Run, finished
from megatron.training.step import (
    PendingStep,
    StepMetrics,
    non_finite_micro_batches,
    train_step,
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
    last: StepMetrics | None = None


def last_iteration(config: Config, progress: Progress) -> int:
    """The iteration at which the run ends; under --train-samples counted through the batch-size
    ramp-up.
    """
    if config.training.train_iters is not None:
        return config.training.train_iters
    return progress.iteration + iterations_for(
        config.training.train_samples, config, progress.consumed_samples
    )


def finish_step(run: Run, pending: PendingStep | None, interval: Interval) -> None:
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


def _count_skipped(run: Run, report: StepMetrics) -> None:
    run.progress.skipped_samples += report.batch_size
    run.progress.open_skipped += 1
    run.timing.events.skipped += 1


def _samples(report: StepMetrics) -> str:
    return f"{report.first_sample}..{report.first_sample + report.batch_size - 1}"


def _blame(run: Run, report: StepMetrics) -> str:
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


def pipeline_timeline(run: Run, recording: Recording, batch_size: int) -> Timeline:
    """The step just recorded, of this rank's pipeline; rank 0 writes --pipeline-timeline."""
    schedule = schedule_of(run, batch_size // run.chunk, training=True)
    timeline = recording.timeline(schedule, run.groups.pp)
    if run.config.logging.pipeline_timeline is not None and run.groups.rank == 0:
        Path(run.config.logging.pipeline_timeline).write_text(timeline.to_json() + "\n")
    return timeline


def _show(run: Run, timeline: Timeline) -> None:
    """The picture of a time line, where the tracker wants it."""
    title = f"{timeline.schedule}, the step of iteration {run.progress.iteration}"
    last = finished(run.config, run.progress)
    page = partial(run.advisor.draw_timeline, title, timeline)
    run.tracker.show("pipeline-timeline", page, last=last)


def log(
    run: Run, interval: Interval, learning_rates: LearningRates, recording: Recording | None
) -> Interval:
    """Log and track one line; the next interval."""
    progress = run.progress
    now = time.perf_counter()
    seconds = (now - interval.started - interval.outside) / interval.iterations
    metrics = _metrics(run, interval, seconds) | _rate_metrics(run, learning_rates)
    timeline = None
    if recording is not None and run.groups.pp.size > 1:
        timeline = pipeline_timeline(run, recording, interval.last.batch_size)
        metrics["pipeline-bubble-fraction"] = timeline.bubble
    metrics |= _weight_metrics(run) | _layer_norms(run, interval.last)
    metrics |= _timing_metrics(run, interval.last)
    end = last_iteration(run.config, progress)
    watch = run.timing.stragglers
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
    run.starving.look(interval.last.counts, progress.iteration)
    if run.tracker is not None:
        run.tracker.log(progress.iteration, metrics)
        if timeline is not None:
            _show(run, timeline)
    progress.open_loss, progress.open_steps, progress.open_skipped, progress.open_nan = 0.0, 0, 0, 0
    return Interval(time.perf_counter())


def _timing_metrics(run: Run, report: StepMetrics) -> dict[str, float]:
    """Goodput, and which rank keeps the others waiting."""
    metrics: dict[str, float] = {}
    if run.config.checkpoint.save is not None:
        metrics |= run.timing.events.goodput(run.progress.iteration)
    watch = run.timing.stragglers
    if watch is not None:
        metrics |= watch.add(rows_of_ranks(report.rank_times, run.groups.world.size))
    return metrics


def _consumed(run: Run) -> dict[str, float]:
    """How far the run is: the x axes of its metrics."""
    samples = run.progress.consumed_samples
    return {
        "consumed_samples": samples,
        "consumed-tokens": samples * run.config.data.seq_length,
    }


def _metrics(run: Run, interval: Interval, seconds: float) -> dict[str, float]:
    """The row of an interval with this time per iteration (names and units: metrics.py)."""
    config, progress, report = run.config, run.progress, interval.last
    seq, batch = config.data.seq_length, report.batch_size
    loss = progress.open_loss / progress.open_steps if progress.open_steps else report.loss
    # layers add up over all tokens, whatever the loss leaves out
    scalars = {name: value / (batch * seq) for name, value in report.scalars.items()}
    return {
        **_consumed(run),
        "lm loss": loss,
        **scalars,
        **load_metrics(report.counts, config.logging.moe_per_layer_logging),
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
        **_prediction(run, batch),
        **memory_metrics(run.device),
        **timer_metrics(
            run.timers.take(),
            iterations=interval.iterations,
            elapsed=seconds * interval.iterations,
            timing_log_level=config.logging.timing_log_level,
        ),
    }


def _prediction(run: Run, batch: int) -> dict[str, float]:
    """Seconds of an iteration by the plan, which is made for the whole global batch."""
    seconds = None if run.forecast is None else run.forecast.step_seconds
    if seconds is None or batch != run.config.training.global_batch_size:
        return {}
    return {"predicted-iteration-time": seconds}


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


def _layer_norms(run: Run, report: StepMetrics) -> dict[str, float]:
    """What --log-layer-norms asks for, of the last step's gradient and the weights after it; all
    ranks take part in one sum. A frozen layer has no gradient, and a tied head no weights of its
    own.
    """
    if report.layer_grad_sq_sums is None:
        return {}
    run.zero.wait_for_weights()
    squares = torch.stack([report.layer_grad_sq_sums, run.optimizer.layer_weight_sq_sums()])
    gradients, weights = all_reduce(squares, run.groups.world).sqrt().tolist()
    model, frozen = run.config.model, frozen_units(run.config)
    names = layer_names(model)
    if not model.untie_embeddings_and_output_weights:
        names.remove("head")
    trained = {f"grad-norm/{n}": v for n, v in zip(names, gradients) if n not in frozen}
    return trained | {f"params-norm/{name}": value for name, value in zip(names, weights)}


def evaluate_all(run: Run, split: str) -> dict[str, float] | None:
    """Evaluate every source of a split, log and track; None when a signal cut it short."""
    sources = run.data.valid if split == "validation" else run.data.test
    losses = {}

    def log_sample(loss: float, bytes_per_token: float | None, label: str | None) -> None:
        logger.info(evaluation_lines(run.progress.iteration, loss, split=split, source=label))
        if run.tracker is not None:
            measured = evaluation_metrics(
                loss, split=split, source=label, bytes_per_token=bytes_per_token
            )
            run.tracker.log(run.progress.iteration, {**_consumed(run), **measured})

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

    evaluation, checkpoint = config.evaluation, config.checkpoint
    return Due(
        log=end or iteration % config.logging.log_interval == 0,
        evaluate=(end or every(evaluation.eval_interval)) and bool(run.data.valid),
        save=every(checkpoint.save_interval),
        save_local=every(checkpoint.local_save_interval),
        end=end,
    )


def _evaluate_and_save(
    run: Run, interval: Interval, due: Due, exit_now: Exit | None
) -> Exit | None:
    """Evaluation and checkpoints between two steps, outside of the interval's time. The reason to
    stop, if there is one now.
    """
    paused = time.perf_counter()
    if due.evaluate:
        with collected_evaluation(run.config.training):
            run.progress.evaluation_due = (
                run.exits.agree(run.groups.world, run.device)
                or evaluate_all(run, "validation") is None
            )
        exit_now = exit_now or run.exits.check(run.progress.iteration)
    if due.save or due.end or exit_now:
        save(run)
    elif due.save_local:
        save_local(run)
    interval.outside += time.perf_counter() - paused
    return exit_now


def _between_steps(
    run: Run, interval: Interval, step: PendingStep, due: Due, exit_now: Exit | None
) -> tuple[Interval, Exit | None]:
    """Log, evaluate and save what is due; the interval that continues, and the reason to stop."""
    if due.log:
        interval = log(run, interval, step.learning_rates, step.result.recording)
    if exit_now or due.evaluate or due.save or due.save_local or due.end:
        exit_now = _evaluate_and_save(run, interval, due, exit_now)
    collect_after(run.progress.iteration, run.config.training)
    return interval, exit_now


def _end(run: Run, reason: Exit) -> Exit:
    """Wait for the last save; the reason to exit, with code 1 when it failed."""
    return reason if finalize(run) else Exit(f"{reason.reason}, but the last save failed", 1)


def train(run: Run) -> Exit:
    """Train until the run ends or an exit condition holds; a checkpoint is written before returning
    (with --save), or the exit code is 1.
    """
    config, progress, timer = run.config, run.progress, run.timing.rank_timer
    interval, pending = Interval(time.perf_counter()), None

    def finish_previous() -> None:
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
            pending = step = train_step(run, finish_previous)
            iteration, due = progress.iteration, due_after(run)

            # 2. The outcome is read now, if it is here or something below needs it.
            if any(due) or step.scalars.is_here or run.exits.check(iteration):
                finish_previous()
            # on a GPU a signal is seen one iteration late, by all ranks in the same one
            exit_now = run.exits.check(iteration)
            run.timing.events.step(iteration)
            if run.lease is not None:
                run.lease.check()

            # 3. Console line, evaluation and checkpoint: no part of a rank's compute time.
            if any(due) or exit_now or config.training.manual_gc:
                with nullcontext() if timer is None else timer.outside():
                    interval, exit_now = _between_steps(run, interval, step, due, exit_now)
            if exit_now and (progress.evaluation_due or not due.end):
                return _end(run, exit_now)
        return Exit(COMPLETE, 0 if finalize(run) else 1)
