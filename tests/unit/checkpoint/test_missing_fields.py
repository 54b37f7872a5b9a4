"""A field that config.json leaves out has transformers' own default, in every family: importing
without it gives the model of the file that transformers writes for it, or is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.tools._convert.families import FAMILIES, Family
from megatron.tools._convert.huggingface import _our_fields, their_config
from megatron.tools._convert.huggingface_rotary import our_rotary
from test_huggingface import CASES, VOCAB
from test_lost_fields import MODELS

from megatron.config.groups import ModelConfig
from megatron.model.attention.rotary import inverse_frequencies

transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

BY_SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
# The models of each family: those of the tests of logits, and DeepSeek's.
OF_FAMILY: dict[str, list[ModelConfig]] = {kind: [] for kind in FAMILIES}
for name, (_, _, kind) in CASES.items():
    OF_FAMILY[kind].append(MODELS[name])
for kind in ("deepseek_v3", "deepseek_v2", "glm4_moe_lite"):
    changes: dict[str, Any] = BY_SOFTMAX if kind == "deepseek_v2" else {}
    OF_FAMILY[kind] = [
        MODELS["deepseek dense"],
        dataclasses.replace(MODELS["deepseek"], **changes),
    ]


def read(kind: str, config: dict) -> dict | None:
    """Our fields of a config.json; None where it is refused."""
    faults: list[str] = []
    try:
        fields = _our_fields(kind, config, faults)
    except KeyError:
        return None
    return None if faults else fields


def left_out(config: dict, family: Family) -> list[tuple[str, ...]]:
    """Which fields are left out: each one, and those of rotary positions together."""
    single = [(field,) for field in config if field not in ("model_type", "architectures")]
    rotary = ("rope_parameters", "rope_scaling", family.base)
    return [*single, rotary[::2], rotary, (*rotary, family.partial or "")]


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_that_are_left_out(kind):
    family = FAMILIES[kind]
    architecture = getattr(transformers, family.architecture)
    compared = 0
    wrong = []
    for model in OF_FAMILY[kind]:
        whole = their_config(kind, model, VOCAB)
        for names in left_out(whole, family):
            short = {name: value for name, value in whole.items() if name not in names}
            ours = read(kind, short)
            if ours is None:
                continue
            compared += 1
            del short["architectures"]
            theirs = read(kind, architecture.config_class(**short).to_dict())
            if ours != theirs:
                differ = {n for n in ours if theirs is None or ours[n] != theirs.get(n)}
                wrong.append((names, differ))
    assert not wrong
    assert compared > 10


@pytest.mark.parametrize(
    "name", [None, "beta_fast", "beta_slow", "original_max_position_embeddings"]
)
@pytest.mark.parametrize("beta_slow", [2.0, 0.001])  # the second: the ramp ends behind all pairs
def test_fields_of_yarn_that_are_left_out(name, beta_slow):
    """Frequencies are those of transformers, to fp32's rounding."""
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20.0,
        "beta_slow": beta_slow,
    }
    scaling.pop(name, None)
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 8192}
    config = sizes | {"rope_theta": 10000.0, "rope_scaling": scaling}
    fields = our_rotary(FAMILIES["llama"], config, [])  # first: transformers fills config in
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(**config), "cpu")
    ours, our_factor = inverse_frequencies(ModelConfig(**sizes, kv_channels=128, **fields))
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)
    assert our_factor == their_factor
