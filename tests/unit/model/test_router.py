"""The router: weights of a single expert, and the precision of its scores. The activation of
experts: the gradient of a gate, which is written out, is autograd's.
"""

import pytest
import torch

from megatron.config.groups import ModelConfig
from megatron.model.experts.experts import _WeightedActivation
from megatron.model.experts.router import Router
from megatron.model.mlp import activation_function


def router_of_four(**options) -> Router:
    """A router of four experts, hidden size 64."""
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_experts=4, **options
    )
    return Router(config, 1, "layers.0.mlp.router")


@pytest.mark.parametrize("topk, total", [(1, 0.9), (2, 1.0)])
def test_scores_of_one_chosen_expert_are_not_normalized(topk, total):
    """Of several they add up to 1; of one that would be a constant without a gradient."""
    scores = torch.tensor([[0.9, 0.3, 0.6, 0.1]])
    router = router_of_four(moe_router_topk=topk, moe_router_score_function="sigmoid")
    weights = router.weights(scores, scores.topk(topk).indices)
    assert weights.sum().item() == pytest.approx(total)


def gradients(kind: str, dtype: torch.dtype, gated: bool) -> list[torch.Tensor]:
    """(output, dx, dweights)."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    x, dy = (torch.randn(9, width, generator=generator).to(dtype) for width in (20, 10))
    weights = torch.rand(9, generator=generator).to(wide)
    leaves = [each.requires_grad_() for each in (x, weights)]
    activation = activation_function(kind)
    out = _WeightedActivation.apply(*leaves, activation, kind if gated else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gradients_of_a_gate_have_the_bits_of_autograds(kind, dtype):
    for found, expected in zip(gradients(kind, dtype, True), gradients(kind, dtype, False)):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("given, dtype", [("fp32", torch.float32), ("fp64", torch.float64)])
def test_scores_are_computed_in_the_precision_of_the_flag(given, dtype):
    """Logits of one sum of 64 terms, whose small ones an fp32 sum would lose."""
    router = router_of_four(moe_router_dtype=given)
    router.weight = torch.nn.Parameter(torch.ones(4, 64))
    x = torch.tensor([1e5, *[1e-3] * 62, -1e5]).view(1, 1, 64)
    logits, scores = router.scores(x, None)
    assert logits.dtype == scores.dtype == dtype
    exact = x.double().sum()
    assert (abs(logits[0, 0] - exact) < 1e-6 * exact) == (given == "fp64")
