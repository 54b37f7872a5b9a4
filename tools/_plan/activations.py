"""What one micro-batch keeps of each unit of a model, and what a unit needs while it runs: measured
by running the real layer on tensors without memory (layer_run.py), once for each kind of unit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import prod
from typing import NamedTuple

from megatron.tools._plan.layer_run import (
    SPLIT,
    LayerRun,
    forget_models,
    micro_batch_of,
    without_experts,
)
from megatron.tools._plan.measured_pass import Between, MeasuredPass
from megatron.tools._plan.state import element_sizes
from megatron.tools._plan.work import UnitWork

from megatron.config.fp8 import layer_in_fp8
from megatron.config.groups import (
    Config,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megatron.config.layers import layer_records
from megatron.model.build import hidden_shape
from megatron.model.recompute import NO_RECOMPUTE, LayerRecompute, stage_offload, stage_recompute
from megatron.model.stages import Stage

EMBEDDING, HEAD = Stage(True, range(0), False), Stage(False, range(0), True)
OF_EXPERTS = frozenset({"moe", "moe_act"})  # modules that layers without experts do not have


@dataclass(frozen=True)
class LeavingBytes:
    """What one forward pass of a layer sends to the host: bytes of its storages, and whether the
    layer's input is one of them, or something that nothing reads.
    """

    storages: tuple[int, ...]
    input_leaves: bool
    input_is_unread: bool

    @property
    def total(self) -> int:
        return sum(self.storages)


@dataclass(frozen=True)
class UnitBytes:
    """What one micro-batch keeps of a unit, and the most that running it takes in addition."""

    saved: int  # from the forward pass to the backward pass, its input included, logits not
    logits: int
    # at the forward pass's worst moment, in addition to `saved`, `logits` and other units' bytes
    forward: int
    # at the backward pass's worst moment, in addition to the same and the gradient of its output
    backward: int
    # of a backward pass in two halves: the peak of the first, what it leaves, that of the second
    split: int = 0
    deferred: int = 0
    weight: int = 0
    head: bool = False
    # of a layer that is recomputed whole: the same when its graph is there again
    rebuilt: UnitBytes | None = None
    keeps_input: bool = True  # itself, or else a share of it or nothing
    leaving: LeavingBytes | None = None  # where tensors go to the host
    # of a layer with experts on other ranks: what it holds more than `saved` while tokens go there
    # or their gradients come back, and while outputs come back
    dispatched: int = 0
    combined: int = 0


class Unit(NamedTuple):
    """What the passes of the one unit of `stage` depend on."""

    config: Config
    vocab_size: int
    device: str
    stage: Stage
    choice: LayerRecompute


def _local_shape(model: ModelConfig, tp: int) -> ModelConfig:
    """The model as one of `tp` tensor-parallel ranks computes it: its heads (of keys and values at
    least one) and its part of the ffn width.
    """
    shared = model.moe_shared_expert_intermediate_size
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // tp,
        num_query_groups=max(1, model.num_query_groups // tp),
        ffn_hidden_size=model.ffn_hidden_size // tp,
        moe_shared_expert_intermediate_size=shared and shared // tp,
    )


class Shape:
    """One rank's sizes of a micro-batch. `vocab_size`: the tokenizer's, or the padded one."""

    def __init__(self, config: Config, vocab_size: int, device: str = "cuda"):
        distributed = config.distributed
        tp = distributed.tensor_model_parallel_size
        self.config, self.vocab_size, self.device = config, vocab_size, device
        self.model = _local_shape(config.model, tp)
        self.compute, self.wide = element_sizes(config.precision)
        samples, cp = config.training.micro_batch_size, distributed.context_parallel_size
        self.tokens = samples * config.data.seq_length // cp
        # bytes of the hidden states of all these tokens, and of those that this rank holds
        self.whole = self.tokens * self.model.hidden_size * self.compute
        self.hidden = self.whole // tp if distributed.sequence_parallel else self.whole

    @cached_property
    def of_units(self) -> Config:
        """What the passes of layers with experts depend on."""
        return unit_config(self.config)

    @cached_property
    def of_dense(self) -> Config:
        """Likewise of layers without."""
        return without_experts(self.of_units)

    @cached_property
    def of_ends(self) -> Config:
        """Likewise of embedding and head."""
        return _without_context(self.of_dense)

    @cached_property
    def known(self) -> dict[Hashable, list[MeasuredPass]]:
        """The passes of its units so far, which other shapes share."""
        return _known_passes.setdefault((self.of_units, self.vocab_size, self.device), {})

    def passes(self, stage: Stage, choice: LayerRecompute = NO_RECOMPUTE) -> list[MeasuredPass]:
        """Those of the one unit of a stage."""
        if (stage, choice) not in self.known:
            self.known[stage, choice] = _passes(self.unit(stage, choice))
        return self.known[stage, choice]

    def like(self, index: int, *, final_norm: bool = True) -> int:
        """The first layer whose passes take what those of layer `index` do, its final norm included
        or not.
        """
        return (self.likes if final_norm else self.likes_inside)[index]

    @cached_property
    def likes(self) -> tuple[int, ...]:
        return _layers_like(self.of_units, True)

    @cached_property
    def likes_inside(self) -> tuple[int, ...]:
        return _layers_like(self.of_units, False)

    def unit(self, stage: Stage, choice: LayerRecompute = NO_RECOMPUTE) -> Unit:
        """The one unit of a stage."""
        config = self.of_ends
        if stage.layers:
            is_dense = not self.config.model.expert_layers()[stage.layers.start]
            config = self.of_dense if is_dense else self.of_units
            if is_dense and choice.modules & OF_EXPERTS:
                choice = replace(choice, modules=choice.modules - OF_EXPERTS)
        return Unit(config, self.vocab_size, self.device, stage, choice)


def unit_config(config: Config) -> Config:
    """What of a configuration the passes of a unit depend on; all else has its default."""
    distributed, training = config.distributed, config.training
    is_split = SPLIT in (distributed.pipeline_schedule or "")
    return Config(
        model=config.model,
        precision=config.precision,
        data=DataConfig(
            seq_length=config.data.seq_length,
            reset_attention_mask=config.data.reset_attention_mask,
        ),
        training=TrainingConfig(
            micro_batch_size=training.micro_batch_size,
            distribute_saved_activations=training.distribute_saved_activations,
            min_offloaded_tensor_size=training.min_offloaded_tensor_size,
        ),
        optimizer=OptimizerConfig(main_grads_dtype=config.optimizer.main_grads_dtype),
        distributed=DistributedConfig(
            tensor_model_parallel_size=distributed.tensor_model_parallel_size,
            sequence_parallel=distributed.sequence_parallel,
            context_parallel_size=distributed.context_parallel_size,
            cp_comm_type=distributed.cp_comm_type,
            hierarchical_context_parallel_sizes=distributed.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=distributed.expert_model_parallel_size,
            expert_tensor_parallel_size=distributed.expert_tensor_parallel_size,
            pipeline_schedule=SPLIT if is_split else "1f1b",
        ),
    )


@lru_cache(maxsize=4096)
def _without_context(config: Config) -> Config:
    """That of units whose positions do not meet: they have no attention."""
    no_attention = config.with_fields("model", attention_backend="auto")
    return no_attention.with_fields(
        "distributed", cp_comm_type="allgather", hierarchical_context_parallel_sizes=None
    )


@lru_cache(maxsize=4096)
def _layers_like(config: Config, final_norm: bool) -> tuple[int, ...]:
    """For each layer the first one whose passes take what its own do."""
    model, layers = config.model, config.model.num_layers
    records = layer_records(model)
    changes_input = model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute"

    def kind(index: int) -> Hashable:
        in_fp8 = layer_in_fp8(config.precision, index, layers)
        first, last = index == 0 and changes_input, final_norm and index == layers - 1
        return records[index]._replace(first=first, last=last), in_fp8

    kinds = [kind(index) for index in range(layers)]
    return tuple(map(kinds.index, kinds))


@lru_cache(maxsize=64)
def _run_of(config: Config, vocab_size: int, device: str, stage: Stage) -> LayerRun:
    """One unit on the meta device."""
    return LayerRun(config, vocab_size, device, stage)


# the passes of a unit that has one sample and all experts, by the samples and the ranks that share
# the experts which it had in their place
_known: defaultdict[Unit, dict[tuple[int, int], list[MeasuredPass]]] = defaultdict(dict)

# by stage and recomputation, of each configuration of units
_known_passes: dict[tuple[Config, int, str], dict[Hashable, list[MeasuredPass]]] = {}


@cache
def _passes(unit: Unit) -> list[MeasuredPass]:
    """As `LayerRun.passes` returns them, without a run where runs with fewer and with more samples
    or ranks show what they are.
    """
    samples, ranks = (
        unit.config.training.micro_batch_size,
        unit.config.distributed.expert_model_parallel_size,
    )
    config = unit.config.with_fields("training", micro_batch_size=1)
    config = config.with_fields("distributed", expert_model_parallel_size=1)
    known = _known[unit._replace(config=config)]
    with_samples = {number: (number, other) for number, other in known if other == ranks}
    with_ranks = {number: (other, number) for other, number in known if other == samples}
    for value, places in ((samples, with_samples), (ranks, with_ranks)):
        low = max((number for number in places if number < value), default=None)
        high = min((number for number in places if number > value), default=None)
        if low is None or high is None:
            continue
        between = Between(low, high, value)
        found = [*map(between.passed, known[places[low]], known[places[high]])]
        if None not in found:
            break
    else:
        found = [*_run_of(*unit[:4]).passes(unit.choice)]
    known[samples, ranks] = [each for each in found if each is not None]
    return known[samples, ranks]


def forget_passes() -> None:
    """Run all units anew: what their passes take has been changed in their modules."""
    forget_models()
    for cached in (_run_of, _passes, unit_bytes_of, _leaving):
        cached.cache_clear()
    _known.clear()
    _known_passes.clear()


def layer_stage(shape: Shape, index: int, *, final_norm: bool = True) -> Stage:
    """A stage of one layer alone, one like this."""
    like = shape.like(index, final_norm=final_norm)
    return Stage(False, range(like, like + 1), False)


def layer_bytes(shape: Shape, index: int, choice: LayerRecompute) -> UnitBytes:
    """One transformer layer."""
    return unit_bytes_of(shape.unit(layer_stage(shape, index), choice))


@cache
def unit_bytes_of(unit: Unit) -> UnitBytes:
    """One unit alone."""
    forward, *others = _passes(unit)
    if unit.choice.whole:
        training = unit.config.training
        own = unit_bytes_of(unit._replace(choice=LayerRecompute(unit.choice.modules)))
        keeps_input = unit.choice.first and not training.distribute_saved_activations
        compute, _ = element_sizes(unit.config.precision)
        hidden = 0 if keeps_input else prod(hidden_shape(unit.config)) * compute
        return replace(
            own,
            saved=forward.left,
            forward=forward.peak - forward.left - hidden,
            rebuilt=own,
            keeps_input=keeps_input,
        )
    kept, backward, halves = forward.left, others[0], others[1:]
    there, back = forward.at_exchanges, backward.at_exchanges
    return UnitBytes(
        saved=kept - forward.logits,
        logits=forward.logits,
        forward=forward.peak - kept,
        backward=backward.peak - kept,
        split=(halves or others)[0].peak - kept,
        deferred=halves[0].left if halves else 0,
        weight=halves[1].peak - halves[0].left if halves else 0,
        head=unit.stage.head,
        # rows go there behind the numbers of rows, and their weights behind the rows
        dispatched=max(there[2], back[-1]) - kept if len(there) > 2 else 0,
        combined=there[-1] - kept if len(there) > 2 else 0,
    )


def unit_work(shape: Shape, stage: Stage, choice: LayerRecompute = NO_RECOMPUTE) -> UnitWork:
    """What the passes of the one unit of a stage compute, move and send."""
    forward, backward, *halves = (each.work for each in shape.passes(stage, choice))
    return UnitWork(forward, *(halves or [backward]))


@cache
def _leaving(unit: Unit, modules: frozenset[str]) -> LeavingBytes:
    sizes, *of_input = _run_of(*unit[:4]).leaving(unit.choice, modules)
    return LeavingBytes(tuple(sizes), *of_input)


def leaving_bytes(
    shape: Shape, index: int, choice: LayerRecompute, modules: frozenset[str]
) -> LeavingBytes | None:
    """What of a layer goes to the host where these modules' inputs do, and is large enough."""
    if not modules:
        return None
    if choice.whole:  # of a group's layers the first one alone has inputs that leave
        choice = replace(choice, first=True)
    return _leaving(shape.unit(layer_stage(shape, index), choice), modules)


