"""Rules as tables: what excludes, needs or bounds what, and what is wrong or remarkable where
conditions hold.

Conditions are those of `derive.RunView.holds`; `@field` in a text is the flag with its value.
validate.py has the rules that need a computation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from megatron.config.derive import GATED_WIDTH, RunView, condition_text
from megatron.config.errors import nearest
from megatron.config.groups import CHANGING, DECAYING, GPT2_BPE, MODEL_FILE
from megatron.config.model import YARN
from megatron.config.options import FIELDS, read_table
from megatron.config.schedules import IN_PAIRS, SCHEDULES

Faults = Iterable[str]
Rule = Callable[[RunView], Faults]

COMPILED = "which fixes what a compiled layer keeps"
ONE_KIND = "keep one kind of data"
LIMITED = "attention_backend=gluon,fa4,sdpa"
UNPAIRED = ",".join(SCHEDULES.keys() - IN_PAIRS)

# Settings that cannot be given together, any before the slash with any after it. The text follows
# "is not supported with ...": a reason (which, whose) and a fix, which is by default to remove one.
EXCLUSIONS = f"""
# two ways to specify the same thing
bf16 / fp16 fp64
fp16 / fp64
train_iters / train_samples
step_batch_size_schedule / rampup_batch_size
lr_warmup_fraction / lr_warmup_iters lr_warmup_samples
override_opt_param_scheduler / use_checkpoint_opt_param_scheduler
recompute_layers recompute / recompute_granularity
data_path / mock_data: {ONE_KIND}
data_path mock_data / train_data_path valid_data_path test_data_path: {ONE_KIND}
# what cannot act together
use_rope_scaling / rotary_seq_len_interpolation_factor
{LIMITED} / attention_dropout>0: set --attention-dropout 0 or remove the backend
{LIMITED} / attn_logit_softcapping
grad_reduce_in_bf16 exp_avg_dtype exp_avg_sq_dtype adam_implementation=triton / fp64
exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload / adam_implementation=apex
# what torch.compile has compiled cannot be recomputed or moved in parts
recompute recompute_layers recompute_granularity=selective / torch_compile:
    {COMPILED}; remove one of them, or set --recompute-granularity full
tiled_mlp / torch_compile: {COMPILED}
activation_offload / recompute:
    which plans for what stays on the device; give what it chose as --recompute-layers, or
    remove one of them
torch_compile cuda_graphs / context_parallel_size: which sends in a layer
cuda_graphs / torch_compile recompute_granularity recompute recompute_layers
# what a captured pass saves stays where it was captured; a small model needs no tensor
# parallelism, and nothing has shown collectives in a graph
cuda_graphs / activation_offload tiled_mlp tensor_model_parallel_size
cuda_graphs / pipeline_schedule=zero-bubble,zero-bubble-v:
    set --pipeline-schedule 1f1b or interleaved
num_experts / add_bias_linear=True:
    set --disable-bias-linear (--add-qkv-bias keeps the bias of attention)
num_experts / torch_compile cuda_graphs fp8_format tiled_mlp
async_save_host_memory / local_checkpoint_dir: whose files are copied instead
distribute_saved_activations / sequence_parallel: which shards them already
overlap_moe_expert_parallel_comm / pipeline_schedule={UNPAIRED}:
    which has no pairs of passes; set --pipeline-schedule 1f1b or interleaved
overlap_moe_expert_parallel_comm / activation_offload:
    which copies during one pass at a time; recompute instead, or remove one of them
moe_router_enable_expert_bias / moe_router_score_function=softmax:
    whose scores have no fixed range; set --moe-router-score-function sigmoid
moe_router_force_load_balancing / moe_expert_capacity_factor:
    which drops nothing where all experts have the same number of tokens
multi_latent_attention / position_embedding_type=learned_absolute:
    set --position-embedding-type rope
multi_latent_attention / group_query_attention add_qkv_bias rotary_percent no_rope_freq
    rotary_backend=triton torch_compile fp8_format
