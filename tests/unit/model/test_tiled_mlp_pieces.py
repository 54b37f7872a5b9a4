"""The MLP in pieces of the sequence: GEMM counts and peak memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_recompute import Peak, Products
from test_split_units import CONFIGS, GPT, PLAIN, B, F, H, S, build, micro_batch
from unit.by_hand import FULL_RECOMPUTE, NO_RECOMPUTE, recomputing
from unit.recomputed_flops import flops_again
from unit.storages import no_collector

from megatron.config.model import GATED
from megatron.model.recompute import WHOLE, stage_recompute
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.schedule import Kind

CHOICES = {
    "kept": NO_RECOMPUTE,
    "full": FULL_RECOMPUTE,
    "norms": recomputing("layernorm"),
    "all": recomputing("layernorm", "qkv", "core_attn", "mlp"),
}


@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_those_of_the_formula(name, what):
    """fc1's product of every piece is made again, whatever else is."""
    config, training = dataclasses.replace(CONFIGS[name], tiled_mlp=4), CHOICES[what]
    model = build(config)
    model.choose_recompute(training)
    layer, passes = model.layers["0"], LayerRunner()
    x = torch.randn(S, B, config.hidden_size, dtype=torch.float64)
    micro = micro_batch(model)
    with Products() as found:
        y, saved = passes.forward(layer, x, micro)
        passes.backward(Kind.BACKWARD, layer, torch.ones_like(y), saved)
    (choice, *_) = stage_recompute(training, range(2))
    plain = dataclasses.replace(config, tiled_mlp=1)
    per_token = 3 * flops_again(plain, 0, WHOLE) + flops_again(config, 0, choice)
    assert found.flops == S * B * per_token
    fc1 = 2 * config.hidden_size * F * (2 if config.activation in GATED else 1)
    more = 0 if "mlp" in choice.modules else fc1
    assert flops_again(config, 0, choice) == flops_again(plain, 0, choice) + more


@pytest.mark.parametrize("what", CHOICES)
def test_one_piece_lives_at_a_time(what):
    """Of tensors as wide as fc1's output a piece's four: that and fc2's input, and the gradients of
    both. The rest of a layer is 40 times as wide as the hidden size at most.
    """
    wide, pieces = 4096, 8
    config = dataclasses.replace(GPT, **PLAIN, num_layers=1, ffn_hidden_size=wide)

    def most(count):
        model = build(dataclasses.replace(config, tiled_mlp=count))
        model.choose_recompute(CHOICES[what])
        layer, passes, micro = model.layers["0"], LayerRunner(), micro_batch(model)
        x = torch.randn(S, B, H, dtype=torch.float64)
        with no_collector(), Peak() as peak:
            y, saved = passes.forward(layer, x, micro)
            passes.backward(Kind.BACKWARD, layer, torch.ones_like(y), saved)
        return peak.most

    element = S * B * torch.float64.itemsize
    rest = 40 * H * element
    assert 3 * wide * element < most(1)
    assert most(pieces) < 4 * wide * element // pieces + rest < most(1)
