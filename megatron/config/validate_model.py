"""Rules of parts of the model: heads and positions, mixtures of experts, latent attention, FP8, and
what of a layer is recomputed or offloaded. `@field` in a text is the flag with its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.config.derive import RunView, expert_ranks, rescales_scores
from megatron.config.errors import about
from megatron.config.fp8 import BLOCK, MULTIPLE, layer_in_fp8, linear_shapes, wide_linears
from megatron.config.layers import expert_pattern, read_pattern
from megatron.config.metadata import flag_name
from megatron.config.model import ROTARY, YARN
from megatron.config.recompute import FULL, LAYER_INPUT, layer_words
from megatron.config.rules import Faults, Rule, divisor


def heads_and_positions(run: RunView) -> Faults:
    """Widths that do not follow, and channels that do not rotate in pairs."""
    sizes = run.has("hidden_size", "num_attention_heads")
    if run.kv_channels is None and sizes and run.hidden_size % run.num_attention_heads:
        yield "@hidden_size: must be a multiple of @num_attention_heads; or give --kv-channels"
    if not run.holds(ROTARY) or run.multi_latent_attention:
        return
    if run.has("kv_channels", "rotary_percent"):
        channels = int(run.kv_channels * run.rotary_percent)
        if channels == 0 or channels % 2:
            text = f"{channels} of {run.kv_channels} channels would rotate"
            yield f"@rotary_percent: {text}; it must be an even number above 0"


PATTERNS: dict[str, Callable[[str, int], Any]] = {
    "window_attn_skip_freq": read_pattern,
    "no_rope_freq": read_pattern,
    "moe_layer_freq": expert_pattern,
}


def pattern(run: RunView, field: str) -> Faults:
    """A flag that chooses which layers are of a kind must be read."""
    is_idle = field == "moe_layer_freq" and run.num_experts is None
    if run.has("num_layers", field) and not is_idle:
        with about(flag_name(field)):
            PATTERNS[field](getattr(run, field), run.num_layers)
    return iter(())


# ---------------------------------------------------------------- experts


def experts(run: RunView) -> Faults:
    """Rules of a mixture of experts."""
    if not run.has("num_experts"):
        return
    yield from _router(run)
    yield from _losses(run)
    words = [
        word for word in run.offload_modules or () if word in ("mlp_fc1", "mlp_act", "mlp_fc2")
    ]
    if run.activation_offload and words:
        yield (
            f"--offload-modules {' '.join(words)}: experts' activations are not offloaded; drop "
            "the words, or recompute them with --recompute-modules moe_act"
        )
    if run.overlap_moe_expert_parallel_comm and run.micro_batches == 1:
        text = "has no effect with one micro-batch a step; give a larger --global-batch-size"
        yield f"@overlap_moe_expert_parallel_comm: {text}"
    stage, (etp, ep) = run.tp * run.cp * run.dp, expert_ranks(run.config)
    if min(ep, etp, stage) > 0 and stage % (ep * etp):
        shown = "@expert_model_parallel_size"
        shown += " x @expert_tensor_parallel_size" * (etp > 1)
        yield (
            f"{shown}: must divide the {stage} rank(s) of a pipeline stage (tensor- x context- x "
            "data-parallel); give fewer, or --expert-tensor-parallel-size 1"
        )
    if run.tp > 1 and not run.sequence_parallel:
        yield (
            "--num-experts with @tensor_model_parallel_size: the ranks would all send the same "
            "tokens to experts; give --sequence-parallel"
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
        yield (
            f"@moe_router_group_topk: {taken} groups of {size} experts hold fewer than "
            f"@moe_router_topk; give {-(-topk // size)} or more"
        )


def _losses(run: RunView) -> Faults:
    kinds, coefficients = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        yield "@moe_router_load_balancing_type: names one twice; keep each once"
    if len(kinds) != len(coefficients):
        yield "@moe_aux_loss_coeff: must be one number for each of @moe_router_load_balancing_type"
    if min(coefficients) < 0:
        yield "@moe_aux_loss_coeff: must be 0 or more"
    if any(coeff > 0 for kind, coeff in zip(kinds, coefficients) if kind == "none"):
        text = "@moe_router_load_balancing_type has no loss; give aux_loss, or drop it"
        yield f"@moe_aux_loss_coeff: {text}"


# ---------------------------------------------------------------- latent attention


def latent_attention(run: RunView) -> Faults:
    """Rules of multi-head latent attention."""
    if not run.multi_latent_attention:
        if run.rope_type == "yarn" and not run.holds(YARN):
            text = "is a setting of --multi-latent-attention; use --position-embedding-type yarn"
            yield f"@rope_type: {text}"
        return
    if run.rope_type == "rope" and run.holds(YARN):
        yield "--rope-type rope: contradicts --position-embedding-type yarn; remove one"
    elif run.rope_type == "rope" and rescales_scores(run):
        yield (
            "--rope-type rope with @rope_scaling_factor and @mscale_all_dim: scaled attention "
            "scores are not supported with plain rotary positions; set --mscale-all-dim 0, or "
            "remove --rope-type rope"
        )
    rotating, keys = run.qk_pos_emb_head_dim, run.qk_head_dim + run.qk_pos_emb_head_dim
    if rotating % 2:
        yield f"@qk_pos_emb_head_dim: channels rotate in pairs; give {rotating + 1}"
    if run.v_head_dim > keys:
        yield f"@v_head_dim: must be at most {keys}, the channels of a key"


# ---------------------------------------------------------------- recomputation, offload, pieces

# Words of recomputation: the flag whose part they are, and what to give without it.
PARTS = (
    ("moe", "num_experts", "mlp"),
    ("moe_act", "num_experts", "mlp_act"),
    ("mla_up_proj", "multi_latent_attention", "qkv"),
)


def recompute(run: RunView) -> Faults:
    """Words of recomputation, and inputs that tensor-parallel ranks can share."""
    if run.holds_all("recompute_method=block recompute_granularity=full recompute_num_layers=None"):
        yield "@recompute_method: set --recompute-num-layers, the number of layers of each stage"
    for field in ("recompute_modules", "recompute_layers"):
        given = re.split(r"[+* ]", " ".join(getattr(run, field) or ()))
        for word, owner, other in PARTS:
            if word in given and not run.has(owner):
                text = f"{word} is a part of {flag_name(owner)}, which is not set; give {other}"
                yield f"@{field}: {text}"
    sizes = run.has("micro_batch_size", "seq_length", "hidden_size")
    if run.distribute_saved_activations and run.tp > 1 and sizes:
        elements = run.micro_batch_size * run.seq_length * run.hidden_size // run.cp
        if elements % run.tp:
            yield (
                f"--distribute-saved-activations: the {elements} elements of a layer's input are "
                "not a multiple of @tensor_model_parallel_size; drop it"
            )


def recompute_layers(run: RunView) -> Faults:
    """--recompute-layers is about each layer."""
    if run.recompute_layers is not None:
        with about("--recompute-layers"):
            count = len(layer_words(run.recompute_layers))
        if run.has("num_layers") and count != run.num_layers:
            yield f"@recompute_layers: covers {count} layers, not @num_layers"


def activation_offload(run: RunView) -> Faults:
    """Modules of --offload-modules must keep inputs that can be offloaded."""
    if not run.activation_offload:
        return
    modules = run.offload_modules or ()
    is_full = run.recompute_granularity == "full"
    all_whole = is_full and run.recompute_method != "block"
    some_whole = is_full or FULL in re.split("[* ]", " ".join(run.recompute_layers or ()))
    if run.torch_compile and not all_whole:
        yield (
            "--activation-offload: is not supported with --torch-compile, which fixes what a "
            "layer keeps; drop one, or give --recompute-granularity full"
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "@offload_modules: core attention keeps attn_proj's input too; add core_attn"
    if LAYER_INPUT in modules and not some_whole and run.recompute is None:
        text = "layer_input needs recomputed layers; add --recompute-granularity full"
        yield f"@offload_modules: {text}"
    if modules and LAYER_INPUT not in modules and all_whole:
        text = "--recompute-granularity full keeps only layer inputs; give layer_input"
        yield f"@offload_modules: {text}"


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
            yield f"@fp8_format: {text}"


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
            "--first-last-layers-bf16 leaves none of @num_layers; lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16"
        )
    for each in wide:
        for size, what in zip(each.on_rank(run.tp), ("outputs", "inputs"), strict=True):
            if size % multiple:
                yield (
                    f"{each.name} has {size} {what} on each tensor-parallel rank, and @fp8_recipe "
                    f"needs a multiple of {multiple}; change --tensor-model-parallel-size or the "
                    "width"
                )
    if run.num_query_groups < run.tp and any(each.name == "attention.qkv" for each in wide):
        yield (
            "with @num_query_groups below @tensor_model_parallel_size several ranks hold parts of "
            "a key's gradient, which would be rounded before they are added up; use at most "
            f"--tensor-model-parallel-size {run.num_query_groups}"
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
            "with @context_parallel_size blocks of tokens would hold other tokens than in one "
            "process; give --no-fp8-wgrad, or --fp8-recipe tensorwise"
        )
    if run.fp8_recipe == "rowwise" or not run.has("seq_length", "micro_batch_size"):
        return
    pieces, multiple = max(1, run.tiled_mlp), BLOCK if is_blockwise else MULTIPLE
    tokens = run.seq_length // run.cp // pieces * run.micro_batch_size
    where = "a piece of @tiled_mlp" if pieces > 1 else "a micro-batch"
    if tokens % multiple == 0 and pieces > 1 and run.sequence_parallel and is_blockwise:
        tokens //= run.tp
        where += " from each rank of --sequence-parallel"
    if tokens % multiple:
        yield (
            f"{where} of {tokens} tokens is no multiple of {multiple}, which @fp8_recipe needs "
            "for weight gradients; change --seq-length, --micro-batch-size or --tiled-mlp, or "
            "give --no-fp8-wgrad"
        )


MODEL_RULES: tuple[Rule, ...] = (
    heads_and_positions,
    *(partial(pattern, field=field) for field in PATTERNS),
    experts,
    latent_attention,
    recompute,
    recompute_layers,
    activation_offload,
    tiled_mlp,
    fp8,
)
