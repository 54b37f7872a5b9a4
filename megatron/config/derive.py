"""Values that follow from others when they are not given, each with its reason, and the view of a
run that rules look at.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config.batch_schedule import parse_schedule
from megatron.config.errors import UserError, shortened
from megatron.config.groups import DECAYING, GROUPS, WARMUP, Config, DistributedConfig
from megatron.config.layers import expert_pattern
from megatron.config.metadata import flag_name
from megatron.config.model import FORMER_ROPE, GATED, yarn_scale
from megatron.config.options import FIELDS, read_table
from megatron.config.stages import AUTO, LAYOUT, PER_VIRTUAL, VIRTUAL, virtual_stages

GATED_WIDTH = "8/3 x hidden-size rounded down to a multiple of 64"


def spelled(field: str, value: Any) -> str:
    """A field with a value as it is typed: `--lr 0.1`, `--no-save-optim`."""
    if value is False:
        return FIELDS[field].off[0]
    if value is True or value is None:
        return flag_name(field)
    items = value if isinstance(value, tuple) else (value,)
    words = " ".join(f"{item:.12g}" if isinstance(item, float) else str(item) for item in items)
    return f"{flag_name(field)} {shortened(words, 60) if isinstance(value, tuple) else words}"


# ---------------------------------------------------------------- ranks


def data_parallel_size(config: Config, world_size: int) -> int:
    """Ranks with different samples; 0 where the other parallel sizes do not divide the world."""
    sizes = (
        config.distributed.tensor_model_parallel_size,
        config.distributed.context_parallel_size,
        config.distributed.pipeline_model_parallel_size,
    )
    if min(world_size, *sizes) <= 0:
        return 0
    replicas, rest = divmod(world_size, math.prod(sizes))
    return 0 if rest else replicas


def replica_count(config: Config, world_size: int) -> int:
    """Data- x context-parallel size."""
    return data_parallel_size(config, world_size) * config.distributed.context_parallel_size


def attention_ranks(distributed: DistributedConfig) -> tuple[int, int]:
    """Context-parallel ranks that exchange heads, and those that pass keys and values in a ring."""
    size = distributed.context_parallel_size
    if distributed.cp_comm_type == "a2a+p2p":
        heads, ring = distributed.hierarchical_context_parallel_sizes or (1, size)
        return heads, ring
    return {"a2a": (size, 1), "p2p": (1, size)}.get(distributed.cp_comm_type, (1, 1))


class ExpertRanks(NamedTuple):
    """Ranks that share the matrices of each expert, and that hold different experts."""

    etp: int = 1
    ep: int = 1


def expert_ranks(config: Config) -> ExpertRanks:
    if config.model.num_experts is None:
        return ExpertRanks()
    distributed = config.distributed
    etp = distributed.expert_tensor_parallel_size or distributed.tensor_model_parallel_size
    return ExpertRanks(etp, distributed.expert_model_parallel_size)


# ---------------------------------------------------------------- conditions

# What messages call a condition, where its flags and values would not explain it.
TEXTS = {
    DECAYING: "a --lr-decay-style that decays",
    "loss_scale=None": "dynamic loss scaling (no --loss-scale)",
    "mock_data=False": "data files (--data-path or --train-data-path)",
    "group_query_attention|one_group_a_head=True": "--group-query-attention",
    WARMUP: "a warm-up (--lr-warmup-iters)",
    "replicas>1": "several data- or context-parallel ranks",
    "sequence_parallel=False": "copies on tensor-parallel ranks (no --sequence-parallel)",
    "world>1": "several ranks",
    "zero_stage>0": "--zero-stage above 0 over several ranks",  # off on one rank
}


@functools.cache
def _alternatives(condition: str) -> list[tuple[str, str, str]]:
    """(field, "", =, != or >, values) of each part of a condition."""
    return re.findall(r"(\w+)(!?=|>|)([^|]*)", condition)


def condition_text(condition: str) -> str:
    """What messages call a condition: `--optimizer adam`, `--profile`, `--eval-iters above 0`."""
    found = []
    for field, sign, values in _alternatives(condition):
        word = {">": "above ", "!=": "other than "}.get(sign, "")
        value = values.replace(",", " or ").replace("True", "")
        found.append(f"{flag_name(field)} {word}{value}".strip())
    return TEXTS.get(condition, " or ".join(found))


class RunView:
    """What rules look at: every field by its own name (`run.lr`), the numbers of ranks and the
    tokenizer's vocabulary.

    Each matrix is shared by `tp` ranks, the positions of a sample by `cp`, the layers by `pp`, and
    the samples by `dp`; together they are the `world` (dp is 0 where the sizes do not divide it).
    `replicas` ranks hold the same parameters.
    """

    def __init__(self, config: Config, world: int, vocabulary: int | None):
        self._config = config
        self._derived: dict[str, dict[str, Any]] = {}  # by group: what the configuration lacks
        self._held: dict[str, bool] = {}
        self.notes: list[str] = []
        # Hundreds of rules ask for fields, thousands of times in a search.
        for group in GROUPS:
            self.__dict__.update(vars(getattr(config, group)))
        self.world = world
        self.vocabulary = vocabulary
        self.tp = config.distributed.tensor_model_parallel_size
        self.pp = config.distributed.pipeline_model_parallel_size
        self.cp = config.distributed.context_parallel_size
        self.dp = data_parallel_size(config, world)
        self.replicas = self.dp * self.cp

    if TYPE_CHECKING:

        def __getattr__(self, field: str) -> Any: ...

    @property
    def config(self) -> Config:
        for group, values in self._derived.items():
            self._config = self._config.with_fields(group, **values)
        self._derived.clear()
        return self._config

    def fill(self, field: str, value: Any, reason: str = "") -> None:
        """Give a field a derived value; one with a reason is a note."""
        self._derived.setdefault(FIELDS[field].group, {})[field] = value
        self._held.clear()
        setattr(self, field, value)
        if reason:
            self.notes.append(f"{field.replace('_', '-')} = {value}: {reason}")

    def default(self, field: str, value: Any, reason: str = "") -> None:
        """Fill in a field that is not given."""
        if getattr(self, field) is None:
            self.fill(field, value, reason)

    def holds(self, condition: str) -> bool:
        """Whether a condition on settings holds: `field`, it is not at its default; `field=a,b`, it
        has, or among its values is, one of these (None: it is not set); `field!=a,b`, none of
        these; `field>0`. Alternatives have | between them. Attributes of this class count as
        fields.
        """
        if condition not in self._held:
            alternatives = _alternatives(condition)
            self._held[condition] = any(self._holds(*each) for each in alternatives)
        return self._held[condition]

    def _holds(self, field: str, sign: str, values: str) -> bool:
        value = getattr(self, field)
        if sign == ">":
            return value is not None and value > float(values)
        if not sign:
            return value is not None and value != FIELDS[field].default
        if values == "None":
            return (value is None) == (sign == "=")
        found = value if isinstance(value, tuple) else (value,)
        is_one = not set(map(str, found)).isdisjoint(values.split(","))
        return is_one == (sign == "=")

    def holds_all(self, conditions: str) -> bool:
        """Whether all of several conditions hold, which have spaces between them."""
        return all(map(self.holds, conditions.split()))

    @property
    def one_group_a_head(self) -> bool:
        """Whether no key/value head is shared."""
        return self.num_query_groups == self.num_attention_heads

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """Words of --recompute-modules and --recompute-layers."""
        words = (*(self.recompute_modules or ()), *(self.recompute_layers or ()))
        return tuple(re.split("[+* ]", " ".join(words)))

    @property
    def dense_mlps(self) -> bool:
        """Whether a model with experts also has dense layers or a shared expert."""
        with suppress(UserError):
            of_experts = expert_pattern(self.moe_layer_freq, self.num_layers or 1)
            return not all(of_experts) or self.moe_shared_expert_intermediate_size is not None
        return True  # invalid --moe-layer-freq: reported by its own rule

    @property
    def rescales_scores(self) -> bool:
        """Whether Megatron-LM's latent attention scales scores by YaRN's factor, as with rope."""
        factor = self.rope_scaling_factor
        return factor is not None and yarn_scale(factor, self.mscale_all_dim) != 1

    @property
    def tp_fits(self) -> bool:
        """Whether the tensor-parallel size is right, so that widths can be held against it."""
        heads = self.num_attention_heads if self.has("num_attention_heads") else 0
        return self.dp > 0 and heads % self.tp == 0

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step on each rank; None while sizes are missing or wrong."""
        if not self.has("micro_batch_size", "global_batch_size") or not self.dp:
            return None
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def batch_unit(self) -> int:
        """Samples of a micro-batch on all data-parallel ranks."""
        return (self.micro_batch_size or 1) * (self.dp or 1)

    @property
    def positions(self) -> int | None:
        """Positions of a sample that a rank holds between the layers."""
        if self.seq_length is None:
            return None
        return self.seq_length // self.cp // (self.tp if self.sequence_parallel else 1)

    def spell_out(self, text: str) -> str:
        """A text with each `@field` as the flag with its value."""

        def shown(match: re.Match[str]) -> str:
            field = match[1]
            return spelled(field, getattr(self, field)) if field in FIELDS else match[0]

        return re.sub(r"(?<!\S)@(\w+)", shown, text)

    def given(self, *fields: str) -> list[str]:
        """Those of some fields that have a value."""
        values = ((field, getattr(self, field)) for field in fields)
        return [field for field, value in values if value is not None and value is not False]

    def has(self, *fields: str) -> bool:
        """All of these are given and, where numbers, greater than zero."""
        values = [getattr(self, field) for field in fields]
        numbers = [value for value in values if isinstance(value, (int, float))]
        return None not in values and all(number > 0 for number in numbers)


