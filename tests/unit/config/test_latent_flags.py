"""Flags of latent attention: each fault is one message that names the flag and what to give."""

import math

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.validate import cross_field_faults, resolve

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3
--micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 127 --tokenizer-type NullTokenizer
--position-embedding-type rope""".split()
LATENT = "--multi-latent-attention"


def faults(words: str) -> list[str]:
    """Those of BASE with more flags."""
    return cross_field_faults(parse_arguments([*BASE, *words.split()]).config, 1, 127)


@pytest.mark.parametrize(
    "words, fault",
    [
        ("--kv-lora-rank 16", "--kv-lora-rank 16: acts only with --multi-latent-attention"),
        (f"{LATENT} --mscale 0.7", "--mscale 0.7: acts only with --position-embedding-type yarn"),
        (f"{LATENT} --position-embedding-type none", "give --position-embedding-type rope or yarn"),
        (f"{LATENT} --qk-pos-emb-head-dim 7", "channels rotate in pairs; give 8"),
        (f"{LATENT} --v-head-dim 193", "more than the 192 channels of a key"),
        (f"{LATENT} --q-lora-rank 0", "--q-lora-rank 0: must be greater than 0"),
        (f"{LATENT} --group-query-attention --num-query-groups 2", "--group-query-attention; drop"),
        (f"{LATENT} --rotary-percent 0.5", "--rotary-percent 0.5; drop one"),
        (f"{LATENT} --add-qkv-bias", "--add-qkv-bias; drop one"),
        (f"{LATENT} --torch-compile", "--torch-compile; drop one"),
        (f"{LATENT} --rotary-backend triton", "--rotary-backend triton; drop one"),
        (f"{LATENT} --bf16 --fp8-format e4m3", "--fp8-format e4m3; drop one"),
        (
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            "mla_up_proj is a part of --multi-latent-attention, which is not given; give qkv",
        ),
        (
            "--recompute-layers mla_up_proj+core_attn*4",
            "mla_up_proj is a part of --multi-latent-attention",
        ),
    ],
)
def test_each_fault_says_what_to_give(words, fault):
    assert any(fault in found for found in faults(words)), faults(words)


def test_a_key_is_as_wide_as_both_of_its_parts():
    """Whatever --kv-channels says, as scripts of Megatron-LM give it."""
    words = f"{LATENT} --kv-channels 128 --qk-head-dim 24 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    assert not faults(words)
    parsed = parse_arguments([*BASE, *words.split()]).config
    found = resolve(parsed, 1, 127)
    model = found.config.model
    assert (model.kv_channels, model.rotary_width, model.value_channels) == (32, 8, 16)
    assert model.num_query_groups == 4
    assert "kv-channels = 32: qk-head-dim + qk-pos-emb-head-dim" in found.notes


def test_other_names_and_the_scale_of_yarn():
    words = (
        f"{LATENT} --position-embedding-type yarn --rotary-scaling-factor 40 "
        "--original-max-position-embeddings 4096 --mscale 1 --mscale-all-dim 1"
    )
    parsed = parse_arguments([*BASE, *words.split()]).config
    model = resolve(parsed, 1, 127).config.model
    assert model.rope_original_max_position_embeddings == 4096
    expected = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2  # DeepSeek-V3
    assert model.softmax_scale == pytest.approx(expected, rel=1e-15)


def test_other_ways_of_computing_it_are_refused():
    with pytest.raises(ArgumentErrors, match="--cache-mla-latents: a way of computing latent"):
        parse_arguments([*BASE, "--cache-mla-latents"])
