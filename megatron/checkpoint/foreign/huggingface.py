"""Logical tensors and model flags <-> Hugging Face tensor names and config.json, both ways, as pure
functions; no tensor is touched here.

Families: GPT-2; Llama, Mistral (sliding window), Qwen2 (QKV biases), Qwen3 (QK norm). What a family
cannot express is refused by the name of the flag or config field. Conventions (facts of
transformers 4.50 to 5.23): GPT-2 stores linear weights as [in, out] and fuses q, k, v along the
outputs; rotary embeddings pair channel i with i + d/2, as ours do, so nothing is permuted;
`sliding_window` counts the token itself, as our window_size does; the Llama families rotate all
channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig


class Rule(NamedTuple):
    """A Hugging Face tensor is the logical ones on top of each other, transposed for GPT-2's linear
    weights.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu2": "squared-relu",
}
_GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_GPT2_NAMES = {"gelu-tanh": "gelu_new", "gelu": "gelu", "squared-relu": "relu2"}
_GATED_NAMES = {"swiglu": "silu", "geglu": "gelu"}
# in older files; computed, not learned
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def family(model: ModelConfig) -> str:
    """The Hugging Face model type that expresses a resolved `model`; raises UserError naming every
    flag that stands in the way.
    """
    gpt2 = model.position_embedding_type == "learned_absolute"
    width = model.kv_channels * model.num_attention_heads
    scalings = (
        model.use_rope_scaling,
        model.position_embedding_type == "yarn",
        model.rotary_seq_len_interpolation_factor is not None,
    )
    faults = {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--final-logit-softcapping": model.final_logit_softcapping is not None,
        "--position-embedding-type none": model.position_embedding_type == "none",
    }
    if gpt2:
        kind = "gpt2"
        faults |= {
            "--normalization RMSNorm with learned positions": model.normalization != "LayerNorm",
            "--disable-bias-linear with learned positions": not model.add_bias_linear,
            "--group-query-attention with learned positions": model.num_query_groups
            != model.num_attention_heads,
            f"--activation {model.activation} with learned positions": model.activation
            not in _GPT2_NAMES,
            "--qk-layernorm with learned positions": model.qk_layernorm,
            "--window-size with learned positions": model.window_size is not None,
            (
                "--kv-channels other than hidden-size / num-attention-heads with learned positions"
            ): width != model.hidden_size,
        }
    else:
        qkv_bias_only = model.add_qkv_bias and not model.add_bias_linear
        kind = (
            "qwen3"
            if model.qk_layernorm
            else "qwen2"
            if qkv_bias_only
            else "mistral"
            if model.window_size is not None
            else "llama"
        )
        faults |= {
            "--normalization LayerNorm with rotary positions": model.normalization != "RMSNorm",
            f"--activation {model.activation} with rotary positions": model.activation
            not in _GATED_NAMES,
            "--rotary-percent": model.rotary_percent != 1.0,
            (
                "biases in all linear layers with --qk-layernorm or "
                "--window-size (use --disable-bias-linear)"
            ): model.add_bias_linear and kind != "llama",
            "--add-qkv-bias with --qk-layernorm": kind == "qwen3" and qkv_bias_only,
            "--num-attention-heads that do not divide --hidden-size": kind == "llama"
            and model.hidden_size % model.num_attention_heads > 0,
            "more than one way of rotary scaling at once": sum(scalings) > 1,
        }
    refused = [flag for flag, holds in faults.items() if holds]
    if refused:
        raise UserError(
            "Hugging Face's GPT-2, Llama, Mistral and Qwen models cannot express: "
            + "; ".join(refused)
        )
    return kind


