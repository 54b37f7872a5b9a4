"""Values that follow from others when they are not given, each with its reason, and the view of a
run that rules look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.config.batch_schedule import schedule_words
from megatron.config.errors import UserError, shortened
from megatron.config.groups import LR_DECAYS, Config, DecayKind, DistributedConfig
from megatron.config.metadata import flag_name
from megatron.config.model import GATED, yarn_scale
from megatron.config.options import FIELDS
from megatron.config.stages import AUTO, virtual_stages

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


def data_parallel_size(config: Config, world_size: int) -> int:
    """How many samples `world_size` ranks work on at a time; 0 where tensor- x context- x
    pipeline-parallel size does not divide them, which `resolve` refuses.
    """
    sizes = (
        config.distributed.tensor_model_parallel_size,
        config.distributed.context_parallel_size,
        config.distributed.pipeline_model_parallel_size,
    )
    model = math.prod(sizes)
    return (
        world_size // model if min(sizes) > 0 and world_size > 0 and world_size % model == 0 else 0
    )


def replica_count(config: Config, world_size: int) -> int:
    """How many times `world_size` ranks hold the model: data- x context-parallel size."""
    return data_parallel_size(config, world_size) * config.distributed.context_parallel_size


def attention_ranks(distributed: DistributedConfig) -> tuple[int, int]:
    """Of the context-parallel ranks: how many exchange heads for positions in attention, and how
    many keys and values go round.
    """
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
    """Those that the flags ask for; one each where no layer has experts."""
    if config.model.num_experts is None:
        return ExpertRanks()
    distributed = config.distributed
    etp = distributed.expert_tensor_parallel_size or distributed.tensor_model_parallel_size
    return ExpertRanks(etp, distributed.expert_model_parallel_size)


class RunView:
    """What rules look at: every field by its own name (`run.lr`), the numbers of ranks and the
    tokenizer's vocabulary.

    Each matrix is shared by `tp` ranks, the positions of a sample by `cp`, the layers by `pp`, and
    the samples by `dp`; together they are the `world` (dp is 0 where the sizes do not divide it).
    `replicas` ranks hold the same parameters. The matrices of an expert are shared by `etp` ranks,
    and the experts of a layer by `ep`.
    """

    def __init__(self, config: Config, world: int, vocabulary: int | None):
        self.config = config
        self.world = world
        self.vocabulary = vocabulary
        self.tp = config.distributed.tensor_model_parallel_size
        self.pp = config.distributed.pipeline_model_parallel_size
        self.cp = config.distributed.context_parallel_size
        self.dp = data_parallel_size(config, world)
        self.replicas = self.dp * self.cp
        self.etp, self.ep = expert_ranks(config)

    def __getattr__(self, field: str) -> Any:
        value = getattr(getattr(self.config, FIELDS[field].group), field)
        setattr(self, field, value)  # hundreds of rules ask again, thousands of times in a search
        return value

    @property
    def decay_kind(self) -> DecayKind:
        """The entry of --lr-decay-style in its table."""
        return LR_DECAYS[self.lr_decay_style]

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step on each rank; None while sizes are missing or wrong."""
        if not self.has("micro_batch_size", "global_batch_size") or not self.dp:
            return None
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    def show(self, field: str) -> str:
        """`--lr-decay-style cosine`: a flag with its value."""
        return spelled(field, getattr(self, field))

    def fault(self, field: str, text: str) -> str:
        """A message about a flag: the flag with its value, and what is wrong."""
        return f"{self.show(field)}: {text}"

    def has(self, *fields: str) -> bool:
        """All of these are given and, where numbers, greater than zero."""
        values = [getattr(self, field) for field in fields]
        return all(
            value is not None and not (isinstance(value, (int, float)) and value <= 0)
            for value in values
        )


Derivation = Iterator[tuple[str, Any, str]]  # field, value, reason; none where it was not asked for


def _derive_model(run: RunView) -> Derivation:
    if run.ffn_hidden_size is None and run.has("hidden_size"):
        if run.activation not in GATED:
            yield "ffn_hidden_size", 4 * run.hidden_size, "4 x hidden-size"
        elif width := run.hidden_size * 8 // 3 // 64 * 64:
            yield "ffn_hidden_size", width, f"{GATED_WIDTH}, as {run.activation} is gated"
    heads = run.num_attention_heads
    if run.multi_latent_attention:
        width = run.qk_head_dim + run.qk_pos_emb_head_dim
        if run.kv_channels != width:
            yield "kv_channels", width, "qk-head-dim + qk-pos-emb-head-dim"
    elif run.kv_channels is None and run.has("hidden_size", "num_attention_heads"):
        if run.hidden_size % heads == 0:
            yield "kv_channels", run.hidden_size // heads, "hidden-size / num-attention-heads"
    if run.num_query_groups is None and not run.group_query_attention and heads is not None:
        yield "num_query_groups", heads, "one for each head without --group-query-attention"
    if run.max_position_embeddings is None and run.seq_length is not None:
        yield "max_position_embeddings", run.seq_length, "seq-length"


