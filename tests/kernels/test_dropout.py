"""Dropout with the residual addition: the mask bit for bit, the values against the definition in
float64.
"""

import pytest
import torch
from checks import check_case
from megatron.kernels import philox
from megatron.kernels.dropout import dropout_add, dropout_add_reference

KEY = philox.key(7, "layers", 3, "mlp.output_dropout")


def where(s, b, device):
    """sample_ids [b] far from zero, token_index [s] from the middle of a sequence."""
    return torch.arange(b, device=device) + 2**31 - 1, torch.arange(s, device=device) + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s, b, h, drop", [(3, 2, 96, 0.1), (2, 1, 2051, 0.5), (1, 3, 5, 0.0)])
def test_against_the_definition(s, b, h, drop, dtype, device):
    """With the residual, and without, as backward."""
    check_case("dropout", {"s": s, "b": b, "width": h, "drop": drop}, dtype, device)


@pytest.mark.parametrize("key", [KEY, (0, philox.MASK), (philox.MASK, 0x80000000)])
def test_mask_is_the_fields(key, device):
    """Bit for bit, that of ones; of other ids, keys and positions another."""
    s, b, h = 2, 2, 300
    samples, tokens = where(s, b, device)
    rows = [word.flatten() for word in torch.broadcast_tensors(samples[None, :], tokens[:, None])]
    keep = philox.keep_mask_of_halves(key, rows, h, 0.3).view(s, b, h)
    ones = torch.ones(s, b, h, device=device)
    assert torch.equal(dropout_add(ones, None, samples, tokens, *key, 0.3) != 0, keep)
    low, high = key
    for other in (
        (samples + 1, tokens, *key),
        (samples, tokens + 1, *key),
        (samples, tokens, low ^ 1, high),
        (samples, tokens, low, high ^ 1),
    ):
        assert ((dropout_add(ones, None, *other, 0.3) != 0) != keep).float().mean() > 0.3


def test_views_and_what_is_not_finite(device):
    x = torch.randn(2, 3, 8, device=device).transpose(0, 1)
    residual = torch.randn(8, 3, 2, device=device).permute(1, 2, 0)
    given = (*where(3, 2, device), KEY, 0.5)
    x[0, 0], residual[2, 1] = torch.tensor([torch.nan, torch.inf] * 4), torch.nan
    y = dropout_add(x, residual, *given[:2], *KEY, 0.5)
    expected = dropout_add_reference(x, residual, *given)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6, equal_nan=True)
    assert not y[0, 0].isfinite().any() and y[1].isfinite().all()
