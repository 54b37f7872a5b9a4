"""Rules of parts of the model: heads and positions, mixtures of experts, latent attention, FP8, and
what of a layer is recomputed or offloaded.
"""

from __future__ import annotations

import re

from megatron.config.derive import RunView, rescales_scores
from megatron.config.errors import UserError
from megatron.config.fp8 import BLOCK, MULTIPLE, layer_in_fp8, linear_shapes, wide_linears
from megatron.config.layers import expert_pattern, read_pattern
from megatron.config.metadata import flag_name
from megatron.config.needs import is_rotary, is_yarn
from megatron.config.recompute import FULL, LAYER_INPUT, layer_words
from megatron.config.rules import Faults, divisor


def heads_and_positions(run: RunView) -> Faults:
    """Widths that do not follow, and channels that do not rotate in pairs."""
    sizes = run.has("hidden_size", "num_attention_heads")
    if run.kv_channels is None and sizes and run.hidden_size % run.num_attention_heads:
        yield run.fault(
            "hidden_size",
            f"must be a multiple of {run.show('num_attention_heads')}; or give --kv-channels",
        )
    if not is_rotary(run) or run.multi_latent_attention:
        return
    if run.has("kv_channels", "rotary_percent"):
        channels = int(run.kv_channels * run.rotary_percent)
        if channels == 0 or channels % 2:
            text = f"{channels} of {run.kv_channels} channels would rotate"
            yield run.fault("rotary_percent", f"{text}; it must be an even number above 0")


def layer_patterns(run: RunView) -> Faults:
    """Rules of the flags that choose which layers are of a kind."""
    experts = ("moe_layer_freq",) if run.has("num_experts") else ()
    for field in ("window_attn_skip_freq", "no_rope_freq", *experts):
        if run.has("num_layers", field):
            try:
                read = expert_pattern if field == "moe_layer_freq" else read_pattern
                read(getattr(run, field), run.num_layers)
            except UserError as problem:
                yield f"{flag_name(field)} {problem}"


# ---------------------------------------------------------------- experts


def experts(run: RunView) -> Faults:
    """Rules of a mixture of experts."""
    if not run.has("num_experts"):
        return
    yield from _router(run)
    yield from _losses(run)
    inside = "mlp_fc1", "mlp_act", "mlp_fc2"
    words = [word for word in run.offload_modules or () if word in inside]
    if run.activation_offload and words:
        yield (
            f"--offload-modules {' '.join(words)}: experts' activations are not offloaded; drop "
            "the words, or recompute them with --recompute-modules moe_act"
        )
    if run.overlap_moe_expert_parallel_comm and run.micro_batches == 1:
        text = "has no effect with one micro-batch a step; give a larger --global-batch-size"
        yield run.fault("overlap_moe_expert_parallel_comm", text)
    stage = run.tp * run.cp * run.dp
    if min(run.ep, run.etp, stage) > 0 and stage % (run.ep * run.etp):
        etp = f" x --expert-tensor-parallel-size {run.etp}" if run.etp > 1 else ""
        yield (
            f"{run.show('expert_model_parallel_size')}{etp}: must divide the {stage} rank(s) of a "
            "pipeline stage (tensor- x context- x data-parallel); give fewer, or "
            "--expert-tensor-parallel-size 1"
        )
    if run.tp > 1 and not run.sequence_parallel:
        yield (
            f"--num-experts with {run.show('tensor_model_parallel_size')}: the ranks would all "
            "send the same tokens to experts; give --sequence-parallel"
        )


def _router(run: RunView) -> Faults:
    is_softmax = run.moe_router_score_function == "softmax"
    topk, groups, taken = run.moe_router_topk, run.moe_router_num_groups, run.moe_router_group_topk
    if topk == 1 and is_softmax and not run.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1: the softmax of one chosen logit is always 1, so the router "
            "would not learn from the loss; give --moe-router-pre-softmax"
        )
    if not run.has("moe_router_num_groups", "moe_router_group_topk") or run.num_experts % groups:
        return
    size = run.num_experts // groups
    if taken <= groups and topk % taken == 0 and topk > taken * size:
        yield run.fault(
            "moe_router_group_topk",
            f"{taken} groups of {size} experts hold fewer than {run.show('moe_router_topk')}; give "
            f"{-(-topk // size)} or more",
        )


