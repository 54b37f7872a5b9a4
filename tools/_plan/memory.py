"""Memory of one rank, predicted from the flags: what the banner, --dry-run and tools/plan.py print.

Not counted: the allocator's fragmentation, the device's context and kernels (0.5 to 0.9 GiB on a
GPU), buffers of the communication library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cached_property, partial

import torch
from megatron.tools._plan.activations import (
    Shape,
    UnitBytes,
    input_bytes,
    unit_bytes,
)
from megatron.tools._plan.engine import META, CountedBlock, CountedGroup, Ledger, Peak, run_step
from megatron.tools._plan.layer_run import SPLIT
from megatron.tools._plan.state import shard_size, static_bytes

from megatron.config.derive import data_parallel_size, expert_ranks
from megatron.config.groups import Config
from megatron.distributed.groups import (
    Groups,
    Layout,
    build_groups,
    group_options,
    layout_of,
)
from megatron.model.arithmetic import (
    expert_elements,
    padded_vocab_size,
    unit_parameters,
)
from megatron.model.build import build_model, hidden_shape
from megatron.model.recompute import stage_offload, stage_recompute
from megatron.model.stages import Stage, pipeline_stages
from megatron.parallel.blocks import Block, build_run_blocks
from megatron.parallel.schedule import Schedule, build_schedule
from megatron.parallel.zero import Zero

# its name, ranks, virtual stages of each, micro-batches, and whether passes run in pairs
ScheduleArguments = tuple[str, int, int, int, bool]
ELSEWHERE = ("host", "disk")  # not on the device
# Schedules whose plan needs all micro-batches: what is alive grows with them, or their number must
# be a multiple of the ranks. A step of another repeats itself after STEADY of them for each rank.
GROWING = ("gpipe", "interleaved")
STEADY = 4


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """What one pipeline rank needs."""

    blocks: list[Block]  # on the meta device
    parameters: int  # real ones, padding left out
    static: dict[str, int]  # when the passes of a step are over, by kind: state.static_bytes
    peak: Peak  # alongside it without its gradients, in a step

    @property
    def resident(self) -> int:
        """Bytes when the passes of a step are over. Between two steps there are no gradients."""
        return sum(size for kind, size in self.static.items() if kind not in ELSEWHERE)

    @property
    def total(self) -> int:
        """Bytes at the worst moment of a step."""
        return self.resident - self.static["gradients"] + sum(self.peak.bytes.values())

    def sizes(self) -> dict[str, int]:
        """Bytes at the worst moment of a step by kind, and in `total`; kinds that are none are left
        out. `host` and `disk` (what the offload flags move) are not in `total`.
        """
        sizes = {**self.static, **self.peak.bytes}
        return {kind: size for kind, size in sizes.items() if size} | {"total": self.total}


@dataclasses.dataclass
class MemoryPlan:
    """What a run needs on each of its pipeline ranks, worked out when it is asked for, and once.

    `device`: `cuda` with NCCL, or `cpu` with Gloo.
    """

    config: Config
    vocab_size: int
    world_size: int
    device: str = "cuda"
    _changed: dict[tuple[int, str | None], MemoryPlan] = dataclasses.field(default_factory=dict)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """As `rank_memories` returns them."""
        return rank_memories(self.config, self.vocab_size, self.world_size, self.device)

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that needs the most."""
        return max(self.ranks, key=lambda rank: rank.total)

    def changed(self, stage: int, recompute: str | None) -> MemoryPlan:
        """The plan of the same run at another stage of ZeRO, with another
        --recompute-granularity.
        """
        training = self.config.training
        distributed = self.config.distributed
        if (stage, recompute) == (distributed.zero_stage, training.recompute_granularity):
            return self
        if (stage, recompute) not in self._changed:
            config = self.config.with_fields("distributed", zero_stage=stage)
            if recompute != training.recompute_granularity:
                config = config.with_fields(
                    "training", recompute_granularity=recompute, recompute_layers=None
                )
            plan = MemoryPlan(config, self.vocab_size, self.world_size, self.device)
            self._changed[stage, recompute] = plan
        return self._changed[stage, recompute]

    def with_stage(self, stage: int) -> MemoryPlan:
        """The plan of the same run at another stage of ZeRO."""
        return self.changed(stage, self.config.training.recompute_granularity)

    def with_recompute(self, granularity: str | None) -> MemoryPlan:
        """The plan of the same run with another --recompute-granularity."""
        return self.changed(self.config.distributed.zero_stage, granularity)


def rank_memories(
    config: Config, vocab_size: int, world_size: int, device: str = "cuda"
) -> list[RankMemory]:
    """What each pipeline rank needs, on a `cuda` device with NCCL or a `cpu` with Gloo. The ranks
    that hold the same stages need the same.
    """
    steps = PlannedSteps(config, vocab_size, world_size, device)
    return [steps.of_rank(rank, Ledger()) for rank in range(steps.schedule.ranks)]


