"""Bounds never leave out a key that is seen, nor call a block whole that is not; and they are not
wider than they must be.
"""

import pytest
import torch
from megatron.kernels.attention_masks import (
    STEP,
    TILE,
    Features,
    attention_mask,
    keys_of_queries,
    queries_of_keys,
)
from megatron.kernels.lang import jit, tl

SIZES = [(96, 96), (64, 96), (96, 64), (77, 50), (1, 40), (40, 1)]


@jit
def bounds_kernel(
    out,
    table,
    s,
    t,
    by_query: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tile, b = tl.program_id(0), tl.program_id(1)
    if by_query:
        low, full_low, full_high, high = keys_of_queries(table, b, tile * M, s, t, M, N, FEATURES)
    else:
        low, full_low, full_high, high = queries_of_keys(table, b, tile * N, s, t, M, N, FEATURES)
    at = out + (b * tl.num_programs(0) + tile) * 4
    tl.store(at, low)
    tl.store(at + 1, full_low)
    tl.store(at + 2, full_high)
    tl.store(at + 3, high)


def check(mask, s, t, M, N, tile, by_query, device):
    """The bounds that a kernel computes, against the mask itself."""
    see = mask.dense(s, t, device)[:, 0]
    if not by_query:
        see = see.transpose(1, 2)
    (rows, columns), (row, column) = see.shape[1:], (M, N) if by_query else (N, M)
    tiles = -(-rows // row)
    table = mask.by_query if by_query else mask.by_key
    out = torch.full((len(see), tiles, 4), -1, dtype=torch.int32, device=device)
    has_documents = mask.document_starts is not None
    served = 0 if table is None else tile
    features = Features(mask.causal, mask.window or 0, served, has_documents)
    bounds_kernel[(tiles, len(see))](out, table, s, t, by_query, M, N, features)
    spare = 0
    for b in range(len(see)):
        for index, (low, full_low, full_high, high) in enumerate(out[b].tolist()):
            part = see[b, index * row : (index + 1) * row]
            at = part.any(0).nonzero().flatten()
            gap = full_high - full_low
            # as the kernels go over the edges
            visited = [step + (gap if step >= full_low else 0) for step in range(low, high - gap)]
            blocks = set(visited) | set(range(full_low, full_high))
            assert len(blocks) == len(visited) + gap >= 0
            assert {int(x) // column for x in at} <= blocks
            assert all(0 <= block < -(-columns // column) for block in blocks)
            for block in range(full_low, full_high):
                assert (block + 1) * column <= columns
                assert part[:, block * column : (block + 1) * column].all()
                assert by_query or (index + 1) * row <= rows
            spare += len(blocks - {int(x) // column for x in at})
    return spare


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize("window", [None, 1, 16, 50])
@pytest.mark.default("None-True", "16-False", "50-True")
def test_closed_form(device, window, by_query):
    for s, t in SIZES:
        for M, N in ((32, 16), (16, 32)):
            mask = attention_mask(s, t, window=window)
            assert check(mask, s, t, M, N, 0, by_query, device) == 0 or s != t
            full = attention_mask(s, t, causal=False)
            assert window or check(full, s, t, M, N, 0, by_query, device) == 0


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.default("40-False")
def test_tables(device, window, by_query):
    generator = torch.Generator().manual_seed(3)
    for s, t in SIZES[1:5]:
        k_at = torch.arange(t)
        orders = [k_at.tensor_split(4)[i] for i in (0, 3)]  # a rank of zigzag context parallelism
        some = torch.cat([*orders, torch.arange(t, t + s)])[:s]
        for q_at in (some, torch.randperm(t + s, generator=generator)[:s]):
            starts = torch.randint(0, t, (2, s), generator=generator).minimum(q_at)
            for document_starts in (None, starts):
                given = {"q_positions": q_at.to(device), "k_positions": k_at.to(device)}
                given |= {"document_starts": document_starts, "window": window, "tile": 32}
                mask = attention_mask(s, t, **given)
                check(mask, s, t, 32, 16, 32, by_query, device)


def test_tables_are_tight(device):
    """In order, packed samples and contiguous positions: no block is visited in vain, whole blocks
    between documents are not masked.
    """
    at = torch.arange(640, device=device)
    starts = torch.where(at < 300, 0, 300)[None]
    mask = attention_mask(640, 640, document_starts=starts)
    low, full_low, full_high, high = mask.by_query[0].T.tolist()
    assert low == [0, 0, 0, 256, 256] and high == [128, 256, 384, 512, 640]
    assert full_low == [0, 0, 0, 320, 320] and full_high == [0, 128, 0, 384, 512]
    assert check(mask, 640, 640, TILE, STEP, TILE, True, device) == 0
    assert check(mask, 640, 640, STEP, TILE, TILE, False, device) == 0
    ordered = attention_mask(640, 640, q_positions=at, k_positions=at)
    assert check(ordered, 640, 640, TILE, STEP, TILE, True, device) == 0
