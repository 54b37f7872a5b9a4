"""Experts in Hugging Face's config.json, both ways: as Mixtral, Granite's, Qwen's or DeepSeek's
models write them.

Softmax over the chosen logits is softmax over all of them, divided by the sum of the chosen: what
Qwen calls norm_topk_prob. Without it a router is one with --moe-router-pre-softmax. Losses of
routers are settings of a training run, which an import leaves to its flags: router_aux_loss_coef is
a coefficient of another formula (all layers as one, k times ours), and no field specifies which
loss a model was trained with. So is router_jitter_noise, which is --moe-input-jitter-eps.
DeepSeek's groups of experts are judged by their best two (V3) or their best (V2), ours by as many
as are chosen of each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron.tools._convert.families import Family

from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject

# Our fields, and theirs of the same value in each kind of experts.
_MIXTRAL = {
    "num_experts": "num_local_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "intermediate_size",
}
_QWEN = _MIXTRAL | {"num_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size"}
SAME = {
    "mixtral": _MIXTRAL,
    "granite": _MIXTRAL,
    "qwen": _QWEN,
    "deepseek": _QWEN | {"num_experts": "n_routed_experts"},
}


def their_experts(family: Family, model: ModelConfig) -> JsonObject:
    """Fields of config.json; a family of experts that may be dense has all layers dense for a
    model without experts.
    """
    sparse = model.expert_layers()
    shared = model.moe_shared_expert_intermediate_size
    fields: JsonObject = {}
    if family.mlp_layer_types:
        fields["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]
    elif family.experts == "deepseek":
        fields["first_k_dense_replace"] = [*sparse, True].index(True)
    if model.num_experts is None:
        return fields
    fields |= {theirs: getattr(model, ours) for ours, theirs in SAME[family.experts or ""].items()}
    if family.experts == "granite":
        fields["shared_intermediate_size"] = shared or 0
    elif family.experts == "qwen":
        fields |= {
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, has_experts in enumerate(sparse) if not has_experts],
        }
        if "moe_shared_expert_gate" in family.ours:
            fields["shared_expert_intermediate_size"] = shared
    elif family.experts == "deepseek":
        groups = model.moe_router_num_groups or 1
        fields |= {
            "moe_layer_freq": 1,
            "n_shared_experts": (shared or 0) // (model.moe_ffn_hidden_size or 1),
            "n_group": groups,
            "topk_group": model.moe_router_group_topk or 1,
            "norm_topk_prob": _normalizes(family, model.moe_router_topk),
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        }
        if _is_softmax(family):
            fields["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return fields


def our_experts(family: Family, config: JsonObject, faults: list[str]) -> JsonObject:
    """Fields of ModelConfig. Raises KeyError for what config.json lacks."""
    sparse = _sparse_layers(family, config)
    if not any(sparse):
        if family.experts == "deepseek":
            return {}
        faults.append("mlp_only_layers or decoder_sparse_step: no layer has experts")
        sparse = [True] * len(sparse)
    same = SAME[family.experts or ""]
    fields: JsonObject = {
        "num_experts": _count(config, same["num_experts"]),
        "moe_router_topk": _required(config, same["moe_router_topk"]),
        "moe_ffn_hidden_size": _required(config, same["moe_ffn_hidden_size"]),
        "moe_layer_freq": _pattern(sparse),
    }
    if family.experts == "granite":
        shared = config.get("shared_intermediate_size") or None
        fields["moe_shared_expert_intermediate_size"] = shared
    elif family.experts == "qwen":
        fields["moe_router_pre_softmax"] = not config.get("norm_topk_prob", False)
        if "moe_shared_expert_gate" in family.ours:
            shared = _required(config, "shared_expert_intermediate_size")
            fields["moe_shared_expert_intermediate_size"] = shared
    elif family.experts == "deepseek":
        fields |= _our_deepseek(family, config, fields, faults)
    return fields


def _our_deepseek(
    family: Family, config: JsonObject, fields: JsonObject, faults: list[str]
) -> JsonObject:
    k = fields["moe_router_topk"]
    method = config.get("topk_method") or "greedy"
    groups = config.get("n_group", family.defaults.get("n_group")) or 1
    if _is_softmax(family) and method == "greedy":
        groups = 1  # greedy ignores n_group
    shared = _given(family, config, "n_shared_experts") or 0
    normalizes = _given(family, config, "norm_topk_prob")
    if shared == 0:
        faults.append("n_shared_experts 0 (a shared expert is needed)")
    if normalizes not in (_normalizes(family, k), None):
        faults.append(f"norm_topk_prob {normalizes!r} has no counterpart")
    if config.get("moe_layer_freq", 1) != 1:
        faults.append(f"moe_layer_freq {config['moe_layer_freq']!r} (only 1 has a counterpart)")
    found = {
        "moe_router_topk_scaling_factor": _given(family, config, "routed_scaling_factor") or 1.0,
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
    }
    if _is_softmax(family) and method not in ("greedy", "group_limited_greedy"):
        faults.append(f"topk_method {method!r} has no counterpart")
    if groups > 1:
        taken = _required(dict(family.defaults) | config, "topk_group")
        judged_by = 1 if _is_softmax(family) else 2
        if k // taken != judged_by:
            faults.append(
                f"num_experts_per_tok {k} with topk_group {taken}: groups are chosen by their best "
                f"{judged_by} there, by their best {k // taken} here"
            )
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": taken}
    return found


def _sparse_layers(family: Family, config: JsonObject) -> list[bool]:
    """Which layers have experts."""
    layers = range(config["num_hidden_layers"])
    if family.mlp_layer_types:
        types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (len(layers) - 1)
        return [each == "sparse" for each in types[: len(layers)]]
    if family.experts == "deepseek":
        dense = _given(family, config, "first_k_dense_replace")
        return [i >= dense for i in layers]
    if family.experts == "qwen":
        plain = config.get("mlp_only_layers") or []
        step = config.get("decoder_sparse_step", 1)
        return [i not in plain and (i + 1) % step == 0 for i in layers]
    return [True] * len(layers)


def _is_softmax(family: Family) -> bool:
    return family.ours.get("moe_router_score_function") == "softmax"


def _normalizes(family: Family, k: int) -> bool:
    """Whether the chosen scores are divided by their sum: of one expert they are not."""
    return not _is_softmax(family) and k > 1


def _given(family: Family, config: JsonObject, name: str) -> Any:
    value = config.get(name)
    return family.defaults.get(name) if value is None else value


def _required(config: JsonObject, name: str) -> Any:
    if config.get(name) is None:
        raise KeyError(name)
    return config[name]


def _count(config: JsonObject, name: str) -> int:
    """The number of experts, by the family's name for it or by one of its others."""
    names = (name, "num_experts", "num_local_experts", "n_routed_experts")
    found = next((config[each] for each in names if config.get(each)), None)
    if not isinstance(found, int):
        raise KeyError(name)
    return found


def _pattern(sparse: Sequence[bool]) -> str:
    """--moe-layer-freq for layers that have experts or not: a number where one describes them."""
    for step in range(1, len(sparse) + 1):
        if list(sparse) == [i % step == 0 for i in range(len(sparse))]:
            return str(step)
    runs = [(int(value), len(list(group))) for value, group in groupby(sparse)]
    return "+".join(f"[{value}]*{length}" for value, length in runs)
