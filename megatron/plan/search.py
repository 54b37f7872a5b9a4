"""Layouts of a run, ranked by the time of a step among those that fit.

A layout is a change of the flags' configuration. Every one is timed; the fastest are then planned
to the byte, one after another, until enough of them fit. One that does not fit is tried again with
more recomputation, at its own time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.plan.engine import Ledger
from megatron.plan.hardware import Hardware
from megatron.plan.memory import MemoryPlan, PlannedSteps
from megatron.plan.step import StepModel, StepTime
from megatron.plan.verdict import RESERVE, judge

Change = dict[tuple[str, str], Any]  # value by (group, field)

FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "context_parallel_size": "--context-parallel-size",
    "sequence_parallel": "--sequence-parallel",
    "zero_stage": "--zero-stage",
    "zero_shard_size": "--zero-shard-size",
    "micro_batch_size": "--micro-batch-size",
    "recompute_granularity": "--recompute-granularity",
    "recompute_modules": "--recompute-modules",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "activation_offload": "--activation-offload",
    "pipeline_schedule": "--pipeline-schedule",
    "grad_reduce_in_bf16": "--grad-reduce-in-bf16",
    "attention_backend": "--attention-backend",
    "fp8_format": "--fp8-format",
}
# from none to all; each costs more time and leaves more memory
RECOMPUTE: tuple[Change, ...] = (
    {},
    {
        ("training", "recompute_granularity"): "selective",
        ("training", "recompute_modules"): ("layernorm", "mlp_act"),
    },
    {("training", "recompute_granularity"): "full"},
    {
        ("training", "recompute_granularity"): "full",
        ("training", "activation_offload"): True,
    },
    {
        ("training", "recompute_granularity"): "full",
        ("optimizer", "optimizer_cpu_offload"): True,
    },
)
MICRO_BATCHES = (1, 2, 4, 8, 16)
FOUND = 5  # layouts that are shown
PLANNED = 60  # layouts that are planned to the byte at most
SHORT = 8192  # tokens of a sequence below which context parallelism is not tried


@dataclass(order=True)
class Candidate:
    """A layout and how long its step takes."""

    seconds: float
    number: int
    change: Change = field(compare=False)
    config: Config = field(compare=False)
    time: StepTime = field(compare=False)
    level: int = field(default=0, compare=False)  # of RECOMPUTE
    peak_gib: float = field(default=0.0, compare=False)
    fits: str = field(default="", compare=False)

    @property
    def flags(self) -> str:
        """To paste."""
        words = []
        for (_, name), value in self.change.items():
            if value is None or value is False or (value == 1 and name.endswith("parallel_size")):
                continue
            words.append(FLAGS[name])
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return " ".join(words)


@dataclass
class SearchResult:
    """`best`: those that fit, fastest first; `larger`: faster ones that do not."""

    best: list[Candidate]
    larger: list[Candidate]
    timed: int
    planned: int


def changed(config: Config, change: Change) -> Config:
    """The configuration with these values."""
    for (group, name), value in change.items():
        config = config.with_fields(group, **{name: value})
    return config


def layouts(config: Config, vocab_size: int, world_size: int, node_size: int) -> Iterator[Change]:
    """Sizes of the axes, ZeRO and micro-batches that could make up a run. `config` is resolved."""
    model, batch = config.model, config.training.global_batch_size
    heads, layers, seq = model.num_attention_heads, model.num_layers, config.data.seq_length
    tensor = [size for size in _powers(node_size) if heads % size == 0]
    pipeline = [size for size in _powers(min(layers, 64)) if size <= layers]
    context = [size for size in _powers(node_size) if size == 1 or seq >= SHORT * size / 2]
    for tp, pp, cp in itertools.product(tensor, pipeline, context):
        if world_size % (tp * pp * cp):
            continue
        dp = world_size // (tp * pp * cp)
        if batch % dp:
            continue
        for micro in MICRO_BATCHES:
            if batch % (dp * micro):
                continue
            count = batch // (dp * micro)
            for virtual in _virtual(layers, pp, count):
                uneven = pp > 1 and layers % (pp * (virtual or 1))
                for stage, shard in _zero(dp * cp, tp, pp, node_size):
                    yield {
                        ("distributed", "tensor_model_parallel_size"): tp,
                        ("distributed", "sequence_parallel"): tp > 1,
                        ("distributed", "context_parallel_size"): cp,
                        **_stages(pp, virtual, bool(uneven)),
                        ("distributed", "zero_stage"): stage,
                        ("distributed", "zero_shard_size"): shard,
                        ("training", "micro_batch_size"): micro,
                    }


def _stages(pp: int, virtual: int | None, uneven: bool) -> Change:
    return {
        ("distributed", "pipeline_model_parallel_size"): pp,
        ("distributed", "num_virtual_stages_per_pipeline_rank"): virtual,
        ("distributed", "pipeline_model_parallel_layout"): "auto" if uneven else None,
    }


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _virtual(layers: int, pp: int, micro_batches: int) -> list[int | None]:
    """Stages of each pipeline rank that the layers and micro-batches allow."""
    if pp == 1:
        return [None]
    if micro_batches < pp:
        return []
    return [None, *(each for each in (2, 4) if layers >= pp * each)]


def _zero(replicas: int, tp: int, pp: int, node_size: int) -> list[tuple[int, int | None]]:
    """(stage, ranks that share a block)."""
    if replicas == 1:
        return [(0, None)]
    found: list[tuple[int, int | None]] = [(1, None)]
    if pp == 1:
        found.append((3, None))
        node = node_size // tp
        if 1 < node < replicas and replicas % node == 0:
            found.append((3, node))
    return found


class Search:
    """The layouts of one run on one device. `config`: as parsed, not resolved."""

    def __init__(self, config: Config, vocab_size: int, world_size: int, hardware: Hardware):
        self.config, self.vocab_size, self.world_size = config, vocab_size, world_size
        self.hardware = hardware
        self.count = 0
        self.planned = 0

    def candidate(self, change: Change, level: int = 0) -> Candidate | None:
        """A layout with its time; None where the program refuses it."""
        try:
            asked = changed(self.config, change | RECOMPUTE[level])
            config = resolve(asked, self.world_size, self.vocab_size).config
        except UserError:
            return None
        time = StepModel(config, self.vocab_size, self.world_size).time(self.hardware)
        self.count += 1
        return Candidate(time.seconds, self.count, change | RECOMPUTE[level], config, time, level)

    def plan(self, found: Candidate) -> None:
        """Memory of the fullest rank; of the first alone where that is too much already."""
        self.planned += 1
        first = PlannedSteps(found.config, self.vocab_size, self.world_size, "cuda").of_rank(
            0, Ledger()
        )
        total = first.total
        if total <= (self.hardware.memory_gib - RESERVE) * 2**30:
            total = MemoryPlan(found.config, self.vocab_size, self.world_size).fullest.total
        found.peak_gib = total / 2**30
        found.fits = judge(found.peak_gib, self.hardware.memory_gib)

    def static_gib(self, found: Candidate) -> float:
        """What weights, gradients and optimizer take at least."""
        model = StepModel(found.config, self.vocab_size, self.world_size)
        largest = max(model.rank_parameters)
        size, shard = model.size, model.shard
        stage = found.config.distributed.zero_stage
        weights = size.compute / (shard if stage == 3 else 1)
        gradients = size.gradient / (shard if stage >= 2 else 1)
        offloaded = found.config.optimizer.optimizer_cpu_offload
        optimizer = 0.0 if offloaded else (size.wide + size.moments) / shard
        return largest * (weights + gradients + optimizer) / 2**30

    def run(self) -> SearchResult:
        """The fastest that fit."""
        resolved = resolve(self.config, self.world_size, self.vocab_size).config
        changes = layouts(resolved, self.vocab_size, self.world_size, self.hardware.node_size)
        queue = [each for change in changes if (each := self.candidate(change)) is not None]
        heapq.heapify(queue)
        found = SearchResult([], [], 0, 0)
        while queue and len(found.best) < FOUND and self.planned < PLANNED:
            each = heapq.heappop(queue)
            if self.static_gib(each) > self.hardware.memory_gib - RESERVE:
                each.fits = "does not fit"
            else:
                self.plan(each)
            if each.fits == "fits":
                found.best.append(each)
                continue
            if each.peak_gib and len(found.larger) < FOUND and not found.best:
                found.larger.append(each)
            if each.level + 1 < len(RECOMPUTE):
                base = {key: each.change[key] for key in each.change if key not in _levels()}
                again = self.candidate(base, each.level + 1)
                if again is not None:
                    heapq.heappush(queue, again)
        found.timed, found.planned = self.count, self.planned
        return found


def _levels() -> set[tuple[str, str]]:
    return {key for change in RECOMPUTE for key in change}


def explain(search: Search, config: Config) -> list[Candidate]:
    """What a change of one flag makes of a run, by its time. `config` is resolved."""
    distributed, training = config.distributed, config.training
    tp, pp = distributed.tensor_model_parallel_size, distributed.pipeline_model_parallel_size
    micro = training.micro_batch_size
    changes: list[Change] = [
        {("training", "micro_batch_size"): 2 * micro},
        {("training", "micro_batch_size"): micro // 2},
        {("training", "recompute_granularity"): None},
        {("training", "recompute_granularity"): "full"},
        {("distributed", "tensor_model_parallel_size"): 2 * tp},
        {("distributed", "tensor_model_parallel_size"): tp // 2},
        {("distributed", "sequence_parallel"): True},
        {("distributed", "pipeline_model_parallel_size"): 2 * pp},
        {("distributed", "pipeline_model_parallel_size"): pp // 2},
        {("distributed", "num_virtual_stages_per_pipeline_rank"): 2},
        {("distributed", "num_virtual_stages_per_pipeline_rank"): 4},
        {("distributed", "pipeline_schedule"): "zero-bubble"},
        {("distributed", "pipeline_model_parallel_layout"): "auto"},
        *({("distributed", "zero_stage"): stage} for stage in (0, 1, 2, 3)),
        {("distributed", "grad_reduce_in_bf16"): True},
        {("model", "attention_backend"): "fa4"},
        {("precision", "fp8_format"): "hybrid"},
    ]
    found = []
    for change in changes:
        if changed(config, change) == config or 0 in change.values() and tp // 2 == 0:
            continue
        each = search.candidate(change)
        if each is None or each.config == config:
            continue
        try:
            search.plan(each)
        except UserError:  # no kernel can do it
            continue
        found.append(each)
    return sorted(found)
