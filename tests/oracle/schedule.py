"""Batch size, learning rate, weight decay and loss scale of each step, from their definitions in
docs/numerics.md.
"""

from __future__ import annotations

import math
from argparse import Namespace


def batch_size(c: Namespace, consumed: int) -> int:
    """Samples of the step that begins after that number: the ramp grows by its increment in equal
    stretches of samples.
    """
    if c.rampup is None:
        return c.global_batch_size
    start, increment, samples = c.rampup
    if consumed >= samples:
        return c.global_batch_size
    stretches = (c.global_batch_size - start) // increment
    return start + increment * (consumed * stretches // samples)


def samples_of(c: Namespace, iterations: int) -> int:
    """Samples of a run's first iterations."""
    consumed = 0
    for _ in range(iterations):
        consumed += batch_size(c, consumed)
    return consumed


class Schedule:
    """Learning rate and weight decay of the step that brings a run to `samples`. All lengths are in
    samples.
    """

    def __init__(self, c: Namespace):
        self.c = c
        if c.train_iters:
            decay_iters = c.lr_decay_iters or c.train_iters
            self.run, self.decay, self.warmup = (
                samples_of(c, n) for n in (c.train_iters, decay_iters, c.lr_warmup_iters)
            )
            self.stable = samples_of(
                c, decay_iters - (c.lr_wsd_decay_iters or 0)
            )  # where the decay of WSD begins
        else:
            self.run, self.decay, self.warmup = (
                c.train_samples,
                c.lr_decay_samples or c.train_samples,
                c.lr_warmup_samples,
            )
            self.stable = self.decay - (c.lr_wsd_decay_samples or 0)
        if c.lr_warmup_fraction is not None:
            self.warmup = c.lr_warmup_fraction * self.decay

    def learning_rate(self, samples: int) -> float:
        return self.between(samples, self.c.lr, self.c.min_lr)

    def decoupled_learning_rate(self, samples: int) -> float | None:
        """Of the word embedding and the head's matrix; None where they have no separate one."""
        c = self.c
        if c.decoupled_lr is None:
            return None
        least = c.min_lr if c.decoupled_min_lr is None else c.decoupled_min_lr
        return self.between(samples, c.decoupled_lr, least)

    def between(self, samples: int, most: float, least: float) -> float:
        c = self.c
        if samples <= self.warmup and self.warmup > 0:
            return c.lr_warmup_init + (most - c.lr_warmup_init) * samples / self.warmup
        if c.lr_decay_style == "constant":
            return most
        if samples > self.decay:
            return least
        if c.lr_decay_style == "inverse-square-root":
            return max(least, most * math.sqrt(max(self.warmup, 1) / samples))
        if c.lr_decay_style == "WSD":
            if samples <= self.stable:
                return most
            share = wsd(c.lr_wsd_decay_style, (samples - self.stable) / (self.decay - self.stable))
        else:
            done = (samples - self.warmup) / (self.decay - self.warmup)
            share = 1 - done if c.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
        return least + share * (most - least)

    def weight_decay(self, samples: int) -> float:
        c = self.c
        if c.weight_decay_incr_style == "constant":
            return c.weight_decay
        done = min(1.0, samples / self.run)
        share = (
            done
            if c.weight_decay_incr_style == "linear"
            else (1 + math.cos(math.pi * (1 - done))) / 2
        )
        return c.start_weight_decay + share * (c.end_weight_decay - c.start_weight_decay)


def wsd(style: str, done: float) -> float:
    """The share of the learning rate that remains after this share of the final decay."""
    if style == "linear":
        return 1 - done
    if style == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if style == "exponential":
        return 2 * 0.5**done - 1
    return 1 - math.sqrt(done)


class LossScale:
    """Dynamic in fp16. Every overflow uses up one of `hysteresis`; with none left each halves the
    scale. `window` clean steps in a row double the scale and restore the hysteresis.
    """

    def __init__(self, c: Namespace):
        self.c, self.dynamic = c, c.fp16 and c.loss_scale is None
        self.value = c.initial_loss_scale if self.dynamic else c.loss_scale or 1.0
        self.left, self.clean = c.hysteresis, 0

    def at_minimum(self) -> bool:
        return not self.dynamic or self.value <= self.c.min_loss_scale

    def after(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self.clean, self.left = 0, self.left - 1
            if self.left <= 0:
                self.value = max(self.value / 2, self.c.min_loss_scale)
        else:
            self.clean += 1
            if self.clean == self.c.loss_scale_window:
                self.value, self.left, self.clean = self.value * 2, self.c.hysteresis, 0
