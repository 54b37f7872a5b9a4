"""Rotary positions of latent attention and YaRN: Megatron-LM's defaults, and the meaning of files
and checkpoints of earlier versions.
"""

import json
import math

import pytest
import torch
from config_lines import LINE, configure, resolved

from megatron.checkpoint.run_state import config_of
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.groups import ModelConfig
from megatron.config.validate import resolve
from megatron.model.attention.rotary import inverse_frequencies
from megatron.model.spec import Box
from megatron.training.resume import take_checkpoint_args

LATENT = "--multi-latent-attention"


def positions(flags: str) -> tuple[ModelConfig, list[str]]:
    """The model of some flags with rotary positions, and the notes of the banner."""
    found = resolved(f"--position-embedding-type rope {flags}")
    return found.config.model, found.notes


def test_a_key_is_as_wide_as_both_of_its_parts():
    """Whatever --kv-channels is, as scripts of Megatron-LM give it."""
    widths = "--kv-channels 128 --qk-head-dim 24 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    model, notes = positions(f"{LATENT} {widths}")
    assert (model.kv_channels, model.rotary_width, model.value_channels) == (32, 8, 16)
    assert "kv-channels = 32: qk-head-dim + qk-pos-emb-head-dim" in notes


def test_the_scale_of_yarn():
    model, _ = positions(f"{LATENT} --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1")
    expected = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2  # DeepSeek-V3
    assert model.softmax_scale == pytest.approx(expected, rel=1e-15)


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
    "flags, factor, original, fast, slow",
    [
        ("--rotary-scaling-factor 4 --yarn-beta-fast 16 --yarn-beta-slow 2", 4, 4096, 16, 2),
        ("--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8192", 4, 8192, 32, 1),
        ("--rope-type yarn", 1, 4096, 32, 1),
    ],
)
def test_yarn_is_taken_whatever_the_position_flag(kind, flags, factor, original, fast, slow):
    model, notes = positions(f"{LATENT} --position-embedding-type {kind} {flags}")
    assert model.position_embedding_type == "yarn"
    text = "position-embedding-type = yarn: latent attention has YaRN unless --rope-type rope"
    assert any(note.startswith(text) for note in notes) == (kind != "yarn")
    if original == 4096:
        line = "rope-original-max-position-embeddings = 4096: YaRN's default in Megatron-LM"
        assert line in notes
    found, _ = inverse_frequencies(model)
    expected = yarn_frequencies(factor, original, fast, slow)
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "flags", ["", "--rope-type rope", "--rope-type rope --rotary-scaling-factor 40 --mscale 0.7"]
)
def test_plain_rope_stays_plain(flags):
    model, _ = positions(f"{LATENT} {flags}")
    assert model.position_embedding_type == "rope"
    plain = [1e4 ** (-i / 32) for i in range(32)]
    torch.testing.assert_close(inverse_frequencies(model)[0].tolist(), plain)
    assert model.softmax_scale == 192**-0.5


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--position-embedding-type yarn", (1.0, 4096)),
        ("--use-rope-scaling", (8.0, 8192)),
        ("", (None, None)),
        ("--position-embedding-type learned_absolute", (None, None)),
        (f"{LATENT} --position-embedding-type yarn", (1.0, 4096)),
        (f"{LATENT} --use-rope-scaling", (8.0, 8192)),
        (LATENT, (None, None)),
    ],
)
def test_defaults_of_rescaled_frequencies(flags, expected):
    model, _ = positions(flags)
    given = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    assert given == expected
    # a model that is not resolved computes the same
    raw = configure(f"--position-embedding-type rope {flags}").model
    assert (raw.rope_factor, raw.rope_original_length) == (
        model.rope_factor,
        model.rope_original_length,
    )


# Megatron-LM's defaults of all settings of positions that change no weights.
MEGATRON = {
    "max_position_embeddings": 32,  # --seq-length
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "no_rope_freq": None,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 1.0,
    "rope_original_max_position_embeddings": 4096,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@pytest.mark.parametrize("latent", [True, False])
def test_what_a_file_leaves_out_has_megatrons_defaults(tmp_path, latent):
    kind = {"position_embedding_type": "yarn", "multi_latent_attention": latent}
    (tmp_path / "flags.json").write_text(json.dumps({"model": kind}))
    read = parse_arguments([*LINE.split(), "--config", str(tmp_path / "flags.json")]).config
    model = vars(resolve(read, 1, 101).config.model)
    assert {name: model[name] for name in MEGATRON} == MEGATRON


FORMER = {"rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 8192}


@pytest.mark.parametrize("latent", ["", LATENT])
@pytest.mark.parametrize("kind", ["rope", "yarn", "rope --use-rope-scaling"])
@pytest.mark.parametrize("written", [True, False])
def test_checkpoints_and_files_of_earlier_versions_keep_their_meaning(
    tmp_path, latent, kind, written
):
    """With the former defaults 8 and 8192 written out, or (in a checkpoint) not there."""
    now = resolved(f"{latent} --position-embedding-type {kind}").config
    state = {"config": now.to_dict()}
    for name, value in FORMER.items():
        state["config"]["model"].pop(name)
        if written:
            state["config"]["model"][name] = value
    model = config_of(state).model
    assert model.position_embedding_type == now.model.position_embedding_type
    values = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    assert values == ((None, None) if kind == "rope" else (8.0, 8192))
    # the command line of a run that is not YaRN still fits
    assert (model == now.model) == (kind != "yarn")
    if written:
        file = tmp_path / "flags.json"
        file.write_text(json.dumps(state["config"]))
        read = resolve(parse_arguments(["--config", str(file)]).config, 1, 101).config.model
        assert read == model


@pytest.mark.parametrize(
    "settings, flags, expected",
    [
        ({"rope_scaling_factor": 8.0}, LATENT, ("yarn", 8.0, 4096)),
        (FORMER | {"rope_scaling_factor": 40.0}, LATENT, ("yarn", 40.0, 8192)),
        (FORMER | {"rope_type": "yarn"}, LATENT, ("yarn", 8.0, 8192)),
        (FORMER, "--position-embedding-type yarn", ("yarn", 8.0, 8192)),
        (FORMER, LATENT, ("rope", None, None)),
        ({}, "--rope-scaling-factor 8", ("rope", None, None)),
    ],
)
def test_former_defaults_in_a_file_count_where_others_rescale(tmp_path, settings, flags, expected):
    file = tmp_path / "flags.json"
    file.write_text(json.dumps({"model": {"position_embedding_type": "rope"} | settings}))
    read = parse_arguments([*LINE.split(), *flags.split(), "--config", str(file)]).config
    model = resolve(read, 1, 101).config.model
    values = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    assert (model.position_embedding_type, *values) == expected


def test_checkpoint_args_fit_the_flags_that_the_run_was_started_with(tmp_path):
    flags = f"{LATENT} --position-embedding-type rope --rotary-scaling-factor 40"
    run = resolved(flags).config
    state = {"config": run.to_dict(), "vocab_size": 101, "iteration": 1}
    whole = Box("x", (1,), (0,), (1,))
    save_checkpoint(tmp_path, 1, [(whole, torch.zeros(1))], state)
    again = f"{LINE} {flags} --load {tmp_path} --use-checkpoint-args"
    taken = take_checkpoint_args(parse_arguments(again.split()).config)
    assert resolve(taken, 1, 101).config.model == run.model
