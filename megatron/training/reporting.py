"""The console line of an interval, and what trackers record of it.

What a line needs of other ranks is summed here: all ranks call `log` in the same iterations.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron.config.stages import frozen_units
from megatron.distributed.collectives import all_reduce
from megatron.model.arithmetic import flops_per_iteration
from megatron.model.gpt import layer_names
from megatron.observe.console import training_line
from megatron.observe.metrics import expert_load_metrics, memory_metrics, rates, timer_metrics
from megatron.optimizer.lr_schedule import last_iteration
from megatron.parallel.timeline import Timeline
from megatron.training.run import Run
from megatron.training.step import PendingStep, StepMetrics

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """What this process knows of the time since the last console line; sums of losses are in
    Progress, which checkpoints keep.
    """

    started: float
    iterations: int = 0
    samples: int = 0
    outside: float = 0.0  # seconds of evaluation and checkpoints, which are no part of an iteration
    last: StepMetrics | None = None  # of the last step that was read
    pending: PendingStep | None = None  # the last step, until its outcome is read

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block from that of iterations. Not to be nested."""
        begun = time.perf_counter()
        yield
        self.outside += time.perf_counter() - begun


def log(run: Run, interval: Interval) -> Interval:
    """Log and track one line; the next interval."""
    progress, step = run.progress, interval.last
    # 1. The time of an iteration, without evaluations and checkpoints.
    now = time.perf_counter()
    seconds = (now - interval.started - interval.outside) / interval.iterations
    metrics = _metrics(run, interval, seconds)
    if run.schedule.decoupled_max_lr is not None:
        metrics["decoupled-learning-rate"] = step.rates.decoupled
    # During a ramp-up of the batch size the forecast is of another batch.
    prediction = None if run.forecast is None else run.forecast.prediction
    if prediction and step.batch.size == run.config.training.global_batch_size:
        metrics["predicted-iteration-time"] = prediction["step_s"]
    if run.config.checkpoint.save is not None:
        metrics |= run.timing.events.goodput(progress.iteration)
    # 2. What all ranks of a pipeline, or of the world, give together.
    metrics |= _metrics_of_all_ranks(run, step)
    # 3. The line of the console, and the trackers' row.
    end = last_iteration(run.config, progress.iteration, progress.consumed_samples)
    watch = run.timing.stragglers
    line = training_line(
        progress.iteration,
        end,
        metrics,
        skipped=progress.open_skipped,
        nan=progress.open_nan,
        eta_seconds=max(0, end - progress.iteration) * seconds,  # without evaluations and saves
        more=[] if watch is None else watch.fields(metrics),
    )
    logger.info(line)
    run.tracker.log(progress.iteration, metrics)
    # 4. The next interval begins; what is open is saved with a checkpoint that comes between lines.
    progress.open_loss = 0.0
    progress.open_steps = progress.open_skipped = progress.open_nan = 0
    return Interval(time.perf_counter())


def _metrics(run: Run, interval: Interval, seconds: float) -> dict[str, float]:
    """The row of an interval with this time per iteration (names and units: metrics.py)."""
    config, progress, step = run.config, run.progress, interval.last
    seq, batch, world_size = config.data.seq_length, step.batch, run.groups.world.size
    loss = progress.open_loss / progress.open_steps if progress.open_steps else step.loss
    # layers add up over all tokens, whatever the loss leaves out
    scalars = {
        n: sums[0] / batch.nominal_tokens for n, sums in step.scalars.items() if len(sums) == 1
    }
    mean_batch = interval.samples / interval.iterations
    return {
        **consumed(run),
        "lm loss": loss,
        **scalars,
        **expert_load_metrics(step.scalars, config.logging.moe_per_layer_logging),
        "learning-rate": step.rates.base,
        "batch-size": batch.size,
        "loss-scale": batch.loss_scale,
        "grad-norm": step.grad_norm,
        "skipped-train-samples": progress.skipped_samples,
        "world-size": world_size,
        **rates(
            seconds=seconds,
            tokens=mean_batch * seq,
            flops=flops_per_iteration(config.model, mean_batch, seq, run.tokenizer.vocab_size),
            padded_flops=flops_per_iteration(config.model, mean_batch, seq, run.padded_vocab),
            world_size=world_size,
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


def _metrics_of_all_ranks(run: Run, step: StepMetrics) -> dict[str, float]:
    """Bubbles, gradients, weights and slow ranks; all ranks take part."""
    metrics = _layer_norms(run, step)
    if run.groups.pp.size > 1:
        metrics["pipeline-bubble-fraction"] = pipeline_timeline(run).bubble
    if run.timing.stragglers is not None:
        table = np.reshape(step.rank_times, (run.groups.world.size, -1))
        metrics |= run.timing.stragglers.add(table)
    if run.config.logging.log_num_zeros_in_grad:
        # The gradients of the last step are still there: the optimizer keeps them under this flag.
        zeros = all_reduce(run.optimizer.count_zero_gradients(), run.groups.world)
        metrics["num-zeros"] = int(zeros.item())
    if run.config.logging.log_params_norm:
        run.zero.wait_for_weights()
        total = all_reduce(run.optimizer.squared_weight_norm(), run.groups.world)
        metrics["params-norm"] = math.sqrt(total.item())
    return metrics


def _layer_norms(run: Run, step: StepMetrics) -> dict[str, float]:
    """What --log-layer-norms asks for, of the last step's gradient and the weights after it; all
    ranks take part in one sum. A frozen layer has no gradient, and a tied head no weights.
    """
    if step.layer_grad_sq_sums is None:
        return {}
    run.zero.wait_for_weights()
    # One all-reduce for both, of as many numbers as there are layers.
    squares = torch.stack([step.layer_grad_sq_sums, run.optimizer.layer_weight_sq_sums()])
    gradients, weights = all_reduce(squares, run.groups.world).sqrt().tolist()
    model, frozen = run.config.model, frozen_units(run.config)
    names = layer_names(model)
    if not model.untie_embeddings_and_output_weights:
        names.remove("head")
    trained = {f"grad-norm/{n}": v for n, v in zip(names, gradients) if n not in frozen}
    return trained | {f"params-norm/{name}": value for name, value in zip(names, weights)}


def consumed(run: Run) -> dict[str, float]:
    """How far the run is: the x axes of its metrics."""
    samples = run.progress.consumed_samples
    return {
        "consumed_samples": samples,
        "consumed-tokens": samples * run.config.data.seq_length,
    }


def pipeline_timeline(run: Run) -> Timeline:
    """The step just recorded, of this rank's pipeline; rank 0 writes --pipeline-timeline."""
    # A collective of the pipeline; rows of other data-parallel ranks are not shown.
    timeline = run.timing.recording.timeline(run.groups.pp)
    file = run.config.logging.pipeline_timeline
    if file is not None and run.groups.rank == 0:
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(timeline.to_json() + "\n")
        except OSError as error:  # a picture is no reason to stop training
            logger.warning(f"--pipeline-timeline {file}: not written: {error}")
    return timeline
