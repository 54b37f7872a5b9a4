"""The generator inside kernels equals kernels/philox.py bit for bit."""

import pytest
import torch
from megatron.kernels import philox
from megatron.kernels.lang import jit, tl
from megatron.kernels.random import philox4x32

KEYS = [(0, 0), (philox.MASK, philox.MASK), (0xA4093822, 0x299F31D0), (3, 0x80000000)]


@jit
def words_kernel(counters, out, k0: tl.uint32, k1: tl.uint32, N: tl.constexpr):
    i = tl.arange(0, N)
    c0, c1 = tl.load(counters + i), tl.load(counters + N + i)
    c2, c3 = tl.load(counters + 2 * N + i), tl.load(counters + 3 * N + i)
    words = philox4x32(c0, c1, c2, c3, k0, k1)
    for lane in tl.static_range(4):
        tl.store(out + lane * N + i, words[lane].to(tl.int64))


@pytest.mark.parametrize("key", KEYS)
def test_words(device, key):
    corners = torch.tensor([0, 1, 2**31 - 1, 2**31, philox.MASK - 1, philox.MASK])
    counters = torch.cat(
        [corners[torch.arange(4 * 6).view(4, 6) % 6], torch.randint(0, 2**32, (4, 58))], 1
    ).to(device)
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    words_kernel[(1,)](counters, out, *key, 64)
    assert torch.equal(out, torch.stack(philox.philox4x32(list(counters), key)))
