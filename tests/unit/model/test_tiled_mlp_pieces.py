"""The MLP in pieces of the sequence: gradients, matrix products, what lives at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_recompute import Products
from test_split_units import (
    CONFIGS,
    GPT,
    PLAIN,
    B,
    F,
    H,
    S,
    build,
    gradients,
    micro_batch,
    split,
    whole,
)
from unit.by_hand import FULL_RECOMPUTE, NO_RECOMPUTE, recomputing
from unit.recomputed_flops import flops_again
from unit.storages import Storages, no_collector

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


def in_pieces(name, count):
    return dataclasses.replace(CONFIGS[name], tiled_mlp=count)


def trained(config, training=NO_RECOMPUTE, run_passes=whole, dtype=torch.float64, prepare=None):
    """The gradients of two micro-batches."""
    model = build(config, dtype)
    if prepare is not None:
        prepare(model)
    model.choose_recompute(training)
    run_passes(model, LayerRunner(), 2)
    return gradients(model)


@pytest.mark.parametrize("run_passes, dtype", [(whole, torch.bfloat16), (split, torch.float32)])
@pytest.mark.parametrize("name", CONFIGS)
def test_recomputation_changes_no_bit(name, run_passes, dtype):
    config = in_pieces(name, 4)
    plain = trained(config, dtype=dtype)
    for what, training in CHOICES.items():
        found = trained(config, training, run_passes, dtype)
        assert all(torch.equal(found[name], plain[name]) for name in plain), what


@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_those_of_the_formula(name, what):
    """fc1's product of every piece is made again, whatever else is."""
    config, training = in_pieces(name, 4), CHOICES[what]
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


class Peak(Storages):
    """The most bytes of what was made that are alive at once."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, sum(self.alive().values()))
        return out


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