def rules(kind: str, layers: int, *, tied: bool, linear_bias: bool, qkv_bias: bool) -> list[Rule]:
    """Every tensor of a model of family `kind`, in the order of the forward pass."""
    table: list[Rule] = []

    def both(theirs: str, *ours: str, bias: bool = True, transposed: bool = False) -> None:
        table.append(Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed))
        if bias:
            table.append(Rule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours)))

    if kind == "gpt2":
        both("transformer.wte", "embedding.word", bias=False)
        both("transformer.wpe", "embedding.position", bias=False)
        for i in range(layers):
            t, o = f"transformer.h.{i}", f"layers.{i}"
            both(f"{t}.ln_1", f"{o}.input_norm")
            both(f"{t}.attn.c_attn", *(f"{o}.attention.{part}" for part in "qkv"), transposed=True)
            both(f"{t}.attn.c_proj", f"{o}.attention.proj", transposed=True)
            both(f"{t}.ln_2", f"{o}.mlp_norm")
            both(f"{t}.mlp.c_fc", f"{o}.mlp.up", transposed=True)
            both(f"{t}.mlp.c_proj", f"{o}.mlp.down", transposed=True)
        both("transformer.ln_f", "final_norm")
    else:
        both("model.embed_tokens", "embedding.word", bias=False)
        for i in range(layers):
            t, o = f"model.layers.{i}", f"layers.{i}"
            both(f"{t}.input_layernorm", f"{o}.input_norm", bias=False)
            for part in "qkv":
                both(f"{t}.self_attn.{part}_proj", f"{o}.attention.{part}", bias=qkv_bias)
            for part in ("q_norm", "k_norm") if kind == "qwen3" else ():
                both(f"{t}.self_attn.{part}", f"{o}.attention.{part}", bias=False)
            both(f"{t}.self_attn.o_proj", f"{o}.attention.proj", bias=linear_bias)
            both(f"{t}.post_attention_layernorm", f"{o}.mlp_norm", bias=False)
            for part in ("gate", "up", "down"):
                both(f"{t}.mlp.{part}_proj", f"{o}.mlp.{part}", bias=linear_bias)
        both("model.norm", "final_norm", bias=False)
    if not tied:
        both("lm_head", "head", bias=False)
    return table


# ---- ours -> theirs ------------------------------------------------------------------------------


def to_huggingface(model: ModelConfig, vocab_size: int) -> tuple[dict[str, Any], list[Rule]]:
    """config.json of a resolved `model` with the real vocabulary, and how each of its tensors is
    made of ours.

    Raises UserError naming every flag that Hugging Face's models cannot express. Training settings
    without a place there (hidden dropout of the Llama families, z-loss) do not change the model and
    are left out.
    """
    kind = family(model)
    tied = not model.untie_embeddings_and_output_weights
    qkv_bias = model.add_bias_linear or model.add_qkv_bias
    table = rules(
        kind, model.num_layers, tied=tied, linear_bias=model.add_bias_linear, qkv_bias=qkv_bias
    )
    return _their_config(kind, model, vocab_size, tied), table


def _their_config(kind: str, model: ModelConfig, vocab_size: int, tied: bool) -> dict[str, Any]:
    common = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "gpt2":
        return common | {
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
    config = common | {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
            + "ForCausalLM"
        ],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": _GATED_NAMES[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        **_their_rotary(model),
    }
    if kind == "llama":
        config |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    elif kind == "mistral":
        config |= {"sliding_window": model.window_size}
    else:
        slides = model.window_size is not None
        config |= {
            "use_sliding_window": slides,
            "sliding_window": model.window_size,
            "max_window_layers": 0 if slides else model.num_layers,
            "layer_types": ["sliding_attention" if slides else "full_attention"] * model.num_layers,
        }
        config |= {"attention_bias": False} if kind == "qwen3" else {}
    return config


