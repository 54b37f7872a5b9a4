"""Experts in Hugging Face's config.json, both ways: Mixtral, Qwen2-MoE (a shared expert with a gate
beside the others) and Qwen3-MoE (QK norm).

Softmax over the chosen logits is softmax over all of them, divided by the sum of the chosen: what
they call norm_topk_prob. Without it a router is one with --moe-router-pre-softmax. Losses of
routers are settings of a training run, which an import leaves to its flags: router_aux_loss_coef is
a coefficient of another formula (all layers as one, k times ours), and no field says which loss a
model was trained with. So is router_jitter_noise, which is --moe-input-jitter-eps.
"""

from __future__ import annotations

from itertools import groupby

from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject

# model types of experts that have no counterpart, and what stands in the way
NO_COUNTERPART = {
    "olmoe": "q_norm and k_norm normalise all heads together, --qk-layernorm each head",
    "deepseek_v2": "no sigmoid scores, no correction bias of its router; DeepSeek-V3 is read",
}


def expert_family(model: ModelConfig) -> str:
    """The family that a model with experts is nearest to."""
    if model.qk_layernorm:
        return "qwen3_moe"
    if model.moe_shared_expert_intermediate_size is not None or model.add_qkv_bias:
        return "qwen2_moe"
    return "mixtral"


def expert_faults(model: ModelConfig, kind: str) -> dict[str, bool]:
    """What a family cannot express of a model's experts, by flag."""
    score = f"--moe-router-score-function {model.moe_router_score_function}"
    factor = model.moe_router_topk_scaling_factor
    width = "--moe-shared-expert-intermediate-size"
    has_shared = model.moe_shared_expert_intermediate_size is not None
    return {
        "--moe-router-force-load-balancing": model.moe_router_force_load_balancing,
        score: model.moe_router_score_function != "softmax",
        "--moe-router-num-groups": model.moe_router_num_groups is not None,
        "--moe-router-topk-scaling-factor": factor not in (None, 1.0),
        f"{width} with --qk-layernorm": kind == "qwen3_moe" and has_shared,
        f"{width} without --moe-shared-expert-gate": has_shared
        and not model.moe_shared_expert_gate,
        f"--add-qkv-bias with --num-experts, without {width}": kind == "qwen2_moe"
        and not has_shared,
        f"--moe-router-pre-softmax without --qk-layernorm or {width}": kind == "mixtral"
        and model.moe_router_pre_softmax,
        f"--moe-layer-freq with dense layers, without --qk-layernorm or {width}": kind == "mixtral"
        and not all(model.expert_layers()),
    }


def their_experts(kind: str, model: ModelConfig) -> JsonObject:
    """Fields of config.json of a model with experts."""
    fields: JsonObject = {"num_experts_per_tok": model.moe_router_topk}
    if kind == "mixtral":
        return fields | {
            "intermediate_size": model.moe_ffn_hidden_size,
            "num_local_experts": model.num_experts,
        }
    fields |= {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(model.expert_layers()) if not sparse],
    }
    if kind == "qwen2_moe":
        fields |= {
            "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
            "qkv_bias": model.add_qkv_bias,
        }
    return fields


def our_experts(config: JsonObject, faults: list[str]) -> JsonObject:
    """Fields of ModelConfig that config.json of a family with experts gives."""
    kind = config["model_type"]
    count = config.get("num_experts") or config.get("num_local_experts")
    if not isinstance(count, int):
        raise KeyError("num_local_experts" if kind == "mixtral" else "num_experts")
    fields: JsonObject = {"num_experts": count, "moe_router_topk": config["num_experts_per_tok"]}
    if kind == "mixtral":
        return fields | {"moe_ffn_hidden_size": config["intermediate_size"], "moe_layer_freq": "1"}
    if kind == "qwen2_moe":
        fields["moe_shared_expert_intermediate_size"] = config["shared_expert_intermediate_size"]
        fields["moe_shared_expert_gate"] = True
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    sparse = [i not in dense and (i + 1) % step == 0 for i in layers]
    if not any(sparse):
        faults.append("mlp_only_layers or decoder_sparse_step: no layer has experts")
        sparse = [True for _ in layers]
    return fields | {
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_layer_freq": _pattern(sparse),
    }


def _pattern(sparse: list[bool]) -> str:
    """--moe-layer-freq for layers that have experts or not: a number where one says it."""
    for step in range(1, len(sparse) + 1):
        if sparse == [i % step == 0 for i in range(len(sparse))]:
            return str(step)
    runs = [(int(value), len(list(group))) for value, group in groupby(sparse)]
    return "+".join(f"[{value}]*{length}" for value, length in runs)
