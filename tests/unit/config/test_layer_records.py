"""The record of each layer: experts, windows and rotary positions of some layers, with
Megatron-LM's meaning.
"""

from __future__ import annotations

import pytest

from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.layers import expert_pattern, layer_records, widest_window, windows_of


def model(layers: int = 8, **fields) -> ModelConfig:
    rotary = {"position_embedding_type": "rope"}
    return ModelConfig(num_layers=layers, window_size=128, **(rotary | fields))


@pytest.mark.parametrize(
    "text, layers, expected",
    [("1", 3, "111"), ("2", 5, "10101"), ("([0]*3+[1]*2)", 5, "00011"), ("2*[0,1]", 4, "0101")],
)
def test_which_layers_have_experts(text, layers, expected):
    assert expert_pattern(text, layers) == tuple(digit == "1" for digit in expected)


@pytest.mark.parametrize(
    "text", ["[2]", "[1]*10**9", "[0]*9999+[1,1]", "x", "", "-1", "[[1]]", "True", "1+1"]
)
def test_another_pattern_is_refused(text):
    with pytest.raises(UserError):
        expert_pattern(text, 4)


@pytest.mark.parametrize(
    "pattern, windowed",
    [
        ("2", "10101010"),  # gpt-oss and Gemma 2
        ("4", "11101110"),  # OLMo 3, Cohere 2, EXAONE 4
        ("[1,1,1,0]*2", "11101110"),
    ],
)
def test_windows(pattern, windowed):
    records = layer_records(model(window_attn_skip_freq=pattern))
    assert [each.window for each in records] == [
        128 if digit == "1" else None for digit in windowed
    ]


@pytest.mark.parametrize(
    "pattern, rotates",
    [
        ("4", "11101110"),  # Llama 4, SmolLM3
        ("[0,0,0,1]*2", "11101110"),
    ],
)
def test_rotary_positions(pattern, rotates):
    records = layer_records(model(no_rope_freq=pattern))
    assert [each.rotary for each in records] == [digit == "1" for digit in rotates]


def test_layers_differ_at_the_ends_and_by_kind():
    """A pattern of four layers in eight, and the first and the last apart."""
    records = layer_records(model(window_attn_skip_freq="4", no_rope_freq="2"))
    assert records[1] == records[5] and records[2] == records[4] == records[6]
    assert len(set(records)) == 5
    assert (records[0].first, records[0].last, records[7].first, records[7].last) == (1, 0, 0, 1)


def test_a_window_of_some_layers_does_not_decide_who_holds_which_positions():
    assert widest_window(model()) == 128 and windows_of(model()) == (128,)
    mixed = model(window_attn_skip_freq="2")
    assert widest_window(mixed) is None and windows_of(mixed) == (128, None)
