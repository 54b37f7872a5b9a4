"""Rules of parts of the model: mixtures of experts, latent attention, and modules that exist only
with them.
"""

from __future__ import annotations

import re

from megatron.config.derive import RunView, rescales_scores
from megatron.config.errors import UserError
from megatron.config.experts import expert_pattern
from megatron.config.metadata import flag_name
from megatron.config.needs import is_rotary
from megatron.config.rules import (
    EXPERT_EXCLUSIONS,
    LATENT_EXCLUSIONS,
    Faults,
    excluded,
    nearest_divisor,
)
from megatron.config.schedules import IN_PAIRS, SCHEDULES


def experts(run: RunView) -> Faults:
    """Rules of a mixture of experts."""
    if not run.has("num_experts"):
        return
    yield from _pattern(run)
    yield from _router(run)
    yield from _groups(run)
    yield from _losses(run)
    yield from _ranks(run)
    yield from excluded(run, EXPERT_EXCLUSIONS)
    yield from _offload(run)
    if run.overlap_moe_expert_parallel_comm:
        yield from _pairs(run)


def _pairs(run: RunView) -> Faults:
    """What passes in pairs ask for."""
    flag = "--overlap-moe-expert-parallel-comm"
    if run.moe_token_dispatcher_type != "alltoall":
        yield (
            f"{flag}: hides what --moe-token-dispatcher-type alltoall sends; give that, or drop "
            "the flag"
        )
    if run.pipeline_schedule in SCHEDULES and run.pipeline_schedule not in IN_PAIRS:
        yield (
            f"{flag}: {run.show('pipeline_schedule')} has no pairs of passes; give "
            f"{' or '.join(IN_PAIRS)}"
        )
    if run.activation_offload:
        yield (
            f"{flag}: --activation-offload copies during one pass at a time; drop one, or "
            "recompute instead"
        )
    if run.has("micro_batch_size", "global_batch_size") and run.dp:
        unit = run.micro_batch_size * run.dp
        if run.global_batch_size // unit == 1:
            yield (
                f"{flag}: {run.show('global_batch_size')} is one micro-batch a step, which has no "
                f"other to overlap with; give {2 * unit} or more, or drop the flag"
            )


def _pattern(run: RunView) -> Faults:
    if not run.has("num_layers"):
        return
    try:
        expert_pattern(run.moe_layer_freq, run.num_layers)
    except UserError as problem:
        yield f"--moe-layer-freq {problem}"


def _router(run: RunView) -> Faults:
    if run.moe_router_topk > run.num_experts:
        yield (
            f"{run.show('moe_router_topk')}: there are {run.num_experts} experts; give "
            f"{run.num_experts} or fewer"
        )
    is_softmax = run.moe_router_score_function == "softmax"
    if run.moe_router_topk == 1 and is_softmax and not run.moe_router_pre_softmax:
        yield (
            f"{run.show('moe_router_topk')}: the softmax of one chosen logit is 1 whatever it is, "
            "so that the router would learn nothing from the loss; give --moe-router-pre-softmax"
        )
    if run.moe_router_enable_expert_bias and is_softmax:
        yield (
            "--moe-router-enable-expert-bias: a bias is meaningful only with scores of a fixed "
            "range; give --moe-router-score-function sigmoid"
        )


def _groups(run: RunView) -> Faults:
    groups, taken = run.moe_router_num_groups, run.moe_router_group_topk
    if groups is None or groups <= 0:
        return
    shown = run.show("moe_router_num_groups")
    if taken is None:
        yield f"{shown}: give --moe-router-group-topk, the groups that a token's experts are from"
        return
    if run.num_experts % groups:
        yield _undivided(run, shown, groups)
        return
    if taken <= 0:
        return
    shown = run.show("moe_router_group_topk")
    size = run.num_experts // groups
    if taken > groups:
        yield f"{shown}: there are {groups} groups; give {groups} or fewer"
    elif run.moe_router_topk % taken:
        yield (
            f"{shown}: must divide {run.show('moe_router_topk')}, since groups are compared by "
            "their best topk / group-topk experts"
        )
    elif run.moe_router_topk > taken * size:
        yield (
            f"{shown}: {taken} groups of {size} experts hold fewer than "
            f"{run.show('moe_router_topk')}; give {-(-run.moe_router_topk // size)} or more"
        )


