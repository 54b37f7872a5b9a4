"""Rules of latent attention: widths, positions, and what it does not combine with."""

from __future__ import annotations

from megatron.config.derive import RunView, rescales_scores
from megatron.config.needs import is_rotary
from megatron.config.rules import LATENT_EXCLUSIONS, Faults, excluded

LATENT = ("multi_latent_attention",)
UP = "mla_up_proj"


def latent_attention(run: RunView) -> Faults:
    """All of them."""
    if not run.multi_latent_attention:
        yield from _nothing_to_recompute(run)
        if run.rope_type == "yarn" and run.position_embedding_type != "yarn":
            yield (
                "--rope-type yarn: is a setting of --multi-latent-attention; use "
                "--position-embedding-type yarn"
            )
        return
    yield from _widths(run)
    yield from excluded(run, LATENT_EXCLUSIONS)


def _nothing_to_recompute(run: RunView) -> Faults:
    for field in ("recompute_modules", "recompute_layers"):
        words = getattr(run, field) or ()
        if any(UP in word.partition("*")[0].split("+") for word in words):
            yield (
                f"{run.show(field)}: {UP} is a part of --multi-latent-attention, which is not "
                "given; give qkv"
            )


def _widths(run: RunView) -> Faults:
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