# ---------------------------------------------------------------- rotary positions

_YARN = (*FORMER_ROPE, "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim")


def _position_type(run: RunView) -> None:
    """Latent attention takes YaRN unless --rope-type rope, as in Megatron-LM. YaRN that changes
    nothing stays rope. Afterwards position_embedding_type alone holds the answer.
    """
    kind = run.position_embedding_type
    if not run.multi_latent_attention or kind == "learned_absolute":
        return
    if run.rope_type == "rope" and (kind == "yarn" or run.rescales_scores):
        return  # a fault
    changed = set(filter(run.holds, _YARN))
    if all(getattr(run, field) == former for field, former in FORMER_ROPE.items()):
        changed -= FORMER_ROPE.keys()
    if run.use_rope_scaling:
        changed.clear()
    wanted = "rope"
    if run.rope_type == "rope":
        for field in sorted(changed):
            run.fill(field, FIELDS[field].default, "--rope-type rope rescales no frequencies")
    elif changed or "yarn" in (kind, run.rope_type):
        wanted = "yarn"
    run.fill("rope_type", None)
    if wanted != kind:
        what = "YaRN unless --rope-type rope" if wanted == "yarn" else "rotary positions"
        reason = f"latent attention has {what}, as in Megatron-LM"
        run.fill("position_embedding_type", wanted, reason)


