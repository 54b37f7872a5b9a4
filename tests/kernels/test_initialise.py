"""Initial weights drawn by the kernel are those of philox.normal."""

import dataclasses

import pytest
import torch
from checks import canaries
from megatron.kernels import dispatch, lang, philox
from megatron.kernels.initialise import normal_, normal_reference

from megatron.config.groups import Config, ModelConfig, OptimizerConfig
from megatron.model import init
from megatron.model.gpt import GPTModel
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import build_blocks

KEY = philox.key(1234, "layers.0.attention.q.weight")
STD = 0.02
SMALL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    kv_channels=8,
    num_query_groups=2,
    max_position_embeddings=8,
)


def ulps(a, b):
    """How many fp32 numbers lie between two of one sign, element by element."""
    assert (a.signbit() == b.signbit()).all()
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


def definition(rows, columns, row, column, key=KEY, std=STD):
    out = torch.empty(rows, columns)
    normal_reference(out, key, row, column, std)
    return out


@pytest.mark.parametrize(
    "rows, columns, row, column",
    [(7, 9, 0, 0), (1, 1, 17, 4), (3, 1100, 5, 60), (300, 8, 0, 0), (2, 64, 2**31 - 2, 2)],
)
def test_any_rectangle(device, rows, columns, row, column):
    with canaries():
        out = torch.empty(rows, columns, device=device)
        normal_(out, *KEY, row, column, STD)
    apart = ulps(out.cpu(), definition(rows, columns, row, column))
    assert apart.max() <= 2 and (apart == 0).float().mean() > 0.99


@pytest.mark.parametrize("key", [(0, 0), (philox.MASK, philox.MASK), (3, 0x80000000)])
def test_any_key(device, key):
    out = torch.empty(16, 16, device=device)
    normal_(out, *key, 0, 0, 1.5)
    assert ulps(out.cpu(), definition(16, 16, 0, 0, key, 1.5)).max() <= 2


def test_rectangles_are_parts_of_one_matrix(device):
    whole, part = torch.empty(12, 50, device=device), torch.empty(5, 21, device=device)
    normal_(whole, *KEY, 0, 0, STD)
    normal_(part, *KEY, 4, 13, STD)
    assert torch.equal(part, whole[4:9, 13:34])


def test_a_models_weights(device, monkeypatch):
    """Every matrix, its residual outputs scaled, and what is not drawn; auto follows the table."""
    weights, drawn = {}, []
    monkeypatch.setattr(init, "normal_", lambda *given: (drawn.append(given), normal_(*given)))
    won = dispatch.Measurement("torch", 2.0, 1.9, 2.1, True, "GPU", "2.13", "3.6", "2026-01-01")
    monkeypatch.setattr(dispatch, "MEASURED", {("init", "triton", lang.capability(device)): won})
    for backend in ("torch", "auto", "triton"):
        drawn.clear()
        model = dataclasses.replace(SMALL, init_backend=backend)
        config = Config(model=model, optimizer=OptimizerConfig(lr=1.0))
        gpt = GPTModel(model, vocab_size=18, padded_vocab=20, dtype=torch.float32, seed=1)
        optimizer = Optimizer(build_blocks(gpt, device), config)
        optimizer.initialise()
        assert bool(drawn) == (backend != "torch")
        weights[backend] = torch.cat([block.master for block in optimizer.blocks]).cpu()
    assert torch.equal(weights["auto"], weights["triton"])
    apart = ulps(weights["triton"], weights["torch"])
    assert apart.max() <= 2 and (apart == 0).float().mean() > 0.99
    assert (weights["triton"] != 0).sum() > 2000


def test_op_is_what_it_says(device):
    torch.library.opcheck(normal_.overload, (torch.zeros(3, 5, device=device), *KEY, 1, 2, STD))