"""

# What is wrong where conditions hold, which have spaces between them.
FAULTS = f"""
# what is missing
num_layers=None: --num-layers is required
hidden_size=None: --hidden-size is required
num_attention_heads=None: --num-attention-heads is required
seq_length=None: --seq-length is required
micro_batch_size=None: --micro-batch-size is required
lr=None skip_train=False: --lr is required
ffn_hidden_size=None hidden_size>0:
    --ffn-hidden-size is required: {GATED_WIDTH} is 0 for @hidden_size
train_iters=None train_samples=None skip_train=False:
    --train-iters or --train-samples is required
train_iters=0 skip_train=False:
    --train-iters 0: nothing would be trained; to evaluate only, set --skip-train
data_path=None mock_data=False train_data_path=None valid_data_path=None test_data_path=None:
    --data-path PREFIX is required (or --train-data-path, or --mock-data)
train_data_path=None valid_data_path|test_data_path skip_train=False:
    --train-data-path is required with --valid-data-path and --test-data-path
tokenizer_type=None mock_data=False: --tokenizer-type is required
tokenizer_type=None mock_data:
    --tokenizer-type is required; with --mock-data, --vocab-size N is enough
tokenizer_type=NullTokenizer vocab_size=None: @tokenizer_type: set --vocab-size
{GPT2_BPE} vocab_file=None: @tokenizer_type: set --vocab-file
{GPT2_BPE} merge_file=None: @tokenizer_type: set --merge-file
{MODEL_FILE} tokenizer_model=None: @tokenizer_type: set --tokenizer-model
{CHANGING} start_weight_decay=None: @weight_decay_incr_style: set --start-weight-decay
{CHANGING} end_weight_decay=None: @weight_decay_incr_style: set --end-weight-decay
group_query_attention num_query_groups=None:
    @group_query_attention: set --num-query-groups, the number of key/value heads
moe_router_num_groups moe_router_group_topk=None:
    @moe_router_num_groups: set --moe-router-group-topk, the groups of a token's experts
recompute memory_budget=None:
    @recompute: set --memory-budget, the GiB that the plan may need on a device
recompute_method=block recompute_granularity=full recompute_num_layers=None:
    @recompute_method: set --recompute-num-layers, the number of layers of each stage
save_retain_interval save save_interval=None:
    @save_retain_interval: set --save-interval, of which it is a multiple
# positions
multi_latent_attention rope_type=rope {YARN}:
    --rope-type rope: contradicts --position-embedding-type yarn; remove one
multi_latent_attention rope_type=rope position_embedding_type!=yarn rescales_scores=True:
    --rope-type rope with @rope_scaling_factor and @mscale_all_dim: scaled attention scores are not
    supported with plain rotary positions; set --mscale-all-dim 0, or remove --rope-type rope
multi_latent_attention=False rope_type=yarn position_embedding_type!=yarn:
    @rope_type: is a setting of --multi-latent-attention; use --position-embedding-type yarn
# experts
num_experts moe_router_topk=1 moe_router_score_function=softmax moe_router_pre_softmax=False:
    --moe-router-topk 1: the softmax of one chosen logit is always 1, so the router would not
    learn from the loss; set --moe-router-pre-softmax
num_experts tensor_model_parallel_size>1 sequence_parallel=False:
    @num_experts with @tensor_model_parallel_size: the ranks would all send the same tokens to
    experts; set --sequence-parallel
num_experts overlap_moe_expert_parallel_comm micro_batches=1:
    @overlap_moe_expert_parallel_comm: has no effect with one micro-batch a step; use a larger
    --global-batch-size
num_experts activation_offload offload_modules=mlp_fc1,mlp_act,mlp_fc2:
    @offload_modules: activations of experts (mlp_fc1, mlp_act, mlp_fc2) are not offloaded; drop
    these, or recompute them with --recompute-modules moe_act
# recomputation
recomputed_parts=moe,moe_act num_experts=None:
    --recompute-modules or --recompute-layers: moe and moe_act need --num-experts; give mlp or
    mlp_act
recomputed_parts=mlp,mlp_act num_experts dense_mlps=False:
    --recompute-modules or --recompute-layers: mlp and mlp_act need a dense MLP, which no layer has;
    give moe or moe_act
