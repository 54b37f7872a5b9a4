"""Sum of squares of many flat pieces of a gradient, which is finite exactly when all of them are.

Shapes: pieces [n_i] in fp32, bf16 or fp16; the result is a float64 scalar: sum over all elements of
g^2.

Squares of fp32 numbers have 48 bits and exponents far from float64's ends: in float64 each is
exact, none overflows (3e38 squared is 1e77) or vanishes, and the sum is as good as the number of
additions in a row allows, 1e-16 times a few hundred. So the sum itself shows whether anything
was infinite or not a number, and no second pass or flag is needed. Each program adds up the
blocks of its stride, lane by lane; its sum goes to a buffer that one more reduction adds up in a
fixed order: the same bits every time.

Roofline: 4 bytes a parameter (2 in bf16); 1e9 parameters at 4.3 TB/s: 0.93 ms (0.47 ms). A Hopper
widens 16 numbers to float64 and multiplies 64 a clock on each multiprocessor: a quarter (half) of
the time that the bytes take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.kernels.configurations import find
from megatron.kernels.lang import capability, cdiv, jit, launch, operator, tl
from torch import Tensor


def sum_of_squares_reference(pieces: Sequence[Tensor]) -> Tensor:
    """The sum in float64."""
    return torch.stack([piece.double().square().sum() for piece in pieces]).sum()


@jit
def squares_kernel(piece, partials, size, BLOCK: tl.constexpr):
    """One partial sum a program."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(piece + at, mask=at < size, other=0.0).to(tl.float32).to(tl.float64)
        total += g * g
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))


@operator("sum_of_squares")
def sum_of_squares(pieces: Sequence[Tensor]) -> Tensor:
    """The sum in float64 of at least one piece; one launch a piece."""
    # on Hopper four blocks of eight warps for each of 132 multiprocessors, sixteen elements a
    # thread: 64 kB in flight on each in fp32
    row = find("grad_norm", capability(pieces[0].device))
    block, most = row.numbers["block"], row.numbers["programs"]
    assert all(piece.is_contiguous() and piece.dtype != torch.float64 for piece in pieces)
    programs = [min(most, cdiv(piece.numel(), block)) for piece in pieces]
    partials = torch.empty(sum(programs), dtype=torch.float64, device=pieces[0].device)
    for piece, partial in zip(pieces, partials.split(programs), strict=True):
        if piece.numel():
            grid = (partial.numel(),)
            launch(squares_kernel, grid, row, piece, partial, piece.numel(), BLOCK=block)
    return partials.sum()
