"""What a run asks of programs outside of the trainer: the planner, the exporters and the reports.

pretrain_gpt.py hands a run the advisor of tools/ (tools/_advisor.py). With the one of this file a
run trains the same numbers; its banner has no plan, --memory-budget is refused, and the logged
goodput begins at the present start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig
from megatron.distributed.groups import Groups


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits into memory. `word`: "fits" (without the device's reserve), "tight" (only
    with it) or "does not fit"; `line` gives the reason.
    """

    word: str
    line: str


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and time of a run.

    `sections`: lines of the banner by section. `verdict`: None where no GPU is planned for.
    `prediction`: of the step's time (`step_s`), for the record of the run; None on an unknown
    device.
    """

    sections: dict[str, list[str]] = field(default_factory=dict)
    verdict: Verdict | None = None
    prediction: dict[str, Any] | None = None


class Advisor:
    """The trainer alone: no predictions and no advice. tools/_advisor.py overrides every method."""

    def choose_recompute(
        self, config: Config, vocab_size: int, world_size: int, device: str
    ) -> tuple[Config, list[str]]:
        """The configuration with --recompute-layers chosen for --memory-budget, and the reasons.
        Raises UserError when nothing fits.
        """
        # A budget without a planner would be ignored silently: refuse it.
        if config.training.memory_budget is not None:
            raise UserError(
                "--memory-budget needs the planner of tools/, which is not installed; set "
                "--recompute-layers"
            )
        return config, []

    def forecast(
        self,
        config: Config,
        vocab_size: int,
        world_size: int,
        device: torch.device,
        planned_for: str | None,
        node: tuple[float, int] | None,
    ) -> Forecast:
        """Predict a resolved run on `device`, or on `planned_for` (cuda, cpu). `node`: GiB of this
        node and its number of ranks. Raises UserError when host memory does not suffice.
        """
        # No sections, no verdict: the banner leaves them out.
        return Forecast()

    def explain_out_of_memory(
        self,
        error: Exception,
        config: Config,
        vocab_size: int,
        groups: Groups,
        device: torch.device,
    ) -> None:
        """Add to an error what takes the memory of this rank, and what to change."""

    def export_fault(self, model: ModelConfig) -> str | None:
        """Why a model cannot be exported; None where it can."""
        return None

    def goodput(self, save: Path) -> dict[str, float]:
        """Metrics of all starts in a run folder: seconds of `goodput/wall`, of which
        `goodput/productive` made progress, and what the rest was lost to.
        """
        return {}
