"""Arguments kept in checkpoints of Megatron-LM and Megatron-DeepSpeed: each is mapped, at its
default, known to change nothing, or refused by name. Every value here differs from our default.
"""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_cases import same_bits
from huggingface_models import MODELS
from megatron.tools import generate
from megatron.tools._convert.megatron_arguments import (
    FORWARD,
    HARMLESS,
    argument_notes,
    model_fields,
    stores_norms_minus_one,
)
from megatron.tools._convert.megatron_deepspeed import megatron_arguments
from megatron.tools._convert.pickles import Record, namespace
from megatron_names import their_arguments, their_tensors
from test_convert_ranks import convert
from test_huggingface import VOCAB, build, tokens
from test_megatron_import import save_alone

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.compatibility import recorded_names
from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.validate import cross_field_faults

LEAST = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 6}


def record(**changes) -> Record:
    return namespace({**LEAST, **changes})


def fields(**changes) -> dict:
    return model_fields(record(**changes))


ROPE = {"position_embedding_type": "rope"}
MLA = {"multi_latent_attention": True, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8, **ROPE}
MOE = {"num_experts": 8}
EXPERTS = {
    **MOE,
    "moe_ffn_hidden_size": 40,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_shared_expert_intermediate_size": 56,
    "moe_shared_expert_gate": True,
}
LLAMA3 = {"use_rope_scaling": True, "rope_original_max_position_embeddings": 8192}
YARN = {
    "position_embedding_type": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}


@pytest.mark.parametrize(
    "given, expected",
    [
        # missing arguments have Megatron-LM's defaults
        (
            {},
            {
                "ffn_hidden_size": 192,
                "kv_channels": 8,
                "num_query_groups": 6,
                "position_embedding_type": "learned_absolute",
                "norm_epsilon": 1e-5,
                "activation": "gelu",
            },
        ),
        ({"num_query_groups": 1}, {"num_query_groups": 6, "group_query_attention": False}),
        # activations
        ({"bias_gelu_fusion": True}, {"activation": "gelu-tanh"}),
        ({"squared_relu": True}, {"activation": "squared-relu"}),
        # the core ignores the flag
        ({"openai_gelu": True, "bias_gelu_fusion": False}, {"activation": "gelu"}),
        # biases of all linear layers, of which Megatron-LM keeps those of QKV by name, too
        ({"add_bias_linear": True, "add_qkv_bias": True}, {"add_qkv_bias": False}),
        ({"add_bias_linear": False, "add_qkv_bias": True}, {"add_qkv_bias": True}),
        # positions
        ({"use_rotary_position_embeddings": True}, ROPE),
        (
            {**ROPE, "use_rope_scaling": True, "rope_scaling_factor": 32},
            {**LLAMA3, "rope_scaling_factor": 32.0},
        ),
        (
            {
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": 2.0,
                "yarn_rotary_scaling_factor": 32.0,
                "yarn_original_max_position_embeddings": 16,
                "yarn_beta_fast": 8.0,
                "yarn_beta_slow": 2.0,
            },
            {
                "rope_scaling_factor": 32.0,
                "rope_original_max_position_embeddings": 16,
                "yarn_beta_fast": 8.0,
                "yarn_beta_slow": 2.0,
            },
        ),
        # latent attention
        (
            {**MLA, "kv_channels": 8, "q_lora_rank": 20, "kv_lora_rank": 12, "v_head_dim": 10},
            {"kv_channels": 32, "q_lora_rank": 20, "kv_lora_rank": 12, "v_head_dim": 10},
        ),
        ({**MLA, "rotary_scaling_factor": 40.0}, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}),
        ({**MLA, "rotary_scaling_factor": 40.0, "rope_type": "rope"}, ROPE),
        ({**MLA, "use_rope_scaling": True}, {"use_rope_scaling": False}),  # ignored there
        ({**MLA, "rotary_percent": 0.5}, {"rotary_percent": 1.0}),  # YaRN ignores it, too
        # windows and experts
        (
            {"window_size": (4, 0), "window_attn_skip_freq": [1, 0, 1]},
            {"window_size": 5, "window_attn_skip_freq": "[1,0,1]"},
        ),
        (
            {
                **EXPERTS,
                "moe_layer_freq": [0, 1, 1],
                "moe_aux_loss_coeff": 0.01,
                "moe_router_load_balancing_type": "seq_aux_loss",
            },
            {
                **EXPERTS,
                "moe_layer_freq": "[0,1,1]",
                "moe_aux_loss_coeff": (0.01,),
                "moe_router_load_balancing_type": ("seq_aux_loss",),
            },
        ),
    ],
)
def test_arguments_become_fields(given, expected):
    model = ModelConfig(**fields(**given))
    assert {name: getattr(model, name) for name in expected} == expected


def test_latent_attention_with_biases_can_be_trained(tmp_path):
    """What Megatron-LM keeps of it holds for common attention alone."""
    kept = {"add_qkv_bias": True, "group_query_attention": True, "v_head_dim": 16}
    (tmp_path / "model.json").write_text(json.dumps({"model": fields(**MLA, **kept)}))
    line = "--seq-length 32 --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --vocab-size 9"
    config = parse_arguments(["--config", str(tmp_path / "model.json"), *line.split()]).config
    assert cross_field_faults(config, 1, 10) == []