recomputed_parts=mla_up_proj multi_latent_attention=False:
    --recompute-modules or --recompute-layers: mla_up_proj needs --multi-latent-attention; give qkv
# activations on the host
activation_offload torch_compile recompute_granularity!=full|recompute_method=block:
    --activation-offload: is not supported with --torch-compile, which fixes what a layer keeps;
    drop one, or set --recompute-granularity full
activation_offload offload_modules=attn_proj offload_modules!=core_attn:
    @offload_modules: core attention keeps attn_proj's input too; add core_attn
activation_offload offload_modules=layer_input recompute=None recompute_granularity!=full
    recomputed_parts!=full:
    @offload_modules: layer_input needs recomputed layers; set --recompute-granularity full
activation_offload offload_modules offload_modules!=layer_input recompute_granularity=full
    recompute_method!=block:
    @offload_modules: --recompute-granularity full keeps only layer inputs; give layer_input
# precision, graphs
fp8_format fp8_wgrad=True fp8_recipe=blockwise context_parallel_size>1:
    @fp8_format: with @context_parallel_size blocks of tokens would hold other tokens than in one
    process; set --no-fp8-wgrad, or --fp8-recipe tensorwise
fp8_format fp8_recipe=tensorwise tiled_mlp>1:
    @tiled_mlp: a piece holds other tokens in each layout, and has its own scale with @fp8_recipe;
    set --fp8-recipe rowwise or blockwise
cuda_graphs zero_stage>1:
    @cuda_graphs: is not supported with @zero_stage, whose gradient buffers move; set --zero-stage
    0 or 1
"""

REMARKS = """
activation=gelu:
    --activation gelu is the exact (erf) form; Megatron-LM's default, which it fuses with the
    bias, is the tanh form: --activation gelu-tanh
tokenizer_type=NullTokenizer mock_data=False vocab_size:
    @vocab_size: the end of document is one more id; Megatron-LM's --vocab-size N, which counts it,
    is --vocab-size N-1 here
save=None skip_train=False: --save is not set: no checkpoints or metrics will be written
# 1 - beta below half the spacing of bf16 just above a power of two, 2**-8
exp_avg_dtype=bf16 adam_beta1>0.996:
    @exp_avg_dtype: with @adam_beta1 a step changes the moment by less than bf16 can hold, so it
    hardly decays; give --adam-beta1 0.99 or less, or keep it in fp32
exp_avg_sq_dtype=bf16 adam_beta2>0.996:
    @exp_avg_sq_dtype: with @adam_beta2 a step changes the moment by less than bf16 can hold, so it
    hardly decays; give --adam-beta2 0.99 or less, or keep it in fp32
