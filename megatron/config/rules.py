"""Rules between two fields, as tables: what excludes, needs or bounds what.

A rule names a field, which counts where it is not at its default (or at the value of OFF), or
`field=a,b`, which counts with these values. validate.py has the rules that need a computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron.config.derive import RunView
from megatron.config.metadata import flag_name
from megatron.config.needs import is_yarn
from megatron.config.options import FIELDS
from megatron.config.schedules import IN_PAIRS, SCHEDULES

Faults = Iterator[str]

OFF = {"attention_dropout": 0}  # where that is not the default


def counts(run: RunView, rule: str) -> bool:
    """Whether a field is given with the values that a rule is about."""
    field, _, values = rule.partition("=")
    value = getattr(run, field)
    if values:
        return str(value) in values.split(",")
    return value is not None and value != OFF.get(field, FIELDS[field].default)


def shown(run: RunView, rule: str) -> str:
    """The flag of a rule with its value."""
    return run.show(rule.partition("=")[0])


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
    Exclusion(LIMITED, "attention_dropout", fix="set --attention-dropout 0 or remove the backend"),
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

MODEL_FILE = "tokenizer_type=SentencePieceTokenizer,HuggingFaceTokenizer,TikTokenizer"
CHANGING = "weight_decay_incr_style=linear,cosine"
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


class Order(NamedTuple):
    """A field that must be greater than another, or at least as great, where `when` holds."""

    greater: str
    less: str
    strictly: bool
    when: Callable[[RunView], bool] = lambda run: True


def _decays(run: RunView) -> bool:
    return run.decay_kind.decays and not run.skip_train


ORDERS = (
    Order("max_position_embeddings", "seq_length", False),
    Order("rope_high_freq_factor", "rope_low_freq_factor", True, lambda run: run.use_rope_scaling),
    Order("yarn_beta_fast", "yarn_beta_slow", True, is_yarn),
    Order("initial_loss_scale", "min_loss_scale", False),
    Order("lr", "lr_warmup_init", False, lambda run: not run.skip_train),
    Order("lr", "min_lr", False, _decays),
    Order("decoupled_lr", "lr_warmup_init", False, lambda run: not run.skip_train),
    Order("decoupled_lr", "decoupled_min_lr", False, _decays),
    Order(
        "decoupled_lr", "min_lr", False, lambda run: _decays(run) and run.decoupled_min_lr is None
    ),
    Order("profile_step_end", "profile_step_start", True, lambda run: run.profile),
    Order("num_layers", "recompute_num_layers", False),
    Order("num_experts", "moe_router_topk", False),
    Order("moe_router_num_groups", "moe_router_group_topk", False, lambda run: run.num_experts),
)


def _tp_fits(run: RunView) -> bool:
    """Whether the tensor-parallel size itself is right, so that widths can be held against it."""
    return run.dp > 0 and not (run.has("num_attention_heads") and run.num_attention_heads % run.tp)


class Multiple(NamedTuple):
    """A size that must be a multiple of another where `when` holds."""

    field: str
    unit: str
    when: Callable[[RunView], bool] = lambda run: True


MULTIPLES = (
    Multiple("ffn_hidden_size", "tensor_model_parallel_size", _tp_fits),
    Multiple("padded_vocab_size", "tensor_model_parallel_size", _tp_fits),
    Multiple("seq_length", "tensor_model_parallel_size", lambda run: run.sequence_parallel),
    Multiple("moe_ffn_hidden_size", "expert_tensor_parallel_size"),
    Multiple("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", _tp_fits),
    Multiple("save_retain_interval", "save_interval", lambda run: run.save is not None),
)
# A size and what it must divide.
DIVISORS = (
    ("num_query_groups", "num_attention_heads"),
    ("expert_model_parallel_size", "num_experts"),
    ("moe_router_num_groups", "num_experts"),
    ("moe_router_group_topk", "moe_router_topk"),
)


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
        yield run.fault(field, f"must be a multiple of {what}; the nearest is {near}")


def divisor(run: RunView, field: str, number: int, what: str, least: int = 1) -> Faults:
    """The fault of a size that does not divide `number`, which is `what`."""
    size = getattr(run, field)
    if number % size:
        near = nearest_divisor(number, size, least)
        yield run.fault(field, f"must divide {what}; the nearest that fits is {near}")


def _is_valid(run: RunView, field: str) -> bool:
    """Whether a field has a value within its bound."""
    value, bound = getattr(run, field), FIELDS[field].bound
    return value is not None and (bound is None or bound.holds(value))


def ranges(run: RunView) -> Faults:
    """Numbers outside the bounds that their fields declare."""
    for field, option in FIELDS.items():
        if getattr(run, field) is not None and not _is_valid(run, field):
            yield f"{run.show(field)}: must be {option.bound.text}"


def without_effect(run: RunView, kind: str) -> Iterator[tuple[str, str]]:
    """(flag as given, what it has no effect without) for each field that is not at its default;
    `kind` is `needs` or `idle_without`, see `metadata.flag`.
    """
    for field, option in FIELDS.items():
        value = getattr(run, field)
        for need in getattr(option, kind) if value != option.default else ():
            if not need.is_met(run):
                yield run.show(field), need.text


def two_fields(run: RunView) -> Faults:
    """The faults of the tables."""
    for flag, text in without_effect(run, "needs"):
        verb = "set" if text.startswith("--") else "use"
        yield f"{flag}: has no effect without {text}; remove it or {verb} {text}"
    for ones, others, why, fix in EXCLUSIONS:
        for one, other in itertools.product(ones.split(), others.split()):
            if counts(run, one) and counts(run, other):
                yield f"{shown(run, one)}: is not supported with {shown(run, other)}{why}; {fix}"
    yield from _values(run)


def _values(run: RunView) -> Faults:
    """What values need of each other."""
    for rule, field, what in NEEDED:
        if counts(run, rule) and getattr(run, field) is None:
            yield f"{shown(run, rule)}: set {flag_name(field)}{what and ', '}{what}"
    for greater, less, strictly, when in ORDERS:
        if not (_is_valid(run, greater) and _is_valid(run, less) and when(run)):
            continue
        high, low = getattr(run, greater), getattr(run, less)
        if high < low or (strictly and high == low):
            relation = "greater than" if strictly else "at least"
            yield f"{run.show(greater)}: must be {relation} {run.show(less)}"
    for field, unit, when in MULTIPLES:
        if run.has(field, unit) and when(run):
            yield from multiple(run, field, getattr(run, unit), run.show(unit))
    for field, number in DIVISORS:
        if run.has(field, number):
            yield from divisor(run, field, getattr(run, number), run.show(number))
