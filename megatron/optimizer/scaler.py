"""Loss scaling for fp16: dynamic as in Megatron-LM, or constant."""

from __future__ import annotations

from megatron.config.groups import PrecisionConfig

LARGEST = 2.0**127  # the largest power of two in fp32


class LossScaler:
    """Halves at the `hysteresis`-th overflow since it last doubled, in a row or not, and at every
    one after that; doubles after `loss_scale_window` clean steps in a row. Megatron-LM's rule.
    Constant 1 unless fp16.
    """

    def __init__(self, config: PrecisionConfig):
        self.config = config
        self.dynamic = config.fp16 and config.loss_scale is None
        self.scale = config.initial_loss_scale if self.dynamic else (config.loss_scale or 1.0)
        self.clean_steps, self.hysteresis = 0, config.hysteresis

    def can_lower(self) -> bool:
        """Whether a smaller scale may cure an overflow; otherwise it is a real NaN or Inf."""
        return self.dynamic and self.scale > self.config.min_loss_scale

    def update(self, overflow: bool) -> None:
        """Account for one step of a dynamic scale."""
        assert self.dynamic
        # An overflow: the step was skipped on every rank, as they share the norm.
        if overflow:
            self.clean_steps, self.hysteresis = 0, self.hysteresis - 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.config.min_loss_scale)
            return
        # A clean step: after a whole window of them a larger scale is tried.
        self.clean_steps += 1
        if self.clean_steps == self.config.loss_scale_window:
            self.clean_steps, self.hysteresis = 0, self.config.hysteresis
            self.scale = min(self.scale * 2, LARGEST)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, float]) -> None:
        """Take a checkpoint's state; a constant scale stays what the flags specify."""
        if self.dynamic:
            self.scale = state["scale"]
            self.clean_steps, self.hysteresis = int(state["clean_steps"]), int(state["hysteresis"])
