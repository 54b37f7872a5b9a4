"""The generator: known answers, addressability, distribution; in kernels the same words."""

import pytest
import torch
from megatron.kernels import philox
from megatron.kernels.lang import jit, tl
from megatron.kernels.random import philox4x32


def words(*values):
    return [torch.tensor([value], dtype=torch.int64) for value in values]


ONES, PI = (philox.MASK,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    "counter, key, expected",
    [  # Random123's published known answers
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter, key, expected):
    assert tuple(int(x) for x in philox.philox4x32(words(*counter), key)) == expected


@pytest.mark.parametrize(
    "row, column, rows, columns",
    [(0, 0, 7, 9), (3, 1, 20, 33), (17, 4, 1, 1), (0, 63, 40, 2), (5, 60, 35, 4)],
)
def test_any_rectangle_of_weights_alone(row, column, rows, columns):
    key = philox.key(1234, "layers.0.attention.q.weight")
    whole = torch.empty(40, 65)
    philox.normal(whole, key, 0, 0, 0.02)
    part = torch.empty(rows, columns)
    philox.normal(part, key, row, column, 0.02)
    assert torch.equal(part, whole[row : row + rows, column : column + columns])


def test_chunks_do_not_show(monkeypatch):
    key = philox.key(1, "x")
    one, many = torch.empty(64, 40), torch.empty(64, 40)
    philox.normal(one, key, 0, 0, 1.0)
    monkeypatch.setitem(philox.DROPOUT_COUNTERS, "cpu", 17)
    philox.normal(many, key, 0, 0, 1.0)
    assert torch.equal(one, many)


def test_normal_moments():
    x = torch.empty(1000, 1000)
    philox.normal(x, philox.key(7, "moments"), 0, 0, 1.0)
    x = x.double()
    # standard errors of mean, variance and kurtosis of n normals: 1, sqrt 2, sqrt 24 over sqrt n;
    # five of them
    n = x.numel()
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs((x[:, :-1] * x[:, 1:]).mean()) < 5 / n**0.5
    assert abs((x[:-1] * x[1:]).mean()) < 5 / n**0.5


@pytest.mark.parametrize("keep_mask", [philox.keep_mask, philox.keep_mask_of_halves])
def test_keep_mask_share_and_address(keep_mask):
    key = philox.key(3, "dropout")
    sample, position = torch.arange(200).repeat_interleave(50), torch.arange(50).repeat(200)
    mask = keep_mask(key, [sample, position], 101, 0.1)
    n = mask.numel()
    assert abs(mask.double().mean() - 0.9) < 5 * (0.09 / n) ** 0.5
    # standard error of the correlation of neighbours, which share a word, and of two words
    apart = mask.double() - mask.double().mean()
    for distance in (1, 2, 8):
        together = (apart[:, distance:] * apart[:, :-distance]).mean()
        assert abs(together) < 5 * 0.09 / n**0.5
    some = torch.tensor([3, 77, 4001])
    assert torch.equal(keep_mask(key, [sample[some], position[some]], 101, 0.1), mask[some])


def test_keep_mask_of_blocks():
    key, row = philox.key(3, "dropout"), torch.arange(50)
    mask = philox.keep_mask(key, [row, row], 101, 0.1)
    fours = torch.tensor([2, 7])
    found = philox.keep_mask(key, [row, row], 7, 0.1, blocks=fours)
    assert torch.equal(found, mask[:, [*range(8, 12), *range(28, 31)]])


def test_dropout_of_hidden_states_takes_half_words_in_order():
    """The lower half of word 0 first, each as a signed number of 16 bits."""
    key, row = philox.key(3, "dropout"), torch.arange(50)
    zero = torch.zeros_like(row)
    numbers = []
    for word in philox.philox4x32([row, row, zero, zero], key):
        numbers += [word % 2**16, word // 2**16]
    signed = torch.stack(numbers, 1)
    signed = torch.where(signed < 2**15, signed, signed - 2**16)
    for drop in (0.0, 0.1, 0.5, 1 - 2**-17):
        kept = philox.keep_mask_of_halves(key, [row, row], 8, drop)
        assert torch.equal(kept, signed >= min(round(drop * 2**16), 2**16 - 1) - 2**15)


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
def test_words_of_kernels(device, key):
    corners = torch.tensor([0, 1, 2**31 - 1, 2**31, philox.MASK - 1, philox.MASK])
    counters = torch.cat(
        [corners[torch.arange(4 * 6).view(4, 6) % 6], torch.randint(0, 2**32, (4, 58))], 1
    ).to(device)
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    words_kernel[(1,)](counters, out, *key, 64)
    assert torch.equal(out, torch.stack(philox.philox4x32(list(counters), key)))
