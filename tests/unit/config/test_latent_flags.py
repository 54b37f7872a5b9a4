"""Flags of latent attention: each fault is one message that names the flag and what to give."""

import json
import math

import pytest
import torch
from rule_rows import rows

from megatron.checkpoint.run_state import config_of
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.groups import ModelConfig
from megatron.config.validate import cross_field_faults, resolve
from megatron.model.attention.rotary import inverse_frequencies
from megatron.model.spec import Box
from megatron.training.resume import take_checkpoint_args

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3
--micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 127 --tokenizer-type NullTokenizer
--position-embedding-type rope""".split()
LATENT = "--multi-latent-attention"


def faults(words: str) -> list[str]:
    """Those of BASE with more flags."""
    return cross_field_faults(parse_arguments([*BASE, *words.split()]).config, 1, 127)


@pytest.mark.parametrize(
    "words, fault",
    rows(
        """
--multi-latent-attention --position-embedding-type learned_absolute
    is not supported with --position-embedding-type learned_absolute
--multi-latent-attention --rope-type rope --position-embedding-type yarn
    contradicts --position-embedding-type yarn
--multi-latent-attention --rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1
    --rope-type rope with --rope-scaling-factor 40.0 and --mscale-all-dim 1.0
--rope-type yarn
    --rope-type yarn: is a setting of --multi-latent-attention
--multi-latent-attention --qk-pos-emb-head-dim 7
    channels rotate in pairs; give 8
--multi-latent-attention --v-head-dim 193
    must be at most 192, the channels of a key
--recompute-granularity selective --recompute-modules mla_up_proj
    mla_up_proj is a part of --multi-latent-attention, which is not set; give qkv
--recompute-layers mla_up_proj+core_attn*4
    mla_up_proj is a part of --multi-latent-attention
"""
    ),
)
def test_each_fault_says_what_to_give(words, fault):
    assert any(fault in found for found in faults(words)), faults(words)


def test_a_key_is_as_wide_as_both_of_its_parts():
    """Whatever --kv-channels is, as scripts of Megatron-LM give it."""
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


def positions(words: str) -> tuple[ModelConfig, list[str]]:
    """The model of BASE with more flags, and the notes of the banner."""
    found = resolve(parse_arguments([*BASE, *words.split()]).config, 1, 127)
    return found.config.model, found.notes


def yarn_frequencies(factor: float, original: int, fast: float, slow: float) -> torch.Tensor:
    """Peng et al. 2023 for 64 channels and base 10000, one channel pair after the other."""

    def pair(turns: float) -> float:
        return 64 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), 63)
    shares = [min(max((i - low) / (high - low), 0), 1) for i in range(32)]
    plain = [1e4 ** (-i / 32) for i in range(32)]
    return torch.tensor([p * (1 - s) + p / factor * s for p, s in zip(plain, shares, strict=True)])


@pytest.mark.parametrize("kind", ["rope", "none", "yarn"])
@pytest.mark.parametrize(
    "words, factor, original, fast, slow",
    [
        ("--rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1", 40, 4096, 32, 1),
        ("--rotary-scaling-factor 4 --yarn-beta-fast 16 --yarn-beta-slow 2", 4, 4096, 16, 2),
        ("--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8192", 4, 8192, 32, 1),
        ("--rope-type yarn", 1, 4096, 32, 1),
    ],
)
def test_yarn_is_taken_whatever_the_position_flag(kind, words, factor, original, fast, slow):
    model, notes = positions(f"{LATENT} --position-embedding-type {kind} {words}")
    assert model.position_embedding_type == "yarn"
    message = "position-embedding-type = yarn: latent attention has YaRN unless --rope-type rope"
    assert any(note.startswith(message) for note in notes) == (kind != "yarn")
    if original == 4096:
        line = "rope-original-max-position-embeddings = 4096: YaRN's default in Megatron-LM"
        assert line in notes
    found, _ = inverse_frequencies(model)
    expected = yarn_frequencies(factor, original, fast, slow)
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "words", ["", "--rope-type rope", "--rope-type rope --rotary-scaling-factor 40 --mscale 0.7"]
)
def test_plain_rope_stays_plain(words):
    model, _ = positions(f"{LATENT} {words}")
    assert model.position_embedding_type == "rope"
    plain = [1e4 ** (-i / 32) for i in range(32)]
    torch.testing.assert_close(inverse_frequencies(model)[0].tolist(), plain)
    assert model.softmax_scale == 192**-0.5


@pytest.mark.parametrize(
    "kind, flags, expected",
    [
        ("yarn", "", (1.0, 4096)),
        ("rope", "--use-rope-scaling", (8.0, 8192)),
        ("rope", "", (None, None)),
        ("learned_absolute", "", (None, None)),
    ],
)
@pytest.mark.parametrize("latent", ["", LATENT])
def test_defaults_of_rescaled_frequencies(kind, flags, expected, latent):
    if latent and kind == "learned_absolute":
        return
    words = f"{latent} --position-embedding-type {kind} {flags}"
    model, _ = positions(words)
    given = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    assert given == expected
    # a model that is not resolved computes the same
    raw = parse_arguments([*BASE, *words.split()]).config.model
    assert (raw.rope_factor, raw.rope_original_length) == (
        model.rope_factor,
        model.rope_original_length,
    )


FORMER = {"rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 8192}


@pytest.mark.parametrize("latent", ["", LATENT])
@pytest.mark.parametrize("kind", ["rope", "yarn", "scaled", "learned_absolute"])
@pytest.mark.parametrize("written", [True, False])
def test_checkpoints_and_files_of_earlier_versions_keep_their_meaning(
    tmp_path, latent, kind, written
):
    """With the former defaults 8 and 8192 written out, or (in a checkpoint) not there."""
    if latent and kind == "learned_absolute":
        return
    flags = "rope --use-rope-scaling" if kind == "scaled" else kind
    words = f"{latent} --position-embedding-type {flags}"
    now = resolve(parse_arguments([*BASE, *words.split()]).config, 1, 127).config
    state = {"config": now.to_dict()}
    for name, value in FORMER.items():
        state["config"]["model"].pop(name)
        if written:
            state["config"]["model"][name] = value
    model = config_of(state).model
    assert model.position_embedding_type == now.model.position_embedding_type
    values = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    assert values == ((8.0, 8192) if kind in ("yarn", "scaled") else (None, None))
    # the command line of a run that is not YaRN still fits
    assert (model == now.model) == (kind != "yarn")
    if written:
        file = tmp_path / "flags.json"
        file.write_text(json.dumps(state["config"]))
        read = resolve(parse_arguments(["--config", str(file)]).config, 1, 127).config.model
        assert read == model


def test_checkpoint_args_fit_the_flags_that_the_run_was_started_with(tmp_path):
    words = [*BASE, LATENT, "--rotary-scaling-factor", "40"]
    run = resolve(parse_arguments(words).config, 1, 127).config
    state = {"config": run.to_dict(), "vocab_size": 127, "iteration": 1}
    whole = Box("x", (1,), (0,), (1,))
    save_checkpoint(tmp_path, 1, [(whole, torch.zeros(1))], state)
    again = [*words, "--load", str(tmp_path), "--use-checkpoint-args"]
    taken = take_checkpoint_args(parse_arguments(again).config)
    assert resolve(taken, 1, 127).config.model == run.model
