"""Logical tensors and model flags <-> Hugging Face tensor names and config.json, both ways, as pure
functions; no tensor is touched here.

Families: GPT-2; Llama, Mistral (sliding window), Qwen2 (QKV biases), Qwen3 (QK norm); with experts
Mixtral, Qwen2-MoE and Qwen3-MoE (`huggingface_experts.py`). What a family cannot express is refused
by the name of the flag or config field. Conventions (facts of transformers 4.50 to 5.23): GPT-2
stores linear weights as [in, out] and fuses q, k, v along the outputs; rotary embeddings pair
channel i with i + d/2, as ours do, so nothing is permuted;
`sliding_window` counts the token itself, as our window_size does; the Llama families rotate all
channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.config.errors import UserError
from megatron.config.experts import expert_pattern
from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject
from megatron.interop.huggingface_experts import (
    NO_COUNTERPART,
    expert_family,
    expert_faults,
    our_experts,
    their_experts,
)
from megatron.interop.huggingface_rules import ExpertNames, Rule, is_fused, rules
from megatron.interop.unread_fields import refuse_unread_fields

_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu2": "squared-relu",
}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_GPT2_NAMES = {"gelu-tanh": "gelu_new", "gelu": "gelu", "squared-relu": "relu2"}
GATED_NAMES = {"swiglu": "silu", "geglu": "gelu"}
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
# where config.json says nothing
_KEY_VALUE_HEADS = {"mistral": 8, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}
_ROTARY_BASES = {"mixtral": 1e6}
# in older files; computed, not learned
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def family(model: ModelConfig) -> str:
    """The Hugging Face model type that expresses a resolved `model`; raises UserError naming every
    flag that stands in the way.
    """
    faults = {
        "--multi-latent-attention": model.multi_latent_attention,
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--final-logit-softcapping": model.final_logit_softcapping is not None,
        "--position-embedding-type none": model.position_embedding_type == "none",
    }
    if model.position_embedding_type == "learned_absolute":
        kind = "gpt2"
        faults |= _gpt2_faults(model)
    elif model.num_experts is not None:
        kind = expert_family(model)
        faults |= _rotary_faults(model, kind) | expert_faults(model, kind)
    else:
        kind = _rotary_family(model)
        faults |= _rotary_faults(model, kind)
    refused = [flag for flag, holds in faults.items() if holds]
    if refused:
        raise UserError(
            "Hugging Face's GPT-2, Llama, Mistral, Mixtral and Qwen models cannot express: "
            + "; ".join(refused)
        )
    return kind


def _gpt2_faults(model: ModelConfig) -> dict[str, bool]:
    """What GPT-2 cannot express, by flag."""
    width = model.kv_channels * model.num_attention_heads
    grouped = model.num_query_groups != model.num_attention_heads
    faults = {
        "--normalization RMSNorm": model.normalization != "LayerNorm",
        "--disable-bias-linear": not model.add_bias_linear,
        "--group-query-attention": grouped,
        f"--activation {model.activation}": model.activation not in _GPT2_NAMES,
        "--qk-layernorm": model.qk_layernorm,
        "--num-experts": model.num_experts is not None,
        "--window-size": model.window_size is not None,
        "--kv-channels other than hidden-size / num-attention-heads": width != model.hidden_size,
    }
    return {f"{flag} with learned positions": holds for flag, holds in faults.items()}


def _rotary_family(model: ModelConfig) -> str:
    """The family among those with rotary positions that a model is nearest to."""
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias and not model.add_bias_linear:
        return "qwen2"
    if model.window_size is not None:
        return "mistral"
    return "llama"


def _rotary_faults(model: ModelConfig, kind: str) -> dict[str, bool]:
    """What the Llama families cannot express, by flag."""
    activation = f"--activation {model.activation} with rotary positions"
    biases = (
        "biases in all linear layers with --qk-layernorm or --window-size "
        "(use --disable-bias-linear)"
    )
    qkv_bias_only = model.add_qkv_bias and not model.add_bias_linear
    uneven_heads = model.hidden_size % model.num_attention_heads > 0
    scalings = (
        model.use_rope_scaling,
        model.position_embedding_type == "yarn",
        model.rotary_seq_len_interpolation_factor is not None,
    )
    return {
        "--normalization LayerNorm with rotary positions": model.normalization != "RMSNorm",
        activation: model.activation not in GATED_NAMES,
        "--rotary-percent": model.rotary_percent != 1.0,
        biases: model.add_bias_linear and kind != "llama",
        "--add-qkv-bias with --qk-layernorm": model.qk_layernorm and qkv_bias_only,
        "--num-attention-heads that do not divide --hidden-size": kind == "llama" and uneven_heads,
        "more than one way of rotary scaling at once": sum(scalings) > 1,
    }


# ---- ours -> theirs ------------------------------------------------------------------------------


@refuse_unread_fields(
    "Hugging Face's GPT-2, Llama, Mistral, Mixtral and Qwen models",
    implied=("group_query_attention",),
)
def to_huggingface(
    model: ModelConfig, vocab_size: int, *, fused: bool = False
) -> tuple[JsonObject, list[Rule]]:
    """config.json of a resolved `model` with the real vocabulary, and how each of its tensors is
    made of ours. Tensors are those of files, where each expert has its own; with `fused` those of a
    model in memory of transformers 5, where the experts of a layer are one tensor.

    Raises UserError naming every flag that Hugging Face's models cannot express. Training settings
    without a place there (hidden dropout of the Llama families, losses of routers, the capacity of
    experts) are left out, as is what routers keep for them.
    """
    kind = family(model)
    tied = not model.untie_embeddings_and_output_weights
    qkv_bias = model.add_bias_linear or model.add_qkv_bias
    experts = None
    if model.num_experts is not None:
        experts = ExpertNames(model.num_experts, model.expert_layers(), fused)
    table = rules(
        kind,
        model.num_layers,
        tied=tied,
        linear_bias=model.add_bias_linear,
        qkv_bias=qkv_bias,
        experts=experts,
    )
    common = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    theirs = _gpt2_config(model) if kind == "gpt2" else _llama_config(kind, model)
    return common | theirs, table


def _gpt2_config(model: ModelConfig) -> JsonObject:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": _GPT2_NAMES[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _llama_config(kind: str, model: ModelConfig) -> JsonObject:
    config = {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": GATED_NAMES[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        **their_rotary(model),
    }
    if kind == "llama":
        return config | {
            "attention_bias": model.add_bias_linear,
            "mlp_bias": model.add_bias_linear,
        }
    config["sliding_window"] = model.window_size
    if model.num_experts is not None:
        config |= their_experts(kind, model)
    if kind in ("mistral", "mixtral"):
        return config
    slides = model.window_size is not None
    attention = "sliding_attention" if slides else "full_attention"
    config |= {
        "use_sliding_window": slides,
        "max_window_layers": 0 if slides else model.num_layers,
        "layer_types": [attention] * model.num_layers,
    }
    if model.qk_layernorm:
        config["attention_bias"] = False
    return config


def their_rotary(model: ModelConfig) -> JsonObject:
    """rope_parameters as transformers 5 reads them, and rope_theta and rope_scaling, which 4
    reads.
    """
    scaling = _their_scaling(model)
    old = {} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}
    return {
        "rope_parameters": scaling | {"rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        **old,
    }


def _their_scaling(model: ModelConfig) -> JsonObject:
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    stretch = {
        "factor": model.rope_factor,
        "original_max_position_embeddings": model.rope_original_length,
    }
    if model.use_rope_scaling:
        return stretch | {
            "rope_type": "llama3",
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
        }
    if model.position_embedding_type == "yarn":
        return stretch | {
            "rope_type": "yarn",
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
        }
    return {"rope_type": "default"}


# ---- theirs -> ours ------------------------------------------------------------------------------


def from_huggingface(config: JsonObject, names: Iterable[str]) -> tuple[JsonObject, list[Rule]]:
    """Fields of a resolved ModelConfig, and what each of the tensors called `names` holds, of a
    model with this config.json.

    Raises UserError for a model type, config field or tensor that has no counterpart here, naming
    all of them.
    """
    kind = config.get("model_type")
    if kind != "gpt2" and kind not in _CLASSES:
        reason = f" ({NO_COUNTERPART[kind]})" if kind in NO_COUNTERPART else ""
        raise UserError(
            f"config.json: model_type {kind!r} has no counterpart here{reason}; known: gpt2, "
            + ", ".join((*_CLASSES, "deepseek_v3"))
        )
    faults: list[str] = []
    if config.get("quantization_config"):
        faults.append("quantization_config: the weights must be plain floating-point numbers")
    try:
        fields = (_our_gpt2 if kind == "gpt2" else _our_llama)(config, faults)
    except KeyError as error:
        raise UserError(f"config.json lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: a field is not of its type: {error}") from None
    # A head of its own has its own tensor; older configs leave the field to the family's default.
    tied = config.get("tie_word_embeddings", kind == "gpt2")
    fields["untie_embeddings_and_output_weights"] = not tied
    bias = fields["add_bias_linear"]
    qkv_bias = bias or fields["add_qkv_bias"]
    present = {_whole_name(name, kind): name for name in names}
    table = rules(
        kind,
        fields["num_layers"],
        tied=tied,
        linear_bias=bias,
        qkv_bias=qkv_bias,
        experts=_expert_names(fields, present),
    )
    faults += name_faults(table, set(present), tied)
    if faults:
        raise UserError(
            "this Hugging Face model cannot be taken over:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    return fields, [rule._replace(theirs=present[rule.theirs]) for rule in table]


def _expert_names(fields: JsonObject, present: Iterable[str]) -> ExpertNames | None:
    """What the names of a model's experts follow from; None where it has none."""
    if fields.get("num_experts") is None:
        return None
    pattern = expert_pattern(fields["moe_layer_freq"], fields["num_layers"])
    return ExpertNames(fields["num_experts"], pattern, any(map(is_fused, present)))


