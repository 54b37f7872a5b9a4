"""Learning rates and weight decay as pure functions of samples.

Iteration i uses the value at the samples consumed *including* it, so the printed rate is the one
used and the first step is not wasted at a rate of zero; a skipped step does not advance `samples`.
Shapes and edge cases follow Megatron-LM's schedules. Made by training/prepare.py; called from
training/loop.py, once a step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from megatron.config.groups import Config
from megatron.model.arithmetic import samples_after
from megatron.model.spec import Multipliers


class LearningRates(NamedTuple):
    """The learning rates of one step."""

    base: float
    decoupled: float  # of tensors that declare `decoupled_lr`; without --decoupled-lr the base

    def of(self, multipliers: Multipliers) -> float:
        """The rate of a tensor that declares these."""
        return (self.decoupled if multipliers.decoupled_lr else self.base) * multipliers.lr


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
            run, decay = training.train_samples, opt.lr_decay_samples
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

    def learning_rates(self, samples: int) -> LearningRates:
        """Learning rates of the step that brings the run to `samples`."""
        base = self.learning_rate(samples)
        if self.decoupled_max_lr is None:
            return LearningRates(base, base)
        ends = replace(self, max_lr=self.decoupled_max_lr, min_lr=self.decoupled_min_lr)
        return LearningRates(base, ends.learning_rate(samples))

    def learning_rate(self, samples: int) -> float:
        """Learning rate of the step that brings the run to `samples`, but for tensors that declare
        `decoupled_lr`.
        """
        if self.warmup > 0 and samples <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(samples, 1)))
        if self.style == "WSD":
            start = self.decay - self.wsd_decay
            if samples <= start:
                return self.max_lr
            return self.min_lr + (self.max_lr - self.min_lr) * _WSD[self.wsd_style](
                (samples - start) / self.wsd_decay
            )
        ratio = (samples - self.warmup) / max(self.decay - self.warmup, 1)
        share = 1 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return self.min_lr + (self.max_lr - self.min_lr) * share

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that brings the run to `samples`."""
        ratio = min(samples / self.weight_decay_length, 1.0)
        share = (
            ratio
            if self.weight_decay_style != "cosine"
            else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        )
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * share


_WSD = {
    "linear": lambda ratio: 1 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1),
    "exponential": lambda ratio: 2 * 0.5**ratio - 1,
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}
