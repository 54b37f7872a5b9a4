"""The layers of a model, each a separate autograd graph, and initialisation by logical
position.
"""

import dataclasses

import pytest
import torch
from unit.by_hand import FULL_RECOMPUTE, NO_RECOMPUTE, backward, filled, forward

from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.model.layer import EmbeddingLayer, HeadLayer, TransformerLayer
from megatron.model.spec import Box, Init, TensorSpec
from megatron.parallel.layer_runner import Inputs, LayerRunner
from megatron.parallel.pipeline import loss_gradient

TIED = ModelConfig(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    kv_channels=4,
    num_query_groups=2,
    max_position_embeddings=8,
    activation="swiglu",
)
UNTIED = dataclasses.replace(
    TIED,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
)
VOCAB, S, B = 30, 8, 2


def build(config, dtype=torch.float64):
    model = GPTModel(config, vocab_size=VOCAB, padded_vocab=32, dtype=dtype, seed=5)
    filled(model)
    return model


def batch(model, training=True):
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(1))
    return model.micro_batch(
        ids[:, :-1],
        ids[:, 1:],
        torch.ones(B, S),
        torch.arange(S).expand(B, S),
        torch.arange(B),
        training=training,
    )


def test_layers_are_run_in_order_and_share_no_graph(monkeypatch):
    model, passes, calls = build(UNTIED), LayerRunner(), []

    def noted(name):
        real = getattr(LayerRunner, name)

        def run(passes, *args):
            layer, x = args[:2] if name == "forward" else args[1:3]
            calls.append((name, type(layer)))
            assert x is None or not x.requires_grad
            return real(passes, *args)

        monkeypatch.setattr(LayerRunner, name, run)

    noted("forward")
    noted("backward")
    out, saved = forward(model, batch(model), passes)
    assert not out.requires_grad
    backward(model, saved, loss_gradient(out, 1.0), passes)
    order = [EmbeddingLayer, TransformerLayer, TransformerLayer, TransformerLayer, HeadLayer]
    assert calls == [("forward", layer) for layer in order] + [
        ("backward", layer) for layer in reversed(order)
    ]
    assert saved == []


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_units_differentiate_like_one_graph(config):
    """Finite differences of the whole loss against the gradients that the units left in
    main_grad.
    """
    model = build(config)
    passes = LayerRunner()
    out, saved = forward(model, batch(model), passes)
    backward(model, saved, loss_gradient(out, 1.0), passes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            direction = torch.randn(
                parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
            )
            if "word" in name or "head" in name:
                direction[VOCAB:] = 0
            start = parameter.clone()

            def slope(h, parameter=parameter, start=start, direction=direction):
                losses = []
                for step in (h, -h):
                    parameter.copy_(start + step * direction)
                    losses.append(forward(model, batch(model))[0][0].item())
                return (losses[0] - losses[1]) / (2 * h)

            # Richardson: the h^2 error of central differences cancels; rounding of a loss near 50
            # (7e-15) over 2h is left
            numeric = (4 * slope(1e-5) - slope(2e-5)) / 3
            parameter.copy_(start)
            exact = (parameter.main_grad * direction).sum().item()
            assert numeric == pytest.approx(exact, rel=1e-8, abs=1e-8), name


def test_parameters_have_no_grad_and_blocks_are_units():
    model = build(TIED)
    passes = LayerRunner()
    out, saved = forward(model, batch(model), passes)
    backward(model, saved, loss_gradient(out, 1.0), passes)
    assert all(p.grad is None for p in model.parameters())
    assert [n for n, _ in model.layers["0"].named_parameters() if n.startswith("position")] == [
        "position.weight"
    ]
    assert [n for n, _ in model.layers["2"].named_parameters() if n.startswith("final")] == [
        "final_norm.weight",
        "final_norm.bias",
    ]
    assert model.head.weight is model.embedding.word.weight


def test_recompute_keeps_only_inputs_of_layers():
    """What a layer holds between forward and backward: one [s, b, h] tensor, and no autograd
    graph.
    """
    model = build(TIED)
    model.choose_recompute(FULL_RECOMPUTE)
    micro = batch(model)
    _, saved = forward(model, micro)
    for kept in saved[1:-1]:
        x = kept.x
        assert (
            isinstance(kept, Inputs)
            and kept.micro is micro
            and x.shape == (S, B, 16)
            and x.grad_fn is None
        )
    model.choose_recompute(NO_RECOMPUTE)
    _, plain = forward(model, micro)
    assert all(graph.output.node is not None for graph in plain)


def test_evaluation_has_no_dropout_and_no_graph():
    model = build(TIED)
    with torch.no_grad():
        a, saved = forward(model, batch(model, training=False))
        b, _ = forward(model, batch(model, training=False))
    assert torch.equal(a, b) and not torch.equal(a, forward(model, batch(model))[0])
    assert saved == [None] * 5


def test_logits_agree_with_the_loss():
    model = build(UNTIED)
    micro = batch(model, training=False)
    with torch.no_grad():
        (_, loss), _ = forward(model, micro)
    logits = model.logits(micro.tokens.t())
    assert logits.shape == (B, S, VOCAB)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), micro.labels.t().flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_logical_names():
    names = {tensor.name for _, _, spec in build(TIED).declared() for tensor in spec.tensors}
    layer = {
        f"layers.1.{rest}"
        for rest in (
            "input_norm.weight",
            "input_norm.bias",
            "mlp_norm.weight",
            "mlp_norm.bias",
            *(
                f"attention.{x}.{kind}"
                for x in ("q", "k", "v", "proj")
                for kind in ("weight", "bias")
            ),
            *(f"mlp.{x}.{kind}" for x in ("gate", "up", "down") for kind in ("weight", "bias")),
        )
    }
    assert {name for name in names if name.startswith("layers.1.")} == layer
    outside = {
        "embedding.word.weight",
        "embedding.position.weight",
        "final_norm.weight",
        "final_norm.bias",
    }
    assert {name for name in names if not name.startswith("layers.")} == outside
    untied = {
        tensor.name: tensor.shape
        for _, _, spec in build(UNTIED).declared()
        for tensor in spec.tensors
    }
    assert untied["head.weight"] == (VOCAB, 16) and "embedding.position.weight" not in untied


def test_weights_depend_on_the_logical_position_alone():
    """Any part of a logical tensor, in any fused parameter, gets the values of that part of the
    whole.
    """
    whole = torch.empty(24, 16)
    spec = TensorSpec("layers.0.attention.q.weight", (24, 16), Init(std=0.02), "matrix")
    fill_initial(Box(spec.name, (24, 16), (0, 0), (24, 16), spec=spec), whole, 5)
    # two groups of 6 query rows then 4 others, the right half of the columns
    fused = torch.full((2 * (6 + 4), 8), 7.0)
    fill_initial(Box(spec.name, (24, 16), (12, 8), (12, 8), groups=2, start=0, spec=spec), fused, 5)
    assert torch.equal(fused.view(2, 10, 8)[:, :6].reshape(12, 8), whole[12:, 8:])
    assert (fused.view(2, 10, 8)[:, 6:] == 7).all()
