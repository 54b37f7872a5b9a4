"""The activation of experts: the gradient of a gate, which is written out, next to autograd's."""

import pytest
import torch

from megatron.model.experts.experts import _WeightedActivation
from megatron.model.mlp import activation_function


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