"""

# Two numbers, how they must be to each other, after `if` where, and another fix: a multiple or a
# divisor is a size that shares out the other.
RELATIONS = f"""
max_position_embeddings >= seq_length
rope_high_freq_factor > rope_low_freq_factor if use_rope_scaling
yarn_beta_fast > yarn_beta_slow if position_embedding_type=yarn
initial_loss_scale >= min_loss_scale
lr >= lr_warmup_init if skip_train=False
lr >= min_lr if skip_train=False {DECAYING}
decoupled_lr >= lr_warmup_init if skip_train=False
decoupled_lr >= decoupled_min_lr if skip_train=False {DECAYING}
decoupled_lr >= min_lr if skip_train=False {DECAYING} decoupled_min_lr=None
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
hidden_size multiple num_attention_heads if kv_channels=None: or give --kv-channels
padded_vocab_size >= vocabulary if tokenizer_type!=NullTokenizer
padded_vocab_size >= vocabulary if tokenizer_type=NullTokenizer: or give --vocab-size one smaller
global_batch_size multiple batch_unit if micro_batches!=None
# without files --vocab-size is that of the tokenizer
vocab_size >= vocabulary if tokenizer_type!=None,NullTokenizer
num_query_groups divisor num_attention_heads
expert_model_parallel_size divisor num_experts
moe_router_num_groups divisor num_experts
moe_router_group_topk divisor moe_router_topk
zero_shard_size divisor replicas if zero_stage>0
tiled_mlp divisor positions if tensor_model_parallel_size>0 context_parallel_size>0 tiled_mlp>1
"""
# What messages call numbers that are no flags.
NUMBERS = {
    "batch_unit": "@micro_batch_size x {run.dp} data-parallel rank(s) = {}",
    "vocabulary": "the {} tokens of the tokenizer",
    "replicas": "the {} data- x context-parallel rank(s)",
    "positions": "the {} positions of the sequence that a rank holds",
}
COMPARISONS = {">": (operator.gt, "greater than"), ">=": (operator.ge, "at least")}


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


def field_of(condition: str) -> str:
    """The first field that a condition is about."""
    return re.split("[!=>|]", condition)[0]


def _is_valid(run: RunView, field: str) -> bool:
    """Whether a field has a value within its bound."""
    value, bound = getattr(run, field), FIELDS[field].bound if field in FIELDS else None
    return value is not None and (bound is None or bound.holds(value))


def ranges(run: RunView) -> Faults:
    for field, option in FIELDS.items():
        if option.bound and getattr(run, field) is not None and not _is_valid(run, field):
            yield f"@{field}: must be {option.bound.text}"


def fields_without_effect(run: RunView) -> tuple[list[str], list[str]]:
    """Faults of fields without what they need, remarks on idle ones, see `metadata.flag`."""
    faults, idle = [], []
    for field, option in FIELDS.items():
        conditions = option.idle_without + option.needs
        if not conditions or getattr(run, field) == option.default:
            continue
        # of two conditions on the same field, what the field needs
        missing = {field_of(each): each for each in conditions if not run.holds(each)}
        if not missing:
            continue
        text = " and ".join(map(condition_text, missing.values()))
        if not all(map(run.holds, option.idle_without)):
            idle.append(f"@{field}: has no effect without {text}")
        else:
            fix = f"{'set' if text.startswith('--') else 'use'} {text}"
            faults.append(f"@{field}: has no effect without {text}; remove it or {fix}")
    return faults, idle


def _texts_that_hold(run: RunView, table: str) -> Faults:
    rows = read_table(table).items()
    return (text for conditions, text in rows if run.holds_all(conditions))


def tables(run: RunView) -> Faults:
    yield from fields_without_effect(run)[0]
    yield from _texts_that_hold(run, FAULTS)
    for settings, text in read_table(EXCLUSIONS).items():
        ones, others = settings.split(" / ")
        reason, fix = "", text
        if text.startswith("wh"):
            reason, _, fix = f", {text}".partition("; ")
        for one in filter(run.holds, ones.split()):
            for other in filter(run.holds, others.split()):
                pair = f"@{field_of(one)}: is not supported with @{field_of(other)}"
                yield f"{pair}{reason}; {fix or 'remove one of them'}"
    for relation, fix in read_table(RELATIONS).items():
        numbers, _, conditions = relation.partition(" if ")
        if run.holds_all(conditions):
            for fault in _relation(run, *numbers.split()):
                yield f"{fault}, {fix}" if fix else fault


def _relation(run: RunView, field: str, relation: str, other: str) -> Faults:
    size, limit = getattr(run, field), getattr(run, other)
    what = f"@{other}" if other in FIELDS else NUMBERS[other].format(limit, run=run)
    if relation in COMPARISONS:
        holds, text = COMPARISONS[relation]
        if _is_valid(run, field) and _is_valid(run, other) and not holds(size, limit):
            yield f"@{field}: must be {text} {what}"
    elif relation == "multiple" and run.has(field, other):
        yield from multiple(run, field, limit, what)
    elif run.has(field, other) and limit % size:
        least = 2 if field == "zero_shard_size" else 1  # 1 would switch ZeRO off
        near = nearest_divisor(limit, size, least)
        yield f"@{field}: must divide {what}; the nearest that fits is {near}"


def remarks(run: RunView) -> Faults:
    return (*fields_without_effect(run)[1], *_texts_that_hold(run, REMARKS))
