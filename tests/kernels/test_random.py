"""The generator inside kernels equals kernels/philox.py bit for bit."""

import pytest
import torch
from megatron.kernels import philox
from megatron.kernels.lang import jit, tl
from megatron.kernels.random import keep_scores, keep_scores_transposed, keep_tile, philox4x32

KEYS = [(0, 0), (philox.MASK, philox.MASK), (0xA4093822, 0x299F31D0), (3, 0x80000000)]


@jit
def words_kernel(counters, out, k0: tl.uint32, k1: tl.uint32, N: tl.constexpr):
    i = tl.arange(0, N)
    c0, c1 = tl.load(counters + i), tl.load(counters + N + i)
    c2, c3 = tl.load(counters + 2 * N + i), tl.load(counters + 3 * N + i)
    words = philox4x32(c0, c1, c2, c3, k0, k1)
    for lane in tl.static_range(4):
        tl.store(out + lane * N + i, words[lane].to(tl.int64))


@jit
def hidden_kernel(
    out,
    samples,
    positions,
    first_column,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    R: tl.constexpr,
    C: tl.constexpr,
):
    i = tl.arange(0, R)
    sample, position = tl.load(samples + i), tl.load(positions + i)
    keep = keep_tile(sample, position, first_column, k0, k1, threshold, R, C)
    tl.store(out + i[:, None] * C + tl.arange(0, C)[None, :], keep)


@jit
def scores_kernel(
    out,
    samples,
    positions,
    head,
    first_key,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    R: tl.constexpr,
    C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    i, j = tl.arange(0, R), tl.arange(0, C)
    sample, position = tl.load(samples), tl.load(positions + i)
    fours = first_key // 4 + tl.arange(0, C // 4)
    if TRANSPOSED:
        keep = keep_scores_transposed(sample, head, position, fours, k0, k1, threshold, C, R)
        tl.store(out + i[None, :] * C + j[:, None], keep)
    else:
        keep = keep_scores(sample, head, position, fours, k0, k1, threshold, R, C)
        tl.store(out + i[:, None] * C + j[None, :], keep)


@pytest.mark.parametrize("key", KEYS)
def test_words(device, key):
    corners = torch.tensor([0, 1, 2**31 - 1, 2**31, philox.MASK - 1, philox.MASK])
    counters = torch.cat(
        [corners[torch.arange(4 * 6).view(4, 6) % 6], torch.randint(0, 2**32, (4, 58))], 1
    ).to(device)
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    words_kernel[(1,)](counters, out, *key, 64)
    assert torch.equal(out, torch.stack(philox.philox4x32(list(counters), key)))


@pytest.mark.parametrize("drop", [0.1, 0.9])
@pytest.mark.parametrize("key", KEYS)
def test_masks(device, key, drop):
    samples = torch.tensor([5, 2**31 + 7] * 8, device=device)
    positions = torch.arange(3, 19, device=device)
    numbers = (*key, round(drop * 2**32))
    out = torch.empty(16, 32, dtype=torch.bool, device=device)
    hidden_kernel[(1,)](out, samples, positions, 64, *numbers, 16, 32)
    assert torch.equal(out, philox.keep_mask(key, [samples, positions], 32, drop, 64))
    rows = [samples[:1].expand(16), torch.full_like(positions, 9), positions]
    for transposed in (False, True):
        out.fill_(False)
        scores_kernel[(1,)](out, samples, positions, 9, 128, *numbers, 16, 32, transposed)
        assert torch.equal(out, philox.keep_mask(key, rows, 32, drop, 128)), transposed
