"""The router: its jitter multiplies by numbers that are uniform around 1; weights of a single
expert. The activation of experts: the gradient of a gate, which is written out, is autograd's.
"""

import math

import pytest
import torch

from megatron.config.groups import ModelConfig
from megatron.model.dropout import DropoutState
from megatron.model.experts.experts import _WeightedActivation
from megatron.model.experts.router import Router
from megatron.model.mlp import activation_function


@pytest.mark.parametrize("eps", [0.01, 0.4])
def test_jitter_is_uniform_around_one(eps):
    """Mean 1, bounds 1 - eps and 1 + eps, variance eps^2 / 3. The mean of n such numbers has the
    standard deviation eps / sqrt(3 n), their variance about eps^2 / 3 x sqrt(4 / 5 n); 5 of these.
    """
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_experts=4, moe_input_jitter_eps=eps
    )
    s, b, h = 32, 4, 64
    state = DropoutState(torch.arange(b), torch.arange(s))
    jitter = Router(config, 1, "layers.0.mlp.router")._jitter(
        torch.ones(s, b, h, dtype=torch.float64), state
    )
    n = jitter.numel()
    assert abs(jitter.mean().item() - 1) < 5 * eps / math.sqrt(3 * n)
    assert abs(jitter.var().item() * 3 / eps**2 - 1) < 5 * math.sqrt(0.8 / n)
    assert 1 - eps <= jitter.min() < 1 - 0.99 * eps and 1 + 0.99 * eps < jitter.max() <= 1 + eps


@pytest.mark.parametrize("topk, total", [(1, None), (2, 1.0)])
def test_scores_of_one_chosen_expert_are_not_normalized(topk, total):
    """Of several they add up to 1; of one that would be a constant without a gradient."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_experts=4,
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
    )
    scores = torch.tensor([[0.9, 0.3, 0.6, 0.1]])
    weights = Router(config, 1, "layers.0.mlp.router").weights(scores, scores.topk(topk).indices)
    assert weights.sum().item() == pytest.approx(0.9 if total is None else total)


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
