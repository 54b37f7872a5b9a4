"""How long a training step takes on a device, and on what it is spent."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from megatron.tools._plan.activations import leaving_bytes
from megatron.tools._plan.hardware import Hardware, Pricing, Seconds
from megatron.tools._plan.memory import (
    schedule_arguments,
    stage_expert_parameters,
    stage_parameters,
)
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.program import OURS, Program
from megatron.tools._plan.simulate import Costs, simulate
from megatron.tools._plan.state import expert_shard_size, precisions, shard_size
from megatron.tools._plan.work import Exchange, UnitWork, Work

from megatron.config.derive import (
    ExpertRanks,
    attention_ranks,
    data_parallel_size,
    expert_ranks,
    replica_count,
)
from megatron.config.groups import Config, ModelConfig
from megatron.distributed.groups import Layout, layout_of
from megatron.model.arithmetic import (
    elements,
    expert_elements,
    flops_per_iteration,
    padded_vocab_size,
)
from megatron.model.layer import layer_parameters
from megatron.model.recompute import NO_RECOMPUTE, LayerRecompute, stage_offload, stage_recompute
from megatron.model.stages import Stage, pipeline_stages
from megatron.parallel.schedule import Schedule, build_schedule

# FlashAttention whose speed a backend of attention has
GENERATIONS = {"fa4": 3, "gluon": 3}
# More micro-batches than this for each pipeline rank repeat what the simulation has shown.
SIMULATED = 8
# what a user reads of exchanges along an axis
SPENT_ON = {
    "tp": "tensor parallel",
    "ep": "expert parallel",
    "etp": "expert parallel",
    "shard": "data parallel",
    "expert_shard": "data parallel",
    "host": "copies to the host",
    **dict.fromkeys(("cp", "cp_heads", "cp_ring", "tp_cp"), "context parallel"),
}
StageSeconds = tuple[Seconds, ...]  # of the three passes of a stage
Units = tuple[tuple[UnitWork, int], ...]  # of a stage: (passes, how many such units)


class LayerKind(NamedTuple):
    """Layers that do the same as layer `like`."""

    like: int
    choice: LayerRecompute
    modules: frozenset[str]  # whose inputs go to the host


class Cost(NamedTuple):
    """The least seconds of one micro-batch in a stage."""

    ahead: float  # its forward pass, which the next stage waits for
    through: float  # its forward pass and input gradient, which the stages before wait for
    busy: float  # all passes on their rank
    late: float  # of these, weight gradients that no stage waits for


class RankParameters(NamedTuple):
    """How many a rank holds: of experts, whose copies ranks of their own hold, and others."""

    dense: float
    experts: float = 0.0


def group_shapes(config: Config, world_size: int, node_size: int) -> dict[str, tuple[int, int]]:
    """(ranks, nodes that they are on) of the groups of rank 0 by axis; `node`: the ranks of a
    node.
    """
    shards = shard_size(config, world_size), expert_shard_size(config, world_size)
    heads, _ = attention_ranks(config.distributed)
    return _group_shapes(layout_of(config, world_size), heads, *shards, node_size)


@lru_cache(maxsize=4096)
def _group_shapes(
    layout: Layout, heads: int, shard: int, expert_shard: int, node_size: int
) -> dict[str, tuple[int, int]]:
    line = partial(_line, layout)
    whole, context = {"tp": layout.tp, "cp": layout.cp}, line(cp=layout.cp)
    replicas = sorted(line(cp=layout.cp, dp=layout.dp))
    lines = {
        "tp": line(tp=layout.tp),
        "cp": context,
        "tp_cp": line(**whole),
        "cp_heads": line(cp=heads),
        "cp_ring": context[::heads],
        "replicas": replicas,
        "shard": replicas[:shard],
        "same_shard": replicas[::shard],
        "pp": line(pp=min(2, layout.pp)),
        **_expert_lines(sorted(line(**whole, dp=layout.dp)), layout, expert_shard),
    }
    shapes = {
        axis: (len(ranks), len({rank // node_size for rank in ranks}))
        for axis, ranks in lines.items()
    }
    return {**shapes, "node": (min(layout.world, node_size), 1)}


def _line(layout: Layout, **sizes: int) -> list[int]:
    """The ranks that differ from rank 0 along these axes alone."""
    ranks = [0]
    for axis, size in sizes.items():
        if size > 1:
            step = layout.rank({name: int(name == axis) for name in layout.order})
            ranks = [rank + step * index for rank in ranks for index in range(size)]
    return ranks


def _expert_lines(ranks: list[int], layout: Layout, shard: int) -> dict[str, list[int]]:
    """The groups of rank 0 on the experts' grid over the ranks of a pipeline stage."""
    etp, ep = layout.etp, layout.ep
    replicas = ranks[:: etp * ep]
    return {
        "etp": ranks[:etp],
        "ep": ranks[: etp * ep : etp],
        "expert_replicas": replicas,
        "expert_shard": replicas[:shard],
        "expert_same_shard": replicas[::shard],
    }


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, and `spent`: the seconds of a mean rank by what they go to, which add up to
    it.
    """

    seconds: float
    spent: dict[str, float]
    tokens: int
    world_size: int
    flops: float  # of the model, with the real vocabulary

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.seconds / self.world_size

    def mfu(self, peak_tflops: float) -> float:
        """Share of the peak that the model's FLOPs are."""
        return self.flops / self.seconds / self.world_size / (peak_tflops * 1e12)