def _losses(run: RunView) -> Faults:
    kinds, coefficients = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    shown = run.show("moe_router_load_balancing_type")
    if len(set(kinds)) < len(kinds):
        yield f"{shown}: names one twice; keep each once"
    if len(kinds) != len(coefficients):
        yield run.fault("moe_aux_loss_coeff", f"must be one number for each of {shown}")
    if min(coefficients) < 0:
        yield run.fault("moe_aux_loss_coeff", "must be 0 or more")
    if any(coeff > 0 for kind, coeff in zip(kinds, coefficients) if kind == "none"):
        yield run.fault("moe_aux_loss_coeff", f"{shown} has no loss; give aux_loss, or drop it")


# ---------------------------------------------------------------- latent attention


def latent_attention(run: RunView) -> Faults:
    """Rules of multi-head latent attention."""
    if not run.multi_latent_attention:
        if run.rope_type == "yarn" and not is_yarn(run):
            text = "is a setting of --multi-latent-attention; use --position-embedding-type yarn"
            yield run.fault("rope_type", text)
        return
    if run.rope_type == "rope" and is_yarn(run):
        yield "--rope-type rope: contradicts --position-embedding-type yarn; remove one"
    elif run.rope_type == "rope" and rescales_scores(run):
        yield (
            f"--rope-type rope with {run.show('rope_scaling_factor')} and "
            f"{run.show('mscale_all_dim')}: scaled attention scores are not supported with plain "
            "rotary positions; set --mscale-all-dim 0, or remove --rope-type rope"
        )
    rotating, keys = run.qk_pos_emb_head_dim, run.qk_head_dim + run.qk_pos_emb_head_dim
    if rotating % 2:
        yield run.fault("qk_pos_emb_head_dim", f"channels rotate in pairs; give {rotating + 1}")
    if run.v_head_dim > keys:
        yield run.fault("v_head_dim", f"must be at most {keys}, the channels of a key")


# ---------------------------------------------------------------- recomputation, offload, pieces

# Words of recomputation: the flag whose part they are, and what to give without it.
PARTS = (
    ("moe", "num_experts", "mlp"),
    ("moe_act", "num_experts", "mlp_act"),
    ("mla_up_proj", "multi_latent_attention", "qkv"),
)


def recompute(run: RunView) -> Faults:
    """Words of recomputation, its layers, and inputs that tensor-parallel ranks can share."""
    in_blocks = run.recompute_granularity == "full" and run.recompute_method == "block"
    if in_blocks and run.recompute_num_layers is None:
        text = "set --recompute-num-layers, the number of layers of each stage"
        yield run.fault("recompute_method", text)
    for field in ("recompute_modules", "recompute_layers"):
        given = {part for word in getattr(run, field) or () for part in re.split(r"[+*]", word)}
        for word, owner, other in PARTS:
            if word in given and not run.has(owner):
                text = f"{word} is a part of {flag_name(owner)}, which is not set; give {other}"
                yield run.fault(field, text)
    if run.recompute_layers is not None:
        try:
            count = len(layer_words(run.recompute_layers))
            if run.has("num_layers") and count != run.num_layers:
                text = f"covers {count} layers, not {run.show('num_layers')}"
                yield run.fault("recompute_layers", text)
        except UserError as problem:
            yield f"--recompute-layers: {problem}"
    sizes = run.has("micro_batch_size", "seq_length", "hidden_size")
    if run.distribute_saved_activations and run.tp > 1 and sizes:
        elements = run.micro_batch_size * run.seq_length * run.hidden_size // run.cp
        if elements % run.tp:
            yield (
                f"--distribute-saved-activations: the {elements} elements of a layer's input are "
                f"not a multiple of {run.show('tensor_model_parallel_size')}; drop it"
            )


