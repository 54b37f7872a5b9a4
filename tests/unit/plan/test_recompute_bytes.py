"""What a layer keeps at each level of recomputation, against the storages that live after its
forward pass.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.tools._plan.activations import Shape, unit_bytes
from test_memory import (
    BATCH,
    DRY,
    GROUPED,
    KERNELS,
    LATENT,
    ROPE,
    SEQ,
    VOCAB,
    configure,
    interpreted,
)
from unit.by_hand import forward
from unit.storages import Storages
from unit.zero.measure import launches_of_nothing

from megatron.config.groups import Config, PrecisionConfig
from megatron.model import layer as model_layer
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import compute_dtype
from megatron.model.layer import MicroBatch
from megatron.model.recompute_context import RecomputeContext
from megatron.model.stages import whole
from megatron.parallel.blocks import build_blocks

MODULES = ("layernorm", "qkv", "core_attn", "mlp_act", "mlp")
CHOICES = [
    chosen
    for count in range(len(MODULES))
    for chosen in itertools.combinations(MODULES, count)
    if not {"mlp", "mlp_act"} <= set(chosen)
]
SOME = [("layernorm", "mlp_act"), ("layernorm", "qkv", "core_attn", "mlp")]
LLAMA = {**DRY, **ROPE, **GROUPED, "activation": "swiglu", "normalization": "RMSNorm"}
ONE_GROUP = {"group_query_attention": True, "num_query_groups": 1}
MODELS: dict[str, dict] = {
    "gpt": {},
    "without attention dropout": {"attention_dropout": 0.0},
    "grouped": {**DRY, **GROUPED},
    "rotary": {**DRY, **ROPE},
    "llama": LLAMA,
    "norms of queries": {**DRY, **ROPE, **GROUPED, "qk_layernorm": True},
    "norms of queries, plain": {**ROPE, "qk_layernorm": True},
    "grouped norms, plain": {
        **DRY,
        **GROUPED,
        "qk_layernorm": True,
        "attention_backend": "plain",
    },
    "soft cap": {"attn_logit_softcapping": 5.0, **GROUPED},
    "window": {**DRY, "window_size": 8},
    "one group": {**DRY, **ONE_GROUP},
    "one group, plain": ONE_GROUP,
    "one group, rotary, plain": {**ONE_GROUP, **ROPE},
    "squared relu": {**DRY, "activation": "squared-relu"},
    "geglu": {"activation": "geglu", "normalization": "RMSNorm"},
}
LATENTS: dict[str, dict] = {
    "all": LATENT,
    "queries of the token": {**LATENT, "q_lora_rank": None},
    "without norms": {**LATENT, "qk_layernorm": False},
    "values as wide as keys": {**LATENT, "v_head_dim": 24},
    "plain": {**LATENT, "attention_backend": "plain"},
    "dropout": {**LATENT, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "window, soft cap": {**LATENT, "window_size": 8, "attn_logit_softcapping": 5.0},
}
UP = "mla_up_proj"
OF_LATENTS = [(), ("layernorm", UP, "core_attn"), ("layernorm", "qkv", "core_attn", "mlp")]
OURS: dict[str, dict] = {
    "gpt": KERNELS,
    "llama": {**LLAMA, **KERNELS},
    "norms of queries": {**ROPE, **GROUPED, "qk_layernorm": True, **KERNELS},
    "squared relu, soft cap": {
        **KERNELS,
        "activation": "squared-relu",
        "attn_logit_softcapping": 5.0,
    },
    **{
        f"{kernel} alone": {
            **ROPE,
            **GROUPED,
            "attention_dropout": 0.1 * (kernel == "attention_backend"),
            kernel: "triton",
        }
        for kernel in KERNELS
    },
}


def with_modules(modules: tuple[str, ...], precision: PrecisionConfig, **model) -> Config:
    training = (
        {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    )
    return configure(precision, training=training, **model)


def model_and_micro_batch(config: Config) -> tuple[GPTModel, MicroBatch]:
    """A whole model that has its storage, and a micro-batch for it."""
    model = GPTModel(
        config.model,
        vocab_size=VOCAB,
        padded_vocab=padded_vocab_size(VOCAB, config.model),
        dtype=compute_dtype(config.precision),
        seed=1,
    )
    model.choose_recompute(config.training)
    for block in build_blocks(model, torch.device("cpu")):
        block.open()
    tokens, ids = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.arange(BATCH)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    mask = torch.ones(BATCH, SEQ)
    return model, model.micro_batch(tokens, tokens, mask, positions, ids, training=True)


def kept_storages(config: Config) -> int:
    """Bytes alive between forward and backward pass, without parameters and the micro-batch."""
    model, micro = model_and_micro_batch(config)
    with launches_of_nothing(), Storages() as storages:
        y, saved = forward(model, micro)
        del y
        total = sum(storages.alive().values())
    del saved
    return total


def planned(config: Config) -> int:
    """The same as planned."""
    units = unit_bytes(Shape(config, VOCAB, "cpu"), whole(config.model)[0])
    return sum(unit.saved + unit.logits for unit in units)


FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)


def check(choices: list[tuple[str, ...]], precision: PrecisionConfig, model: dict):
    for modules in choices:
        config = with_modules(modules, precision, **model)
        assert kept_storages(config) == planned(config), modules


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept(name):
    check(SOME, FP32, MODELS[name])


@pytest.mark.parametrize("name", LATENTS)
def test_what_is_kept_of_latent_attention(name):
    check(OF_LATENTS, FP32, LATENTS[name])


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.default("all", "plain")
def test_what_is_kept_of_latent_attention_in_bf16(name):
    check(OF_LATENTS, BF16, LATENTS[name])


@interpreted
def test_what_is_kept_of_latent_attention_with_our_kernels():
    ours = {kind: "triton" for kind in KERNELS if kind != "rotary_backend"}
    check(OF_LATENTS, FP32, {**LATENT, **ours})


def test_a_latent_that_lives_on_would_be_found(monkeypatch):
    """The whole down-projection is kept where its part is normalised."""
    config = with_modules((), FP32, **LATENT)
    assert kept_storages(config) == planned(config)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x)
    assert kept_storages(config) > planned(config)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_with_every_choice(name):
    check(CHOICES, FP32, MODELS[name])


@interpreted
@pytest.mark.parametrize("name", OURS)
def test_what_is_kept_with_our_kernels(name):
    check(SOME, FP32, OURS[name])


@interpreted
@pytest.mark.campaign
@pytest.mark.parametrize("name", OURS)
def test_what_is_kept_with_our_kernels_and_every_choice(name):
    check(CHOICES, FP32, OURS[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default("gpt", "llama", "squared relu", "geglu")
def test_what_is_kept_with_the_mlp_in_pieces(name):
    model = {**MODELS[name], "tiled_mlp": 4}
    check([(), *SOME], FP32, model)


@interpreted
def test_what_is_kept_with_our_kernels_and_the_mlp_in_pieces():
    check([(), *SOME], FP32, {**OURS["llama"], "tiled_mlp": 4})


def test_a_piece_that_keeps_its_activation_would_be_found(monkeypatch):
    """Of the MLP in pieces, one layer keeps what it makes."""
    config = with_modules((), FP32, **LLAMA, tiled_mlp=4)
    assert kept_storages(config) == planned(config)
    monkeypatch.setattr(model_layer, "always_rebuilt", lambda model: frozenset({"mlp_act"}))
    assert kept_storages(config) > planned(config)


@pytest.mark.parametrize("name", ["llama", "one group"])
def test_what_is_kept_in_bf16_on_a_cpu(name):
    """Whose attention is computed in fp32."""
    check(SOME, BF16, {**MODELS[name], "normalization": "RMSNorm"})


def test_what_is_marked_and_kept_would_be_found(monkeypatch):
    """The result of a computation that is made again lives on."""
    mark = RecomputeContext._mark

    def keeping(recompute_context, rebuilt, y):
        mark(recompute_context, rebuilt, y)
        rebuilt.output = y

    config = with_modules(("mlp_act",), FP32, **LLAMA)
    assert kept_storages(config) == planned(config)
    monkeypatch.setattr(RecomputeContext, "_mark", keeping)
    assert kept_storages(config) > planned(config)