class StepModel:
    """The steps of a resolved configuration, as `program` runs them. What does not depend on the
    device is found once.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        world_size: int,
        program: Program = OURS,
        device: str = "cuda",
    ):
        self.config, self.vocab_size, self.world_size = config, vocab_size, world_size
        distributed, training = config.distributed, config.training
        self.operations = Operations(config, vocab_size, program, device)
        padded = padded_vocab_size(vocab_size, config.model, distributed.tensor_model_parallel_size)
        self.stages = pipeline_stages(config, padded)
        ranks = data_parallel_size(config, world_size)
        self.micro_batches = training.global_batch_size // (training.micro_batch_size * ranks)
        self.placement = self.schedule(1).placement
        self.parameters = stage_parameters(config, self.stages, self.placement, padded)
        self.expert_parameters = stage_expert_parameters(config, self.stages)
        self.shard = shard_size(config, world_size)
        self.expert_shard = expert_shard_size(config, world_size)
        self.replicas = replica_count(config, world_size)
        self.size = precisions(config)
        self.launches = program.launches
        self._layers: dict[LayerKind, UnitWork] = {}
        self.generation = program.generation or GENERATIONS.get(config.model.attention_backend, 2)

    def schedule(self, micro_batches: int) -> Schedule:
        """Of that many micro-batches."""
        return build_schedule(*schedule_arguments(self.config, micro_batches))

    def stages_of(self, rank: int) -> list[Stage]:
        """Those of a pipeline rank."""
        placed = zip(self.stages, self.placement, strict=True)
        return [stage for stage, where in placed if where == rank]

    @property
    def padded_flops(self) -> float:
        """Of the model in a step, with the padded vocabulary: Megatron-LM's count."""
        padded = self.operations.vocab * self.operations.tp
        training, seq = self.config.training, self.config.data.seq_length
        return flops_per_iteration(self.config.model, training.global_batch_size, seq, padded)

    @property
    def kind(self) -> str:
        """The kind of layout by which errors of predictions are distinguished."""
        distributed = self.config.distributed
        if self.config.model.num_experts is not None:
            return "experts"
        if self.config.model.multi_latent_attention:
            return "latent attention"
        if distributed.pipeline_model_parallel_size > 1:
            return "pipeline"
        if distributed.tensor_model_parallel_size > 1:
            return "tensor"
        return "sharded weights" if distributed.zero_stage == 3 else "data"

    @cached_property
    def units(self) -> list[Units]:
        """The units of each stage; stages that do the same have one tuple."""
        found: dict[Hashable, Units] = {}
        stages = []
        for stage in self.stages:
            kinds = tuple(self._kinds(stage).items())
            does = kinds, stage.embedding, stage.head
            if does not in found:
                found[does] = tuple(self._stage_units(kinds, stage))
            stages.append(found[does])
        return stages

    def _stage_units(
        self, kinds: Sequence[tuple[LayerKind, int]], stage: Stage
    ) -> Iterator[tuple[UnitWork, int]]:
        """With what ZeRO sends alongside the passes."""
        for kind, count in kinds:
            if kind not in self._layers:
                layer = self.operations.layer(kind.like, kind.choice)
                layer = self._with_zero(layer, self.layer_parameters(kind.like))
                self._layers[kind] = self._with_host_copies(layer, kind)
            yield self._layers[kind], count
        if stage.embedding:
            yield self.operations.embedding(), 1
        if stage.head:
            matrix = RankParameters(self.operations.vocab * self.operations.hidden)
            yield self._with_zero(self.operations.head(), matrix), 1

    def _kinds(self, stage: Stage) -> Counter[LayerKind]:
        """Those of the layers of a stage."""
        training = self.config.training
        likes = map(self.operations.like, stage.layers)
        choices = stage_recompute(training, stage.layers)
        going = stage_offload(training, self.config.model, stage.layers)
        found: Counter[LayerKind] = Counter()
        for (like, choice, modules), count in Counter(zip(likes, choices, going)).items():
            found[LayerKind(like, _within_its_group(choice), modules)] += count
        return found

    def _with_host_copies(self, layer: UnitWork, kind: LayerKind) -> UnitWork:
        """With what goes to the host in a forward pass and comes back in a backward pass, alongside
        the layers that run at the same time.
        """
        if not kind.modules:
            return layer
        leaving = leaving_bytes(self.operations.shape, kind.like, kind.choice, kind.modules)
        copy = Work(exchanges=(Exchange("copy", "host", leaving.total if leaving else 0, "pass"),))
        return dataclasses.replace(
            layer, forward=layer.forward + copy, backward_input=layer.backward_input + copy
        )

    def layer_parameters(self, index: int) -> RankParameters:
        """Of a layer on a rank."""
        return _layer_parameters(
            self.config.model, index, self.operations.tp, expert_ranks(self.config)
        )

    @property
    def gathers(self) -> bool:
        """Whether ZeRO gathers the weights that it cuts in each pass."""
        distributed = self.config.distributed
        keeps = distributed.zero3_keep_gathered and self.micro_batches > 1
        return distributed.zero_stage == 3 and not keeps

    def _with_zero(self, passes: UnitWork, parameters: RankParameters) -> UnitWork:
        """What ZeRO 2 and 3 send in the passes of a unit, if they do in every micro-batch."""
        distributed = self.config.distributed
        if distributed.zero_stage < 2:
            return passes
        forward, backward = passes.forward, passes.backward_input
        for kind, count, shard in self.buffers(parameters):
            if shard == 1:
                continue
            axis = f"{kind}shard"
            if self.gathers:
                hidden_by = "pass" if distributed.overlap_param_gather else ""
                gather = Exchange("all-gather", axis, count * self.size.compute, hidden_by)
                forward += Work(exchanges=(gather,), launches=2)
                backward += Work(exchanges=(gather,), launches=2)
            if self.micro_batches > 1 or self.gathers:
                hidden_by = "pass" if distributed.overlap_grad_reduce else ""
                reduce = Exchange("reduce-scatter", axis, count * self.size.wire, hidden_by)
                backward += Work(exchanges=(reduce,), launches=2)
        return dataclasses.replace(passes, forward=forward, backward_input=backward)

    def buffers(self, parameters: RankParameters) -> Iterator[tuple[str, float, int]]:
        """(beginning of the names of its axes, parameters, ranks that ZeRO cuts it over) of each
        kind of buffer.
        """
        yield "", parameters.dense, self.shard
        if parameters.experts:
            yield "expert_", parameters.experts, self.expert_shard

    def pricing(self, hardware: Hardware) -> Pricing:
        """Of this run's operations on a device."""
        shapes = group_shapes(self.config, self.world_size, hardware.node_size)
        return Pricing(hardware, shapes, self.generation, self.launches)

    def time(self, hardware: Hardware, is_bound: bool = False) -> StepTime:
        """What a step takes on this device; with `is_bound` at least: the pipeline is not
        simulated.
        """
        pricing = self.pricing(hardware)
        stages = self._stages_seconds(pricing)
        spent = self._spent_in_passes(stages, pricing, is_bound)
        data = max(self._reduction(pricing, *each) for each in self.by_rank(stages))
        spent["data parallel"] += data
        spent["optimizer"] = self._optimizer(hardware, pricing.factor)
        total = sum(spent.values())
        nodes = -(-self.world_size // hardware.node_size)
        jitter = hardware.layer_jitter if self.gathers and self.shard > 1 else hardware.jitter
        spent["other"] = hardware.step_ms * 1e-3 + total * jitter * _doublings(nodes)
        config = self.config
        batch, seq = config.training.global_batch_size, config.data.seq_length
        return StepTime(
            sum(spent.values()),
            spent,
            batch * seq,
            self.world_size,
            flops_per_iteration(config.model, batch, seq, self.vocab_size),
        )

    def least_costs(self, hardware: Hardware) -> list[Cost]:
        """The least costs of each unit in every layout whose layers do the same: what is recomputed
        or goes to the host and what ZeRO sends only adds work.
        """
        pricing = self.pricing(hardware).alone()
        pairs = self.config.distributed.overlap_moe_expert_parallel_comm

        def cost(unit: UnitWork) -> Cost:
            passes = _stage_seconds(pricing, [(unit, 1)])
            for each in passes if pairs else ():
                each.pop("host launches")  # a longer exchange of experts may hide them
            return _least_cost(passes, pairs)

        like = self.operations.like
        layers = [like(index) for index in range(self.config.model.num_layers)]
        costs = {index: cost(self.operations.layer(index, NO_RECOMPUTE)) for index in {*layers}}
        return [
            cost(self.operations.embedding()),
            *(costs[index] for index in layers),
            cost(self.operations.head()),
        ]

    def _stages_seconds(self, pricing: Pricing) -> list[StageSeconds]:
        """Of the three passes of each stage."""
        each = {id(units): units for units in self.units}  # comparing them takes longer
        found = {key: _stage_seconds(pricing, units) for key, units in each.items()}
        return [found[id(units)] for units in self.units]

    def _spent_in_passes(
        self, stages: Sequence[StageSeconds], pricing: Pricing, is_bound: bool
    ) -> defaultdict[str, float]:
        """What all passes of a step take, by the names that a user reads."""
        pipeline = self._pipeline_seconds(stages, pricing, is_bound)
        distributed = self.config.distributed
        each = self.micro_batches / distributed.pipeline_model_parallel_size
        total = Seconds()
        counts = Counter(map(id, stages))  # those that do the same are one object
        for passes in {id(passes): passes for passes in stages}.values():
            for seconds in passes:
                total.add(seconds, counts[id(passes)])
        spent: defaultdict[str, float] = defaultdict(float)
        for name, value in total.items():
            spent[SPENT_ON.get(name, name)] += value * each
        if distributed.overlap_moe_expert_parallel_comm:
            exposed = self._pipeline_seconds(stages, pricing.unpaired(), is_bound)
            spent["expert parallel"] -= exposed - pipeline
        spent["pipeline bubble"] = max(0.0, pipeline - sum(spent.values()))
        return spent

    def _pipeline_seconds(
        self, stages: Sequence[StageSeconds], pricing: Pricing, is_bound: bool
    ) -> float:
        """Of all passes. A rank that waits for another leaves it its core, where they share one."""
        if pricing.factor > 1:
            pricing = pricing.alone()
            stages = self._stages_seconds(pricing)
        return (self.least_seconds if is_bound else self.passes_seconds)(stages, pricing)

    @cached_property
    def rank_parameters(self) -> list[RankParameters]:
        """Parameters of each pipeline rank."""
        found = [RankParameters(0)] * (max(self.placement) + 1)
        of_stages = zip(self.parameters, self.expert_parameters, self.placement, strict=True)
        for parameters, experts, rank in of_stages:
            before = found[rank]
            found[rank] = RankParameters(
                before.dense + parameters - experts, before.experts + experts
            )
        return found

    def by_rank(self, stages: Sequence[StageSeconds]) -> list[tuple[float, float, RankParameters]]:
        """(forward, backward seconds of a micro-batch, parameters) of each pipeline rank."""
        forward, backward = ([0.0] * len(self.rank_parameters) for _ in range(2))
        for (first, *others), rank in zip(stages, self.placement, strict=True):
            forward[rank] += first.total
            backward[rank] += sum(each.total for each in others)
        return [*zip(forward, backward, self.rank_parameters)]

    def passes_seconds(self, stages: Sequence[StageSeconds], pricing: Pricing) -> float:
        """Seconds of all passes of a step."""
        passes = [tuple(each[i].total for each in stages) for i in range(3)]
        ranks = self.config.distributed.pipeline_model_parallel_size
        exchanged = self._exchanged(stages) if pricing.pairs and pricing.hides else ((), ())
        if ranks == 1 and not exchanged[0]:
            return self.micro_batches * sum(map(sum, passes))
        message = pricing.exchange(Exchange("message", "pp", self.operations.shape.hidden))
        costs = Costs(*passes, 0.0, message, *exchanged, pricing.hardware.slowdown)
        return self._simulated(costs, ranks)

    def least_seconds(self, stages: Sequence[StageSeconds], pricing: Pricing) -> float:
        """Seconds that all passes of a step take at least, without a simulation."""
        pairs = pricing.pairs and self.config.distributed.overlap_moe_expert_parallel_comm
        costs = [_least_cost(passes, pairs) for passes in stages]
        return least_pipeline_seconds(costs, self.placement, self.micro_batches)

    def _simulated(self, costs: Costs, ranks: int) -> float:
        """Seconds of the time line of all passes, whose steady part repeats itself."""

        def seconds(micro_batches: int) -> float:
            line = simulate(self.schedule(micro_batches), costs)
            return line.end - line.begin

        count = self.micro_batches
        if count <= SIMULATED * ranks:
            return seconds(count)
        rest = count % ranks
        fewer, more = (ranks * times + rest for times in (SIMULATED // 2, SIMULATED - 1))
        first, second = seconds(fewer), seconds(more)
        return second + (second - first) / (more - fewer) * (count - more)

    def _exchanged(
        self, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of a forward and of a backward pass of each stage in exchanges of experts that
        run in pairs; none where they do not.
        """
        if not self.config.distributed.overlap_moe_expert_parallel_comm:
            return (), ()
        forward, backward = (tuple(each[i].get("ep", 0.0) for each in stages) for i in (0, 1))
        return forward, backward

    def _reduction(
        self, pricing: Pricing, forward: float, backward: float, parameters: RankParameters
    ) -> float:
        """Exposed seconds of what data parallelism sends once a step."""
        hardware, distributed = pricing.hardware, self.config.distributed

        # Gloo ends each block's exchange before it begins the next; NCCL's follow one another
        blocks = sum(count for units in self.units for _, count in units) if hardware.cores else 1

        def exposed(exchanges: Sequence[Exchange], window: float, overlaps: bool) -> float:
            time = sum(pricing.exchange(each, blocks) for each in exchanges)
            covered = min(time, window) if overlaps and pricing.hides else 0.0
            return time - covered + hardware.slowdown * covered

        reductions, gathers = [], []
        for kind, count, shard in self.buffers(parameters):
            reduced, gathered = self._once_a_step(pricing, kind, count, shard)
            reductions += reduced
            gathers += gathered
        return exposed(reductions, backward, distributed.overlap_grad_reduce) + exposed(
            gathers, forward, distributed.overlap_param_gather
        )

    def _once_a_step(
        self, pricing: Pricing, kind: str, parameters: float, shard: int
    ) -> tuple[list[Exchange], list[Exchange]]:
        """Reductions and gathers of a kind of buffer that are not part of the passes."""
        stage = self.config.distributed.zero_stage
        replicas = pricing.groups[f"{kind}replicas"][0]
        gradients, weights = parameters * self.size.wire, parameters * self.size.compute
        if replicas == 1:
            return [], []
        if shard == 1:
            return [Exchange("all-reduce", f"{kind}replicas", gradients)], []
        every = stage >= 2 and (self.micro_batches > 1 or stage == 3)
        reductions = [] if every else [Exchange("reduce-scatter", f"{kind}shard", gradients)]
        if shard < replicas:
            reductions.append(Exchange("all-reduce", f"{kind}same_shard", gradients / shard))
        gathers = [Exchange("all-gather", f"{kind}shard", weights)] if stage < 3 else []
        return reductions, gathers

    def _optimizer(self, hardware: Hardware, factor: float) -> float:
        """The update of the slices that a rank holds; on the host, copies and its memory."""
        optimizer = self.config.optimizer
        elements = max(
            sum(count / shard for _, count, shard in self.buffers(parameters))
            for parameters in self.rank_parameters
        )
        size = self.size
        # gradients are read for the norm and for the update, state is read and written
        touched = 2 * size.gradient + 2 * (size.wide + size.moments) + size.compute
        host = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
        seconds = factor * hardware.stream_seconds(elements * (1 - host) * touched)
        if host:
            share = hardware.host_memory_gbps / min(hardware.node_size, self.world_size)
            copied = size.gradient + size.compute
            seconds += elements * host * copied / (hardware.host_gbps * 1e9)
            seconds += elements * host * touched / (share * 1e9)
        return seconds


def least_pipeline_seconds(
    stages: Sequence[Cost], placement: Sequence[int], micro_batches: int
) -> float:
    """Seconds that the passes of a step take at least: a rank starts when the first forward pass
    has reached it, and after its last input gradient those of the stages before are computed.
    """
    busy: defaultdict[int, float] = defaultdict(float)
    waited: defaultdict[int, float] = defaultdict(float)
    for cost, rank in zip(stages, placement, strict=True):
        busy[rank] += cost.busy
        waited[rank] += cost.busy - cost.late
    ahead = around = found = 0.0
    for cost, rank in zip(stages, placement, strict=True):
        if rank in busy:  # its first stage
            last_work = ahead + micro_batches * busy.pop(rank)
            last_input_grad = around + micro_batches * waited[rank]
            found = max(found, last_work, last_input_grad)
        ahead += cost.ahead
        around += cost.through
    return found


def _least_cost(passes: StageSeconds, pairs: bool) -> Cost:
    """The least cost of passes; in `pairs`, which hide at most all that is sent to experts."""
    forward, inputs, weights = passes
    through, late = forward.total + inputs.total, weights.total
    hidden = forward.get("ep", 0.0) + inputs.get("ep", 0.0) if pairs else 0.0
    return Cost(forward.total, through, through + late - hidden, late)


@lru_cache(maxsize=4096)
def _layer_parameters(
    model: ModelConfig, index: int, tp: int, experts: ExpertRanks
) -> RankParameters:
    total = elements(layer_parameters(model, index).values(), tp, experts)
    of_experts = expert_elements(model, index, experts)
    return RankParameters(total - of_experts, of_experts)


@lru_cache
def _within_its_group(choice: LayerRecompute) -> LayerRecompute:
    """What is computed again, wherever in a group the layer is."""
    return dataclasses.replace(choice, first=False, last=False)


def _doublings(nodes: int) -> float:
    return max(0, nodes - 1).bit_length()


def _stage_seconds(
    pricing: Pricing, units: Sequence[tuple[UnitWork, int]]
) -> tuple[Seconds, Seconds, Seconds]:
    """Of the three passes of a stage."""

    def total(which: str) -> Seconds:
        found = Seconds()
        for passes, count in units:
            found.add(pricing.seconds(getattr(passes, which)), count)
        return found

    return total("forward"), total("backward_input"), total("backward_weight")