class PlannedSteps:
    """The steps of each pipeline rank, on tensors without memory."""

    def __init__(self, config: Config, vocab_size: int, world_size: int, device: str):
        self.config, self.vocab_size, self.device = config, vocab_size, device
        tp = config.distributed.tensor_model_parallel_size
        padded = padded_vocab_size(vocab_size, config.model, tp)
        self.stages = pipeline_stages(config, padded)
        self.schedule = schedule_of(config, world_size, steady=True)
        self.shape = Shape(config, vocab_size, device)
        self.shard = shard_size(config, world_size)
        self.layout = layout_of(config, world_size)

    def stages_of(self, rank: int) -> list[Stage]:
        """Those that a pipeline rank holds."""
        placed = zip(self.stages, self.schedule.placement)
        return [stage for stage, where in placed if where == rank]

    def largest_ranks(self) -> list[int]:
        """Ranks among which the one is that needs the most. Of ranks with the same units the first
        one has the most micro-batches in flight, unless the backward pass comes in halves.
        """
        ranks = range(self.schedule.ranks)
        if SPLIT in (self.config.distributed.pipeline_schedule or ""):
            return [*ranks]
        found: dict[Hashable, int] = {}
        for rank in ranks:
            found.setdefault(tuple(map(self._kinds, self.stages_of(rank))), rank)
        return [*found.values()]

    def _kinds(self, stage: Stage) -> Hashable:
        """Stages with the same kinds of units keep and take the same."""
        training, layers = self.config.training, stage.layers
        likes = map(self.shape.like, layers)
        choices = stage_recompute(training, layers)
        going = stage_offload(training, self.config.model, layers)
        return stage.embedding, stage.head, tuple(zip(likes, choices, going))

    def units_of(self, rank: int) -> list[list[UnitBytes]]:
        """The units of each of its stages."""
        return [unit_bytes(self.shape, stage) for stage in self.stages_of(rank)]

    def of_rank(
        self, rank: int, ledger: Ledger, units: list[list[UnitBytes]] | None = None
    ) -> RankMemory:
        """What a pipeline rank needs; `units`: others than those of the flags."""
        config, shape = self.config, self.shape
        group = CountedGroup(self.device != "cuda", ledger)
        groups = _groups_of(rank, config, self.layout, group)
        model = build_model(config, self.vocab_size, groups, torch.device(self.device))
        inside = with_state_on_the_device(config)
        blocks = build_run_blocks(inside, model, META, groups, make=partial(CountedBlock, ledger))
        inputs = input_bytes(shape)
        zero = Zero(model, blocks, groups, config.distributed)
        units = units or self.units_of(rank)
        hidden = hidden_shape(config)
        peak = run_step(
            ledger, model, zero, self.schedule, groups, units, hidden, inputs, self.device
        )
        count = sum(parameter.numel() for parameter in model.parameters())
        static = static_bytes(config, blocks, self.shard)
        static["host"] += peak.host
        return RankMemory(blocks, count, static, peak)


def _groups_of(rank: int, config: Config, layout: Layout, group: CountedGroup) -> Groups:
    """Those of a pipeline rank that is the first in all other dimensions; `group` replaces
    each process group.
    """
    place = layout.rank({"tp": 0, "cp": 0, "dp": 0, "pp": rank})
    return build_groups(
        layout, place, lambda ranks, group_desc: group, own_only=True, **group_options(config)
    )


def with_state_on_the_device(config: Config) -> Config:
    """The same run without what it keeps in the host's memory or in files, which nothing in the
    passes of a step depends on.
    """
    return config.with_fields(
        "optimizer",
        optimizer_cpu_offload=False,
        optimizer_nvme_offload=None,
        param_cpu_offload=False,
    )


def schedule_of(config: Config, world_size: int, *, steady: bool = False) -> Schedule:
    """What one training step runs: of the full global batch, or of the first micro-batches where
    these hold what all of them would.
    """
    training = config.training
    ranks = data_parallel_size(config, world_size)
    assert ranks > 0
    micro_batches = training.global_batch_size // (training.micro_batch_size * ranks)
    return build_schedule(*schedule_arguments(config, micro_batches, steady=steady))


def schedule_arguments(
    config: Config, micro_batches: int, *, steady: bool = False
) -> ScheduleArguments:
    """The arguments of `build_schedule` for a run."""
    distributed = config.distributed
    name, ranks = distributed.pipeline_schedule, distributed.pipeline_model_parallel_size
    if steady and name not in GROWING:
        micro_batches = min(micro_batches, STEADY * ranks)
    virtual = distributed.num_virtual_stages_per_pipeline_rank
    return name, ranks, virtual, micro_batches, distributed.overlap_moe_expert_parallel_comm


def stage_parameters(
    config: Config, stages: tuple[Stage, ...], placement: tuple[int, ...], padded_vocab: int
) -> list[int]:
    """Parameters of each stage on each of its ranks."""
    units = unit_parameters(
        config.model,
        padded_vocab,
        config.distributed.tensor_model_parallel_size,
        expert_ranks(config),
        copied=placement[0] != placement[-1],
    )
    return [sum(units[i] for i in stage.units) for stage in stages]


def stage_expert_parameters(config: Config, stages: tuple[Stage, ...]) -> list[int]:
    """Those of them that belong to experts."""
    model = config.model
    has_experts = model.expert_layers()
    if not any(has_experts):
        return [0] * len(stages)
    each = expert_elements(model, has_experts.index(True), expert_ranks(config))
    return [each * sum(has_experts[index] for index in stage.layers) for stage in stages]
