"""What the planner and the exporters know of a run: the advisor that pretrain_gpt.py hands to it
(megatron/training/advisor.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.tools._convert.huggingface import family_of
from megatron.tools._plan.advice import Machine
from megatron.tools._plan.hardware import Hardware, known_hardware, load_hardware
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.out_of_memory import explain
from megatron.tools._plan.recompute import choose_layers
from megatron.tools._plan.stages import stage_lines
from megatron.tools._plan.step_table import estimate, step_lines
from megatron.tools._plan.table import banner_lines
from megatron.tools._plan.tuning import tuning_lines
from megatron.tools._plan.verdict import (
    DEVICE_MEMORY,
    NODE_RANKS,
    check_host_memory,
    memory_verdict,
)
from megatron.tools._report.goodput_account import goodput

from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig
from megatron.distributed.groups import Groups
from megatron.training.advisor import Advisor, Forecast, Verdict
from megatron.training.banner import peak_tflops_of
from megatron.training.resume import device_name

DRY_RUN_HARDWARE = "h100"


class PlanningAdvisor(Advisor):
    def choose_recompute(
        self, config: Config, vocab_size: int, world_size: int, device: str
    ) -> tuple[Config, list[str]]:
        return choose_layers(config, vocab_size, world_size, device)

    def forecast(
        self,
        config: Config,
        vocab_size: int,
        world_size: int,
        device: torch.device,
        planned_for: str | None,
        node: tuple[float, int] | None,
    ) -> Forecast:
        target = torch.device(planned_for or device)
        plan = MemoryPlan(config, vocab_size, world_size, target.type)
        verdict = _verdict(plan, device, target, node)
        hardware = _hardware(config, device, planned_for)
        predicted = None if hardware is None else estimate(plan, hardware)
        sections = {
            "verdict": [verdict.line] if verdict else [],
            "pipeline": stage_lines(plan),
            "memory": banner_lines(plan, _machine(config, device, world_size)),
            "time": [] if predicted is None else step_lines(plan, predicted),
            "advice": tuning_lines(plan, predicted) if plan.device == "cuda" else [],
        }
        return Forecast(sections, verdict, None if predicted is None else predicted.written())

    def explain_out_of_memory(
        self,
        error: Exception,
        config: Config,
        vocab_size: int,
        groups: Groups,
        device: torch.device,
    ) -> None:
        explain(error, config, vocab_size, groups, device)

    def export_fault(self, model: ModelConfig) -> str | None:
        try:
            family_of(model)
        except UserError as error:
            return str(error)
        return None

    def goodput(self, save: Path) -> dict[str, float]:
        try:
            return goodput(save).summary()
        except (UserError, OSError):  # no events, or their disk failed
            return {}


def _machine(config: Config, device: torch.device, world_size: int) -> Machine | None:
    """That of several nodes, whose links the plan knows."""
    peak = peak_tflops_of(config, device)
    across = device.type == "cuda" and world_size > torch.cuda.device_count()
    return Machine(peak) if across and peak else None


def _hardware(config: Config, device: torch.device, planned_for: str | None) -> Hardware | None:
    """That of --hardware or of the GPU; a dry run without a word of it is one for H100s."""
    asked = config.distributed.hardware
    if asked is not None:
        return load_hardware(asked)
    if planned_for == "cuda" and device.type == "cpu":
        return load_hardware(DRY_RUN_HARDWARE)
    return known_hardware(device_name(device)) if device.type == "cuda" else None


def _verdict(
    plan: MemoryPlan,
    device: torch.device,
    target: torch.device,
    node: tuple[float, int] | None,
) -> Verdict | None:
    """Of --device-memory, or what the GPU has, or that of a usual one; None on a CPU. Of a node
    --host-memory, or what this one has, must suffice; a dry run knows no node.
    """
    on_host, ranks = node or (None, min(plan.world_size, NODE_RANKS))
    check_host_memory(plan, plan.config.distributed.host_memory or on_host, ranks)
    if target.type != "cuda":
        return None
    memory = plan.config.distributed.device_memory
    if memory is None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return memory_verdict(plan, memory or DEVICE_MEMORY)
