"""Our models become those of transformers and come back the same; what cannot be expressed is
refused.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from checkpoint_cases import part_of
from huggingface_models import MODELS, family
from huggingface_names import made_of
from megatron.tools._convert.huggingface import (
    family_of,
    from_huggingface,
    left_out,
    to_huggingface,
)
from megatron.tools._convert.huggingface_files import (
    open_folder,
    read_json,
    take_parts,
    take_rules,
    without_copied_head,
)
from megatron.tools._convert.models import Pair, box_part

from megatron.config.groups import ModelConfig
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.parallel.blocks import build_blocks

transformers = pytest.importorskip("transformers")

FUSED = int(transformers.__version__.partition(".")[0]) >= 5
VOCAB = 67
GPT2, LLAMA, MIXTRAL = MODELS["gpt2"], MODELS["llama"], MODELS["mixtral"]


def build(config: ModelConfig) -> tuple[GPTModel, dict[str, torch.Tensor]]:
    """A float64 model with random logical tensors: no value is as initialised, norms and biases
    included.
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
    for name, parameter, spec in model.declared():
        for box in spec.boxes():
            values = 0.3 * torch.randn(box.extent, generator=g, dtype=torch.float64)
            if "norm" in name and box.name.endswith("weight"):
                values += 1
            view = box.view(parameter.data)
            view.copy_(values.reshape(view.shape))
            held[box.name] = values
    return model, held


def their_model(config: dict, tensors: dict[str, torch.Tensor]):
    kind = getattr(transformers, config["architectures"][0])
    fields = {name: value for name, value in config.items() if name != "architectures"}
    model = kind(kind.config_class(**fields)).double().eval()
    if FUSED:
        model.set_experts_implementation("eager")  # the others take no float64
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    return model


