"""Batch sizes, learning rates and weight decay as pure functions of samples.

Iteration i uses the value at the samples consumed *including* it, so the printed rate is the one
used and the first step is not wasted at a rate of zero; a skipped step does not advance `samples`.
Shapes and edge cases follow Megatron-LM's schedules.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatron.config.batch_schedule import batch_steps
from megatron.config.groups import FINAL_DECAYS, LR_DECAYS, WEIGHT_DECAY_CHANGES, Config


class StepRates(NamedTuple):
    """The learning rates and the weight decay of one step."""

    base: float
    decoupled: float  # of tensors that declare `decoupled_lr`; without --decoupled-lr the base
    weight_decay: float


@dataclass(frozen=True)
class ParamSchedule:
    """The schedules of a run; all lengths in samples."""

    max_lr: float
    min_lr: float
    init_lr: float
    warmup: float
    decay: float
    style: str
    wsd_style: str
    wsd_decay: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    weight_decay_length: float
    # of tensors that declare `decoupled_lr`; None without --decoupled-lr
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None

    @classmethod
    def of(cls, config: Config) -> ParamSchedule:
        """Read a resolved configuration; lengths in iterations are turned into samples through the
        batch-size ramp-up.
        """
        opt, training = config.optimizer, config.training
        warmup: float
        if training.train_iters is not None:
            run, decay = (
                samples_after(iters, config)
                for iters in (training.train_iters, opt.lr_decay_iters or training.train_iters)
            )
            warmup = samples_after(opt.lr_warmup_iters, config)
            wsd_decay = decay - samples_after(
                (opt.lr_decay_iters or 0) - (opt.lr_wsd_decay_iters or 0), config
            )
        else:
            run, decay = training.train_samples, opt.lr_decay_samples or training.train_samples
            warmup, wsd_decay = opt.lr_warmup_samples, opt.lr_wsd_decay_samples or 0
        if opt.lr_warmup_fraction is not None:
            warmup = opt.lr_warmup_fraction * decay
        constant = opt.weight_decay_incr_style == "constant"
        decoupled_min_lr = opt.min_lr if opt.decoupled_min_lr is None else opt.decoupled_min_lr
        return cls(
            max_lr=opt.lr,
            min_lr=opt.min_lr,
            init_lr=opt.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=opt.lr_decay_style,
            wsd_style=opt.lr_wsd_decay_style,
            wsd_decay=wsd_decay,
            start_weight_decay=opt.weight_decay if constant else opt.start_weight_decay,
            end_weight_decay=opt.weight_decay if constant else opt.end_weight_decay,
            weight_decay_style=opt.weight_decay_incr_style,
            weight_decay_length=run,
            decoupled_max_lr=opt.decoupled_lr,
            decoupled_min_lr=None if opt.decoupled_lr is None else decoupled_min_lr,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: all that is given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def rates(self, samples: int) -> StepRates:
        """Learning rates and weight decay of the step that brings the run to `samples`."""
        base = decoupled = self.learning_rate(samples)
        if self.decoupled_max_lr is not None:
            # The same shape between other ends.
            ends = replace(self, max_lr=self.decoupled_max_lr, min_lr=self.decoupled_min_lr)
            decoupled = ends.learning_rate(samples)
        share = CHANGES[self.weight_decay_style](min(samples / self.weight_decay_length, 1.0))
        change = (self.end_weight_decay - self.start_weight_decay) * share
        return StepRates(base, decoupled, self.start_weight_decay + change)

    def learning_rate(self, samples: int) -> float:
        """Learning rate of the step that brings the run to `samples`, but for tensors that declare
        `decoupled_lr`.
        """
        # Warm-up, then the style's shape, then the minimum, in the order of Megatron-LM's tests.
        if self.warmup > 0 and samples <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup
        if LR_DECAYS[self.style] and samples > self.decay:
            return self.min_lr
        return DECAYS[self.style](self, samples)


# ---------------------------------------------------------------- shapes, by the choices of flags

Shape = Callable[[float], float]  # ratio of a length, 0 to 1 -> share of the way between two values


def _cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1)


def _between(shape: Shape) -> Callable[[ParamSchedule, int], float]:
    """A decay from the end of the warm-up on."""

    def rate(schedule: ParamSchedule, samples: int) -> float:
        length = max(schedule.decay - schedule.warmup, 1)
        share = shape((samples - schedule.warmup) / length)
        return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * share

    return rate


def _inverse_square_root(schedule: ParamSchedule, samples: int) -> float:
    share = math.sqrt(max(schedule.warmup, 1) / max(samples, 1))
    return max(schedule.min_lr, schedule.max_lr * share)


def _wsd(schedule: ParamSchedule, samples: int) -> float:
    """Warm-up, stable, decay."""
    start = schedule.decay - schedule.wsd_decay
    if samples <= start:
        return schedule.max_lr
    share = FINAL[schedule.wsd_style]((samples - start) / schedule.wsd_decay)
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * share


# --lr-decay-style: the rate after the warm-up, and before the end of a decay
DECAYS: dict[str, Callable[[ParamSchedule, int], float]] = {
    "constant": lambda schedule, samples: schedule.max_lr,
    "linear": _between(lambda ratio: 1 - ratio),
    "cosine": _between(_cosine),
    "inverse-square-root": _inverse_square_root,
    "WSD": _wsd,
}
# --lr-wsd-decay-style
FINAL: dict[str, Shape] = {
    "exponential": lambda ratio: 2 * 0.5**ratio - 1,
    "linear": lambda ratio: 1 - ratio,
    "cosine": _cosine,
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}
# --weight-decay-incr-style
CHANGES: dict[str, Shape] = {
    "constant": lambda ratio: 0.0,
    "linear": lambda ratio: ratio,
    "cosine": lambda ratio: _cosine(1 - ratio),
}


def check_tables() -> None:
    """Raises KeyError for a choice of a flag without a function, or a function without a choice."""
    for flag, choices, functions in (
        ("--lr-decay-style", LR_DECAYS, DECAYS),
        ("--lr-wsd-decay-style", FINAL_DECAYS, FINAL),
        ("--weight-decay-incr-style", WEIGHT_DECAY_CHANGES, CHANGES),
    ):
        # At import, so that an incomplete entry is found before a run is.
        if incomplete := sorted(set(choices) ^ set(functions)):
            raise KeyError(
                f"{flag} {incomplete[0]}: needs an entry in config/groups.py and a function in "
                "optimizer/lr_schedule.py"
            )


check_tables()


# ---------------------------------------------------------------- batch sizes


def global_batch_size_at(consumed: int, config: Config) -> int:
    """Samples of the step that starts after `consumed` samples, see batch_steps."""
    steps = batch_steps(config.training, config.data.seq_length)
    return next(size for first, size in reversed(steps) if first <= consumed)


def _stages(config: Config, consumed: int) -> Iterator[tuple[int, int, int]]:
    """(samples before, batch size, steps of that size), from `consumed` on; the last size has no
    end.
    """
    steps = batch_steps(config.training, config.data.seq_length)
    for (_, size), (end, _) in pairwise(steps):
        if consumed < end:  # the last step of a size may pass over whole stages
            count = -(-(end - consumed) // size)
            yield consumed, size, count
            consumed += count * size
    yield consumed, steps[-1][1], sys.maxsize


def iterations_for(samples: int, config: Config, consumed: int = 0) -> int:
    """Steps that bring a run from `consumed` to at least `samples` samples."""
    # Full steps of each batch size; the last of all may consume more than is asked for.
    return sum(
        min(-(-max(samples - before, 0) // size), steps)
        for before, size, steps in _stages(config, consumed)
    )


def samples_after(iterations: int, config: Config) -> int:
    """Samples consumed by the first `iterations` steps of a run, through all batch sizes."""
    samples = 0
    for _, size, steps in _stages(config, 0):
        count = min(iterations, steps)
        samples += count * size
        iterations -= count
    return samples


def last_iteration(config: Config, iteration: int = 0, consumed_samples: int = 0) -> int:
    """The iteration at which a run with these counts ends; under --train-samples counted through
    the batch-size ramp-up.
    """
    if config.training.train_iters is not None:
        return config.training.train_iters
    return iteration + iterations_for(config.training.train_samples, config, consumed_samples)


def finished(config: Config, iteration: int, consumed_samples: int) -> bool:
    """Whether a run with these counts has reached --train-iters or --train-samples."""
    # Only one of the two flags can be given.
    if config.training.train_iters is not None:
        return iteration >= config.training.train_iters
    return consumed_samples >= config.training.train_samples
