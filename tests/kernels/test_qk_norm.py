"""Norms of query and key heads with their rotation, in one pass over the fused projection."""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels.qk_norm import qk_norm, qk_norm_backward, qk_norm_reference
from test_rotary import tables

EPS = 1e-5
SHAPES = [  # groups, queries of each, d, channels that turn (None: no tables)
    (2, 3, 64, 64),
    (1, 4, 24, 12),
    (4, 1, 128, None),
    (3, 2, 10, 6),
]


def operands(groups, queries, d, width, dtype, device, centre, seed=0):
    s, b = 3, 2
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    qkv, dy = (draw(s, b, groups, queries + 2, d) + 0.5 for _ in range(2))
    weights = draw(d) + 1, draw(d) - 1
    biases = (draw(d), draw(d)) if centre else None
    rotary = None if width is None else tables(s, b, width, device)
    return qkv, dy, weights, biases, rotary


def defined(given, dtype):
    """(y, dx, gradients of the parameters) of the definition in a precision."""
    qkv, dy, weights, biases, rotary = given
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (qkv, *weights, *(biases or ()))]
    pair = tuple(leaves[3:]) if biases else None
    if rotary is not None and dtype == torch.float64:
        rotary = tuple(table.double() for table in rotary)
    y = qk_norm_reference(leaves[0], tuple(leaves[1:3]), pair, rotary, EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))


def ours(qkv, dy, weights, biases, rotary):
    y, statistics = qk_norm(qkv, *weights, *(biases or (None, None)), *(rotary or (None,) * 2), EPS)
    dx, gradients = qk_norm_backward(dy, qkv, *weights, *(rotary or (None,) * 2), statistics)
    return y, dx, *gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centre", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_definition(shape, centre, dtype, device):
    given = operands(*shape, dtype, device, centre)
    with canaries():
        found = ours(*given)
    expected, torchs = defined(given, torch.float64), defined(given, dtype)
    for actual, wanted, low in zip(found[:2], expected[:2], torchs[:2], strict=True):
        assert_as_good(actual, wanted, low, dtype)
    # fp32 sums of fp32 terms, whatever the precision of the operands
    for actual, wanted in zip(found[2:], expected[2:], strict=True):
        assert actual.dtype == torch.float32
        assert (actual.double() - wanted).norm() < 2e-6 * wanted.norm()


def test_values_stay_to_the_bit(device):
    given = qkv, dy, *_ = operands(2, 3, 64, 64, torch.bfloat16, device, False)
    y, dx, *_ = ours(*given)
    assert torch.equal(y[..., -1, :], qkv[..., -1, :])
    assert torch.equal(dx[..., -1, :], dy[..., -1, :])


def test_many_tiles(device):
    """More heads than one program takes: parameter gradients are the sums of all."""
    generator = torch.Generator().manual_seed(1)
    qkv, dy = (torch.randn(24, 1, 2, 4, 64, generator=generator).to(device) for _ in range(2))
    weights = torch.ones(64, device=device), torch.ones(64, device=device)
    given = qkv, dy, weights, None, tables(24, 1, 64, device)
    for actual, wanted in zip(ours(*given), defined(given, torch.float64), strict=True):
        assert (actual.double() - wanted).norm() < 2e-6 * wanted.norm()


def test_the_definition_in_float64_is_differentiable():
    qkv = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 8, dtype=torch.float64).unbind()
    angles = tuple(table.double() for table in tables(2, 1, 6, "cpu"))
    assert torch.autograd.gradcheck(lambda x: qk_norm_reference(x, weights, None, angles, EPS), qkv)


def test_the_operators_pass_torchs_own_checks(device):
    qkv, dy, weights, biases, rotary = operands(2, 1, 16, 16, torch.float32, device, True)
    call = (qkv, *weights, *biases, *rotary, EPS)
    torch.library.opcheck(torch.ops.megatron.qk_norm.default, call)
    _, statistics = qk_norm(*call)
    torch.library.opcheck(
        torch.ops.megatron.qk_norm_backward.default, (dy, qkv, *weights, *rotary, statistics)
    )
