"""The layers of a model, each a separate autograd graph, and initialisation by logical
position.
"""

import dataclasses

import torch
from unit.by_hand import filled, forward

from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel

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