def _rope_scaling(run: RunView) -> None:
    """Megatron-LM's defaults of rescaled frequencies."""
    model, is_yarn = run.config.model, run.position_embedding_type == "yarn"
    if is_yarn or run.use_rope_scaling:
        reason = "YaRN's default in Megatron-LM" if is_yarn else ""
        run.default("rope_scaling_factor", model.rope_factor, reason)
        run.default("rope_original_max_position_embeddings", model.rope_original_length, reason)
    else:
        for field, former in FORMER_ROPE.items():
            if getattr(run, field) == former:
                run.fill(field, None)


# ---------------------------------------------------------------- what follows from flags

# Where conditions hold, fields get values (@: that of another field), and the reason is a note.
# A row sees the values of those above it.
DERIVED_VALUES = """
num_experts=1: num_experts = None; one expert is the MLP itself
moe_expert_capacity_factor=-1.0: moe_expert_capacity_factor = None; -1 is no limit
# never, as in Megatron-LM
exit_interval=0: exit_interval = None
exit_duration_in_mins=0.0: exit_duration_in_mins = None
save_interval=0: save_interval = None
eval_interval=0: eval_interval = None
# the model
num_query_groups=None num_attention_heads!=None group_query_attention=False:
    num_query_groups = @num_attention_heads; one for each head without --group-query-attention
max_position_embeddings=None seq_length!=None:
    max_position_embeddings = @seq_length; seq-length
moe_ffn_hidden_size=None ffn_hidden_size!=None num_experts:
    moe_ffn_hidden_size = @ffn_hidden_size; ffn-hidden-size
# the layout
sequence_parallel tensor_model_parallel_size=1: sequence_parallel = False;
    --tensor-model-parallel-size 1 has no ranks to split the sequence over
expert_tensor_parallel_size=None num_experts tensor_model_parallel_size=1:
    expert_tensor_parallel_size = 1
expert_tensor_parallel_size=None num_experts tensor_model_parallel_size!=1:
    expert_tensor_parallel_size = @tensor_model_parallel_size; tensor-model-parallel-size
pp=1 num_virtual_stages_per_pipeline_rank=None: num_virtual_stages_per_pipeline_rank = 1
pp=1 num_virtual_stages_per_pipeline_rank!=1: num_virtual_stages_per_pipeline_rank = 1;
    --pipeline-model-parallel-size 1 has one stage
pp=1 pipeline_schedule=None: pipeline_schedule = 1f1b
pp=1 pipeline_schedule!=1f1b: pipeline_schedule = 1f1b;
    --pipeline-model-parallel-size 1 has one order
# data and tokenizer
tokenizer_type=None vocab_file merge_file: tokenizer_type = GPT2BPETokenizer;
    --vocab-file and --merge-file are given
tokenizer_type=None mock_data vocab_size: tokenizer_type = NullTokenizer;
    --mock-data with --vocab-size
split=None data_path: split = 969,30,1; shares of train, valid and test when none are given
# recomputation and offload
recompute_method=None recompute_granularity=full: recompute_method = uniform;
    every layer is recomputed
recompute_num_layers=None recompute_granularity=full recompute_method=uniform:
    recompute_num_layers = 1; every layer by itself
recompute_modules=None recompute_granularity=selective: recompute_modules = core_attn;
    Megatron's default
optimizer_cpu_offload=False optimizer=adam optimizer_nvme_offload: optimizer_cpu_offload = True;
    --optimizer-nvme-offload moves on from host memory
optimizer_cpu_offload=False optimizer=adam param_cpu_offload zero_stage=3:
    optimizer_cpu_offload = True; --param-cpu-offload keeps weights where they are stepped
# ZeRO of a single rank is off: the same flags run in every layout. Weights come and go from host
# memory all the same.
replicas=1 zero_stage=3 zero3_keep_gathered param_cpu_offload=False:
    zero3_keep_gathered = False; one data-parallel rank has nothing to shard over
replicas=1 zero_stage>0 zero_shard_size>0:
    zero_shard_size = None; one data-parallel rank has nothing to shard over
replicas=1 zero_stage>0 zero_stage!=3|param_cpu_offload=False:
    zero_stage = 0; one data-parallel rank has nothing to shard over
replicas!=1 zero_shard_size=1 zero_stage=3 zero3_keep_gathered param_cpu_offload=False:
    zero3_keep_gathered = False; --zero-shard-size 1 shards over a single rank
replicas!=1 zero_shard_size=1 zero_stage>0 zero_stage!=3|param_cpu_offload=False:
    zero_stage = 0, zero_shard_size = None; --zero-shard-size 1 shards over a single rank
# lengths, batches and files
global_batch_size=None step_batch_size_schedule=None micro_batch_size!=None dp>0:
    global_batch_size = @batch_unit; micro-batch-size x {run.dp} data-parallel rank(s)
train_iters=None skip_train train_samples=None: train_iters = 0; --skip-train trains nothing
lr=None skip_train: lr = 0.0; --skip-train trains nothing
lr_decay_iters=None train_iters>0 lr_decay_samples=None:
    lr_decay_iters = @train_iters; train-iters
lr_decay_samples=None train_samples>0 lr_decay_iters=None:
    lr_decay_samples = @train_samples; train-samples
profile_dir=None tensorboard_dir!=None save=None profile|record_memory_history:
    profile_dir = @tensorboard_dir; tensorboard-dir
profile_dir=None save=None profile|record_memory_history: profile_dir = profile;
    without --save, where --profile writes
"""