def _their_rotary(model: ModelConfig) -> dict[str, Any]:
    """rope_parameters as transformers 5 reads them, and rope_theta and rope_scaling, which 4
    reads.
    """
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    elif model.use_rope_scaling or model.position_embedding_type == "yarn":
        scaling = {
            "factor": model.rope_scaling_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
        if model.use_rope_scaling:
            bounds = {
                "low_freq_factor": model.rope_low_freq_factor,
                "high_freq_factor": model.rope_high_freq_factor,
            }
            scaling |= {"rope_type": "llama3", **bounds}
        else:
            scaling |= {
                "rope_type": "yarn",
                "beta_fast": model.yarn_beta_fast,
                "beta_slow": model.yarn_beta_slow,
            }
    old = {} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}
    return {
        "rope_parameters": scaling | {"rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        **old,
    }


# ---- theirs -> ours ------------------------------------------------------------------------------


def from_huggingface(
    config: dict[str, Any], names: Iterable[str]
) -> tuple[dict[str, Any], list[Rule]]:
    """Fields of a resolved ModelConfig, and what each of the tensors called `names` holds, of a
    model with this config.json.

    Raises UserError for a model type, config field or tensor that has no counterpart here, naming
    all of them.
    """
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        raise UserError(
            f"config.json: model_type {kind!r} has no counterpart here; known: gpt2, llama, "
            "mistral, qwen2, qwen3"
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
    present = {
        name
        if name.startswith(("transformer.", "model.", "lm_head."))
        else f"{_prefix(kind)}{name}": name
        for name in names
    }
    bias = fields["add_bias_linear"]
    table = rules(
        kind,
        fields["num_layers"],
        tied=tied,
        linear_bias=bias,
        qkv_bias=bias or fields["add_qkv_bias"],
    )
    missing = [rule.theirs for rule in table if rule.theirs not in present]
    extra = sorted(
        set(present) - {rule.theirs for rule in table} - ({"lm_head.weight"} if tied else set())
    )
    extra = [name for name in extra if not name.endswith(_BUFFERS)]
    faults += (
        [f"tensors missing: {', '.join(missing[:5])} ({len(missing)} in all)"] if missing else []
    )
    faults += (
        [f"tensors without a counterpart here: {', '.join(extra[:5])} ({len(extra)} in all)"]
        if extra
        else []
    )
    if faults:
        raise UserError(
            "this Hugging Face model cannot be taken over:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )

    return fields, [rule._replace(theirs=present[rule.theirs]) for rule in table]


def _prefix(kind: str) -> str:
    return "transformer." if kind == "gpt2" else "model."


def _expect(config: dict[str, Any], faults: list[str], **values: Any) -> None:
    for name, value in values.items():
        if config.get(name, value) not in (value, None):
            faults.append(f"{name} {config[name]!r} (only {value!r} has a counterpart)")


def _our_gpt2(config: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    _expect(
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
    hidden, heads = config.get("n_embd", 768), config.get("n_head", 12)
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


def _our_llama(config: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    kind, hidden, heads, layers = (
        config["model_type"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_hidden_layers"],
    )
    groups = config.get("num_key_value_heads") or (
        8 if kind == "mistral" and "num_key_value_heads" not in config else heads
    )
    activation = config.get("hidden_act", "silu")
    if activation not in _GATED_ACTIVATIONS:
        faults.append(f"hidden_act {activation!r} (known: {', '.join(_GATED_ACTIVATIONS)})")
    bias = kind == "llama" and bool(config.get("attention_bias"))
    if kind == "llama":
        _expect(config, faults, mlp_bias=bias)
    elif kind == "qwen3":
        _expect(config, faults, attention_bias=False)
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
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": _GATED_ACTIVATIONS.get(activation),
        "add_bias_linear": bias,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind == "qwen3",
        "window_size": _our_window(config, faults),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "init_method_std": config.get("initializer_range", 0.02),
    }
    return fields | _our_rotary(config, faults)


def _our_window(config: dict[str, Any], faults: list[str]) -> int | None:
    """One window for all layers, or none."""
    if config["model_type"] == "mistral":
        return config.get("sliding_window", 4096)
    if config["model_type"] == "llama" or not config.get("use_sliding_window", False):
        return None
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
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


def _our_rotary(config: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = {name: value for name, value in given.items() if value is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    fields: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": float(base)}
    _expect(config | scaling, faults, partial_rotary_factor=1.0)
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
        _expect(
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