def _whole_name(name: str, kind: str) -> str:
    """A tensor's name in the model with its head; files of the model without one lack the
    prefix.
    """
    if name.startswith(("transformer.", "model.", "lm_head.")):
        return name
    return ("transformer." if kind == "gpt2" else "model.") + name


def name_faults(table: list[Rule], present: set[str], tied: bool) -> list[str]:
    """What is missing among the tensors that are there, and what has no counterpart."""
    wanted = {rule.theirs for rule in table}
    spare = {"lm_head.weight"} if tied else set()
    missing = [rule.theirs for rule in table if rule.theirs not in present]
    extra = [name for name in sorted(present - wanted - spare) if not name.endswith(_BUFFERS)]
    return [
        *some_names("tensors missing", missing),
        *some_names("tensors without a counterpart here", extra),
    ]


def some_names(what: str, names: list[str]) -> list[str]:
    """A line about tensors; none where there are none."""
    return [f"{what}: {', '.join(names[:5])} ({len(names)} in all)"] if names else []


def expect(config: JsonObject, faults: list[str], **values: Any) -> None:
    for name, value in values.items():
        if config.get(name, value) not in (value, None):
            faults.append(f"{name} {config[name]!r} (only {value!r} has a counterpart)")


def _our_gpt2(config: JsonObject, faults: list[str]) -> JsonObject:
    expect(
        config,
        faults,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        faults.append(f"activation_function {activation!r} (known: {', '.join(_GPT2_ACTIVATIONS)})")
    if config.get("embd_pdrop", 0.1) != config.get("resid_pdrop", 0.1):
        faults.append("embd_pdrop other than resid_pdrop (one --hidden-dropout serves both)")
    hidden = config.get("n_embd", 768)
    heads = config.get("n_head", 12)
    return {
        "num_layers": config.get("n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": heads,
        "kv_channels": hidden // heads,
        "group_query_attention": False,
        "num_query_groups": heads,
        "max_position_embeddings": config.get("n_positions", 1024),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": _GPT2_ACTIVATIONS.get(activation),
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "hidden_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "init_method_std": config.get("initializer_range", 0.02),
    }


def _our_llama(config: JsonObject, faults: list[str]) -> JsonObject:
    kind = config["model_type"]
    layers = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", _KEY_VALUE_HEADS.get(kind)) or heads
    activation = config.get("hidden_act", "silu")
    if activation not in GATED_ACTIVATIONS:
        faults.append(f"hidden_act {activation!r} (known: {', '.join(GATED_ACTIVATIONS)})")
    bias = kind == "llama" and bool(config.get("attention_bias"))
    if kind == "llama":
        expect(config, faults, mlp_bias=bias)
    elif kind in ("qwen3", "qwen3_moe"):
        expect(config, faults, attention_bias=False)
    fields = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        "activation": GATED_ACTIVATIONS.get(activation),
        "add_bias_linear": bias,
        "add_qkv_bias": kind == "qwen2" or kind == "qwen2_moe" and config.get("qkv_bias", True),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "window_size": _our_window(config, faults),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "init_method_std": config.get("initializer_range", 0.02),
    }
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        fields |= our_experts(config, faults)
    return fields | our_rotary(config, faults)


def _our_window(config: JsonObject, faults: list[str]) -> int | None:
    """One window for all layers, or none."""
    kind = config["model_type"]
    if kind in ("mistral", "mixtral"):
        return config.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind == "llama" or not config.get("use_sliding_window", False):
        return None
    layers = config["num_hidden_layers"]
    if kind == "qwen2_moe" and not config.get("layer_types"):
        faults.append("use_sliding_window without layer_types: versions differ in what slides")
    # all layers of Qwen3-MoE have the window
    first = 0 if kind == "qwen3_moe" else config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(layers)
    ]
    if set(kinds) == {"sliding_attention"}:
        return config.get("sliding_window", 4096)
    if set(kinds) != {"full_attention"}:
        faults.append(
            "layer_types or max_window_layers: layers with and without a sliding window "
            "cannot be mixed"
        )
    return None