def exported(
    config: ModelConfig,
    held: dict[str, torch.Tensor],
    fused: bool = FUSED,
    kind: str | None = None,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and the tensors as the rules have them; by default as the installed transformers
    holds them in memory.
    """
    described, rules = to_huggingface(config, VOCAB, kind=kind, fused=fused)
    return described, {rule.theirs: made_of(rule, held) for rule in rules}


def described(model: ModelConfig) -> tuple[dict, list[str]]:
    """config.json of a model, and the names of its tensors."""
    config, rules = to_huggingface(model, VOCAB)
    return config, [rule.theirs for rule in rules]


def imported(
    config: dict, theirs: dict[str, torch.Tensor]
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    theirs = without_copied_head(config, theirs)
    fields, rules = from_huggingface(config, theirs)
    return ModelConfig(**fields), assembled(take_rules(rules, theirs))


def assembled(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """The logical tensors of which these are the parts."""
    found: dict[str, torch.Tensor] = {}
    for box, tensor in pairs:
        whole = found.setdefault(box.name, tensor.new_full(box.shape, torch.nan))
        at = part_of(whole, box.offset, box.extent)
        assert at.isnan().all()  # nothing is there twice
        at.copy_(tensor)
    return found


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# families that come first for a model that is of several
FIRST = "gpt2 llama mistral qwen2 qwen3 mixtral granitemoeshared qwen2_moe qwen3_moe".split()


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back(name):
    """tests/parity/test_huggingface_oracle.py compares what the exported models compute."""
    model, kind = MODELS[name], family(name)
    assert kind not in FIRST or family_of(model) == kind
    _, held = build(model)
    them = their_model(*exported(model, held, kind=kind))
    fields, back = imported(them.config.to_dict(), them.state_dict())
    assert fields == model
    assert sorted(back) == sorted(held)
    # float64 rounds the offset of Nemotron's norms
    rounding = 2**-51 if kind == "nemotron" else 0
    for tensor in held:
        torch.testing.assert_close(back[tensor], held[tensor], rtol=0, atol=rounding)


def test_rotary_fields_of_transformers_4_mean_the_same():
    for scaling in ("3 scaling", "yarn", "linear scaling"):
        config = MODELS[f"llama {scaling}"]
        described, theirs = exported(config, build(config)[1])
        wanted = transformers.LlamaConfig(**described).rope_parameters
        for without in (["rope_parameters"], ["rope_scaling", "rope_theta"]):  # old and new
            variant = {name: each for name, each in described.items() if name not in without}
            assert transformers.LlamaConfig(**variant).rope_parameters == wanted
            assert imported(variant, theirs)[0] == config


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        (GPT2, {"normalization": "RMSNorm"}, "GPT2LMHeadModel, .*--normalization RMSNorm"),
        (LLAMA, {"no_rope_freq": "2"}, "--no-rope-freq 1,0,1"),
        (MIXTRAL, {"window_size": 4, "window_attn_skip_freq": "2"}, "attn-skip-freq 1,0,1"),
        (
            LLAMA,
            {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0},
            "(?s)--attn-logit-softcapping.*--final-logit-softcapping",
        ),
    ],
)
def test_flags_without_a_counterpart_are_refused_by_name(base, changes, text):
    with pytest.raises(ValueError, match=text):
        family_of(dataclasses.replace(base, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"model_type": "bloom"}, "model_type 'bloom'"),
        ("llama", {"attention_bias": True}, "mlp_bias False"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ("llama", {"num_hidden_layers": 4}, "tensors missing: model.layers.3"),
        (
            "llama",
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            },
            "layer_types: 'chunked_attention' has no counterpart",
        ),
        (
            "llama",
            {"model_type": "olmoe"},
            "'olmoe' has no .*q_norm and k_norm normalise all heads",
        ),
        (
            "llama",
            {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}},
            "'longrope' .a factor for each channel, by two lists for short and for long sequences",
        ),
        (
            "llama",
            {"model_type": "granitemoeshared", "num_local_experts": 2, "num_experts_per_tok": 1},
            "attention_multiplier 1.0 .only 1 / sqrt.8. has a counterpart",
        ),
        (
            "llama",
            {"text_config": {"model_type": "gemma3_text"}},
            "text_config: model_type 'gemma3_text'",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok 4"),
        ("deepseek_v3", {"n_routed_experts": 9}, "tensors missing: model.layers.1.mlp.experts.8"),
    ],
)
def test_foreign_models_are_refused_by_field(name, changes, text):
    config, names = described(MODELS[name])
    with pytest.raises(ValueError, match=text):
        from_huggingface(config | changes, names)


def test_older_gpt2_files_without_prefix_and_with_buffers():
    _, held = build(GPT2)
    config, theirs = exported(GPT2, held)
    old = {name.removeprefix("transformer."): value for name, value in theirs.items()}
    old |= {"h.0.attn.bias": torch.ones(1), "h.0.attn.masked_bias": torch.ones(1)}
    _, back = imported(config, old)
    assert all(torch.equal(back[name], held[name]) for name in held)


WITH_EXPERTS = [name for name, model in MODELS.items() if model.num_experts]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_of_files_are_those_of_models(name, tmp_path):
    """transformers loads the names of files and writes them again; both ways are exact."""
    config, kind = MODELS[name], family(name)
    _, held = build(config)
    described, in_files = exported(config, held, fused=False, kind=kind)
    assert imported(described, in_files)[0] == config
    them = their_model(*exported(config, held, kind=kind))
    them.save_pretrained(tmp_path)
    written = open_folder(tmp_path)
    assert sorted(written) == sorted(in_files)
    assert all(torch.equal(written[name], in_files[name]) for name in written)
    fields, back = imported(read_json(tmp_path / "config.json"), written)
    assert fields == config
    assert all(torch.equal(back[name], held[name]) for name in held)


def test_parts_of_fused_experts_are_cut_at_each_expert():
    """As ranks of other programs hold them: some experts whole, rows of one, or columns."""
    _, held = build(MIXTRAL)
    described, theirs = exported(MIXTRAL, held, fused=True)
    _, rules = from_huggingface(described, theirs)
    (rule,) = [r for r in rules if r.theirs == "model.layers.1.mlp.experts.gate_up_proj"]
    whole = theirs[rule.theirs]  # [5, 160, 32]
    cuts = [
        ((0, 0, 0), (2, 160, 32)),
        ((2, 0, 0), (1, 100, 32)),
        ((2, 100, 0), (1, 60, 32)),
        ((3, 0, 0), (2, 160, 20)),
        ((3, 0, 20), (2, 160, 12)),
    ]
    parts = [box_part(*place, part_of(whole, *place)) for place in cuts]
    made = assembled(take_parts([rule], {rule.theirs: (tuple(whole.shape), parts)}))
    assert all(torch.equal(made[name], held[name]) for name in rule.ours)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"decoder_sparse_step": 2}, "[0]*1+[1]*1+[0]*1"),
        ({"mlp_only_layers": [1]}, "2"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, None),
    ],
)
def test_which_layers_have_experts(changes, pattern):
    config = dataclasses.replace(MIXTRAL, qk_layernorm=True, moe_layer_freq=pattern or "1")
    described, theirs = exported(config, build(config)[1])
    if pattern is None:
        with pytest.raises(ValueError, match="decoder_sparse_step: no layer has experts"):
            imported(described | changes, theirs)
    else:
        described["mlp_only_layers"] = []
        assert imported(described | changes, theirs)[0].moe_layer_freq == pattern


# ---- DeepSeek ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, groups",
    [
        ({"n_group": 8}, None),  # greedy, which ignores the groups
        ({"n_group": 8, "topk_method": "greedy"}, None),
        ({"n_group": 1, "topk_method": "group_limited_greedy"}, None),
        ({"n_group": 8, "topk_method": "group_limited_greedy"}, 8),
    ],
)
def test_groups_of_deepseek_v2_follow_its_method(changes, groups):
    config, names = described(dataclasses.replace(MODELS["deepseek_v2"], moe_router_topk=4))
    assert config["model_type"] == "deepseek_v2" and config.pop("topk_method") == "greedy"
    fields, _ = from_huggingface(config | changes | {"topk_group": 4}, names)
    assert fields.get("moe_router_num_groups") == groups
    with pytest.raises(ValueError, match="topk_method 'noaux_tc'"):
        from_huggingface(config | {"topk_method": "noaux_tc"}, names)


PUBLISHED = """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
    "norm_topk_prob": true, "scoring_func": "sigmoid", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "attention_bias": false, "ep_size": 1, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": false, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}}"""


def test_the_published_fields_of_deepseek_v3_and_kimi_k2():
    """Of their config.json, without quantisation, with 5 of 61 layers. Kimi K2 is the same model
    under another model_type.
    """
    published = json.loads(PUBLISHED)
    experts = {"num_layers": 5, "moe_layer_freq": "[0]*3+[1]*2", "num_experts": 256}
    _, names = described(dataclasses.replace(MODELS["deepseek_v3"], **experts))
    predicting = "model.layers.5.embed_tokens.weight"
    fields, _ = from_huggingface(published, [*names, predicting])
    model = ModelConfig(**fields)
    assert model.kv_channels == 192 and model.rope_scaling_factor == 40
    assert model.rope_original_max_position_embeddings == 4096 and model.mscale_all_dim == 1
    assert model.expert_layers() == (False, False, False, True, True)
    (line,) = left_out(published, [*names, predicting])
    assert predicting in line

    rope = published["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0}
    kimi = published | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
    kimi |= {"num_nextn_predict_layers": 0, "rope_theta": 50000.0, "rope_scaling": rope}
    fields, _ = from_huggingface(kimi, names)
    assert fields == from_huggingface(kimi | {"model_type": "deepseek_v3"}, names)[0]
    model = ModelConfig(**fields)
    assert (model.num_experts, model.moe_router_topk, model.moe_router_num_groups) == (256, 8, None)
    assert (model.rotary_base, model.rope_scaling_factor, model.yarn_beta_fast) == (50000.0, 32, 1)
