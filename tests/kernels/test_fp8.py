"""Quantisation to 8 bits: bit for bit the definition, whose rounding error is the format's."""

import pytest
import torch
from checks import canaries
from megatron.kernels.fp8 import (
    BLOCK,
    SCALINGS,
    Maxima,
    dequantise,
    find_maxima,
    maxima_reference,
    quantise,
    quantise_by_definition,
    quantise_reference,
)

pytestmark = pytest.mark.table

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "dtype, wide",
    [(E4M3, torch.bfloat16), (E5M2, torch.bfloat16), (E4M3, torch.float32), (E5M2, torch.float16)],
)
@pytest.mark.parametrize("m, n", [(128, 128), (70, 200), (1, 129)])
def test_against_the_definition(m, n, dtype, wide, scaling, device):
    x = (torch.randn(m, n, device=device) * torch.logspace(-3, 2, n, device=device)).to(wide)
    with canaries():
        alone, both = quantise(x, dtype, scaling), quantise(x, dtype, scaling, transposed=True)
        turned = quantise(x, dtype, scaling, plain=False, transposed=True)
    for found, source in (
        (alone[:2], x),
        (both[:2], x),
        (both[2:], x.t()),
        (turned[2:], x.t()),
    ):
        q, scale = quantise_reference(source, dtype, scaling)
        assert torch.equal(found[1], scale) and torch.equal(bits(found[0]), bits(q))
    assert alone.q_t is None and alone.scale_t is None
    assert turned.q is None and turned.scale is None


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_part_takes_the_scales_of_the_whole(dimension, scaling, device):
    """With the maxima of the whole, parts of a matrix come out as the whole one's parts do."""
    x = torch.randn(140, 140, device=device).bfloat16()
    x[3, 100], x[80, 2], x[100, 120] = 100.0, 60.0, 30.0
    parts = x.chunk(2, dimension)
    own = [find_maxima(part, scaling) for part in parts]
    for found, part in zip(own, parts, strict=True):
        for a, b in zip(found, maxima_reference(part, scaling), strict=True):
            assert torch.equal(a, b)

    def of(side: int, part: int) -> torch.Tensor:
        # a row's maximum is shared where the row is cut, and its own part's where it is not
        is_cut = scaling == "tensor" or dimension != side
        return torch.maximum(own[0][side], own[1][side]) if is_cut else own[part][side]

    for number, part in enumerate(parts):
        given = Maxima(of(0, number), of(1, number))
        for make in (quantise, quantise_by_definition):
            found = make(part, E4M3, scaling, transposed=True, maxima=given)
            whole = quantise(x, E4M3, scaling, transposed=True)
            assert torch.equal(bits(found.q), bits(whole.q.chunk(2, dimension)[number]))
            assert torch.equal(bits(found.q_t), bits(whole.q_t.chunk(2, 1 - dimension)[number]))
            plain = make(part, E4M3, scaling, maxima=given)
            assert torch.equal(bits(found.q), bits(plain.q))
            assert torch.equal(found.scale, plain.scale)


@pytest.mark.parametrize("dtype, mantissa", [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_definition_rounds_as_the_format_does(scaling, dtype, mantissa):
    """Half a unit in the last place of each number, or of the smallest normal one; the greatest of
    what shares a scale comes out as it went in.
    """
    x = torch.randn(130, 300)
    q, scale = quantise_reference(x, dtype, scaling)
    back, unit = dequantise(q, scale), scale
    if scale.shape[1] > 1:
        unit = scale.repeat_interleave(BLOCK, 1)[:, :300]
    size = x.abs().clamp_min(unit * torch.finfo(dtype).smallest_normal)
    assert ((back - x).abs() <= 2.0 ** -(mantissa + 1) * size * (1 + 1e-6)).all()
    assert scale.shape == {"tensor": (1, 1), "row": (130, 1), "block": (130, 3)}[scaling]
    torch.testing.assert_close(back.abs().amax(), x.abs().amax(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_all_that_shares_its_scale_and_nothing_else(scaling, bad, device):
    x = torch.randn(150, 260, device=device).bfloat16()
    x[140, 200] = bad
    found = quantise(x, E4M3, scaling, transposed=True)
    for q, scale, source, at in (
        (found.q, found.scale, x, (140, 200)),
        (found.q_t, found.scale_t, x.t(), (200, 140)),
    ):
        expected = quantise_reference(source, E4M3, scaling)
        assert torch.equal(bits(q), bits(expected[0])) and torch.equal(scale, expected[1])
        spoilt = ~dequantise(q, scale).isfinite()
        shared = torch.zeros_like(spoilt)
        first = at[1] // BLOCK * BLOCK
        block = (at[0], slice(first, first + BLOCK))
        shared[{"tensor": (slice(None),), "row": (at[0],), "block": block}[scaling]] = True
        assert torch.equal(spoilt, shared)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_and_the_ends_of_the_range(scaling, device):
    x = torch.zeros(3, 130, device=device)
    assert (quantise(x, E4M3, scaling).q.float() == 0).all()
    for value in (1e-38, 3e38, 2.0**-100):
        x[1] = value
        found, expected = quantise(x, E5M2, scaling), quantise_reference(x, E5M2, scaling)
        assert torch.equal(bits(found.q), bits(expected[0]))
        assert torch.equal(found.scale, expected[1]) and found.scale.isfinite().all()


def test_a_row_longer_than_what_stays_in_registers(device):
    x = torch.randn(2, 8192 + 700, device=device).bfloat16()
    x[1, -1] = 1000.0  # the second look finds the greatest
    found, expected = quantise(x, E4M3, "row"), quantise_reference(x, E4M3, "row")
    assert torch.equal(bits(found.q), bits(expected[0])) and torch.equal(found.scale, expected[1])
