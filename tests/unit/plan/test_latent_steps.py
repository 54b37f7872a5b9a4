"""The time of a step with latent attention: what its layers compute and send, by
separate arithmetic, and what the tool makes of a model like DeepSeek-V3.
"""

from __future__ import annotations

import pytest
from megatron.tools._plan.step import StepModel
from unit.recomputed_flops import flops_again

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.arithmetic import unit_flops
from megatron.model.recompute import NO_RECOMPUTE, WHOLE, choice_of
from tools.plan import run

HIDDEN, HEADS, FFN, TOKENS = 2048, 16, 5632, 4096
QUERIES, LATENT, CONTENT, POSITION, VALUE = 768, 512, 128, 64, 96
KEY = CONTENT + POSITION
MODEL = (
    f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --swiglu "
    f"--ffn-hidden-size {FFN} --normalization RMSNorm --position-embedding-type rope "
    f"--disable-bias-linear --seq-length {TOKENS} --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --vocab-size 31999 "
    "--micro-batch-size 1 --global-batch-size 64 --multi-latent-attention --qk-layernorm "
    f"--kv-lora-rank {LATENT} --qk-head-dim {CONTENT} --qk-pos-emb-head-dim {POSITION} "
    f"--v-head-dim {VALUE} "
)
NARROW = f"--q-lora-rank {QUERIES} "
EXPERTS = (
    "--num-experts 32 --moe-ffn-hidden-size 768 --moe-router-topk 4 --moe-layer-freq [0,1,1,1] "
)
VOCABULARY = 32000
# a token's products in front of the attention core, with queries of a vector of their own
UP = QUERIES * HEADS * KEY + LATENT * HEADS * (CONTENT + VALUE)
DOWN = HIDDEN * (QUERIES + LATENT + POSITION)


def step(flags: str = NARROW, world: int = 8) -> StepModel:
    """The steps of a run."""
    config = parse_arguments((MODEL + flags).split()).config
    return StepModel(resolve(config, world, VOCABULARY).config, VOCABULARY, world)


@pytest.mark.parametrize("flags", [NARROW, "", NARROW + EXPERTS])
def test_products_are_those_of_the_model(flags):
    """The attention core computes as many channels of values as of keys."""
    model = step(flags)
    filled = 2 * HEADS * (KEY - VALUE) * TOKENS / 2
    counted = [flops + filled for flops in unit_flops(model.config.model, TOKENS, 0)[1:]]
    for index in (0, 1):
        layer = model.operations.layer(index, NO_RECOMPUTE)
        assert layer.forward.flops == pytest.approx(counted[index] * TOKENS)
        core = sum(each.flops for each in layer.forward.cores)
        assert core == 2 * 2 * HEADS * KEY * TOKENS / 2 * TOKENS
        back = layer.backward.flops
        assert back == pytest.approx(2 * counted[index] * TOKENS + core / 2)
        whole = model.operations.layer(index, WHOLE).backward_input
        assert whole.flops == pytest.approx(layer.backward_input.flops + layer.forward.flops)


@pytest.mark.parametrize("what, products", [("mla_up_proj", UP), ("qkv", UP + DOWN)])
def test_what_is_recomputed_of_latent_attention(what, products):
    """By the operations of a real pass, and by hand."""
    model = step()
    kept, again = (
        model.operations.layer(1, choice).backward_input
        for choice in (NO_RECOMPUTE, choice_of(what))
    )
    assert again.flops - kept.flops == pytest.approx(2 * products * TOKENS)
    assert flops_again(model.config.model, TOKENS, choice_of(what), 1) == 2 * products
    assert sum(again.streams) > sum(kept.streams) and again.launches > kept.launches


@pytest.mark.parametrize("what", ["memory", "step"])
def test_the_tool_plans_latent_attention(what):
    hardware = [] if what == "memory" else ["--hardware", "h100"]
    flags = [*(MODEL + NARROW + EXPERTS).split(), "--expert-model-parallel-size", "8"]
    text = "\n".join(run(what, [*flags, "--world-size", "8", *hardware]))
    assert "fits" in text and (what == "memory" or "tokens/s/GPU" in text)
