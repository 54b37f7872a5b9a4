"""Which keys a query sees, and which blocks of keys a tile of queries has to visit.

A query at position p sees the keys at positions <= p, of these the `window` latest ones (itself
included), and none before the start of its document. Without causality it sees all keys.

Every mask is one mechanism to the kernels: four bounds low <= full_low <= full_high <= high of a
tile of queries, in keys. The tile sees nothing outside [low, high) and everything in [full_low,
full_high); only blocks between are masked, elementwise and exactly, so bounds that are too wide
cost time and nothing else. A tile of keys has the same four bounds in queries (the backward pass of
keys and values). Causality and windows have a closed form that a kernel computes itself; positions
and documents take tables, made once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.kernels.lang import jit, tl
from torch import Tensor

TILE = 128  # a row of a table serves this many queries (or keys); a multiple of every kernel's tile
STEP = 64  # bounds in a table are multiples of it: the smallest block that a kernel visits
LAST = 2**31 - 1


@dataclass(frozen=True)
class AttentionMask:
    """What attention may see, by query_length s and key_length t. Make it with `attention_mask`,
    once for all layers of a micro-batch.

    q_positions [s], k_positions [t], document_starts [b, s]: int32, or None where positions count
    0, 1, 2, ... and a sample is one document. by_query [b or 1, ceil(s / 128), 4] and by_key [b or
    1, ceil(t / 128), 4]: int32 tables of bounds, None where the closed form serves.
    """

    causal: bool = True
    window: int | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    document_starts: Tensor | None = None
    by_query: Tensor | None = None
    by_key: Tensor | None = None

    def dense(self, s: int, t: int, device: torch.device) -> Tensor:
        """[b or 1, 1, s, t], True where a query sees a key: the definition."""
        if not self.causal:
            return torch.ones(1, 1, s, t, dtype=torch.bool, device=device)
        q_at, k_at = positions(self.q_positions, s, device), positions(self.k_positions, t, device)
        distance = q_at[:, None] - k_at[None, :]
        visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        visible = visible[None]
        if self.document_starts is not None:
            visible = visible & (k_at[None, None, :] >= self.document_starts[:, :, None])
        return visible.unsqueeze(1)


def attention_mask(
    s: int,
    t: int,
    *,
    causal: bool = True,
    window: int | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    document_starts: Tensor | None = None,
    tile: int = 0,
) -> AttentionMask:
    """The mask of s queries on t keys; some twenty small operations on the device where it needs
    tables, and no wait for the device.

    q_positions [s], k_positions [t] and document_starts [b, s] are integers of any width. `tile` is
    for tests: tables for square tiles of this size, to be given to the kernels too.
    """
    assert causal or (window is None and q_positions is None and document_starts is None), (
        "without causality every query sees every key"
    )
    assert window is None or window > 0
    assert (q_positions is None) == (k_positions is None), "positions of both or of neither"
    places = (
        x if x is None else x.to(torch.int32).contiguous()
        for x in (q_positions, k_positions, document_starts)
    )
    mask = AttentionMask(causal, window, *places)
    if q_positions is None and document_starts is None:
        return mask
    by_query, by_key = _tables(mask, s, t, tile or TILE, tile or STEP)
    return replace(mask, by_query=by_query, by_key=by_key)


def positions(given: Tensor | None, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device, dtype=torch.int32) if given is None else given


def _extremes(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each `size` consecutive elements of x [..., count]; the last ones may
    be fewer.
    """
    pad = (0, -x.shape[-1] % size)
    low, high = (F.pad(x, pad, value=fill).unflatten(-1, (-1, size)) for fill in (LAST, -1))
    return low.amin(-1), high.amax(-1)


