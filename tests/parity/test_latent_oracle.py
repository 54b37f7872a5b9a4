"""Latent attention against transformers' models, dense and with experts: the same loss and the same
gradient of every tensor, in float64.
"""

import dataclasses

import pytest
import torch
from parity.latent_fields import LATENT, ROUTED, YARN
from parity.test_huggingface_oracle import LLAMA, S, compare, our_run

pytest.importorskip("transformers")

BOUND = 1e-10  # relative Frobenius norm
DENSE = dataclasses.replace(LLAMA, num_query_groups=4, q_lora_rank=20, **LATENT)
SCALED = dataclasses.replace(DENSE, rotary_base=100.0, **YARN)
EXPERTS = dataclasses.replace(SCALED, num_layers=3, moe_layer_freq="[0]*1+[1]*2", **ROUTED)
ONE_GROUP = dataclasses.replace(
    EXPERTS, moe_router_num_groups=None, moe_router_group_topk=None, moe_router_topk=3
)
SOFTMAX = dataclasses.replace(
    ONE_GROUP,
    moe_router_score_function="softmax",
    moe_router_pre_softmax=True,
    moe_router_enable_expert_bias=False,
)
MODELS = {
    ("deepseek_v3", "dense"): DENSE,
    ("deepseek_v3", "whole-queries"): dataclasses.replace(DENSE, q_lora_rank=None),
    ("deepseek_v3", "yarn"): SCALED,
    ("deepseek_v3", "yarn-plain"): dataclasses.replace(SCALED, mscale=1.0, mscale_all_dim=0.0),
    ("deepseek_v3", "experts"): EXPERTS,
    ("deepseek_v3", "one-group"): ONE_GROUP,
    ("deepseek_v3", "epsilons"): dataclasses.replace(
        DENSE, norm_epsilon=1e-2, latent_norm_epsilon=1e-6
    ),
    ("deepseek_v2", "greedy"): dataclasses.replace(SOFTMAX, q_lora_rank=None),
    ("deepseek_v2", "groups"): dataclasses.replace(
        SOFTMAX, moe_router_num_groups=4, moe_router_group_topk=3
    ),
    ("glm4_moe_lite", "experts"): dataclasses.replace(
        ONE_GROUP, norm_epsilon=1e-2, latent_norm_epsilon=1e-6
    ),
    ("glm4_moe_lite", "every-second"): dataclasses.replace(ONE_GROUP, moe_layer_freq="2"),
}


@pytest.mark.parametrize("kind, name", MODELS)
def test_loss_and_gradients_equal_transformers(kind, name):
    compare(MODELS[kind, name], torch.float64, BOUND, kind)


def test_what_would_hide_a_mistake():
    """The biases that choose experts differ, and positions outrun the length of YaRN."""
    _, weights, _ = our_run(EXPERTS, torch.float64)
    assert weights["layers.1.mlp.router.expert_bias"].unique().numel() == 8
    assert S > EXPERTS.rope_original_max_position_embeddings