# Values of the factor and the original length that configuration files of earlier versions hold
# for every model, scaled or not.
_FORMER_DEFAULTS = (8.0, 8192)
_YARN = (
    "rope_scaling_factor",
    "rope_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _derive_position_type(run: RunView) -> Derivation:
    """Latent attention takes YaRN unless --rope-type rope, as in Megatron-LM. YaRN that changes
    nothing stays rope. Afterwards position_embedding_type alone holds the answer.
    """
    kind = run.position_embedding_type
    if not run.multi_latent_attention or kind == "learned_absolute":
        return
    given = {field: getattr(run, field) for field in _YARN}
    changed = {field for field, value in given.items() if value != FIELDS[field].default}
    if tuple(given.values())[:2] == _FORMER_DEFAULTS:
        changed -= set(_YARN[:2])
    if run.rope_type == "rope" and (kind == "yarn" or rescales_scores(run)):
        return  # a fault
    wanted = "rope"
    if run.rope_type == "rope":
        for field in () if run.use_rope_scaling else sorted(changed):
            yield field, FIELDS[field].default, "--rope-type rope rescales no frequencies"
    elif kind == "yarn" or run.rope_type == "yarn" or (changed and not run.use_rope_scaling):
        wanted = "yarn"
    yield "rope_type", None, ""
    if wanted != kind:
        what = "YaRN unless --rope-type rope" if wanted == "yarn" else "rotary positions"
        yield "position_embedding_type", wanted, f"latent attention has {what}, as in Megatron-LM"


def rescales_scores(run: RunView) -> bool:
    """Whether Megatron-LM's latent attention multiplies scores by a factor of YaRN's, which it does
    with --rope-type rope too.
    """
    factor = run.rope_scaling_factor
    return factor is not None and yarn_scale(factor, run.mscale_all_dim) != 1


def _derive_rope_scaling(run: RunView) -> Derivation:
    """Megatron-LM's defaults of rescaled frequencies."""
    model = run.config.model
    yarn = run.position_embedding_type == "yarn"
    fields = {
        "rope_scaling_factor": model.rope_factor,
        "rope_original_max_position_embeddings": model.rope_original_length,
    }
    for (field, value), former in zip(fields.items(), _FORMER_DEFAULTS, strict=True):
        given = getattr(run, field)
        if yarn or run.use_rope_scaling:
            if given is None:
                yield field, value, "YaRN's default in Megatron-LM" if yarn else ""
        elif given == former:
            yield field, None, ""


def _derive_experts(run: RunView) -> Derivation:
    if run.num_experts == 1:
        yield "num_experts", None, "one expert is the MLP itself"
    elif run.num_experts is not None and run.moe_ffn_hidden_size is None:
        yield "moe_ffn_hidden_size", run.ffn_hidden_size, "ffn-hidden-size"


def _derive_data(run: RunView) -> Derivation:
    if run.tokenizer_type is None and run.vocab_file is not None and run.merge_file is not None:
        yield "tokenizer_type", "GPT2BPETokenizer", "--vocab-file and --merge-file are given"
    elif run.tokenizer_type is None and run.mock_data and run.vocab_size is not None:
        yield "tokenizer_type", "NullTokenizer", "--mock-data with --vocab-size"
    if run.split is None and run.data_path is not None:
        yield "split", "969,30,1", "shares of train, valid and test when none are given"


OFF_AT_ZERO = ("exit_interval", "exit_duration_in_mins", "save_interval", "eval_interval")


def _derive_training(run: RunView) -> Derivation:
    for field in OFF_AT_ZERO:
        if getattr(run, field) == 0:
            yield field, None, ""
    if run.step_batch_size_schedule is not None:
        yield from _derive_batches(run)
    elif run.global_batch_size is None and run.micro_batch_size is not None and run.dp:
        reason = f"micro-batch-size x {run.dp} data-parallel rank(s)"
        yield "global_batch_size", run.micro_batch_size * run.dp, reason
    if run.recompute_granularity == "full" and run.recompute_method is None:
        yield "recompute_method", "uniform", "every layer is recomputed"
    if run.recompute_granularity == "full" and run.recompute_num_layers is None:
        if run.recompute_method != "block":
            yield "recompute_num_layers", 1, "every layer by itself"
    if run.recompute_granularity == "selective" and run.recompute_modules is None:
        yield "recompute_modules", ("core_attn",), "Megatron's default"
    if run.skip_train and run.train_iters is None and run.train_samples is None:
        yield "train_iters", 0, "--skip-train trains nothing"
    if run.skip_train and run.lr is None:
        yield "lr", 0.0, "--skip-train trains nothing"


def _derive_batches(run: RunView) -> Derivation:
    try:
        words = schedule_words(run.step_batch_size_schedule)
    except UserError:  # reported separately
        return
    yield "step_batch_size_schedule", words, ""
    if run.global_batch_size is None:
        size = int(words[-1].partition(":")[2])
        yield "global_batch_size", size, "the last step of --step-batch-size-schedule"


def _derive_logging(run: RunView) -> Derivation:
    if (run.profile or run.record_memory_history) and run.profile_dir is None and run.save is None:
        folder = run.tensorboard_dir or "profile"
        yield "profile_dir", folder, "without --save, where --profile writes"


def _derive_schedule(run: RunView) -> Derivation:
    if run.lr_decay_iters is None and run.train_iters and run.lr_decay_samples is None:
        yield "lr_decay_iters", run.train_iters, "train-iters"
    if run.lr_decay_samples is None and run.train_samples and run.lr_decay_iters is None:
        yield "lr_decay_samples", run.train_samples, "train-samples"


def _derive_optimizer(run: RunView) -> Derivation:
    if run.optimizer_cpu_offload or run.optimizer != "adam":
        return
    if run.optimizer_nvme_offload is not None:
        yield "optimizer_cpu_offload", True, "--optimizer-nvme-offload moves on from host memory"
    elif run.param_cpu_offload and run.zero_stage == 3:
        reason = "--param-cpu-offload keeps weights where they are stepped"
        yield "optimizer_cpu_offload", True, reason


def _derive_distributed(run: RunView) -> Derivation:
    if run.sequence_parallel and run.tp == 1:
        reason = "--tensor-model-parallel-size 1 has no ranks to split the sequence over"
        yield "sequence_parallel", False, reason
    if run.num_experts is not None and run.expert_tensor_parallel_size is None:
        reason = "tensor-model-parallel-size" if run.tp > 1 else ""
        yield "expert_tensor_parallel_size", run.tp, reason
    yield from _without_sharing(run)
    virtual = virtual_stages(run.config) if run.pp > 1 else 1
    if virtual is not None and run.num_virtual_stages_per_pipeline_rank != virtual:
        unasked = run.pp == 1 and run.num_virtual_stages_per_pipeline_rank is None
        yield "num_virtual_stages_per_pipeline_rank", virtual, "" if unasked else _why_virtual(run)
    if run.pp == 1 and run.pipeline_schedule not in (None, "1f1b"):
        yield "pipeline_schedule", "1f1b", "--pipeline-model-parallel-size 1 has one order"
    elif run.pipeline_schedule is None and virtual is not None:
        name = "1f1b" if virtual == 1 else "interleaved"
        reason = f"{virtual} stage(s) on each pipeline rank" if run.pp > 1 else ""
        yield "pipeline_schedule", name, reason


def _without_sharing(run: RunView) -> Derivation:
    """ZeRO where each rank would share with itself alone: the same flags run in every layout.
    Weights come and go from host memory all the same.
    """
    if run.zero_stage == 0 or (run.replicas != 1 and run.zero_shard_size != 1):
        return
    reason = "--zero-shard-size 1 shards over a single rank"
    if run.replicas == 1:
        reason = "one data-parallel rank has nothing to shard over"
    offloaded = run.zero_stage == 3 and run.param_cpu_offload
    if not offloaded:
        yield "zero_stage", 0, reason
    if run.has("zero_shard_size") and (run.replicas == 1 or not offloaded):
        yield "zero_shard_size", None, reason
    if run.zero3_keep_gathered and run.zero_stage == 3 and not offloaded:
        yield "zero3_keep_gathered", False, reason


def _why_virtual(run: RunView) -> str:
    if run.pp == 1:
        return "--pipeline-model-parallel-size 1 has one stage"
    sources = (
        "pipeline_model_parallel_layout",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_schedule",
    )
    given = [run.show(field) for field in sources if getattr(run, field) not in (None, AUTO)]
    return f"stages on each pipeline rank of {given[0] if given else '1f1b'}"


POSITIONS = (_derive_position_type, _derive_rope_scaling)
DERIVED = (
    *POSITIONS,
    _derive_model,
    _derive_experts,
    _derive_data,
    _derive_training,
    _derive_logging,
    _derive_schedule,
    _derive_optimizer,
    _derive_distributed,
)


def derive(
    config: Config,
    world: int,
    vocabulary: int | None,
    derivations: tuple[Callable[[RunView], Derivation], ...] = DERIVED,
) -> tuple[Config, list[str]]:
    """The configuration with every derived value filled in, and a note for each that has a reason:
    field = value: reason.
    """
    notes = []
    for derivation in derivations:
        for field, value, reason in derivation(RunView(config, world, vocabulary)):
            config = config.with_fields(FIELDS[field].group, **{field: value})
            notes += [f"{field.replace('_', '-')} = {value}: {reason}"] if reason else []
    return config, notes
