"""Our model and transformers' give the same logits from the same weights, in both directions; what
cannot be expressed is refused.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.config.groups import ModelConfig
from megatron.interop.huggingface import family, from_huggingface, to_huggingface
from megatron.interop.huggingface_files import take_rules
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.optimizer.blocks import build_blocks

transformers = pytest.importorskip("transformers")

VOCAB = 67
GPT2 = ModelConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=96,
    num_attention_heads=4,
    kv_channels=8,
    num_query_groups=4,
    max_position_embeddings=24,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = dataclasses.replace(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    ffn_hidden_size=80,
    untie_embeddings_and_output_weights=True,
)
STRETCHED = {
    "rope_scaling_factor": 4.0,
    "rope_original_max_position_embeddings": 16,
    "rotary_base": 50.0,
}
LLAMA3 = {"use_rope_scaling": True, **STRETCHED}
YARN = {"position_embedding_type": "yarn", "yarn_beta_fast": 2.0, **STRETCHED}
GQA = {"group_query_attention": True, "num_query_groups": 2}
CASES = {
    "gpt2": (GPT2, {}, "gpt2"),
    "gpt2 untied, tanh": (
        GPT2,
        {
            "untie_embeddings_and_output_weights": True,
            "activation": "gelu-tanh",
            "norm_epsilon": 1e-3,
        },
        "gpt2",
    ),
    "gpt2 squared-relu": (GPT2, {"activation": "squared-relu"}, "gpt2"),
    "llama": (LLAMA, {}, "llama"),
    "llama tied, gqa, eps": (
        LLAMA,
        {"untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-2, **GQA},
        "llama",
    ),
    "llama biases": (LLAMA, {"add_bias_linear": True}, "llama"),
    "llama geglu, wide heads": (
        LLAMA,
        {"activation": "geglu", "kv_channels": 16, "rotary_base": 500.0},
        "llama",
    ),
    "llama 3 scaling": (LLAMA, LLAMA3, "llama"),
    "llama linear scaling": (LLAMA, {"rotary_seq_len_interpolation_factor": 3.0}, "llama"),
    "llama yarn": (LLAMA, YARN, "llama"),
    "mistral": (LLAMA, {"window_size": 5, **GQA}, "mistral"),
    "qwen2": (LLAMA, {"add_qkv_bias": True, **GQA}, "qwen2"),
    "qwen2 window": (LLAMA, {"add_qkv_bias": True, "window_size": 5}, "qwen2"),
    "qwen2 wide heads": (
        LLAMA,
        {"add_qkv_bias": True, "kv_channels": 12, "hidden_size": 36},
        "qwen2",
    ),
    "qwen3": (
        LLAMA,
        {"qk_layernorm": True, "kv_channels": 12, "norm_epsilon": 1e-2, **GQA},
        "qwen3",
    ),
    "qwen3 window": (LLAMA, {"qk_layernorm": True, "window_size": 7}, "qwen3"),
}


def build(
    config: ModelConfig, tensors: dict[str, torch.Tensor] | None = None
) -> tuple[GPTModel, dict[str, torch.Tensor]]:
    """A float64 model with the given logical tensors, or with random ones: no value is as
    initialised, norms and biases included.
    """
    model = GPTModel(
        config,
        vocab_size=VOCAB,
        padded_vocab=padded_vocab_size(VOCAB, config),
        dtype=torch.float64,
        seed=1,
    )
    build_blocks(model, torch.device("cpu"), training=False)
    g, held = torch.Generator().manual_seed(3), {}
    for box, name, parameter in [
        (box, name, parameter) for name, parameter, spec in model.declared() for box in spec.boxes()
    ]:
        values = (
            0.3 * torch.randn(box.extent, generator=g, dtype=torch.float64)
            if tensors is None
            else tensors[box.name].double()
        )
        if tensors is None and "norm" in name and box.name.endswith("weight"):
            values += 1
        view = box.view(parameter.data)
        view.copy_(values.reshape(view.shape))
        held[box.name] = values
    return model, held


def their_model(config: dict, tensors: dict[str, torch.Tensor]):
    kind = getattr(transformers, config["architectures"][0])
    model = (
        kind(
            kind.config_class(
                **{name: value for name, value in config.items() if name != "architectures"}
            )
        )
        .double()
        .eval()
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= (
        {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    )
    return model


def exported(
    config: ModelConfig, held: dict[str, torch.Tensor]
) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and the tensors as the rules say."""
    described, rules = to_huggingface(config, VOCAB)
    stacked = {
        rule.theirs: (torch.cat([held[name] for name in rule.ours]), rule.transposed)
        for rule in rules
    }
    return described, {
        name: (value.t() if transposed else value).contiguous()
        for name, (value, transposed) in stacked.items()
    }


def imported(
    config: dict, theirs: dict[str, torch.Tensor]
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    fields, rules = from_huggingface(config, theirs)
    return dataclasses.replace(ModelConfig(), **fields), {
        box.name: tensor for box, tensor in take_rules(rules, theirs)
    }


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("base", "changes", "kind"), CASES.values(), ids=CASES)
def test_logits_equal_and_the_way_back(base, changes, kind):
    config = dataclasses.replace(base, **changes)
    model, held = build(config)
    theirs_config, theirs = exported(config, held)
    assert theirs_config["model_type"] == kind
    them = their_model(theirs_config, theirs)
    with torch.no_grad():
        want = them(tokens()).logits
    # transformers computes rotary tables and RMSNorm in fp32 even in a float64 model; GPT-2 has
    # neither
    assert difference(model.logits(tokens()), want) < (1e-12 if kind == "gpt2" else 3e-6)

    fields, back = imported(them.config.to_dict(), them.state_dict())
    assert fields == config
    assert sorted(back) == sorted(held) and all(
        torch.equal(back[name], held[name]) for name in held
    )


