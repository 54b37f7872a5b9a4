"""Layouts of a run, ranked by the time of a step among those that fit.

A layout is a change of the flags' configuration. Of every one the least time is found, and in that
order the least memory, the time with its pipeline simulated, and the memory to the byte, until
enough of them fit. One that does not fit is tried again with more recomputation, or activations on
the host, at its own time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from typing import Any

import torch
from megatron.tools._plan.activations import kept_bytes, running_bytes
from megatron.tools._plan.engine import Ledger
from megatron.tools._plan.hardware import Hardware
from megatron.tools._plan.layer_run import SPLIT
from megatron.tools._plan.memory import PlannedSteps, ScheduleArguments, schedule_arguments
from megatron.tools._plan.schedule_check import in_memory
from megatron.tools._plan.step import Cost, StepModel, StepTime, least_pipeline_seconds
from megatron.tools._plan.verdict import RESERVE, judge

from megatron.config.derive import derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS
from megatron.config.stages import AUTO
from megatron.config.validate import cross_field_faults, resolve
from megatron.model.kernels import choose_kernels
from megatron.model.stages import Stage
from megatron.parallel.schedule import Kind, build_schedule

Change = dict[str, Any]  # values by the name of a field of the configuration

FULL: Change = {"recompute_granularity": "full"}
SELECTIVE: Change = {"recompute_granularity": "selective"}
OFFLOAD: Change = {"activation_offload": True}
HALF: Change = OFFLOAD | {"activation_offload_fraction": 0.5}
ON_HOST: Change = {"optimizer_cpu_offload": True}
ACTIVATIONS = SELECTIVE | {"recompute_modules": ("layernorm", "mlp_act")}
EXPERT_ACTIVATIONS = SELECTIVE | {"recompute_modules": ("layernorm", "moe_act")}
# what a layout that does not fit tries in turn
RECOMPUTE: tuple[Change, ...] = (
    {},
    ACTIVATIONS,
    ACTIVATIONS | HALF,
    ACTIVATIONS | OFFLOAD,
    FULL,
    FULL | HALF,
    FULL | OFFLOAD,
    FULL | ON_HOST,
)
# of experts nothing goes to the host but layers' inputs
RECOMPUTE_EXPERTS: tuple[Change, ...] = (
    {},
    EXPERT_ACTIVATIONS,
    SELECTIVE | {"recompute_modules": ("layernorm", "moe")},
    FULL,
    FULL | OFFLOAD,
    FULL | ON_HOST,
)
PIPELINE = "pipeline_model_parallel_size"
STAGE_LAYOUT = "pipeline_model_parallel_layout"
CUT = {PIPELINE, "num_virtual_stages_per_pipeline_rank", STAGE_LAYOUT}
# settings on which no pass of a layer depends, what ZeRO sends alongside it left out
OUTSIDE_LAYERS = CUT | {"zero_stage", "zero_shard_size"}
MICRO_BATCHES = (1, 2, 4, 8, 16)
FOUND = 5  # layouts that are shown
PLANNED = 60  # layouts that are planned to the byte at most
NEAR = 2  # times the device's memory that a layout may need to be shown as one that does not fit
# what a search chooses, whatever the flags of the run ask for
CHOSEN = (
    "recompute memory_budget recompute_granularity recompute_modules recompute_method "
    "recompute_num_layers recompute_layers distribute_saved_activations activation_offload "
    "offload_modules activation_offload_fraction min_offloaded_tensor_size "
    "hierarchical_context_parallel_sizes num_layers_per_virtual_pipeline_stage"
).split()
SHORT = 8192  # tokens of a sequence below which context parallelism is not tried


@dataclass(order=True)
class Candidate:
    """A layout and how long its step takes; at least so long while it is not exact."""

    seconds: float
    number: int
    layout: Change = field(compare=False)
    level: int = field(compare=False)  # of the search's rungs
    rung: Change = field(compare=False)
    model: StepModel = field(compare=False)
    time: StepTime = field(compare=False)
    is_exact: bool = field(default=False, compare=False)
    peak_gib: float = field(default=0.0, compare=False)
    fits: str = field(default="", compare=False)

    @property
    def config(self) -> Config:
        """Resolved."""
        return self.model.config

    @property
    def flags(self) -> str:
        """To paste."""
        words = []
        for name, value in (self.layout | self.rung).items():
            # expert-tensor-parallel ranks are as many as tensor-parallel ones by default
            usual = value == 1 and name.endswith(("model_parallel_size", "context_parallel_size"))
            if value is None or value is False or usual:
                continue
            words.append(flag_name(name))
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return " ".join(words)


@dataclass
class SearchResult:
    """`best`: those that fit, fastest first; `larger`: faster ones that do not."""

    best: list[Candidate] = field(default_factory=list)
    larger: list[Candidate] = field(default_factory=list)
    timed: int = 0
    planned: int = 0


def changed(config: Config, change: Change) -> Config:
    """The configuration with these values."""
    groups: dict[str, Change] = {}
    for name, value in change.items():
        groups.setdefault(FIELDS[name].group, {})[name] = value
    for group, values in groups.items():
        config = config.with_fields(group, **values)
    return config


def without_chosen(config: Config) -> tuple[Config, list[str]]:
    """The run without its settings of what a search chooses, and the flags of these."""
    given = {
        name: FIELDS[name].default
        for name in CHOSEN
        if getattr(getattr(config, FIELDS[name].group), name) != FIELDS[name].default
    }
    return changed(config, given), [*map(flag_name, given)]


def layouts(config: Config, world_size: int, node_size: int) -> Iterator[tuple[Change, int]]:
    """Sizes of the axes, ZeRO and micro-batches that could make up a run, with the number of
    micro-batches. `config` is resolved.
    """
    model, batch = config.model, config.training.global_batch_size
    seq = config.data.seq_length
    tensor = [tp for tp in _powers(node_size) if model.num_attention_heads % tp == 0]
    pipeline = _powers(min(model.num_layers, 64))
    context = [cp for cp in _powers(node_size) if cp == 1 or seq >= SHORT * cp / 2]
    for tp, pp, cp, micro in itertools.product(tensor, pipeline, context, MICRO_BATCHES):
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or batch % (dp * micro):
            continue
        micro_batches = batch // (dp * micro)
        for cut, context_type, zero, experts in itertools.product(
            _stages(model.num_layers, pp, micro_batches),
            _context(cp, tp, node_size),
            _zero(dp * cp, tp, pp, node_size),
            _experts(config, tp, tp * cp * dp, micro_batches),
        ):
            layout = {
                "tensor_model_parallel_size": tp,
                "sequence_parallel": tp > 1,
                "context_parallel_size": cp,
                **context_type,
                **cut,
                **experts,
                **zero,
                "micro_batch_size": micro,
            }
            yield layout, micro_batches


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _stages(layers: int, pp: int, micro_batches: int) -> Iterator[Change]:
    """Cuts into stages: of as many layers, where these divide, and of equal cost, in which the
    embedding and the head count.
    """
    if micro_batches < pp:
        return
    for virtual in (None, 2, 4) if pp > 1 else (None,):
        stages = pp * (virtual or 1)
        cut: Change = {
            PIPELINE: pp,
            "num_virtual_stages_per_pipeline_rank": virtual,
            STAGE_LAYOUT: None,
        }
        if layers % stages == 0:
            yield cut
        if pp > 1 and stages <= layers:
            yield cut | {STAGE_LAYOUT: AUTO}


def _context(cp: int, tp: int, node_size: int) -> list[Change]:
    """How context-parallel ranks exchange keys: whole, by heads, round a ring, or by heads within a
    node and round a ring of nodes.
    """
    if cp == 1:
        return [{}]
    found: list[Change] = [{"cp_comm_type": each} for each in ("allgather", "a2a", "p2p")]
    near = node_size // tp
    if 1 < near < cp and cp % near == 0:
        sizes = near, cp // near
        found.append({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": sizes})
    return found


def _zero(replicas: int, tp: int, pp: int, node_size: int) -> Iterator[Change]:
    """Stages, and ranks that share a block."""
    node = node_size // tp
    yield {"zero_stage": int(replicas > 1), "zero_shard_size": None}
    if pp == 1 and replicas > 1:
        yield {"zero_stage": 3, "zero_shard_size": None}
        if 1 < node < replicas and replicas % node == 0:
            yield {"zero_stage": 3, "zero_shard_size": node}


def _experts(config: Config, tp: int, ranks: int, micro_batches: int) -> Iterator[Change]:
    """How the `ranks` of a pipeline stage hold experts: whole ones, or their matrices shared as
    others are. Passes in pairs, where they can be, if the run has asked for them.
    """
    model = config.model
    pairs = config.distributed.overlap_moe_expert_parallel_comm and micro_batches > 1
    if model.num_experts is None:
        yield {}
        return
    for etp, ep in itertools.product(sorted({1, tp}), _powers(min(model.num_experts, ranks))):
        width = model.moe_ffn_hidden_size or 0
        if model.num_experts % ep or ranks % (ep * etp) or width % etp:
            continue
        yield {
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp if tp > 1 else None,
            "overlap_moe_expert_parallel_comm": pairs and ep > 1,
        }


class Search:
    """The layouts of one run on one device. `config`: as parsed, not resolved."""

    def __init__(self, config: Config, vocab_size: int, world_size: int, hardware: Hardware):
        self.config, self.vocab_size, self.world_size = config, vocab_size, world_size
        self.hardware = hardware
        self.rungs = RECOMPUTE if config.model.num_experts is None else RECOMPUTE_EXPERTS
        self.found = SearchResult()
        self.queue: list[Candidate] = []
        self.with_kernels: set[Hashable] = set()  # all that kernels depend on in a search
        # what layouts have in common: costs of units, stages and the ranks that hold them
        self.costs: dict[Hashable, list[Cost]] = {}
        self.cuts: dict[Hashable, tuple[tuple[Stage, ...], tuple[int, ...]]] = {}

    def checked_model(self, change: Change) -> StepModel:
        """The steps of a layout. Raises UserError where the program refuses it, or no kernel
        computes it.
        """
        asked = changed(self.config, change)
        config = resolve(asked, self.world_size, self.vocab_size).config
        model = StepModel(config, self.vocab_size, self.world_size, device=self.hardware.device)
        kinds = model.operations.shape.of_units, config.optimizer.optimizer_cpu_offload
        if kinds not in self.with_kernels:
            choose_kernels(config, torch.device(self.hardware.device))
            self.with_kernels.add(kinds)
        return model

    def model(self, change: Change) -> StepModel | None:
        """As `checked_model`; None where that raises."""
        try:
            return self.checked_model(change)
        except UserError:
            return None

    def timed(self, layout: Change, level: int, model: StepModel) -> Candidate:
        """A layout with the least time that its step may take."""
        self.found.timed += 1
        time, number = model.time(self.hardware, is_bound=True), self.found.timed
        return Candidate(time.seconds, number, layout, level, self.rungs[level], model, time)

    def candidate(self, layout: Change, level: int = 0) -> Candidate | None:
        """A layout at a rung; None where `model` is."""
        model = self.model(layout | self.rungs[level])
        return None if model is None else self.timed(layout, level, model)

    def push(self, layout: Change, level: int) -> None:
        """Queue a layout at this rung, or the last one, which alone has the optimizer on the host:
        if weights and optimizer are small enough there for it to fit, or to be shown as one that
        does not.
        """
        for rung in sorted({level, len(self.rungs) - 1}):
            model = self.model(layout | self.rungs[rung])
            if model is None or self.is_out_of_reach(held_gib(model, has_optimizer=False)):
                return  # so it is at every rung
            if not self.is_out_of_reach(held_gib(model)):
                heapq.heappush(self.queue, self.timed(layout, rung, model))
                return

    def is_out_of_reach(self, gib: float) -> bool:
        """Whether a layout that needs so much is not even shown."""
        return gib > NEAR * self.hardware.memory_gib

    def simulate(self, found: Candidate) -> None:
        """Its whole time, of which it has a bound so far."""
        if not found.is_exact:
            found.time = found.model.time(self.hardware)
            found.seconds, found.is_exact = found.time.seconds, True

    def plan(self, found: Candidate) -> None:
        """Memory of the fullest rank; of the first alone where that is too much already."""
        self.found.planned += 1
        steps = PlannedSteps(found.config, self.vocab_size, self.world_size, self.hardware.device)
        total = steps.of_rank(0, Ledger()).total
        if total <= (self.hardware.memory_gib - RESERVE) * 2**30:
            others = (rank for rank in steps.largest_ranks() if rank > 0)
            total = max([total, *(steps.of_rank(rank, Ledger()).total for rank in others)])
        found.peak_gib = total / 2**30
        found.fits = judge(found.peak_gib, self.hardware.memory_gib)

    def least_gib(self, found: Candidate, rank: int = 0) -> float:
        """What a pipeline rank takes at least: what it holds, and what its micro-batches in flight
        keep.
        """
        return held_gib(found.model, rank) + most_kept(found.model, rank) / 2**30

    def is_too_large(self, found: Candidate) -> bool:
        """Whether one whose first pipeline rank may fit has another one that cannot."""
        most = self.hardware.memory_gib - RESERVE
        steps = PlannedSteps(found.config, self.vocab_size, self.world_size, self.hardware.device)
        return any(
            self.least_gib(found, rank) + running_gib(found.model, rank) > most
            for rank in steps.largest_ranks()
        )

    def bounded_layouts(self) -> list[tuple[float, Change]]:
        """Those that a run could have, with the least time that all passes of a step take, the
        fastest first. Raises ArgumentErrors where the program accepts none.
        """
        asked = self.config, self.world_size, self.vocab_size
        # the layout that the flags have by default need not divide the batch
        config = derive(*asked).config
        sizes = (config.model.num_layers, config.model.num_attention_heads, config.data.seq_length)
        if None in (*sizes, config.training.global_batch_size):
            raise ArgumentErrors(cross_field_faults(*asked))
        possible = list(layouts(config, self.world_size, self.hardware.node_size))
        # what layers take of some sizes follows from what they take of smaller and larger ones
        possible.sort(key=lambda each: _inner(each[0], config.model.num_experts or 0))
        if not possible:
            raise ArgumentErrors(
                [
                    f"--world-size {self.world_size}: no layout can run --global-batch-size "
                    f"{config.training.global_batch_size} with --num-attention-heads "
                    f"{config.model.num_attention_heads}; choose numbers that powers of two divide"
                ]
            )
        found = []
        for layout, micro_batches in possible:
            seconds = self.least_seconds(layout, micro_batches)
            if seconds is not None:
                found.append((seconds, layout))
        if not found:  # what is wrong with one of them is wrong with all
            self.checked_model(possible[0][0])
        return sorted(found, key=lambda each: each[0])

    def least_seconds(self, layout: Change, micro_batches: int) -> float | None:
        """That all passes of a step take at least, found without a model of the layout where others
        have shown what its units cost and how it is cut into stages. None where the program refuses
        it, another one is the same, or its weights are too large.
        """
        outside, distributed = OUTSIDE_LAYERS, self.config.distributed
        # at pp=1 a split schedule is 1f1b; with the other order of ranks groups span other nodes
        is_split = SPLIT in (distributed.pipeline_schedule or "")
        if is_split or distributed.use_tp_pp_dp_mapping:
            outside = outside - {PIPELINE}
        layers = frozenset((name, layout[name]) for name in layout.keys() - outside)
        # tensor-parallel ranks pad the vocabulary, which counts in stages of equal cost
        cut = tuple(layout[name] for name in ("tensor_model_parallel_size", *sorted(CUT)))
        if layers not in self.costs or cut not in self.cuts:
            model = self.model(layout)
            if model is None or self.is_out_of_reach(held_gib(model, has_optimizer=False)):
                return None
            self.cuts[cut] = model.stages, model.placement
            if layers not in self.costs:
                self.costs[layers] = model.least_costs(self.hardware)
        stages, placement = self.cuts[cut]
        if layout[STAGE_LAYOUT] == AUTO and is_even(stages):
            return None
        units = self.costs[layers]
        costs = []
        for stage in stages:
            parts = zip(*(units[index] for index in stage.units))
            costs.append(Cost(*map(sum, parts)))
        return least_pipeline_seconds(costs, placement, micro_batches)

    def run(self) -> SearchResult:
        """The fastest that fit."""
        found, waiting = self.found, deque(self.bounded_layouts())
        while len(found.best) < FOUND and found.planned < PLANNED:
            # a layout is timed when it may be faster than all in the queue
            while waiting and (not self.queue or waiting[0][0] <= self.queue[0].seconds):
                _, layout = waiting.popleft()
                self.push(layout, 0)
            if not self.queue:
                break
            self.settle(heapq.heappop(self.queue))
        return found

    def settle(self, each: Candidate) -> None:
        """Of the fastest in the queue: one that may fit is queued with its exact time, and then
        planned to the byte. One that does not fit is shown, where none has fitted yet and a larger
        device might hold it, and tried again at the next rung.
        """
        found = self.found
        is_shown = not found.best and len(found.larger) < FOUND
        if each.is_exact:
            self.plan(each)
        elif self.may_fit(each, is_shown):
            self.simulate(each)
            heapq.heappush(self.queue, each)
            return
        if each.fits == "fits":
            found.best.append(each)
            return
        if is_shown and not self.is_out_of_reach(each.peak_gib):
            self.simulate(each)
            found.larger.append(each)
        if each.level + 1 < len(self.rungs):
            self.push(each.layout, each.level + 1)

    def may_fit(self, each: Candidate, is_shown: bool) -> bool:
        """Whether bounds of its memory allow it; of one that would be shown the first pipeline
        rank's alone, so that what it needs is planned to the byte.
        """
        each.peak_gib = self.least_gib(each)
        if judge(each.peak_gib, self.hardware.memory_gib) != "fits":
            return False
        return is_shown or not self.is_too_large(each)


def is_even(stages: Sequence[Stage]) -> bool:
    """Whether all stages have as many layers."""
    return len({len(stage.layers) for stage in stages}) == 1


def held_gib(model: StepModel, rank: int = 0, *, has_optimizer: bool = True) -> float:
    """Weights, optimizer, and gradients of earlier micro-batches of a pipeline rank; of a model of
    which parts are frozen the weights alone, at least.
    """
    size, distributed = model.size, model.config.distributed
    is_trained = model.config.optimizer.freeze is None
    stage, held = distributed.zero_stage, 0.0
    for _, count, shard in model.buffers(model.rank_parameters[rank]):
        each = size.compute / (shard if stage == 3 else 1)
        if is_trained and model.micro_batches > distributed.pipeline_model_parallel_size:
            each += size.gradient / (shard if stage >= 2 else 1)
        if is_trained and has_optimizer and not model.config.optimizer.optimizer_cpu_offload:
            each += (size.wide * (size.wide != size.compute) + size.moments) / shard
        held += count * each
    return held / 2**30


def running_gib(model: StepModel, rank: int) -> float:
    """What the backward pass of a rank's last layer takes at least, in which all that the
    micro-batches keep is there: at ZeRO 3 with gathered weights and whole gradients.
    """
    stages = [stage.layers for stage in model.stages_of(rank)]
    if not all(stages):  # an embedding or a head alone
        return 0.0
    running = min(running_bytes(model.operations.shape, layers) for layers in stages)
    if model.config.distributed.zero_stage == 3:
        parameters = model.buffers(model.layer_parameters(stages[-1][-1]))
        gathered = sum(count for _, count, shard in parameters if shard > 1)
        running += gathered * (model.size.compute + model.size.gradient)
    return running / 2**30


def most_kept(model: StepModel, rank: int) -> int:
    """The most bytes that the micro-batches in flight of a pipeline rank keep on the device."""
    each = [kept_bytes(model.operations.shape, stage) for stage in model.stages_of(rank)]
    schedule = schedule_arguments(model.config, model.micro_batches, steady=True)
    return max(sum(map(mul, counts, each)) for counts in _in_flight(schedule, rank))


@cache
def _in_flight(arguments: ScheduleArguments, rank: int) -> set[tuple[int, ...]]:
    """Micro-batches of each of a pipeline rank's stages that are in flight at the same time."""
    schedule = build_schedule(*arguments)
    now = {stage: 0 for stage, where in enumerate(schedule.placement) if where == rank}
    found = set()
    for kind, stage, _ in in_memory(schedule, rank):
        if kind is Kind.FORWARD:
            now[stage] += 1
            found.add(tuple(now.values()))
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            now[stage] -= 1
    return found


