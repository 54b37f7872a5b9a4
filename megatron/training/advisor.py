"""What a run asks of programs outside of the trainer: the planner and the exporters.

pretrain_gpt.py hands a run the advisor of tools/ (tools/_advisor.py). Without one a run trains the
same numbers; its banner has no plan, and --memory-budget is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig


@dataclass(frozen=True)
class Verdict:
    """fits: up to what a device has without the reserve; tight: up to all of it; does not fit:
    more.
    """

    word: str
    line: str

    @property
    def fits(self) -> bool:
        return self.word != "does not fit"


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a run before its first step.

    `sections`: lines of the banner, by its section. `verdict`: None where no GPU is planned for;
    `prediction`: of the time of a step, for the record of the run, None where the device is not
    known.
    """

    sections: dict[str, list[str]] = field(default_factory=dict)
    verdict: Verdict | None = None
    prediction: dict[str, Any] | None = None

    @property
    def step_seconds(self) -> float | None:
        return None if self.prediction is None else self.prediction["step_s"]


class Advisor(Protocol):
    def choose_recompute(
        self, config: Config, vocab_size: int, world_size: int, device: str
    ) -> tuple[Config, list[str]]:
        """The configuration with --recompute-layers chosen for --memory-budget, and the reasons;
        without that flag as it is. Raises UserError when nothing fits.
        """

    def forecast(
        self,
        config: Config,
        vocab_size: int,
        world_size: int,
        device: torch.device,
        planned_for: str | None,
        node: tuple[float, int] | None,
    ) -> Forecast:
        """Of a resolved run on `device`, or on `planned_for` (cuda, cpu); `node`: GiB of this node
        and its ranks. Raises UserError when the host's memory does not suffice.
        """

    def memory_advice(
        self,
        config: Config,
        vocab_size: int,
        world_size: int,
        device: str,
        pp_rank: int,
        gib: float,
    ) -> list[str]:
        """What the plan counts for a pipeline rank, and what to change to fit into `gib`."""

    def export_fault(self, model: ModelConfig) -> str | None:
        """Why a model cannot be exported; None where it can."""


class NoAdvisor:
    """The trainer alone."""

    def choose_recompute(
        self, config: Config, vocab_size: int, world_size: int, device: str
    ) -> tuple[Config, list[str]]:
        if config.training.memory_budget is not None:
            raise UserError(
                "--memory-budget: the planner of tools/ is not installed; give --recompute-layers"
            )
        return config, []

    def forecast(self, *_: Any) -> Forecast:
        return Forecast()

    def memory_advice(self, *_: Any) -> list[str]:
        return []

    def export_fault(self, model: ModelConfig) -> str | None:
        return None
