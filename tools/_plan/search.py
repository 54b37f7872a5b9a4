"""Layouts of a run, ranked by the time of a step among those that fit.

A layout is a change of the flags' configuration. Of every one the least time is found, and in that
order the least memory, the time with its pipeline simulated, and the memory to the byte, until
enough of them fit. One that does not fit is tried again with more recomputation, or activations on
the host, at its own time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.tools._plan.activations import kept_bytes, running_bytes
from megatron.tools._plan.engine import Ledger
from megatron.tools._plan.hardware import Hardware
from megatron.tools._plan.memory import PlannedSteps, schedule_of
from megatron.tools._plan.step import StepModel, StepTime
from megatron.tools._plan.verdict import RESERVE, judge

from megatron.config.derive import derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.stages import AUTO
from megatron.config.validate import checked, cross_field_faults
from megatron.model.kernels import choose_kernels
from megatron.model.stages import Stage
from megatron.parallel.schedule import Kind

Change = dict[tuple[str, str], Any]  # value by (group, field)

FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "context_parallel_size": "--context-parallel-size",
    "cp_comm_type": "--cp-comm-type",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes",
    "sequence_parallel": "--sequence-parallel",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "zero_stage": "--zero-stage",
    "zero_shard_size": "--zero-shard-size",
    "micro_batch_size": "--micro-batch-size",
    "recompute_granularity": "--recompute-granularity",
    "recompute_modules": "--recompute-modules",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "activation_offload": "--activation-offload",
    "activation_offload_fraction": "--activation-offload-fraction",
    "pipeline_schedule": "--pipeline-schedule",
    "grad_reduce_in_bf16": "--grad-reduce-in-bf16",
    "attention_backend": "--attention-backend",
    "fp8_format": "--fp8-format",
}


ON_HOST = "optimizer", "optimizer_cpu_offload"
SAMPLES = "training", "micro_batch_size"
EP = "distributed", "expert_model_parallel_size"
MODULES = ("layernorm", "mlp_act")  # that selective recomputation begins with


def _rung(
    granularity: str | None,
    offloaded: float = 0.0,
    optimizer: bool = False,
    modules: tuple[str, ...] = MODULES,
) -> Change:
    """Recomputation, of these modules where it is selective, the share of layers whose activations
    go to the host, and where the optimizer is.
    """
    found: Change = {}
    if granularity is not None:
        found["training", "recompute_granularity"] = granularity
    if granularity == "selective":
        found["training", "recompute_modules"] = modules
    if offloaded:
        found["training", "activation_offload"] = True
        if offloaded < 1:
            found["training", "activation_offload_fraction"] = offloaded
    if optimizer:
        found[ON_HOST] = True
    return found


# what a layout that does not fit tries in turn
RECOMPUTE: tuple[Change, ...] = (
    _rung(None),
    _rung("selective"),
    _rung("selective", 0.5),
    _rung("selective", 1.0),
    _rung("full"),
    _rung("full", 0.5),
    _rung("full", 1.0),
    _rung("full", optimizer=True),
)
# of experts nothing goes to the host but layers' inputs
RECOMPUTE_EXPERTS: tuple[Change, ...] = (
    _rung(None),
    _rung("selective", modules=("layernorm", "moe_act")),
    _rung("selective", modules=("layernorm", "moe")),
    _rung("full"),
    _rung("full", 1.0),
    _rung("full", optimizer=True),
)
MICRO_BATCHES = (1, 2, 4, 8, 16)
FOUND = 5  # layouts that are shown
PLANNED = 60  # layouts that are planned to the byte at most
NEAR = 2  # times the device's memory that a layout may need to be shown as one that does not fit
_MOE: Change = {("training", "recompute_modules"): ("layernorm", "moe_act")}
USUAL = {("context_parallel_size", 1), ("moe_token_dispatcher_type", "alltoall")}
SHORT = 8192  # tokens of a sequence below which context parallelism is not tried


@dataclass(order=True)
class Candidate:
    """A layout and how long its step takes; at least so long while it is not exact."""

    seconds: float
    number: int
    change: Change = field(compare=False)
    model: StepModel = field(compare=False)
    time: StepTime = field(compare=False)
    level: int = field(default=0, compare=False)  # of the search's rungs
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
        for (_, name), value in self.change.items():
            # expert-tensor-parallel ranks are as many as tensor-parallel ones by default
            usual = value == 1 and name.endswith("model_parallel_size")
            if value is None or value is False or usual or (name, value) in USUAL:
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
    groups: dict[str, dict[str, Any]] = {}
    for (group, name), value in change.items():
        groups.setdefault(group, {})[name] = value
    for group, values in groups.items():
        config = config.with_fields(group, **values)
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
        for micro in MICRO_BATCHES:
            if batch % (dp * micro):
                continue
            count = batch // (dp * micro)
            cuts = _stages(layers, pp, count)
            for cut, context_type, (stage, shard), experts in itertools.product(
                cuts,
                _context(cp, tp, node_size),
                _zero(dp * cp, tp, pp, node_size),
                _experts(config, tp, tp * cp * dp, count),
            ):
                yield {
                    **_tensor(tp),
                    ("distributed", "context_parallel_size"): cp,
                    **context_type,
                    **cut,
                    **experts,
                    ("distributed", "zero_stage"): stage,
                    ("distributed", "zero_shard_size"): shard,
                    ("training", "micro_batch_size"): micro,
                }


def _tensor(tp: int) -> Change:
    return {
        ("distributed", "tensor_model_parallel_size"): tp,
        ("distributed", "sequence_parallel"): tp > 1,
    }


def _context(cp: int, tp: int, node_size: int) -> list[Change]:
    """How context-parallel ranks exchange keys: whole, by heads, round a ring, or by heads within a
    node and round a ring of nodes.
    """
    if cp == 1:
        return [{}]
    found: list[Change] = [
        {("distributed", "cp_comm_type"): each} for each in ("allgather", "a2a", "p2p")
    ]
    near = node_size // tp
    if 1 < near < cp and cp % near == 0:
        found.append(
            {
                ("distributed", "cp_comm_type"): "a2a+p2p",
                ("distributed", "hierarchical_context_parallel_sizes"): (near, cp // near),
            }
        )
    return found


def _experts(config: Config, tp: int, ranks: int, micro_batches: int) -> list[Change]:
    """How the `ranks` of a pipeline stage hold experts: whole ones, or their matrices shared as
    others are; and gathered tokens where these are less to send. Passes in pairs, where they can
    be, if the run has asked for them.
    """
    model = config.model
    pairs = config.distributed.overlap_moe_expert_parallel_comm and micro_batches > 1
    count = model.num_experts
    if count is None:
        return [{}]
    found: list[Change] = []
    for etp, ep in itertools.product(sorted({1, tp}), _powers(min(count, ranks))):
        if count % ep or ranks % (ep * etp) or (model.moe_ffn_hidden_size or 0) % etp:
            continue
        dispatchers = ["alltoall"] + (["allgather"] if 1 < ep < model.moe_router_topk else [])
        for dispatcher in dispatchers:
            found.append(
                {
                    ("distributed", "expert_model_parallel_size"): ep,
                    ("distributed", "expert_tensor_parallel_size"): etp if tp > 1 else None,
                    ("model", "moe_token_dispatcher_type"): dispatcher,
                    ("distributed", "overlap_moe_expert_parallel_comm"): (
                        pairs and ep > 1 and dispatcher == "alltoall"
                    ),
                }
            )
    return found


def _stages(layers: int, pp: int, micro_batches: int) -> list[Change]:
    """Cuts into stages: of as many layers, where these divide, and of equal cost, in which the
    embedding and the head count.
    """
    found: list[Change] = []
    for virtual in _virtual(layers, pp, micro_batches):
        even = pp == 1 or layers % (pp * (virtual or 1)) == 0
        for layout in ([None] if even else []) + (["auto"] if pp > 1 else []):
            found.append(
                {
                    ("distributed", "pipeline_model_parallel_size"): pp,
                    ("distributed", "num_virtual_stages_per_pipeline_rank"): virtual,
                    ("distributed", "pipeline_model_parallel_layout"): layout,
                }
            )
    return found


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
        self.rungs = RECOMPUTE if config.model.num_experts is None else RECOMPUTE_EXPERTS
        self.count = 0
        self.planned = 0
        self.with_kernels: set[Hashable] = set()  # all that kernels depend on in a search

    def candidate(self, change: Change, level: int = 0) -> Candidate | None:
        """A layout with its time; None where the program refuses it, no kernel computes it, or
        another change makes the same.
        """
        try:
            model = self.model(change | self.rungs[level])
        except UserError:
            return None
        return None if model is None else self.timed(change | self.rungs[level], level, model)

    def model(self, change: Change) -> StepModel | None:
        """The steps of a layout; None where another change makes the same. Raises UserError where
        the program refuses it, or no kernel computes it.
        """
        asked = changed(self.config, change)
        config = checked(asked, self.world_size, self.vocab_size).config
        model = StepModel(config, self.vocab_size, self.world_size)
        kinds = model.operations.shape.of_units, config.optimizer.optimizer_cpu_offload
        if kinds not in self.with_kernels:
            choose_kernels(config, torch.device("cuda"))
            self.with_kernels.add(kinds)
        if config.distributed.pipeline_model_parallel_layout == AUTO and is_even(model.stages):
            return None  # tried already
        return model

    def timed(self, change: Change, level: int, model: StepModel) -> Candidate:
        """A layout with the least time that its step may take."""
        time = model.time(self.hardware, is_bound=True)
        self.count += 1
        return Candidate(time.seconds, self.count, change, model, time, level)

    def within_reach(self, change: Change, level: int) -> Candidate | None:
        """A layout at the first rung from this one at which its weights and optimizer alone are
        small enough for it to fit, or to be shown as one that does not. None as of `candidate`, and
        where there is none.
        """
        most, is_too_large = NEAR * self.hardware.memory_gib, False
        for rung in range(level, len(self.rungs)):
            if is_too_large and ON_HOST not in self.rungs[rung]:
                continue  # recomputation makes neither weights nor optimizer smaller
            try:
                model = self.model(change | self.rungs[rung])
            except UserError:
                return None
            if model is None or held_gib(model, has_optimizer=False) > most:  # at every rung
                return None
            is_too_large = held_gib(model) > most
            if not is_too_large:
                return self.timed(change | self.rungs[rung], rung, model)
        return None

    def simulate(self, found: Candidate) -> None:
        """Its whole time, of which it has a bound so far."""
        if not found.is_exact:
            found.time = found.model.time(self.hardware)
            found.seconds, found.is_exact = found.time.seconds, True

    def plan(self, found: Candidate) -> None:
        """Memory of the fullest rank; of the first alone where that is too much already."""
        self.planned += 1
        steps = PlannedSteps(found.config, self.vocab_size, self.world_size, "cuda")
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
        steps = PlannedSteps(found.config, self.vocab_size, self.world_size, "cuda")
        return any(
            self.least_gib(found, rank) + running_gib(found.model, rank) > most
            for rank in steps.largest_ranks()
        )

    def candidates(self) -> list[Candidate]:
        """Every layout within reach. Raises ArgumentErrors where the program accepts none."""
        asked = self.config, self.world_size, self.vocab_size
        # the layout that the flags have by default need not divide the batch
        config = derive(*asked)
        sizes = (config.model.num_layers, config.model.num_attention_heads, config.data.seq_length)
        if None in (*sizes, config.training.global_batch_size):
            raise ArgumentErrors(cross_field_faults(*asked))
        changes = [*layouts(config, self.vocab_size, self.world_size, self.hardware.node_size)]
        # what layers take of some sizes follows from what they take of smaller and larger ones
        changes.sort(key=lambda change: _inner(change, config.model.num_experts or 0))
        if not changes:
            raise ArgumentErrors(
                [
                    f"--world-size {self.world_size}: no layout can run --global-batch-size "
                    f"{config.training.global_batch_size} with --num-attention-heads "
                    f"{config.model.num_attention_heads}; choose numbers that powers of two divide"
                ]
            )
        found = [each for change in changes if (each := self.within_reach(change, 0)) is not None]
        if not found:  # what is wrong with one of them is wrong with all
            self.model(changes[0] | self.rungs[0])
        return found

    def run(self) -> SearchResult:
        """The fastest that fit."""
        queue = self.candidates()
        heapq.heapify(queue)
        found = SearchResult([], [], 0, 0)
        while queue and len(found.best) < FOUND and self.planned < PLANNED:
            each = heapq.heappop(queue)
            each.peak_gib = self.least_gib(each)
            each.fits = judge(each.peak_gib, self.hardware.memory_gib)
            if each.fits == "fits" and not each.is_exact:
                # what one that is shown needs is planned to the byte
                is_shown = not found.best and len(found.larger) < FOUND
                if not is_shown and self.is_too_large(each):
                    self.rejected(each, queue, found)
                    continue
                self.simulate(each)
                heapq.heappush(queue, each)
                continue
            if each.fits == "fits":
                self.plan(each)
            if each.fits == "fits":
                found.best.append(each)
            else:
                self.rejected(each, queue, found)
        found.timed, found.planned = self.count, self.planned
        return found

    def rejected(self, each: Candidate, queue: list[Candidate], found: SearchResult) -> None:
        """Of one that does not fit: it is shown where none has fitted yet and a larger device might
        hold it, and tried again.
        """
        is_near = each.peak_gib <= NEAR * self.hardware.memory_gib
        if is_near and len(found.larger) < FOUND and not found.best:
            self.simulate(each)
            found.larger.append(each)
        if each.level + 1 < len(self.rungs):
            base = {key: each.change[key] for key in each.change if key not in _levels()}
            again = self.within_reach(base, each.level + 1)
            if again is not None:
                heapq.heappush(queue, again)


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
    schedule = schedule_of(model.config, model.world_size, steady=True)
    each = {
        number: kept_bytes(model.operations.shape, stage)
        for number, (stage, where) in enumerate(zip(model.stages, schedule.placement))
        if where == rank
    }
    now = most = 0
    for kind, stage, _ in schedule.in_memory(rank):
        if kind is Kind.FORWARD:
            now += each[stage]
            most = max(most, now)
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            now -= each[stage]
    return most


def _inner(change: Change, experts: int) -> int:
    """The number of settings of which a layout has neither the least value nor the most. Ranks with
    one expert, or all, are unlike the others.
    """
    ends = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    return (change[SAMPLES] not in ends) + (2 < change.get(EP, 1) < experts // 2)


def _levels() -> set[tuple[str, str]]:
    return {key for change in (*RECOMPUTE, *RECOMPUTE_EXPERTS) for key in change}


def _expert_changes(config: Config) -> list[Change]:
    """Of how experts are held and tokens sent."""
    if config.model.num_experts is None:
        return []
    ep = config.distributed.expert_model_parallel_size
    return [
        {("distributed", "expert_model_parallel_size"): 2 * ep},
        {("distributed", "expert_model_parallel_size"): ep // 2},
        {("distributed", "expert_tensor_parallel_size"): 1},
        {("model", "moe_token_dispatcher_type"): "allgather"},
        {("distributed", "overlap_moe_expert_parallel_comm"): True},
        {("training", "recompute_granularity"): "selective", **_MOE},
    ]


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
        *_expert_changes(config),
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
        search.simulate(each)
        search.plan(each)
        found.append(each)
    return sorted(found)