@pytest.mark.parametrize(
    "given, text",
    [
        ({**MLA, "position_embedding_type": "learned_absolute"}, "--position-embedding-type learn"),
        (
            {**MLA, "rope_type": "rope", "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0},
            "--rope-type rope with --rotary-scaling-factor 40.0 and --mscale-all-dim 1.0",
        ),
        ({**MLA, "rope_type": "rope", "rotary_percent": 0.5}, "--rotary-percent 0.5"),
        (
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7},
            "--mscale 0.7",
        ),
        ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type"),
        # no name of a released flag
        ({"embedding_scale": 8.0, "qk_l2_norm": True}, "--embedding-scale 8.0; --qk-l2-norm"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given, text):
    with pytest.raises(UserError) as error:
        fields(**given)
    assert text in str(error.value)


def test_what_changes_the_forward_pass_is_harmless_at_its_default_only():
    plain = fields()
    for name, harmless in FORWARD.items():
        assert all(fields(**{name: value}) == plain for value in harmless), name
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 7"):
            fields(**{name: 7})


def test_arguments_of_training_change_nothing():
    """All other flags that Megatron-LM and Megatron-DeepSpeed have had, with any value."""
    mapped = set(vars(ModelConfig())) | set(FORWARD)
    mapped |= {"swiglu", "squared_relu", "layernorm_epsilon", "bias_gelu_fusion"}
    mapped |= {"use_rotary_position_embeddings", "rope_type"}
    names = {name[2:].replace("-", "_") for name in recorded_names()} - mapped
    assert len(names) > 900 and names <= HARMLESS
    assert fields(**dict.fromkeys(names, 7), world_size=64) == fields()
    assert fields(an_option_that_is_off=False, another=None) == fields()


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"add_position_embedding": False}, {"position_embedding_type": "none"}),
        # unlike the core, its MLP obeys the flag
        ({"openai_gelu": True, "add_bias_linear": False}, {"activation": "gelu-tanh"}),
        (
            {
                "use_rotary_position_embeddings": True,
                "rope_theta": 500,
                "rotary_percent": 0.25,
                "add_position_embedding": False,
            },
            {"position_embedding_type": "rope", "rotary_base": 500.0, "rotary_percent": 0.25},
        ),
    ],
)
def test_arguments_of_megatron_deepspeed(given, expected):
    found = ModelConfig(**model_fields(megatron_arguments(record(**given))))
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_versions_of_megatron_have_ignored_is_noted():
    (line,) = argument_notes(record(use_rope_scaling=True, rope_scaling_factor=32.0))
    assert "--rope-scaling-factor 32.0" in line and "computed with 8" in line
    (line,) = argument_notes(record(rotary_seq_len_interpolation_factor=4))
    assert "--rotary-seq-len-interpolation-factor 4" in line
    assert argument_notes(record(use_rope_scaling=True, rope_scaling_factor=8.0)) == ()
    assert argument_notes(record(rope_scaling_factor=32.0)) == ()
    (line,) = argument_notes(record(openai_gelu=True, bias_gelu_fusion=False))
    assert "--openai-gelu: core models" in line
    assert argument_notes(record(openai_gelu=True, bias_gelu_fusion=True)) == ()


# ---- tensors of experts, latent attention and norms that are stored minus one --------------------

# Models with their tensors under three spellings of experts.
SPELLINGS = ("stacked", "local_experts.{}.linear_{}.weight", "linear_{1}.weight{0}")


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        *(("deepseek_v3", spelling) for spelling in SPELLINGS),
        ("mixtral window, top 1", SPELLINGS[1]),
        ("qwen2_moe", SPELLINGS[2]),
        ("llama minus one", "stacked"),
    ],
)
def test_experts_latent_attention_and_norms_minus_one(tmp_path, name, spelling):
    minus_one = name == "llama minus one"
    model = MODELS["llama" if minus_one else name]
    ours, held = build(model)
    theirs = their_tensors(model, held, spelling)
    arguments = their_arguments(model)
    if minus_one:
        arguments.apply_layernorm_1p = True
        theirs = {key: value - 1 if "norm" in key else value for key, value in theirs.items()}
    save_alone(tmp_path / "theirs", theirs)
    torch.save({"args": arguments}, tmp_path / "theirs" / "common.pt")
    code, text = convert("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "run")
    assert code == 0, text

    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert sorted(checkpoint.names) == sorted(held)
        for key, value in held.items():
            if minus_one and "norm" in key:
                # below 4: one rounding of subtracting 1, one of adding it
                torch.testing.assert_close(checkpoint.read_tensor(key), value, rtol=0, atol=2**-50)
            else:
                assert same_bits(checkpoint.read_tensor(key), value)
        loaded = generate.load_model(checkpoint, torch.device("cpu"))
        assert torch.allclose(
            loaded.logits(tokens()), ours.logits(tokens()), rtol=1e-12, atol=1e-12
        )
    assert stores_norms_minus_one(namespace(vars(arguments))) == minus_one
    assert VOCAB == held["embedding.word.weight"].shape[0]
