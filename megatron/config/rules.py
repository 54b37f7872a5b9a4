"""Rules between two fields, as tables: what excludes, needs or bounds what.

Conditions are those of `derive.RunView.holds`; `@field` in a text is the flag with its value.
validate.py has the rules that need a computation.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron.config.derive import RunView, condition_text
from megatron.config.groups import CHANGING, MODEL_FILE
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS
from megatron.config.schedules import IN_PAIRS, SCHEDULES

Faults = Iterator[str]
Rule = Callable[[RunView], Faults]


class Exclusion(NamedTuple):
    """Settings that cannot be given together, any of the first with any of the others, and why."""

    ones: str  # with spaces between them
    others: str
    why: str = ""  # after a comma or as a sentence's rest
    fix: str = "remove one of them"


COMPILED = ", which fixes what a compiled layer keeps"
TO_1F1B = "set --pipeline-schedule 1f1b or interleaved"
LIMITED = "attention_backend=gluon,fa4,sdpa"

EXCLUSIONS = (
    # two ways to specify the same thing
    Exclusion("bf16", "fp16 fp64"),
    Exclusion("fp16", "fp64"),
    Exclusion("train_iters", "train_samples"),
    Exclusion("step_batch_size_schedule", "rampup_batch_size"),
    Exclusion("lr_warmup_fraction", "lr_warmup_iters lr_warmup_samples"),
    Exclusion("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    Exclusion("recompute_layers recompute", "recompute_granularity"),
    # what cannot act together
    Exclusion("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
    Exclusion(
        LIMITED, "attention_dropout>0", fix="set --attention-dropout 0 or remove the backend"
    ),
    Exclusion(LIMITED, "attn_logit_softcapping"),
    Exclusion(
        "grad_reduce_in_bf16 exp_avg_dtype exp_avg_sq_dtype adam_implementation=triton", "fp64"
    ),
    Exclusion("exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload", "adam_implementation=apex"),
    # what torch.compile has compiled cannot be recomputed or moved in parts
    Exclusion(
        "recompute recompute_layers recompute_granularity=selective",
        "torch_compile",
        COMPILED,
        "remove one of them, or set --recompute-granularity full",
    ),
    Exclusion("tiled_mlp", "torch_compile", COMPILED),
    Exclusion(
        "activation_offload",
        "recompute",
        ", which plans for what stays on the device",
        "give what it chose as --recompute-layers, or remove one of them",
    ),
    Exclusion("torch_compile cuda_graphs", "context_parallel_size", ", which sends in a layer"),
    Exclusion("cuda_graphs", "torch_compile recompute_granularity recompute recompute_layers"),
    # what a captured pass saves stays where it was captured; a small model needs no tensor
    # parallelism, and nothing has shown collectives in a graph
    Exclusion("cuda_graphs", "activation_offload tiled_mlp tensor_model_parallel_size"),
    Exclusion("cuda_graphs", "pipeline_schedule=zero-bubble,zero-bubble-v", fix=TO_1F1B),
    Exclusion(
        "num_experts",
        "add_bias_linear=True",
        fix="set --disable-bias-linear (--add-qkv-bias keeps the bias of attention)",
    ),
    Exclusion("num_experts", "torch_compile cuda_graphs fp8_format tiled_mlp"),
    Exclusion("async_save_host_memory", "local_checkpoint_dir", ", whose files are copied instead"),
    Exclusion("distribute_saved_activations", "sequence_parallel", ", which shards them already"),
    Exclusion(
        "overlap_moe_expert_parallel_comm",
        f"pipeline_schedule={','.join(SCHEDULES.keys() - IN_PAIRS)}",
        ", which has no pairs of passes",
        TO_1F1B,
    ),
    Exclusion(
        "overlap_moe_expert_parallel_comm",
        "moe_token_dispatcher_type=allgather",
        fix="set --moe-token-dispatcher-type alltoall",
    ),
    Exclusion(
        "overlap_moe_expert_parallel_comm",
        "activation_offload",
        ", which copies during one pass at a time",
        "recompute instead, or remove one of them",
    ),
    Exclusion(
        "moe_router_enable_expert_bias",
        "moe_router_score_function=softmax",
        ", whose scores have no fixed range",
        "set --moe-router-score-function sigmoid",
    ),
    Exclusion(
        "moe_router_force_load_balancing",
        "moe_expert_capacity_factor",
        ", which drops nothing where all experts have the same number of tokens",
    ),
    Exclusion(
        "multi_latent_attention",
        "position_embedding_type=learned_absolute",
        fix="set --position-embedding-type rope",
    ),
    Exclusion(
        "multi_latent_attention",
        "group_query_attention add_qkv_bias rotary_percent no_rope_freq rotary_backend=triton "
        "torch_compile fp8_format",
    ),
)

# A setting and the field that it needs a value of, with what that is.
NEEDED = (
    ("moe_router_num_groups", "moe_router_group_topk", "the groups that a token's experts are of"),
    ("group_query_attention", "num_query_groups", "the number of key/value heads"),
    ("recompute", "memory_budget", "the GiB that the plan may need on a device"),
    ("tokenizer_type=NullTokenizer", "vocab_size", ""),
    ("tokenizer_type=GPT2BPETokenizer", "vocab_file", ""),
    ("tokenizer_type=GPT2BPETokenizer", "merge_file", ""),
    (MODEL_FILE, "tokenizer_model", ""),
    (CHANGING, "start_weight_decay", ""),
    (CHANGING, "end_weight_decay", ""),
)

# Two numbers, how they must be to each other, and after `if` where: a multiple or a divisor is a
# size that shares out the other.
RELATIONS = """
max_position_embeddings >= seq_length
rope_high_freq_factor > rope_low_freq_factor if use_rope_scaling
yarn_beta_fast > yarn_beta_slow if position_embedding_type=yarn
initial_loss_scale >= min_loss_scale
lr >= lr_warmup_init if skip_train=False
lr >= min_lr if skip_train=False decays=True
decoupled_lr >= lr_warmup_init if skip_train=False
decoupled_lr >= decoupled_min_lr if skip_train=False decays=True
decoupled_lr >= min_lr if skip_train=False decays=True decoupled_min_lr=None
profile_step_end > profile_step_start if profile
num_layers >= recompute_num_layers
num_experts >= moe_router_topk
moe_router_num_groups >= moe_router_group_topk if num_experts
ffn_hidden_size multiple tensor_model_parallel_size if tp_fits=True
padded_vocab_size multiple tensor_model_parallel_size if tp_fits=True
seq_length multiple tensor_model_parallel_size if sequence_parallel
moe_ffn_hidden_size multiple expert_tensor_parallel_size
moe_shared_expert_intermediate_size multiple tensor_model_parallel_size if tp_fits=True
save_retain_interval multiple save_interval if save
num_query_groups divisor num_attention_heads
expert_model_parallel_size divisor num_experts
moe_router_num_groups divisor num_experts
moe_router_group_topk divisor moe_router_topk
"""
COMPARISONS = {">": (operator.gt, "greater than"), ">=": (operator.ge, "at least")}


class Relation(NamedTuple):
    """A line of RELATIONS."""

    field: str
    relation: str
    other: str
    conditions: str


def _relations() -> Iterator[Relation]:
    for line in RELATIONS.strip().splitlines():
        numbers, _, conditions = line.partition(" if ")
        field, relation, other = numbers.split()
        yield Relation(field, relation, other, conditions)


TABLE = tuple(_relations())


def nearest(value: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to a value, above 0."""
    return max(unit, (value + unit // 2) // unit * unit)


def nearest_divisor(number: int, size: int, least: int = 1) -> int:
    """The divisor of a number, of at least `least`, that is nearest to `size`."""
    sizes = (*range(least, min(number, 4096) + 1), size, number)
    fitting = (other for other in sizes if other >= least and number % other == 0)
    return min(fitting, key=lambda other: abs(other - size))


def multiple(run: RunView, field: str, unit: int, what: str) -> Faults:
    """The fault of a size that is no multiple of `unit`, which is `what`."""
    value = getattr(run, field)
    if value % unit:
        near = nearest(value, unit)
        yield f"@{field}: must be a multiple of {what}; the nearest is {near}"


def divisor(run: RunView, field: str, number: int, what: str, least: int = 1) -> Faults:
    """The fault of a size that does not divide `number`, which is `what`."""
    size = getattr(run, field)
    if number % size:
        near = nearest_divisor(number, size, least)
        yield f"@{field}: must divide {what}; the nearest that fits is {near}"


def _is_valid(run: RunView, field: str) -> bool:
    """Whether a field has a value within its bound."""
    value, bound = getattr(run, field), FIELDS[field].bound
    return value is not None and (bound is None or bound.holds(value))


def ranges(run: RunView) -> Faults:
    """Numbers outside the bounds that their fields declare."""
    for field, option in FIELDS.items():
        if option.bound and getattr(run, field) is not None and not _is_valid(run, field):
            yield f"@{field}: must be {option.bound.text}"


def _changed(run: RunView) -> Iterator[tuple[str, list[str]]]:
    """The fields that are not at their default, and what is missing of what they are idle
    without.
    """
    for field, option in FIELDS.items():
        if (option.needs or option.idle_without) and getattr(run, field) != option.default:
            yield field, [each for each in option.idle_without if not run.holds(each)]


def idle(run: RunView) -> Faults:
    """Remarks on flags without effect, see `metadata.flag`."""
    for field, missing in _changed(run):
        for condition in missing:
            yield f"@{field}: has no effect without {condition_text(condition)}"


def two_fields(run: RunView) -> Faults:
    """The faults of fields without what they need, and of the tables."""
    for field, missing in _changed(run):
        for condition in () if missing else FIELDS[field].needs:
            if not run.holds(condition):
                text = condition_text(condition)
                fix = f"{'set' if text.startswith('--') else 'use'} {text}"
                yield f"@{field}: has no effect without {text}; remove it or {fix}"
    for ones, others, why, fix in EXCLUSIONS:
        given = (filter(run.holds, conditions.split()) for conditions in (ones, others))
        for one, other in itertools.product(*map(list, given)):
            text = f"is not supported with @{field_of(other)}{why}"
            yield f"@{field_of(one)}: {text}; {fix}"
    for condition, field, what in NEEDED:
        if run.holds(condition) and getattr(run, field) is None:
            fix = ", ".join(filter(None, (flag_name(field), what)))
            yield f"@{field_of(condition)}: set {fix}"
    yield from _numbers(run)


def field_of(condition: str) -> str:
    """The field that a condition without alternatives is about."""
    return re.split("[=>]", condition)[0]


def _numbers(run: RunView) -> Faults:
    for field, relation, other, conditions in TABLE:
        if not run.holds_all(conditions):
            continue
        if relation in COMPARISONS:
            holds, text = COMPARISONS[relation]
            are_valid = _is_valid(run, field) and _is_valid(run, other)
            if are_valid and not holds(getattr(run, field), getattr(run, other)):
                yield f"@{field}: must be {text} @{other}"
        elif run.has(field, other):
            check = multiple if relation == "multiple" else divisor
            yield from check(run, field, getattr(run, other), f"@{other}")