def _undivided(run: RunView, shown: str, size: int) -> str:
    """The fault of a size that does not divide the experts."""
    nearest = nearest_divisor(run.num_experts, size)
    return f"{shown}: must divide --num-experts {run.num_experts}; the nearest is {nearest}"


def _losses(run: RunView) -> Faults:
    kinds, coefficients = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    shown = run.show("moe_router_load_balancing_type")
    if len(set(kinds)) < len(kinds):
        yield f"{shown}: names one twice; keep each once"
    if len(kinds) != len(coefficients):
        yield (
            f"{run.show('moe_aux_loss_coeff')}: has {len(coefficients)} numbers for the "
            f"{len(kinds)} of {shown}; give one for each"
        )
    if min(coefficients) < 0:
        yield f"{run.show('moe_aux_loss_coeff')}: must be 0 or more"
    if any(coeff > 0 for kind, coeff in zip(kinds, coefficients) if kind == "none"):
        yield f"{run.show('moe_aux_loss_coeff')}: {shown} has no loss; give aux_loss, or drop it"


def _ranks(run: RunView) -> Faults:
    shown = run.show("expert_model_parallel_size")
    if run.ep <= 0 or run.etp <= 0:
        return
    if run.num_experts % run.ep:
        yield _undivided(run, shown, run.ep)
    stage = run.tp * run.cp * run.dp
    if run.dp and stage % (run.ep * run.etp):
        product = shown
        if run.etp > 1:
            product += f" x --expert-tensor-parallel-size {run.etp}"
        yield (
            f"{product}: must divide the {stage} rank(s) of a pipeline stage (tensor- x context- x "
            "data-parallel); give fewer, or --expert-tensor-parallel-size 1"
        )
    if run.tp > 1 and not run.sequence_parallel:
        yield (
            f"--num-experts with {run.show('tensor_model_parallel_size')}: the ranks would all "
            "send the same tokens to experts; give --sequence-parallel"
        )


def _offload(run: RunView) -> Faults:
    if run.activation_offload and run.offload_modules:
        inside = "mlp_fc1", "mlp_act", "mlp_fc2"
        shown = [word for word in run.offload_modules if word in inside]
        if shown:
            yield (
                f"{flag_name('offload_modules')} {' '.join(shown)}: experts' activations are not "
                "offloaded; drop the words, or recompute them with --recompute-modules moe_act"
            )


# ---------------------------------------------------------------- latent attention


def latent_attention(run: RunView) -> Faults:
    """Rules of multi-head latent attention."""
    if not run.multi_latent_attention:
        if run.rope_type == "yarn" and run.position_embedding_type != "yarn":
            yield (
                "--rope-type yarn: is a setting of --multi-latent-attention; use "
                "--position-embedding-type yarn"
            )
        return
    yield from _latent_widths(run)
    yield from excluded(run, LATENT_EXCLUSIONS)


def _latent_widths(run: RunView) -> Faults:
    if not is_rotary(run):
        yield (
            f"--multi-latent-attention with {run.show('position_embedding_type')}: a learned "
            "table in addition to rotary positions, as Megatron-LM builds it, is not supported; "
            "give --position-embedding-type rope"
        )
    if run.rope_type == "rope":
        yield from _plain_rope(run)
    if run.qk_pos_emb_head_dim % 2:
        yield (
            f"{run.show('qk_pos_emb_head_dim')}: channels rotate in pairs; give "
            f"{run.qk_pos_emb_head_dim + 1}"
        )
    keys = run.qk_head_dim + run.qk_pos_emb_head_dim
    if run.v_head_dim > keys:
        yield (
            f"{run.show('v_head_dim')}: more than the {keys} channels of a key (--qk-head-dim + "
            f"--qk-pos-emb-head-dim); give {keys} or fewer"
        )


def _plain_rope(run: RunView) -> Faults:
    if run.position_embedding_type == "yarn":
        yield "--rope-type rope: contradicts --position-embedding-type yarn; remove one"
    elif rescales_scores(run):
        yield (
            f"--rope-type rope with {run.show('rope_scaling_factor')} and "
            f"{run.show('mscale_all_dim')}: Megatron-LM scales the attention scores as YaRN does, "
            "which is not supported with plain rotary positions; set --mscale-all-dim 0, or remove "
            "--rope-type rope"
        )


# ---------------------------------------------------------------- modules

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
                yield (
                    f"{run.show(field)}: {word} is a part of {flag_name(owner)}, which is not set; "
                    f"give {other}"
                )