def _blocks_seen(
    mask: AttentionMask, s: int, t: int, queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """(some, whole) [b or 1, query blocks, key blocks]: whether a block of `queries` sees any (all)
    of a block of `keys`.
    """
    device = (mask.document_starts if mask.q_positions is None else mask.q_positions).device
    q_at, k_at = positions(mask.q_positions, s, device), positions(mask.k_positions, t, device)
    starts = mask.document_starts
    if starts is None:
        starts = torch.zeros(1, s, device=device, dtype=torch.int32)
    q_low, q_high = (x[None, :, None] for x in _extremes(q_at, queries))
    k_low, k_high = (x[None, None, :] for x in _extremes(k_at, keys))
    start_low, start_high = (x[:, :, None] for x in _extremes(starts, queries))
    some = (k_low <= q_high) & (k_high >= start_low)
    whole = (k_high <= q_low) & (k_low >= start_high)
    if mask.window is not None:
        some &= q_low - k_high < mask.window
        whole &= q_high - k_low < mask.window
    # the last blocks may be cut
    whole &= torch.arange(k_low.numel(), device=device) < t // keys
    whole &= (torch.arange(q_low.numel(), device=device) < s // queries)[:, None]
    return some, whole


def _tables(mask: AttentionMask, s: int, t: int, tile: int, step: int) -> tuple[Tensor, Tensor]:
    some, whole = _blocks_seen(mask, s, t, tile, step)
    by_query = _bounds(some, whole, step, t)
    some, whole = _blocks_seen(mask, s, t, step, tile)
    return by_query, _bounds(some.transpose(1, 2), whole.transpose(1, 2), step, s)


def _bounds(some: Tensor, whole: Tensor, step: int, length: int) -> Tensor:
    """[b, rows, 4] int32 bounds in elements, from flags [b, rows, blocks] of `step` elements each.
    Whole blocks with gaps between count as none.
    """
    index = torch.arange(some.shape[-1], device=some.device)

    def span(flags: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(flags, index, some.shape[-1]).amin(-1)
        return first, torch.where(flags, index + 1, 0).amax(-1)

    (low, high), (full_low, full_high) = span(some), span(whole)
    low = torch.minimum(low, high)  # nothing is seen: both 0
    solid = (full_high - full_low == whole.sum(-1)) & (full_low < full_high)
    full_low, full_high = (torch.where(solid, x, low) for x in (full_low, full_high))
    bounds = torch.stack([low, full_low, full_high, high], -1) * step
    return bounds.clamp_max(length).to(torch.int32).contiguous()


@dataclass(frozen=True)
class Features:
    """What of the mask and of the scores is compiled into a kernel, which takes it as a constexpr.

    window and softcap: 0 for none. table: how many queries (or keys) a row of the mask's table
    serves, 0 for the closed form.
    """

    causal: bool = True
    window: int = 0
    table: int = 0
    documents: bool = False
    positions: bool = False
    softcap: float = 0.0
    dropout: bool = False


@jit
def _row_of(table, b, first, length, ROWS: tl.constexpr):
    """The four bounds in a table [b, ceil(length / ROWS), 4] of the tile that begins with element
    `first`.
    """
    at = table + (b * tl.cdiv(length, ROWS) + first // ROWS) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@jit
def keys_of_queries(table, b, row, s, t, M: tl.constexpr, N: tl.constexpr, FEATURES: tl.constexpr):
    """Bounds of the M queries from `row` on, in blocks of N keys."""
    if FEATURES.table > 0:
        sample = b if FEATURES.documents else 0
        low, full_low, full_high, high = _row_of(table, sample, row, s, FEATURES.table)
    else:
        last = tl.minimum(row + M, s) - 1
        low, full_low, full_high, high = row * 0, row * 0, t, t
        if FEATURES.causal:
            full_high, high = tl.minimum(t, row + 1), tl.minimum(t, last + 1)
        if FEATURES.window > 0:
            low = tl.maximum(0, row - FEATURES.window + 1)
            full_low = tl.maximum(0, last - FEATURES.window + 1)
    return _blocks(low, full_low, full_high, high, N)


@jit
def queries_of_keys(table, b, key, s, t, M: tl.constexpr, N: tl.constexpr, FEATURES: tl.constexpr):
    """Bounds of the N keys from `key` on, in blocks of M queries. A tile that passes the last key
    is masked everywhere.
    """
    if FEATURES.table > 0:
        sample = b if FEATURES.documents else 0
        low, full_low, full_high, high = _row_of(table, sample, key, t, FEATURES.table)
    else:
        last = key + N - 1
        low, full_low, full_high, high = key * 0, key * 0, s, s
        if FEATURES.causal:
            low, full_low = tl.minimum(key, s), tl.minimum(last, s)
        if FEATURES.window > 0:
            full_high = tl.minimum(s, key + FEATURES.window)
            high = tl.minimum(s, last + FEATURES.window)
        full_high = tl.where(last < t, full_high, 0)
    return _blocks(low, full_low, full_high, high, M)


@jit
def _blocks(low, full_low, full_high, high, SIZE: tl.constexpr):
    """Bounds in elements -> in blocks of SIZE: outwards, the full ones inwards."""
    low, high = low // SIZE, tl.cdiv(high, SIZE)
    full_low = tl.minimum(tl.cdiv(full_low, SIZE), high)
    return low, full_low, tl.maximum(full_high // SIZE, full_low), high


@jit
def steps_of_pass(bounds, MASKED: tl.constexpr):
    """(first, last): the steps in which a tile with these bounds takes the whole blocks or, MASKED,
    those before and after them, a step each.
    """
    low, full_low, full_high, high = bounds
    if MASKED:
        first, last = low, high - (full_high - full_low)
    else:
        first, last = full_low, full_high
    return first, last


@jit
def block_of_step(step, bounds, MASKED: tl.constexpr):
    """The block that a step takes: masked steps pass over the whole blocks between."""
    low, full_low, full_high, high = bounds
    if MASKED:
        block = step + tl.where(step >= full_low, full_high - full_low, 0)
    else:
        block = step
    return block


@jit
def visible(q_at, k_at, k_index, start, t, FEATURES: tl.constexpr):
    """Whether queries see keys, exactly: q_at and start of one shape, k_at and k_index of another,
    which broadcast to a tile or its transpose.
    """
    see = k_index < t
    if FEATURES.causal:
        see = see & (k_at <= q_at)
    if FEATURES.window > 0:
        see = see & (q_at - k_at < FEATURES.window)
    if FEATURES.documents:
        see = see & (k_at >= start)
    return see


@jit
def places_of_queries(q_positions, starts, b, rows, s, FEATURES: tl.constexpr):
    """(positions, starts of their documents) [M] of the queries `rows` of sample b. Where the mask
    knows no positions they count 0, 1, 2, ...; where it knows no documents the starts are not read.
    """
    q_at = tl.load(q_positions + rows, mask=rows < s, other=0) if FEATURES.positions else rows
    start = rows
    if FEATURES.documents:
        start = tl.load(starts + b * s + rows, mask=rows < s, other=0)
    return q_at, start


@jit
def places_of_keys(k_positions, k_index, t, FEATURES: tl.constexpr):
    """Positions [N] of the keys with these indices."""
    if FEATURES.positions:
        return tl.load(k_positions + k_index, mask=k_index < t, other=0)
    else:
        return k_index


@jit
def fours_of_keys(k_positions, key, t, N: tl.constexpr, FEATURES: tl.constexpr):
    """The counters of dropout [N / 4] of the N keys from `key` on: the positions of each four,
    divided by 4. Positions count on within each four keys, from a multiple of 4.
    """
    if FEATURES.positions:
        return places_of_keys(k_positions, key + 4 * tl.arange(0, N // 4), t, FEATURES) // 4
    else:
        return key // 4 + tl.arange(0, N // 4)


@jit
def visible_tile(queries, key, k_positions, t, N: tl.constexpr, FEATURES: tl.constexpr):
    """[M, N]: whether `queries`, their positions and the starts of their documents [M], see the N
    keys from `key` on.
    """
    q_at, start = queries
    k_index = key + tl.arange(0, N)
    k_at = places_of_keys(k_positions, k_index, t, FEATURES)
    return visible(q_at[:, None], k_at[None, :], k_index[None, :], start[:, None], t, FEATURES)


@jit
def queries_of_program(s, heads, group, section, M: tl.constexpr):
    """(row, sample, head of all samples, key head, member of its group): this program has M queries
    of that head from `row` on. The last ones come first: they see the most keys.
    """
    blocks = tl.cdiv(s, M)
    block, head = schedule(tl.program_id(0), blocks, tl.num_programs(0) // blocks, section)
    return (blocks - 1 - block) * M, head // heads, head, head // group, head % group


@jit
def schedule(program, blocks, heads, section):
    """(block, head) of a program: blocks one after another over `section` heads at a time, whose
    keys and values stay in the L2 cache together.

    With the heavy blocks first, programs that end late are short ones.
    """
    first = program // (section * blocks) * section
    within = program % (section * blocks)
    count = tl.minimum(section, heads - first)
    return within // count, first + within % count