def our_rotary(config: JsonObject, faults: list[str]) -> JsonObject:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = {name: value for name, value in given.items() if value is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    default = _ROTARY_BASES.get(config["model_type"], 10000.0)
    base = scaling.get("rope_theta", config.get("rope_theta", default))
    fields: JsonObject = {"position_embedding_type": "rope", "rotary_base": float(base)}
    expect(config | scaling, faults, partial_rotary_factor=1.0)
    longest = config.get("max_position_embeddings", 2048)
    original = scaling.get("original_max_position_embeddings", longest)
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    elif kind == "llama3":
        fields |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": scaling["factor"],
            "rope_original_max_position_embeddings": original,
            "rope_low_freq_factor": scaling["low_freq_factor"],
            "rope_high_freq_factor": scaling["high_freq_factor"],
        }
    elif kind == "yarn":
        expect(
            scaling, faults, truncate=True, attention_factor=None, mscale=None, mscale_all_dim=None
        )
        fields |= {
            "position_embedding_type": "yarn",
            "rope_scaling_factor": float(scaling.get("factor", longest / original)),
            "rope_original_max_position_embeddings": original,
            "yarn_beta_fast": float(scaling.get("beta_fast", 32.0)),
            "yarn_beta_slow": float(scaling.get("beta_slow", 1.0)),
        }
    elif kind != "default":
        faults.append(f"rope_type {kind!r} (known: default, linear, llama3, yarn)")
    return fields
