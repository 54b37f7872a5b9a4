"""Initial weights drawn by the kernel are those of philox.normal."""

import pytest
import torch
from checks import canaries
from megatron.kernels import philox
from megatron.kernels.initialise import normal_, normal_reference

KEY = philox.key(1234, "layers.0.attention.q.weight")
STD = 0.02


def ulps(a, b):
    """How many fp32 numbers lie between two of one sign, element by element."""
    assert (a.signbit() == b.signbit()).all()
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


def definition(rows, columns, row, column):
    out = torch.empty(rows, columns)
    normal_reference(out, KEY, row, column, STD)
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