def _inner(layout: Change, experts: int) -> int:
    """The number of settings of which a layout has neither the least value nor the most. Ranks with
    one expert, or all, are unlike the others.
    """
    is_inner = MICRO_BATCHES[0] < layout["micro_batch_size"] < MICRO_BATCHES[-1]
    return is_inner + (2 < layout.get("expert_model_parallel_size", 1) < experts // 2)


def _expert_changes(config: Config) -> list[Change]:
    """Of how experts are held and tokens sent."""
    if config.model.num_experts is None:
        return []
    ep = config.distributed.expert_model_parallel_size
    return [
        {"expert_model_parallel_size": 2 * ep},
        {"expert_model_parallel_size": ep // 2},
        {"expert_tensor_parallel_size": 1},
        {"overlap_moe_expert_parallel_comm": True},
        EXPERT_ACTIVATIONS,
    ]


def explain(search: Search, config: Config) -> list[Candidate]:
    """What a change of one flag makes of a run, by its time. `config` is resolved."""
    distributed, micro = config.distributed, config.training.micro_batch_size
    tp, pp = distributed.tensor_model_parallel_size, distributed.pipeline_model_parallel_size
    changes: list[Change] = [
        {"micro_batch_size": 2 * micro},
        {"micro_batch_size": micro // 2},
        {"recompute_granularity": None},
        FULL,
        {"tensor_model_parallel_size": 2 * tp},
        {"tensor_model_parallel_size": tp // 2},
        {"sequence_parallel": True},
        {PIPELINE: 2 * pp},
        {PIPELINE: pp // 2},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"num_virtual_stages_per_pipeline_rank": 4},
        {"pipeline_schedule": "zero-bubble"},
        {STAGE_LAYOUT: AUTO},
        *_expert_changes(config),
        *({"zero_stage": stage} for stage in (0, 1, 2, 3)),
        {"grad_reduce_in_bf16": True},
        {"attention_backend": "fa4"},
        {"fp8_format": "hybrid"},
    ]
    found = []
    for change in changes:
        if changed(config, change) == config:
            continue
        each = search.candidate(change)
        if each is None or each.config == config:
            continue
        if STAGE_LAYOUT in change and is_even(each.model.stages):
            continue  # as without it
        search.simulate(each)
        search.plan(each)
        found.append(each)
    return sorted(found)
