"""DeepSeek-V3's family of Hugging Face: latent attention, and experts behind the first layers.

Facts of transformers 5.23 and of the files of DeepSeek-V3: position channels 2i and 2i + 1 are a
pair, as ours are; the latents' norms have an epsilon of 1e-6 whatever `rms_norm_eps` says; a group
of experts is judged by its best two; the layers of multi-token prediction, which stand behind the
last one, are ignored there and here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject
from megatron.config.metadata import is_rotary
from megatron.interop.huggingface import (
    GATED_ACTIVATIONS,
    GATED_NAMES,
    Rule,
    expect,
    name_faults,
    our_rotary,
    their_rotary,
)
from megatron.interop.unread_fields import refuse_unread_fields

KIND = "deepseek_v3"
EPSILON = 1e-6  # of the latents' norms
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def deepseek_rules(model: ModelConfig) -> list[Rule]:
    """Every tensor of a resolved `model`, in the order of the forward pass."""
    table = [Rule("model.embed_tokens.weight", ("embedding.word.weight",))]
    for index, experts in enumerate(model.expert_layers()):
        table += _layer_rules(model, f"model.layers.{index}", f"layers.{index}", experts)
    table.append(Rule("model.norm.weight", ("final_norm.weight",)))
    if model.untie_embeddings_and_output_weights:
        table.append(Rule("lm_head.weight", ("head.weight",)))
    return table


def _layer_rules(model: ModelConfig, theirs: str, ours: str, experts: bool) -> list[Rule]:
    queries = {"q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up"}
    attention = {
        **({"q_proj": "q"} if model.q_lora_rank is None else queries),
        "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
        "o_proj": "proj",
    }
    pairs = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
    pairs |= {f"self_attn.{name}": f"attention.{own}" for name, own in attention.items()}
    mlps = {"mlp": "mlp"}
    if experts:
        pairs["mlp.gate"] = "mlp.router"
        mlps = {f"mlp.experts.{i}": f"mlp.experts.{i}" for i in range(model.num_experts or 0)}
        if model.moe_shared_expert_intermediate_size:
            mlps["mlp.shared_experts"] = "mlp.shared_expert"
    for name, own in mlps.items():
        pairs |= {f"{name}.{part}_proj": f"{own}.{part}" for part in ("gate", "up", "down")}
    table = [
        Rule(f"{theirs}.{name}.weight", (f"{ours}.{own}.weight",)) for name, own in pairs.items()
    ]
    if experts:
        bias = f"{theirs}.mlp.gate.e_score_correction_bias"
        table.append(Rule(bias, (f"{ours}.mlp.router.expert_bias",)))
    return table


# ---- ours -> theirs ------------------------------------------------------------------------------


@refuse_unread_fields(
    "Hugging Face's DeepSeek-V3 models",
    implied=("multi_latent_attention", "kv_channels", "num_query_groups"),
)
def to_deepseek(model: ModelConfig, vocab_size: int) -> tuple[JsonObject, list[Rule]]:
    """As `to_huggingface`, of a model with latent attention."""
    faults = [flag for flag, holds in _faults(model).items() if holds]
    if faults:
        raise UserError("Hugging Face's DeepSeek-V3 models cannot express: " + "; ".join(faults))
    yarn = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    rotary = their_rotary(model)
    for field in ("rope_parameters", "rope_scaling"):
        if rotary.get(field, {}).get("rope_type") == "yarn":
            rotary[field] |= yarn
    config = {
        "model_type": KIND,
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "hidden_act": GATED_NAMES[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "num_nextn_predict_layers": 0,
        **rotary,
    }
    return config | _their_experts(model), deepseek_rules(model)


def _faults(model: ModelConfig) -> dict[str, bool]:
    """What the family cannot express, by flag."""
    sparse = model.num_experts is not None
    yarn = model.position_embedding_type == "yarn"
    both = model.mscale > 0 and model.mscale_all_dim > 0
    experts = {
        "--moe-router-force-load-balancing": model.moe_router_force_load_balancing,
        "--moe-layer-freq other than dense layers first": sorted(model.expert_layers())
        != list(model.expert_layers()),
        f"--moe-router-score-function {model.moe_router_score_function}": (
            model.moe_router_score_function != "sigmoid"
        ),
        "experts without --moe-router-enable-expert-bias": not model.moe_router_enable_expert_bias,
        "experts without --moe-shared-expert-intermediate-size": (
            model.moe_shared_expert_intermediate_size is None
        ),
        "--moe-shared-expert-intermediate-size that --moe-ffn-hidden-size does not divide": (
            (model.moe_shared_expert_intermediate_size or 0) % (model.moe_ffn_hidden_size or 1) > 0
        ),
        "--moe-shared-expert-gate": model.moe_shared_expert_gate,
        "--moe-router-topk other than 2 x --moe-router-group-topk": (
            model.moe_router_num_groups is not None
            and model.moe_router_topk // (model.moe_router_group_topk or 1) != 2
        ),
    }
    return {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--final-logit-softcapping": model.final_logit_softcapping is not None,
        "--window-size": model.window_size is not None,
        f"--position-embedding-type {model.position_embedding_type}": not is_rotary(model),
        "--normalization LayerNorm": model.normalization != "RMSNorm",
        f"--norm-epsilon other than {EPSILON}": model.norm_epsilon != EPSILON,
        "latent attention without --qk-layernorm": not model.qk_layernorm,
        "biases in linear layers (use --disable-bias-linear)": model.add_bias_linear,
        f"--activation {model.activation}": model.activation not in GATED_NAMES,
        "--mscale other than 1 without --mscale-all-dim, or 0 with it": (
            yarn and not both and (model.mscale, model.mscale_all_dim) != (1, 0)
        ),
        **(experts if sparse else {}),
    }


def _their_experts(model: ModelConfig) -> JsonObject:
    """The fields of experts; those of a dense model say that all layers are dense."""
    if model.num_experts is None:
        return {"first_k_dense_replace": model.num_layers}
    width = model.moe_ffn_hidden_size or 1
    return {
        "first_k_dense_replace": model.expert_layers().index(True),
        "moe_layer_freq": 1,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "moe_intermediate_size": width,
        "num_experts_per_tok": model.moe_router_topk,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "norm_topk_prob": model.moe_router_topk > 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


# ---- theirs -> ours ------------------------------------------------------------------------------


def from_deepseek(config: JsonObject, names: Iterable[str]) -> tuple[JsonObject, list[Rule]]:
    """As `from_huggingface`, of this family."""
    faults: list[str] = []
    if config.get("quantization_config"):
        faults.append("quantization_config: the weights must be plain floating-point numbers")
    try:
        fields = _our_fields(config, faults)
    except KeyError as error:
        raise UserError(f"config.json lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: a field is not of its type: {error}") from None
    table = deepseek_rules(ModelConfig(**fields))
    names = list(names)
    present = set(names) - set(predicting(config, names))
    faults += name_faults(table, present, not fields["untie_embeddings_and_output_weights"])
    if faults:
        raise UserError(
            "this Hugging Face model cannot be taken over:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    return fields, table


def predicting(config: JsonObject, names: Iterable[str]) -> list[str]:
    """The tensors of multi-token prediction: of layers behind the last one."""
    layers = config["num_hidden_layers"]
    found = ((name, _LAYER.match(name)) for name in names)
    return [name for name, match in found if match and int(match[1]) >= layers]


def _our_fields(config: JsonObject, faults: list[str]) -> JsonObject:
    heads = config["num_attention_heads"]
    expect(config, faults, num_key_value_heads=heads, attention_bias=False, rope_interleave=True)
    expect(config, faults, rms_norm_eps=EPSILON)
    activation = config.get("hidden_act", "silu")
    if activation not in GATED_ACTIVATIONS:
        faults.append(f"hidden_act {activation!r} (known: {', '.join(GATED_ACTIVATIONS)})")
    content, position = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": content + position,
        "group_query_attention": False,
        "num_query_groups": heads,
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": content,
        "qk_pos_emb_head_dim": position,
        "v_head_dim": config["v_head_dim"],
        "qk_layernorm": True,
        "max_position_embeddings": config.get("max_position_embeddings", 4096),
        "normalization": "RMSNorm",
        "norm_epsilon": EPSILON,
        "activation": GATED_ACTIVATIONS.get(activation),
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "init_method_std": config.get("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        **_our_positions(config, faults),
        **_our_experts(config, faults),
    }


def _our_positions(config: JsonObject, faults: list[str]) -> JsonObject:
    """Rotary scaling, with YaRN's two factors."""
    plain = dict(config)
    given: JsonObject = {}
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(field), dict):
            given |= config[field]
            plain[field] = {
                name: value
                for name, value in config[field].items()
                if name not in ("mscale", "mscale_all_dim")
            }
    fields = our_rotary(plain, faults)
    if fields["position_embedding_type"] != "yarn":
        return fields
    mscale, all_dim = given.get("mscale") or 0, given.get("mscale_all_dim") or 0
    if all_dim and not mscale:
        faults.append("mscale_all_dim without mscale")
    # without both the table has YaRN's own factor
    return fields | {"mscale": float(mscale) if all_dim else 1.0, "mscale_all_dim": float(all_dim)}


def _our_experts(config: JsonObject, faults: list[str]) -> JsonObject:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 3)
    if dense >= layers:
        return {}
    k, groups = config["num_experts_per_tok"], config.get("n_group") or 1
    expect(
        config,
        faults,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=k > 1,
    )
    fields: JsonObject = {
        "num_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}",
        "moe_router_topk": k,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 2.5),
    }
    shared = config.get("n_shared_experts") or 0
    if shared:
        fields["moe_shared_expert_intermediate_size"] = shared * config["moe_intermediate_size"]
    if groups > 1:
        taken = config["topk_group"]
        if k // taken != 2:
            faults.append(
                f"num_experts_per_tok {k} (only 2 x topk_group {taken} has a counterpart)"
            )
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": taken}
    return fields