def activation_offload(run: RunView) -> Faults:
    """Modules of --offload-modules must keep inputs that can be offloaded."""
    if not run.activation_offload:
        return
    modules = set(run.offload_modules or ())
    words = run.recompute_layers or ()
    full = run.recompute_granularity == "full"
    some_whole = full or any(word.partition("*")[0] == FULL for word in words)
    all_whole = full and run.recompute_method != "block"
    if run.torch_compile and not all_whole:
        yield (
            "--activation-offload: is not supported with --torch-compile, which fixes what a "
            "layer keeps; drop one, or give --recompute-granularity full"
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        text = "core attention keeps attn_proj's input too; add core_attn"
        yield run.fault("offload_modules", text)
    if LAYER_INPUT in modules and not some_whole and run.recompute is None:
        text = "layer_input needs recomputed layers; add --recompute-granularity full"
        yield run.fault("offload_modules", text)
    if modules and LAYER_INPUT not in modules and all_whole:
        text = "--recompute-granularity full keeps only layer inputs; give layer_input"
        yield run.fault("offload_modules", text)


def tiled_mlp(run: RunView) -> Faults:
    """Pieces of the sequence must be equal: ranks communicate in each, and 8-bit floats share
    scales in blocks of tokens.
    """
    if run.tiled_mlp > 1 and run.has("seq_length"):
        length = run.seq_length // run.cp // (run.tp if run.sequence_parallel else 1)
        what = f"the {length} positions of the sequence that a rank holds"
        yield from divisor(run, "tiled_mlp", length, what)


# ---------------------------------------------------------------- FP8


def fp8(run: RunView) -> Faults:
    """Sizes of a run with FP8 GEMMs."""
    needed = ("hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads")
    if run.fp8_format is not None and run.has(*needed, "num_query_groups", "num_layers"):
        for text in (*_fp8_layers(run), *_fp8_tokens(run)):
            yield run.fault("fp8_format", text)


def _fp8_layers(run: RunView) -> Faults:
    model, precision = run.config.model, run.config.precision
    wide = wide_linears(model, precision)
    multiple = BLOCK if run.fp8_recipe == "blockwise" else MULTIPLE
    if not wide:
        widest = max(min(each.outputs, each.inputs) for each in linear_shapes(model))
        yield (
            f"no linear layer has {run.fp8_min_width} inputs and outputs, the widest has {widest} "
            "of the fewer; narrow ones lose more time than they gain: drop it, or lower "
            "--fp8-min-width"
        )
    layers = range(run.num_layers)
    if not any(layer_in_fp8(precision, index, run.num_layers) for index in layers):
        yield (
            f"--first-last-layers-bf16 leaves none of --num-layers {run.num_layers}; lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16"
        )
    for each in wide:
        for size, what in zip(each.on_rank(run.tp), ("outputs", "inputs"), strict=True):
            if size % multiple:
                yield (
                    f"{each.name} has {size} {what} on each tensor-parallel rank, and "
                    f"{run.show('fp8_recipe')} needs a multiple of {multiple}; change "
                    "--tensor-model-parallel-size or the width"
                )
    if run.num_query_groups < run.tp and any(each.name == "attention.qkv" for each in wide):
        yield (
            f"with {run.show('num_query_groups')} below {run.show('tensor_model_parallel_size')} "
            "several ranks hold parts of a key's gradient, which would be rounded before they are "
            f"added up; use at most --tensor-model-parallel-size {run.num_query_groups}"
        )


def _fp8_tokens(run: RunView) -> Faults:
    """Weight gradients sum over tokens, those of a piece of --tiled-mlp with sequence parallelism
    gathered from the ranks.
    """
    if not run.fp8_wgrad:
        return
    is_blockwise = run.fp8_recipe == "blockwise"
    if run.cp > 1 and is_blockwise:
        yield (
            f"with {run.show('context_parallel_size')} blocks of tokens would hold other tokens "
            "than in one process; give --no-fp8-wgrad, or --fp8-recipe tensorwise"
        )
    if run.fp8_recipe == "rowwise" or not run.has("seq_length", "micro_batch_size"):
        return
    pieces, multiple = max(1, run.tiled_mlp), BLOCK if is_blockwise else MULTIPLE
    tokens = run.seq_length // run.cp // pieces * run.micro_batch_size
    where = f"a piece of {run.show('tiled_mlp')}" if pieces > 1 else "a micro-batch"
    if tokens % multiple == 0 and pieces > 1 and run.sequence_parallel and is_blockwise:
        tokens //= run.tp
        where += " from each rank of --sequence-parallel"
    if tokens % multiple:
        yield (
            f"{where} of {tokens} tokens is no multiple of {multiple}, which "
            f"{run.show('fp8_recipe')} needs for weight gradients; change --seq-length, "
            "--micro-batch-size or --tiled-mlp, or give --no-fp8-wgrad"
        )


MODEL_RULES = (
    heads_and_positions,
    layer_patterns,
    experts,
    latent_attention,
    recompute,
    activation_offload,
    tiled_mlp,
    fp8,
)
