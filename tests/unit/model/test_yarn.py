"""YaRN's frequencies, from the paper's definition by rotations and not from the program's formula.

Peng et al. 2023, section 3.2: a pair of channels that turns r times within the original length
keeps its frequency for r >= beta_fast, has it divided by the factor for r <= beta_slow, and lies on
a ramp between. Published models draw the ramp in the pair's index, between the last pair that
keeps and the first one that is divided.
"""

import math

import pytest
import torch

from megatron.config.groups import ModelConfig
from megatron.model.attention.rotary import inverse_frequencies


@pytest.mark.parametrize(
    "width, base, length, fast, slow",
    [(64, 10000.0, 4096, 32.0, 1.0), (128, 500.0, 512, 16.0, 2.0), (32, 100.0, 256, 16.0, 4.0)],
)
def test_pairs_keep_or_divide_by_their_rotations(width, base, length, fast, slow):
    factor = 8.0
    config = ModelConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=1,
        kv_channels=width,
        position_embedding_type="yarn",
        rotary_base=base,
        rope_scaling_factor=factor,
        rope_original_max_position_embeddings=length,
        yarn_beta_fast=fast,
        yarn_beta_slow=slow,
    )
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    rotations = [length * frequency / (2 * math.pi) for frequency in plain]
    last_kept = max(i for i, r in enumerate(rotations) if r >= fast)
    first_divided = min(i for i, r in enumerate(rotations) if r <= slow)
    assert 0 < last_kept < first_divided < width // 2 - 1
    expected = []
    for i, frequency in enumerate(plain):
        divided = min(max((i - last_kept) / (first_divided - last_kept), 0.0), 1.0)
        expected.append(frequency * (1 - divided) + frequency / factor * divided)
    found, _ = inverse_frequencies(config)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
