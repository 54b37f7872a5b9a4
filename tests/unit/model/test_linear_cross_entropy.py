"""The head's product and loss in chunks of tokens against the two apart: the same numbers in
float64, whatever the layout, and never all logits.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model import loss as module
from megatron.model.linear import column_function
from megatron.model.loss import cross_entropy, linear_cross_entropy, sharded_cross_entropy
from megatron.model.model_parallel import NO_TP

S, B, H, PADDED = 8, 3, 12, 32  # 24 tokens


def draw(*shape, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def head(x, weight, *, fused, vocabulary, softcap, tp, frozen=False, micro_batches=1):
    """(loss, lse, dx, main_grad) of micro-batches with a z-loss; the weight's first product
    overwrites what is there.
    """
    labels = torch.randint(0, vocabulary, (S, B), generator=torch.Generator().manual_seed(5))
    labels[0, 0], labels[0, 1] = 0, vocabulary - 1
    weight = torch.nn.Parameter(weight.clone(), requires_grad=not frozen)
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight.main_grad = torch.full(weight.shape, 7.0, dtype=wide)
    weight.overwrite_main_grad = True
    sharded = sharded_cross_entropy(weight.shape[0], vocabulary, softcap, tp)
    for _ in range(micro_batches):
        x = x.detach().clone().requires_grad_()
        if fused:
            loss, lse = linear_cross_entropy(x, weight, labels, sharded)
        else:
            loss, lse = cross_entropy(column_function(tp)(x, weight, None, tp), labels, sharded)
        ((loss + 0.1 * lse.square()) * draw(S, B, seed=2).to(loss.dtype)).sum().backward()
    return loss.detach(), lse.detach(), x.grad, weight.main_grad


def chunks_of(tokens, width, element_size=8):
    """The setting that makes the logits of `tokens` tokens at once."""
    return {"cpu": tokens * width * element_size}


@pytest.mark.parametrize("tokens", [1, 7, 8, 24, 1000])
@pytest.mark.parametrize("vocabulary, softcap", [(32, None), (21, 2.0)])
def test_equals_the_two_apart(tokens, vocabulary, softcap, monkeypatch):
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", chunks_of(tokens, PADDED))
    settings = {"vocabulary": vocabulary, "softcap": softcap, "tp": NO_TP, "micro_batches": 2}
    apart, together = (
        head(draw(S, B, H), draw(PADDED, H, seed=3), fused=fused, **settings)
        for fused in (False, True)
    )
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert (together[3][vocabulary:] == 0).all()


class LiveLogits(TorchDispatchMode):
    """The most bytes, at any moment, of storages that a tensor as wide as the logits was made in,
    those of matrix products.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.name() and out.shape[-1] == PADDED:
            self.storages[weakref.ref(out.untyped_storage())] = out.untyped_storage().nbytes()
        self.storages = {
            storage: size for storage, size in self.storages.items() if storage() is not None
        }
        self.most = max(self.most, sum(self.storages.values()))
        return out


@pytest.mark.parametrize("fused, tokens", [(True, 5), (False, S * B)])
def test_the_logits_are_never_whole(fused, tokens, monkeypatch):
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", chunks_of(5, PADDED))
    with LiveLogits() as live:
        head(draw(S, B, 4), draw(PADDED, 4), fused=fused, vocabulary=30, softcap=2.0, tp=NO_TP)
    assert live.most == tokens * PADDED * 8


def test_gradients_of_bf16_are_summed_in_fp32(monkeypatch):
    """Chunks of one token: in bf16 their sum would lose the small ones."""
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", chunks_of(1, PADDED, 2))
    x, weight = draw(S, B, H, dtype=torch.bfloat16), draw(PADDED, H, seed=3, dtype=torch.bfloat16)
    settings = {"vocabulary": 30, "softcap": None, "tp": NO_TP}
    got, again, exact = (
        head(x.to(kind), weight.to(kind), fused=True, **settings)[3]
        for kind in (torch.bfloat16, torch.bfloat16, torch.float64)
    )
    assert got.dtype == torch.float32 and torch.equal(got, again)
    # A logit is rounded (2^-9 of at most 12 or so), and so is its gradient (2^-9): its relative
    # error is about 2^-5 at most, and most are far less.
    assert (got.double() - exact).norm() < 2**-6 * exact.norm()


def test_a_frozen_weight_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", chunks_of(5, PADDED))
    settings = {"vocabulary": 30, "softcap": None, "tp": NO_TP, "frozen": True}
    apart, together = (
        head(draw(S, B, H), draw(PADDED, H), fused=fused, **settings) for fused in (False, True)
    )
    torch.testing.assert_close(together[2], apart[2], rtol=1e-13, atol=1e-13)
    assert (together[3] == 7).all()
