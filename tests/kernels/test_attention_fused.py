"""Attention of the fused projection where it lies: the same numbers as of its parts, and no copy of
them in either pass.
"""

import dataclasses

import pytest
import torch
from checks import Allocations, canaries
from megatron.kernels import attention, lang
from megatron.kernels.attention import flash_attention
from megatron.kernels.attention_masks import attention_mask
from selection import each_value
from test_attention import assert_near, defined, results

from megatron.config.groups import ModelConfig
from megatron.model.attention.attention import SelfAttention, seen_by_queries
from megatron.model.attention.rotary import RotaryTables

pytestmark = pytest.mark.table(traits=each_value)

S, B = 24, 1
TILES = {"scale": 0.25, "tile": 16}
FORMS = [(2, 1), (2, 2), (3, 4), (1, 4)]  # key heads, query heads each


def split(qkv):
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    return q.flatten(2, 3), k, v


@pytest.mark.parametrize("g, m", FORMS)
@pytest.mark.parametrize("programs", [1, 12])
@pytest.mark.default("1-2-2")
def test_same_bits_as_of_the_parts(device, monkeypatch, g, m, programs):
    """Where one program takes all heads of a key and where it takes some; dk and dv are the fused
    gradient's own.
    """
    monkeypatch.setattr(lang, "multiprocessors", lambda _: programs)
    generator = torch.Generator().manual_seed(g + m)
    qkv, dout = (
        torch.randn(S, B, *heads, 16, generator=generator).to(device)
        for heads in ((g, m + 2), (g * m,))
    )
    given = (dout, torch.randn(B, g * m, S, generator=generator).to(device)), attention_mask(S, S)
    apart = results(flash_attention, [x.contiguous() for x in split(qkv)], *given, **TILES)
    exact, torchs = defined(split(qkv), *given, scale=0.25)
    with canaries():
        out, lse, of_qkv = results(flash_attention, [qkv], *given, **TILES)
    dq, dk, dv = split(of_qkv)
    assert of_qkv.is_contiguous()
    for got, want, low, part in zip((out, lse, dq, dk, dv), exact, torchs, apart, strict=True):
        assert_near(got, want, low)
        assert torch.equal(got, part)


CONFIG = ModelConfig(
    num_layers=1,
    hidden_size=24,
    ffn_hidden_size=8,
    num_attention_heads=8,
    kv_channels=8,
    num_query_groups=2,
    max_position_embeddings=S,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    position_embedding_type="rope",
    add_bias_linear=False,
    attention_backend="triton",
    rotary_backend="triton",
    norm_backend="torch",
)


@pytest.mark.parametrize("groups, rotary", [(8, True), (4, True), (2, True), (2, False), (1, True)])
@pytest.mark.default("4-True")
def test_a_layer_copies_nothing(device, monkeypatch, groups, rotary):
    """Allocated are products of matrices, the output, one gradient, and the rows' statistics; kept
    are x, the projection, the output and lse.
    """
    config = dataclasses.replace(
        CONFIG,
        num_query_groups=groups,
        **({} if rotary else {"position_embedding_type": "learned_absolute"}),
    )
    layer = SelfAttention(config, 1, 0).to_empty(device=device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.main_grad = torch.zeros_like(parameter)
    positions = torch.arange(S, device=device)[:, None].expand(S, B)
    table = RotaryTables(config, torch.float32).table(positions) if rotary else None
    x, dy = (torch.randn(S, B, 24, device=device) for _ in range(2))
    monkeypatch.setattr(lang, "multiprocessors", lambda _: 1)
    forth, back, kept = Allocations(), Allocations(), {}
    monkeypatch.setattr(attention, "forward", forth.inside(attention.forward))
    monkeypatch.setattr(attention, "backward", back.inside(attention.backward))

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with forth, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x.requires_grad_(), table, seen_by_queries(config, S), None)
    with back:
        y.backward(dy)
    tokens, heads, d = S * B, 8, 8
    fused, q, lse, rows = (
        tokens * (heads + 2 * groups) * d,
        tokens * heads * d,
        tokens * heads,
        128 * B * heads,
    )
    of_us = [[each for each in mode.seen if each[0] != "mm"] for mode in (forth, back)]
    assert of_us == [
        [("empty", q), ("empty", lse)],
        [("empty", fused), ("empty", rows), ("empty", rows)],
    ]
    assert sum(kept.values()) == 4 * (x.numel() + fused + q + lse) + (
        2 * table[0].nbytes if rotary else 0
    )


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("groups, rotary", [(8, True), (2, True), (2, False)])
@pytest.mark.default("2-False-LayerNorm")
def test_norms_of_heads_stay_in_the_projection(device, groups, rotary, kind):
    """Outputs and gradients are those of norms, rotation and attention apart; what is kept is what
    the plan counts.
    """
    config = dataclasses.replace(
        CONFIG,
        num_query_groups=groups,
        normalization=kind,
        norm_epsilon=0.1,
        qk_layernorm=True,
        **({} if rotary else {"position_embedding_type": "learned_absolute"}),
    )
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(S, B, 24, generator=generator).to(device) for _ in range(2))
    positions = torch.arange(S, device=device)[:, None].expand(S, B)
    table = RotaryTables(config, torch.float32).table(positions) if rotary else None
    results, kept = [], {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for backend in ("torch", "triton"):
        config = dataclasses.replace(config, norm_backend=backend)
        layer = SelfAttention(config, 1, 0).to_empty(device=device)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + 0.2)
            parameter.main_grad = torch.zeros_like(parameter)
        kept.clear()
        own = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(own, table, seen_by_queries(config, S), None)
        y.backward(dy)
        results.append([y.detach(), own.grad, *(p.main_grad for p in layer.parameters())])
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    sizes = {name: expected.norm() for name, expected in zip(names, results[0], strict=True)}
    # The gradient of the keys' bias is zero where nothing turns, since it moves all scores of a
    # query alike: terms as large as those of the scale's gradient cancel.
    sizes["k_norm.bias"] = sizes["k_norm.weight"]
    for name, expected, actual in zip(names, *results, strict=True):
        assert (actual - expected).norm() < 3e-6 * sizes[name], name
    # the layer's input, the projection and the normed one, the output; three numbers a head
    heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
    projection, output = (4 * S * B * n * d for n in (heads + 2 * groups, heads))
    each = 2 if config.normalization == "LayerNorm" else 1
    numbers = 4 * S * B * (heads + each * (heads + 2 * groups))
    tables = 2 * table[0].nbytes if rotary else 0
    assert sum(kept.values()) == x.nbytes + 2 * projection + output + numbers + tables