def unit_bytes(shape: Shape, stage: Stage) -> list[UnitBytes]:
    """The units of a stage in the order of the forward pass."""
    training = shape.config.training
    choices = stage_recompute(training, stage.layers)
    going = stage_offload(training, shape.model, stage.layers)
    kinds: dict[Hashable, UnitBytes] = {}

    def layer(index: int, choice: LayerRecompute, modules: frozenset[str]) -> UnitBytes:
        kind = shape.like(index), choice, modules
        if kind not in kinds:
            leaving = leaving_bytes(shape, index, choice, modules)
            kinds[kind] = replace(layer_bytes(shape, index, choice), leaving=leaving)
        return kinds[kind]

    return [
        *([unit_bytes_of(shape.unit(EMBEDDING))] if stage.embedding else []),
        *map(layer, stage.layers, choices, going),
        *([unit_bytes_of(shape.unit(HEAD))] if stage.head else []),
    ]


def kept_bytes(shape: Shape, stage: Stage) -> int:
    """What a micro-batch keeps of a stage on the device at least: logits and the final norm's input
    are left out.
    """
    training = shape.config.training
    total = 0
    for is_there, end in ((stage.embedding, EMBEDDING), (stage.head, HEAD)):
        total += _saved_bytes(shape.passes(end)) if is_there else 0
    counts = Counter(
        zip(
            (layer_stage(shape, index, final_norm=False) for index in stage.layers),
            stage_recompute(training, stage.layers),
            stage_offload(training, shape.model, stage.layers),
            strict=True,
        )
    )
    for (like, choice, modules), count in counts.items():
        leaving = leaving_bytes(shape, like.layers[0], choice, modules)
        own = _saved_bytes(shape.passes(like, choice))
        total += count * (own - (leaving.total if leaving else 0))
    return total


def _saved_bytes(passes: list[MeasuredPass]) -> int:
    return passes[0].left - passes[0].logits


def running_bytes(shape: Shape, layers: range) -> int:
    """What the backward pass of the last of these layers takes at least, in addition to what their
    forward passes keep.
    """
    stage = layer_stage(shape, layers[-1], final_norm=False)
    choice = stage_recompute(shape.config.training, layers)[-1]
    unit = unit_bytes_of(shape.unit(stage, choice))
    graph = unit.rebuilt or unit
    return graph.saved - unit.saved + min(graph.backward, graph.split)


def input_bytes(shape: Shape) -> int:
    """What layers read of a micro-batch: token ids, labels, loss mask, positions, rotary tables,
    and the tables of attention masks.
    """
    return micro_batch_of(shape.of_dense, shape.device)[1]
