"""Rules of parts of the model: heads and positions, mixtures of experts, latent attention, and
modules that exist only with them.
"""

from __future__ import annotations

import re

from megatron.config.derive import RunView, rescales_scores
from megatron.config.errors import UserError
from megatron.config.experts import expert_pattern, read_pattern
from megatron.config.metadata import flag_name
from megatron.config.needs import is_rotary
from megatron.config.rules import Faults


def heads_and_positions(run: RunView) -> Faults:
    """Widths that do not follow, and channels that do not rotate in pairs."""
    sizes = run.has("hidden_size", "num_attention_heads")
    if run.kv_channels is None and sizes and run.hidden_size % run.num_attention_heads:
        yield run.fault(
            "hidden_size",
            f"must be a multiple of {run.show('num_attention_heads')}; or give --kv-channels",
        )
    if not is_rotary(run) or run.multi_latent_attention or not run.has("kv_channels"):
        return
    channels = int(run.kv_channels * run.rotary_percent)
    if run.has("rotary_percent") and (channels == 0 or channels % 2):
        yield run.fault(
            "rotary_percent",
            f"{channels} of {run.kv_channels} channels would rotate; it must be an even number "
            "above 0",
        )


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


def experts(run: RunView) -> Faults:
    """Rules of a mixture of experts."""
    if not run.has("num_experts"):
        return
    yield from _router(run)
    yield from _losses(run)
    yield from _ranks(run)
    inside = "mlp_fc1", "mlp_act", "mlp_fc2"
    words = [word for word in run.offload_modules or () if word in inside]
    if run.activation_offload and words:
        yield (
            f"--offload-modules {' '.join(words)}: experts' activations are not offloaded; drop "
            "the words, or recompute them with --recompute-modules moe_act"
        )
    if run.overlap_moe_expert_parallel_comm and run.micro_batches == 1:
        text = "has no effect with one micro-batch a step, which has no other to overlap with"
        yield f"--overlap-moe-expert-parallel-comm: {text}; give a larger --global-batch-size"


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


def _ranks(run: RunView) -> Faults:
    if run.ep <= 0 or run.etp <= 0:
        return
    stage = run.tp * run.cp * run.dp
    if run.dp and stage % (run.ep * run.etp):
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


def latent_attention(run: RunView) -> Faults:
    """Rules of multi-head latent attention."""
    is_yarn = run.position_embedding_type == "yarn"
    if not run.multi_latent_attention:
        if run.rope_type == "yarn" and not is_yarn:
            yield (
                "--rope-type yarn: is a setting of --multi-latent-attention; use "
                "--position-embedding-type yarn"
            )
        return
    if run.rope_type == "rope" and is_yarn:
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


# Words of recomputation: the flag whose part they are, and what to give without it.
PARTS = (
    ("moe", "num_experts", "mlp"),
    ("moe_act", "num_experts", "mlp_act"),
    ("mla_up_proj", "multi_latent_attention", "qkv"),
)


def recomputed_parts(run: RunView) -> Faults:
    """Words of recomputation that no layer has a module for."""
    for field in ("recompute_modules", "recompute_layers"):
        given = {part for word in getattr(run, field) or () for part in re.split(r"[+*]", word)}
        for word, owner, other in PARTS:
            if word in given and not run.has(owner):
                text = f"{word} is a part of {flag_name(owner)}, which is not set; give {other}"
                yield run.fault(field, text)