SENSITIVE = [
    "mistral",
    "qwen2 window",
    "qwen3 window",
    "llama 3 scaling",
    "llama yarn",
    "llama linear scaling",
    "gpt2 untied, tanh",
]


@pytest.mark.parametrize("case", SENSITIVE)
def test_the_comparison_sees_each_setting(case):
    """The negative control: the same weights under the neighbouring setting give other logits by
    far more than the bound.
    """
    base, changes, _ = CASES[case]
    config = dataclasses.replace(base, **changes)
    _, held = build(config)
    neighbour = {
        "window_size": changes.get("window_size", 0) + 1,
        "rope_original_max_position_embeddings": 17,
        "rotary_seq_len_interpolation_factor": 3.01,
        "activation": "gelu",
    }
    model, _ = build(
        dataclasses.replace(
            config, **{name: value for name, value in neighbour.items() if name in changes}
        ),
        held,
    )
    with torch.no_grad():
        assert (
            difference(
                model.logits(tokens()), their_model(*exported(config, held))(tokens()).logits
            )
            > 1e-5
        )


def test_rotary_fields_of_transformers_4_mean_the_same():
    for changes in (
        LLAMA3,
        YARN,
        {"rotary_seq_len_interpolation_factor": 3.0},
        {"rotary_base": 7.0},
    ):
        config = dataclasses.replace(LLAMA, **changes)
        described, theirs = exported(config, build(config)[1])
        old = {name: value for name, value in described.items() if name != "rope_parameters"}
        new = {
            name: value
            for name, value in described.items()
            if name not in ("rope_scaling", "rope_theta")
        }
        for variant in (old, new):
            assert (
                transformers.LlamaConfig(**variant).rope_parameters
                == transformers.LlamaConfig(**described).rope_parameters
            )
            assert imported(variant, theirs)[0] == config


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        (GPT2, {"normalization": "RMSNorm"}, "--normalization RMSNorm"),
        (GPT2, {"add_bias_linear": False}, "--disable-bias-linear"),
        (GPT2, {"num_query_groups": 2, "group_query_attention": True}, "--group-query-attention"),
        (GPT2, {"activation": "swiglu"}, "--activation swiglu"),
        (GPT2, {"window_size": 4}, "--window-size"),
        (GPT2, {"kv_channels": 16}, "--kv-channels"),
        (GPT2, {"qk_layernorm": True}, "--qk-layernorm"),
        (LLAMA, {"position_embedding_type": "none"}, "--position-embedding-type none"),
        (LLAMA, {"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        (LLAMA, {"activation": "gelu"}, "--activation gelu"),
        (LLAMA, {"rotary_percent": 0.5}, "--rotary-percent"),
        (LLAMA, {"add_bias_linear": True, "window_size": 4}, "--disable-bias-linear"),
        (LLAMA, {"add_qkv_bias": True, "qk_layernorm": True}, "--add-qkv-bias with --qk-layernorm"),
        (LLAMA, {"attn_logit_softcapping": 30.0}, "--attn-logit-softcapping"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "--final-logit-softcapping"),
        (
            LLAMA,
            {"use_rope_scaling": True, "position_embedding_type": "yarn"},
            "rotary scaling at once",
        ),
        (LLAMA, {"num_attention_heads": 3, "num_query_groups": 3}, "--num-attention-heads"),
    ],
)
def test_flags_without_a_counterpart_are_refused_by_name(base, changes, text):
    with pytest.raises(ValueError, match=text):
        family(dataclasses.replace(base, **changes))


def test_all_flags_without_a_counterpart_are_named_at_once():
    with pytest.raises(
        ValueError,
        match="(?s)--attn-logit-softcapping.*--final-logit-softcapping.*--rotary-percent",
    ):
        family(
            dataclasses.replace(
                LLAMA, rotary_percent=0.5, attn_logit_softcapping=1.0, final_logit_softcapping=1.0
            )
        )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": True}, "mlp_bias False"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale 0.7"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 4}, "tensors missing: model.layers.3"),
        ({"num_hidden_layers": 2}, "tensors without a counterpart here: model.layers.2"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "cannot be mixed",
        ),
        ({"hidden_size": None}, "config.json lacks 'hidden_size'"),
    ],
)
def test_foreign_models_are_refused_by_field(changes, text):
    _, held = build(LLAMA)
    config, theirs = exported(LLAMA, held)
    config = {
        name: value
        for name, value in (config | changes).items()
        if changes.get(name, 0) is not None
    }
    if "rope_scaling" in changes or "partial_rotary_factor" in changes:
        config.pop("rope_parameters")
    with pytest.raises(ValueError, match=text):
        from_huggingface(config, theirs)


def test_older_gpt2_files_without_prefix_and_with_buffers():
    _, held = build(GPT2)
    config, theirs = exported(GPT2, held)
    old = {name.removeprefix("transformer."): value for name, value in theirs.items()}
    old |= {"h.0.attn.bias": torch.ones(1), "h.0.attn.masked_bias": torch.ones(1)}
    _, back = imported(config, old)
    assert all(torch.equal(back[name], held[name]) for name in held)
