"""Rules of parts of the model that compute something: head widths, rotary channels, mixtures of
experts, FP8, and what of a layer is recomputed. `@field` in a text is the flag with its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.config.derive import RunView, expert_ranks, rescales_scores
from megatron.config.errors import about, collected
from megatron.config.fp8 import BLOCK, MULTIPLE, layer_in_fp8, linear_shapes, wide_linears
from megatron.config.layers import expert_pattern, read_pattern
from megatron.config.metadata import flag_name
from megatron.config.model import ROTARY
from megatron.config.recompute import layer_words
from megatron.config.rules import Faults, Rule, divisor, multiple


def head_width(run: RunView) -> Faults:
    if run.kv_channels is None and run.has("hidden_size", "num_attention_heads"):
        for fault in multiple(run, "hidden_size", run.num_attention_heads, "@num_attention_heads"):
            yield f"{fault}, or give --kv-channels"


def rotary_channels(run: RunView) -> Faults:
    if run.holds(ROTARY) and not run.multi_latent_attention:
        if run.has("kv_channels", "rotary_percent"):
            channels = int(run.kv_channels * run.rotary_percent)
            if channels == 0 or channels % 2:
                text = f"{channels} of {run.kv_channels} channels would rotate"
                yield f"@rotary_percent: {text}; it must be an even number above 0"


def latent_attention(run: RunView) -> Faults:
    """Widths and scales of multi-head latent attention."""
    if not run.multi_latent_attention:
        return
    rotating, keys = run.qk_pos_emb_head_dim, run.qk_head_dim + run.qk_pos_emb_head_dim
    if rotating % 2:
        yield f"@qk_pos_emb_head_dim: channels rotate in pairs; give {rotating + 1}"
    if run.v_head_dim > keys:
        yield f"@v_head_dim: must be at most {keys}, the channels of a key"
    is_rope = run.rope_type == "rope" and run.position_embedding_type != "yarn"
    if is_rope and rescales_scores(run):
        yield (
            "--rope-type rope with @rope_scaling_factor and @mscale_all_dim: scaled attention "
            "scores are not supported with plain rotary positions; set --mscale-all-dim 0, or "
            "remove --rope-type rope"
        )


def patterns(run: RunView) -> Faults:
    """Flags that choose which layers are of a kind must be readable."""
    readers: dict[str, Callable] = {
        "window_attn_skip_freq": read_pattern,
        "no_rope_freq": read_pattern,
    }
    if run.has("num_experts"):
        readers["moe_layer_freq"] = expert_pattern
    faults: list[str] = []
    for field, read in readers.items():
        if run.has("num_layers", field):
            with collected(faults, flag_name(field)):
                read(getattr(run, field), run.num_layers)
    return faults


def experts(run: RunView) -> Faults:
    if not run.has("num_experts"):
        return
    stage, (etp, ep) = run.tp * run.cp * run.dp, expert_ranks(run.config)
    if min(ep, etp, stage) > 0 and stage % (ep * etp):
        shown = "@expert_model_parallel_size"
        shown += " x @expert_tensor_parallel_size" * (etp > 1)
        yield (
            f"{shown}: must divide the {stage} rank(s) of a pipeline stage (tensor- x context- x "
            "data-parallel); give fewer, or --expert-tensor-parallel-size 1"
        )
    groups, chosen, topk = run.moe_router_num_groups, run.moe_router_group_topk, run.moe_router_topk
    if run.has("moe_router_num_groups", "moe_router_group_topk") and chosen <= groups:
        size, rest = divmod(run.num_experts, groups)
        if rest == 0 and topk % chosen == 0 and topk > chosen * size:
            yield (
                f"@moe_router_group_topk: {chosen} groups of {size} experts hold fewer than "
                f"@moe_router_topk; give {-(-topk // size)} or more"
            )
    kinds, coefficients = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        yield "@moe_router_load_balancing_type: names one twice; keep each once"
    if len(kinds) != len(coefficients):
        yield "@moe_aux_loss_coeff: must be one number for each of @moe_router_load_balancing_type"
    if min(coefficients) < 0:
        yield "@moe_aux_loss_coeff: must be 0 or more"
    for kind, coefficient in zip(kinds, coefficients):
        if kind == "none" and coefficient > 0:
            yield (
                "@moe_aux_loss_coeff: @moe_router_load_balancing_type has no loss for none; give "
                "aux_loss, or drop the coefficient"
            )


# Words of recomputation: the flag whose part they are, and what to give without it.
PARTS = (
    ("moe", "num_experts", "mlp"),
    ("moe_act", "num_experts", "mlp_act"),
    ("mla_up_proj", "multi_latent_attention", "qkv"),
)


def recompute(run: RunView) -> Faults:
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
    if run.recompute_layers is not None:
        with about("--recompute-layers"):
            count = len(layer_words(run.recompute_layers))
        if run.has("num_layers") and count != run.num_layers:
            yield f"@recompute_layers: covers {count} layers, not @num_layers"


def tiled_mlp(run: RunView) -> Faults:
    """Pieces of the sequence must be equal: ranks communicate in each, and 8-bit floats share
    scales in blocks of tokens.
    """
    if run.tiled_mlp > 1 and run.has("seq_length"):
        length = run.seq_length // run.cp // (run.tp if run.sequence_parallel else 1)
        what = f"the {length} positions of the sequence that a rank holds"
        yield from divisor(run, "tiled_mlp", length, what)


_FP8_SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "num_attention_heads",
    "num_query_groups",
    "num_layers",
    "tensor_model_parallel_size",
)


def fp8(run: RunView) -> Faults:
    if run.fp8_format is None or not run.has(*_FP8_SIZES):
        return
    model, precision = run.config.model, run.config.precision
    wide = wide_linears(model, precision)
    unit = BLOCK if run.fp8_recipe == "blockwise" else MULTIPLE
    if not wide:
        widest = max(min(each.outputs, each.inputs) for each in linear_shapes(model))
        yield (
            f"@fp8_format: no linear layer has {run.fp8_min_width} inputs and outputs, the widest "
            f"has {widest} of the fewer; narrow ones lose more time than they gain: drop it, or "
            "lower --fp8-min-width"
        )
    if not any(layer_in_fp8(precision, each, run.num_layers) for each in range(run.num_layers)):
        yield (
            "@fp8_format: --first-last-layers-bf16 leaves none of @num_layers; lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16"
        )
    for each in wide:
        for size, what in zip(each.on_rank(run.tp), ("outputs", "inputs"), strict=True):
            if size % unit:
                yield (
                    f"@fp8_format: {each.name} has {size} {what} on each tensor-parallel rank, and "
                    f"@fp8_recipe needs a multiple of {unit}; change "
                    "--tensor-model-parallel-size or the width"
                )
    if run.num_query_groups < run.tp and any(each.name == "attention.qkv" for each in wide):
        yield (
            "@fp8_format: with @num_query_groups below @tensor_model_parallel_size several ranks "
            "hold parts of a key's gradient, which would be rounded before they are added up; use "
            f"at most --tensor-model-parallel-size {run.num_query_groups}"
        )
    if run.fp8_wgrad and run.fp8_recipe != "rowwise":
        yield from _fp8_tokens(run, unit)


def _fp8_tokens(run: RunView, unit: int) -> Faults:
    """Weight gradients sum over tokens, those of a piece of --tiled-mlp with sequence parallelism
    gathered from the ranks.
    """
    if not run.has("seq_length", "micro_batch_size"):
        return
    pieces = max(1, run.tiled_mlp)
    tokens = run.seq_length // run.cp // pieces * run.micro_batch_size
    where = "a piece of @tiled_mlp" if pieces > 1 else "a micro-batch"
    is_gathered = pieces > 1 and run.sequence_parallel and run.fp8_recipe == "blockwise"
    if is_gathered and tokens % unit == 0:
        tokens //= run.tp
        where += " from each rank of --sequence-parallel"
    if tokens % unit:
        yield (
            f"@fp8_format: {where} of {tokens} tokens is no multiple of {unit}, which "
            "@fp8_recipe needs for weight gradients; change --seq-length, --micro-batch-size or "
            "--tiled-mlp, or set --no-fp8-wgrad"
        )


MODEL_RULES: tuple[Rule, ...] = (
    head_width,
    rotary_channels,
    latent_attention,
    patterns,
    experts,
    recompute,
    recompute_layers,
    tiled_mlp,
    fp8,
)
