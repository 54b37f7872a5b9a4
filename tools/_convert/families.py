"""Hugging Face's model families: a table with one entry per `model_type`.

An entry is data. `huggingface.py` reads and writes config.json by it, and `huggingface_rules.py`
derives the tensors' names from it, so a family of known parts is added here alone. Facts are those
of transformers 4.50 to 5.23 and of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Bias = bool | str  # always, never, or the field of config.json for it
# what both sides call by different names and mean alike
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
# values that transformers takes where config.json leaves a field out
DEFAULTS: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QKV = ("attention.q", "attention.k", "attention.v")


@dataclass(frozen=True)
class Family:
    """How one of transformers' model classes expresses a model of ours.

    `same`: our field -> theirs of the same value, in addition to SIZES; several of theirs, with
    spaces between them, must agree. `ours`: fields that the family fixes. `theirs`: fields that
    must have this value. `defaults`: in addition to DEFAULTS. `names`: our module -> theirs where
    it is not Llama's name. `fused`: theirs -> ours, stacked along their rows. `biases`: of queries,
    keys and values, of the attention output, and of the MLP.
    """

    architecture: str
    same: Mapping[str, str] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    normalization: str = "RMSNorm"
    epsilon: str = "rms_norm_eps"
    gated: bool = True
    activation: str = "hidden_act"
    biases: tuple[Bias, Bias, Bias] = (False, False, False)
    qk_norm: Bias = False
    key_value_heads: str | None = "num_key_value_heads"  # None: as many as query heads
    head_dim: bool = True  # config.json may give the width of a head
    even_heads: bool = False  # the number of heads must divide the hidden size
    rotary: bool = True
    partial: str | None = None  # field with the share of channels that rotate
    base: str = "rope_theta"
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")
    interleaved: bool = False  # channels 2i and 2i + 1 rotate together; of ours i and i + d/2
    window: Literal["all", "layers"] | None = None  # sliding_window of all layers, or layer_types
    latent: bool = False
    experts: Literal["mixtral", "granite", "qwen", "deepseek"] | None = None
    mlp_layer_types: bool = False  # names the layers with experts, instead of counting dense ones
    predicts: bool = False  # layers of multi-token prediction may follow the last one
    transposed: bool = False  # linear weights are [in, out]
    by_head: bool = False  # a fused q, k and v holds those of each head together
    scores: str | None = None  # field with the scale of attention's scores, 1 / sqrt(head width)
    unit_offset: bool = False  # norms multiply by weight + 1


_PLAIN_MLP = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_LLAMA_BIASES = ("attention_bias", "attention_bias", "mlp_bias")
_QWEN_BIASES = ("attention_bias", "attention_bias", False)
_DEEPSEEK = {"q_lora_rank": 1536, "n_shared_experts": 1}
_EXPERTS_BY_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def _latent(architecture: str, **fields: Any) -> Family:
    """A family of latent attention with the experts of DeepSeek."""
    fields["ours"] = {"latent_norm_epsilon": 1e-6} | fields.get("ours", {})
    fields["theirs"] = {"attention_bias": False} | fields.get("theirs", {})
    return Family(
        architecture,
        same={
            "kv_lora_rank": "kv_lora_rank",
            "qk_head_dim": "qk_nope_head_dim",
            "qk_pos_emb_head_dim": "qk_rope_head_dim",
            "v_head_dim": "v_head_dim",
        },
        qk_norm=True,
        latent=True,
        experts="deepseek",
        predicts=True,
        **fields,
    )


# Of several families that express a model, the first is exported.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        same={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "ffn_hidden_size": "n_inner",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "hidden_dropout": "resid_pdrop embd_pdrop",
            "attention_dropout": "attn_pdrop",
        },
        theirs={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        defaults={
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "n_inner": None,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        names={
            "embedding.word": "transformer.wte",
            "embedding.position": "transformer.wpe",
            "layers": "transformer.h",
            "input_norm": "ln_1",
            "attention.proj": "attn.c_proj",
            "mlp_norm": "ln_2",
            "final_norm": "transformer.ln_f",
            **_PLAIN_MLP,
        },
        fused={"attn.c_attn": QKV},
        normalization="LayerNorm",
        epsilon="layer_norm_epsilon",
        gated=False,
        activation="activation_function",
        biases=(True, True, True),
        key_value_heads=None,
        head_dim=False,
        rotary=False,
        transposed=True,
    ),
    "llama": Family("LlamaForCausalLM", biases=_LLAMA_BIASES, even_heads=True),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32},
        biases=(True, False, False),
        window="layers",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        biases=_QWEN_BIASES,
        qk_norm=True,
        window="layers",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        window="all",
        experts="mixtral",
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        theirs={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        defaults={"attention_multiplier": 1.0},
        names={"mlp.shared_expert.down": "shared_mlp.output_linear"},
        fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate", "mlp.shared_expert.up")},
        biases=_QWEN_BIASES,
        experts="granite",
        scores="attention_multiplier",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        ours={"moe_shared_expert_gate": True},
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
        biases=("qkv_bias", False, False),
        window="layers",
        experts="qwen",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        defaults={"num_key_value_heads": 4},
        biases=_QWEN_BIASES,
        qk_norm=True,
        window="layers",
        experts="qwen",
    ),
    "deepseek_v3": _latent(
        "DeepseekV3ForCausalLM",
        ours=_EXPERTS_BY_SIGMOID,
        theirs={"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        defaults={
            **_DEEPSEEK,
            "num_key_value_heads": 128,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
    "deepseek_v2": _latent(
        "DeepseekV2ForCausalLM",
        ours={"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
        theirs={"mlp_bias": False, "scoring_func": "softmax", "norm_topk_prob": False},
        defaults={**_DEEPSEEK, "first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "glm4_moe_lite": _latent(
        "Glm4MoeLiteForCausalLM",
        ours=_EXPERTS_BY_SIGMOID,
        theirs={"rope_interleave": True},
        mlp_layer_types=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "num_key_value_heads": 20,
            "n_shared_experts": 1,
            "q_lora_rank": 768,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        ours=_EXPERTS_BY_SIGMOID,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
        biases=("attention_bias", False, False),
        qk_norm="use_qk_norm",
        partial="partial_rotary_factor",
        experts="deepseek",
        predicts=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        ours=_EXPERTS_BY_SIGMOID,
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        biases=_QWEN_BIASES,
        qk_norm=True,
        window="layers",
        experts="deepseek",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        fused={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": ("mlp.gate", "mlp.up")},
        partial="partial_rotary_factor",
        scalings=(),
        window="all",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        biases=("use_bias", "use_bias", "use_bias"),
        interleaved=True,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        gated=False,
        biases=_LLAMA_BIASES,
        even_heads=True,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        defaults={
            "num_key_value_heads": 2,
            "initializer_range": 0.018042,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        names=_PLAIN_MLP,
        normalization="LayerNorm",
        epsilon="norm_epsilon",
        gated=False,
        biases=("use_bias", "use_bias", "use_bias"),
        window="all",
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        same={"hidden_dropout": "hidden_dropout"},
        theirs={"use_parallel_residual": False, "qk_layernorm": False},
        defaults={"hidden_dropout": 0.0, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
        normalization="LayerNorm",
        epsilon="layer_norm_eps",
        biases=("use_qkv_bias", False, False),
        head_dim=False,
        partial="partial_rotary_factor",
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        same={"hidden_dropout": "hidden_dropout"},
        theirs={"use_parallel_residual": False},
        defaults={
            "hidden_act": "gelu",
            "hidden_dropout": 0.0,
            "attention_bias": True,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000.0,
            "use_parallel_residual": True,
        },
        names={
            "embedding.word": "gpt_neox.embed_in",
            "layers": "gpt_neox.layers",
            "attention.proj": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        fused={"attention.query_key_value": QKV},
        normalization="LayerNorm",
        epsilon="layer_norm_eps",
        gated=False,
        biases=("attention_bias", "attention_bias", True),
        key_value_heads=None,
        head_dim=False,
        even_heads=True,
        partial="rotary_pct",
        base="rotary_emb_base",
        by_head=True,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        defaults={
            "initializer_range": 0.0134,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
        },
        normalization="LayerNorm",
        epsilon="norm_eps",
        gated=False,
        biases=_LLAMA_BIASES,
        partial="partial_rotary_factor",
        unit_offset=True,
    ),
}
# the same models under another model_type, of files that transformers reads with code of their own
ALIASES = {"kimi_k2": "deepseek_v3"}
# model types that have no counterpart, and what prevents it
NO_COUNTERPART = {
    "olmoe": "q_norm and k_norm normalise all heads together, --qk-layernorm each head",
}