def _model(run: RunView) -> None:
    if run.has("hidden_size"):
        width = run.hidden_size * 8 // 3 // 64 * 64
        if run.activation not in GATED:
            run.default("ffn_hidden_size", 4 * run.hidden_size, "4 x hidden-size")
        elif width:
            run.default("ffn_hidden_size", width, f"{GATED_WIDTH}, as {run.activation} is gated")
    heads = run.num_attention_heads
    if run.multi_latent_attention:
        width = run.qk_head_dim + run.qk_pos_emb_head_dim
        if run.kv_channels != width:
            run.fill("kv_channels", width, "qk-head-dim + qk-pos-emb-head-dim")
    elif run.has("hidden_size", "num_attention_heads") and run.hidden_size % heads == 0:
        run.default("kv_channels", run.hidden_size // heads, "hidden-size / num-attention-heads")


def _table(run: RunView) -> None:
    for conditions, text in read_table(DERIVED_VALUES).items():
        if run.holds_all(conditions):
            assigned, _, reason = text.partition("; ")
            for each in assigned.split(", "):
                field, value = each.split(" = ")
                run.fill(field, _read(run, field, value), reason.format(run=run))


def _read(run: RunView, field: str, value: str) -> Any:
    """The value that a row of DERIVED_VALUES gives to a field."""
    if value.startswith("@"):
        return getattr(run, value[1:])
    return None if value == "None" else FIELDS[field].parse([value])


def _batch_schedule(run: RunView) -> None:
    if run.step_batch_size_schedule is None:
        return
    try:
        steps = parse_schedule(run.step_batch_size_schedule)
    except UserError:  # reported separately
        return
    # in one spelling, which checkpoints keep and a resume compares
    run.fill("step_batch_size_schedule", tuple(f"{tokens}:{size}" for tokens, size in steps))
    run.default("global_batch_size", steps[-1][1], "the last step of --step-batch-size-schedule")


def _pipeline(run: RunView) -> None:
    virtual = virtual_stages(run.config) if run.pp > 1 else None
    if virtual is not None:  # None with several ranks: a fault
        sources = (LAYOUT, PER_VIRTUAL, "pipeline_schedule")
        given = [field for field in sources if getattr(run, field) not in (None, AUTO)]
        source = spelled(given[0], getattr(run, given[0])) if given else "1f1b"
        reason = f"stages on each pipeline rank of {source}"
        run.default(VIRTUAL, virtual, reason)
        schedule = "1f1b" if virtual == 1 else "interleaved"
        run.default("pipeline_schedule", schedule, f"{virtual} stage(s) on each pipeline rank")


Derivations = tuple[Callable[[RunView], None], ...]
POSITIONS: Derivations = (_position_type, _rope_scaling)
DERIVED: Derivations = (*POSITIONS, _model, _table, _batch_schedule, _pipeline)


def derive(
    config: Config, world: int, vocabulary: int | None, derivations: Derivations = DERIVED
) -> RunView:
    """A run with every derived value filled in, and a note for each that has a reason."""
    run = RunView(config, world, vocabulary)
    for derivation in derivations:
        derivation(run)
    return run
