"""DeepSeek-V3's family of Hugging Face, both ways (tests/parity/test_huggingface_oracle.py has
transformers as the judge).
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from huggingface_models import MODELS
from megatron.tools._convert.huggingface import from_huggingface, left_out, to_huggingface
from test_huggingface import VOCAB

from megatron.config.groups import ModelConfig


def described(model: ModelConfig) -> tuple[dict, list[str]]:
    """config.json of a model, and the names of its tensors."""
    config, rules = to_huggingface(model, VOCAB)
    return config, [rule.theirs for rule in rules]


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
