"""The backward pass of flash attention on Hopper, written out warp by warp in Gluon beside
attention_gluon.py: a kernel for dk and dv, then one for dq, so that every sum has one order.

Formulas and the launch that prepares lse and delta are attention_backward.py's, operands and masks
those of attention_gluon.py. A block of threads holds two operands, 64 rows for each of its two
consumers, and goes over the two others in blocks, which one warp loads through the TMA unit into a
ring of buffers:

- dk, dv: holds k and v of 128 keys and goes over q and dout, with lse and delta, of all queries
  that see them. Scores are transposed (k q^T, keys along the rows), so that P^T and dS^T are
  operands of dv += P^T dout and dk += dS^T q as they lie in registers;
- dq: holds q and dout of 128 queries and goes over k and v; dS is an operand of dq += dS k.

A consumer issues the products for the scores and for dP of a block at once, behind those of the
block before. Exponentials run beside the product for dP, and dS of the dk, dv kernel beside that of
dv. Longest tiles start first, one a block of threads, and the GPU deals out the next one to the
first that is free: a fixed share for each (as in the forward pass) would have to guess their
lengths.

Roofline: 14 b n s t d FLOPs, half of it when causal; 10 count. docs/kernels.md has predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.kernels import lang
from megatron.kernels.attention_backward import (
    add_parts,
    heads_of_a_program,
    prepared,
    room_for_parts,
)
from megatron.kernels.attention_gluon import (
    ROWS,
    VARIANTS,
    TensorDescriptor,
    block_at,
    block_type,
    described,
    gl,
    gluon,
    jit,
    make_barriers,
    make_ring,
    mbarrier,
    store_rows,
    tma,
    visits_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from megatron.kernels.attention_launch import Options, by_key_head, columns, section
from megatron.kernels.attention_masks import (
    TILE,
    AttentionMask,
    keys_of_queries,
    queries_of_keys,
    schedule,
    visible,
)
from megatron.kernels.configurations import find
from torch import Tensor

CONSUMERS = 2  # of ROWS rows each: together the TILE rows that a row of a mask's table serves
RUNTIME = ("s", "t", "heads", "group", "members", "section")  # one compilation for all values


@dataclass(frozen=True)
class GradientLayout:
    """How a block of threads is laid out: rows of a block that it goes over, buffers in the ring,
    registers of a thread in a consumer and in the producer.
    """

    block: int
    stages: int
    registers: int
    producer_registers: int


def configuration(kernel: str, d: int) -> GradientLayout:
    """Of the kernel "dkv" or "dq" for head dimension d, from the table."""
    return GradientLayout(**find(f"attention gluon {kernel}", lang.HOPPER, d=columns(d)).numbers)


@jit
def _load_held(first, second, tiles, full, at, PARTS: gl.constexpr):
    """Copy the rows that a block of threads holds of both operands, 64 for each consumer."""
    first_tiles, second_tiles = tiles
    kv, member, row = at
    R: gl.constexpr = first.block_type.shape[2]
    bar = full.index(0)
    mbarrier.expect(bar, 2 * PARTS * first.block_type.nbytes)
    for part in gl.static_range(PARTS):
        place = [kv, member, row + part * R, 0]
        tma.async_copy_global_to_shared(first, place, bar, first_tiles.index(part))
        tma.async_copy_global_to_shared(second, place, bar, second_tiles.index(part))


@jit
def _free_slot(barriers, count, size: gl.constexpr, STAGES: gl.constexpr):
    """The slot of block `count` of the ring, once all consumers have left it; `size` bytes are
    announced.
    """
    full, empty = barriers
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), size)
    return slot


@jit
def _keys_of_program(
    table,
    sizes,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
):
    """((head among all parts, sample, key head, first member), first key, (span, edges, steps)) of
    this block of threads: the first keys start first, which have the most queries.
    """
    s, t, heads, group, members, section = sizes
    blocks = gl.cdiv(t, N)
    block, head = schedule(gl.program_id(0), blocks, gl.num_programs(0) // blocks, section)
    b, kv = head * members // heads, head * members // group
    key = block * N
    bounds = queries_of_keys(table, b, key, s, t, CAUSAL, WINDOW, TABLE, M, N)
    return (head, b, kv, head * members - kv * group), key, visits_of(bounds)


@jit
def _produce_queries(
    given,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp of the dk, dv kernel: q, dout, lse and delta of all query heads."""
    q, k, v, dout, base, delta, table, buffers, barriers, sizes = given
    held, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    N: gl.constexpr = PARTS * k.block_type.shape[2]
    SIZE: gl.constexpr = 2 * q.block_type.nbytes + 2 * base.block_type.nbytes
    place, key, visits = _keys_of_program(table, sizes, CAUSAL, WINDOW, TABLE, M, N)
    head, b, kv, start = place
    span, edges, steps = visits
    _load_held(k, v, held, held_full, (kv, 0, key), PARTS)
    count = 0
    for member in range(start, start + members):
        for step in range(steps):
            row = block_at(step, span, edges) * M
            slot = _free_slot((full, empty), count, SIZE, STAGES)
            bar = full.index(slot)
            tma.async_copy_global_to_shared(q, [kv, member, row, 0], bar, q_ring.index(slot))
            line = [kv * group + member, row]
            tma.async_copy_global_to_shared(base, line, bar, base_ring.index(slot))
            tma.async_copy_global_to_shared(dout, [kv, member, row, 0], bar, dout_ring.index(slot))
            tma.async_copy_global_to_shared(delta, line, bar, delta_ring.index(slot))
            count += 1


@jit
def _scores(held, tile, X: gl.constexpr):
    """Issue held tile^T: q k^T or dout v^T of a block, or its transpose."""
    unused = gl.full([held.shape[0], tile.shape[0]], 0.0, gl.float32, X)
    return warpgroup_mma(held, tile.permute((1, 0)), unused, use_acc=False, is_async=True)


@jit
def _add(total, factor, tile, O: gl.constexpr):
    """Issue total + factor tile; the factor [64, rows] is in registers."""
    factor = gl.convert_layout(factor.to(tile.dtype), gl.DotOperandLayout(0, O, 2))
    return warpgroup_mma(factor, tile, total, is_async=True)


@jit
def _tiles_of_slot(buffers, barriers, count, STAGES: gl.constexpr):
    """(q [M, D], dout [M, D]) of block `count`, which is waited for."""
    held, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    held_full, full, empty = barriers
    M: gl.constexpr = q_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    slot = count % STAGES
    mbarrier.wait(full.index(slot), count // STAGES & 1)
    return q_ring.index(slot).reshape([M, D]), dout_ring.index(slot).reshape([M, D])


@jit
def _seen_by_queries(
    x,
    step,
    key,
    starts,
    visits,
    s,
    t,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    X: gl.constexpr,
):
    """Which of the keys from `key` on the queries of this step see, of the shape of x. Rows beyond
    the last one see nothing: the lse of a block beyond all rows reads as 0.
    """
    span, edges, steps = visits
    R: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    rows = block_at(step, span, edges) * M + gl.arange(0, M, layout=gl.SliceLayout(0, X))
    start = gl.load(starts + rows, mask=rows < s, other=0) if DOCUMENTS else rows
    keys = gl.expand_dims(key + gl.arange(0, R, layout=gl.SliceLayout(1, X)), 1)
    queries, start = gl.expand_dims(rows, 0), gl.expand_dims(start, 0)
    return visible(queries, keys, keys, start, t, CAUSAL, WINDOW, DOCUMENTS) & (queries < s)


@jit
def _first_queries(
    held,
    buffers,
    barriers,
    starts,
    key,
    visits,
    sizes,
    factor,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    STAGES: gl.constexpr,
    X: gl.constexpr,
    O: gl.constexpr,
):
    """(dS^T [64, M], dv [64, D]) of the first block of queries, which is masked."""
    k_tile, v_tile = held
    tiles, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    s, t, heads, group, members, section = sizes
    R: gl.constexpr = k_tile.shape[0]
    D: gl.constexpr = q_ring.shape[4]
    q_tile, dout_tile = _tiles_of_slot(buffers, barriers, 0, STAGES)
    x = warpgroup_mma_wait(0, deps=[_scores(k_tile, q_tile, X)])
    dp = _scores(v_tile, dout_tile, X)
    see = _seen_by_queries(x, 0, key, starts, visits, s, t, CAUSAL, WINDOW, DOCUMENTS, X)
    p = gl.where(see, gl.exp2(x * factor - base_ring.index(0).load(X)), 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = gl.zeros([R, D], gl.float32, O)
    dv = warpgroup_mma_wait(0, deps=[_add(dv, p, dout_tile, O)])
    return gl.where(see, p * (dp - delta_ring.index(0).load(X)), 0.0), dv


@jit
def _steps_of_keys(
    dk,
    dv,
    ds,
    first,
    last,
    count,
    held,
    buffers,
    barriers,
    starts,
    key,
    visits,
    sizes,
    factor,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    X: gl.constexpr,
    O: gl.constexpr,
):
    """Take the queries of the steps first..last into dv, and those of the step before each into dk:
    ds [64, M] is dS^T of block `count`, whose q has not been multiplied yet.
    """
    k_tile, v_tile = held
    tiles, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    M: gl.constexpr = q_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    for step in range(first, last):
        before = count % STAGES
        count += 1
        slot = count % STAGES
        q_tile, dout_tile = _tiles_of_slot(buffers, barriers, count, STAGES)
        dk = _add(dk, ds, q_ring.index(before).reshape([M, D]), O)
        x = _scores(k_tile, q_tile, X)
        dp = _scores(v_tile, dout_tile, X)
        x, dk = warpgroup_mma_wait(1, deps=[x, dk])
        mbarrier.arrive(empty.index(before), count=1)
        p = gl.exp2(x * factor - base_ring.index(slot).load(X))
        if MASKED:
            see = _seen_by_queries(x, step, key, starts, visits, s, t, CAUSAL, WINDOW, DOCUMENTS, X)
            p = gl.where(see, p, 0.0)
        dv = _add(dv, p, dout_tile, O)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta_ring.index(slot).load(X))
        if MASKED:
            ds = gl.where(see, ds, 0.0)  # a gradient that is NaN stays with the keys of its row
        dv = warpgroup_mma_wait(0, deps=[dv])
    return dk, dv, ds, count


@jit
def _consume_queries(
    given,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer of the dk, dv kernel: its 64 keys."""
    dk, dv, table, starts, buffers, barriers, sizes, scale = given
    held, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    k_tiles, v_tiles = held
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    R: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    place, key, visits = _keys_of_program(table, sizes, CAUSAL, WINDOW, TABLE, M, PARTS * R)
    head, b, kv, start = place
    span, edges, steps = visits
    key += PART * R
    tiles = (k_tiles.index(PART).reshape([R, D]), v_tiles.index(PART).reshape([R, D]))
    starts_of_sample = starts + b * s if TABLE > 0 else starts
    factor = scale * 1.4426950408889634
    mbarrier.wait(held_full.index(0), 0)
    ds, dv_sum = _first_queries(
        tiles,
        buffers,
        barriers,
        starts_of_sample,
        key,
        visits,
        sizes,
        factor,
        CAUSAL,
        WINDOW,
        TABLE > 0,
        STAGES,
        X,
        O,
    )
    dk_sum = gl.zeros([R, D], gl.float32, O)
    count = 0
    for member in range(members):
        for MASKED in gl.static_range(1, -1, -1):
            before = gl.where(member == 0, 1, 0) if MASKED else edges
            dk_sum, dv_sum, ds, count = _steps_of_keys(
                dk_sum,
                dv_sum,
                ds,
                before,
                edges if MASKED else steps,
                count,
                tiles,
                buffers,
                barriers,
                starts_of_sample,
                key,
                visits,
                sizes,
                factor,
                CAUSAL,
                WINDOW,
                TABLE > 0,
                STAGES,
                MASKED,
                X,
                O,
            )
    q_tile = q_ring.index(count % STAGES).reshape([M, D])
    dk_sum = warpgroup_mma_wait(0, deps=[_add(dk_sum, ds, q_tile, O)])
    out_tile = out_tiles.index(PART)
    store_rows(dv, out_tile, dv_sum, [head, 0, key, 0])
    store_rows(dk, out_tile, dk_sum * scale, [head, 0, key, 0])
    tma.store_wait(0)


@partial(jit, do_not_specialize=RUNTIME)
def dkv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    base,
    delta,
    table,
    starts,
    s,
    t,
    heads,
    group,
    members,
    section,
    scale,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    M: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """q, dout: descriptors [b g, m, s, d] of blocks [1, 1, M, D]; k, v [b g, 1, t, d] and dk, dv
    [b g parts, 1, t, d] of [1, 1, 64, D]; base, delta [b n, padded] of [1, M]. Each key head's
    query heads are taken `members` by one block of threads.
    """
    held = (make_ring(k, PARTS), make_ring(v, PARTS))
    rows = (make_ring(base, STAGES), make_ring(delta, STAGES))
    rings = (make_ring(q, STAGES), make_ring(dout, STAGES))
    buffers = (held, rings[0], rings[1], rows[0], rows[1], make_ring(dk, PARTS))
    barriers = (make_barriers(1, 1), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS))
    sizes = (s, t, heads, group, members, section)
    consumer = (dk, dv, table, starts, buffers, barriers, sizes, scale)
    producer = (q, k, v, dout, base, delta, table, buffers, barriers, sizes)
    gl.warp_specialize(
        [
            (_consume_queries, (consumer, 0, PARTS, CAUSAL, WINDOW, TABLE, M, STAGES)),
            (_consume_queries, (consumer, 1, PARTS, CAUSAL, WINDOW, TABLE, M, STAGES)),
            (_produce_queries, (producer, PARTS, CAUSAL, WINDOW, TABLE, M, STAGES)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@jit
def _queries_of_program(
    table,
    sizes,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
):
    """(head of all samples, first row, (span, edges, steps)) of this block of threads: the last
    rows start first, which see the most keys.
    """
    s, t, heads, group, members, section = sizes
    blocks = gl.cdiv(s, M)
    block, head = schedule(gl.program_id(0), blocks, gl.num_programs(0) // blocks, section)
    row = (blocks - 1 - block) * M
    bounds = keys_of_queries(table, head // heads, row, s, t, CAUSAL, WINDOW, TABLE, M, N)
    return head, row, visits_of(bounds)


@jit
def _produce_keys(
    given,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp of the dq kernel: k and v."""
    q, k, v, dout, table, buffers, barriers, sizes = given
    held, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    M: gl.constexpr = PARTS * q.block_type.shape[2]
    SIZE: gl.constexpr = 2 * k.block_type.nbytes
    head, row, visits = _queries_of_program(table, sizes, CAUSAL, WINDOW, TABLE, M, N)
    span, edges, steps = visits
    kv, member = head // group, head % group
    _load_held(q, dout, held, held_full, (kv, member, row), PARTS)
    for step in range(steps):
        key = block_at(step, span, edges) * N
        slot = _free_slot((full, empty), step, SIZE, STAGES)
        bar = full.index(slot)
        tma.async_copy_global_to_shared(k, [kv, 0, key, 0], bar, k_ring.index(slot))
        tma.async_copy_global_to_shared(v, [kv, 0, key, 0], bar, v_ring.index(slot))


@jit
def _seen_keys(
    x,
    step,
    rows,
    visits,
    t,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    X: gl.constexpr,
):
    """Which of this step's keys the queries see, of the shape of x."""
    q_at, start, base, delta = rows
    span, edges, steps = visits
    N: gl.constexpr = x.shape[1]
    column = gl.arange(0, N, layout=gl.SliceLayout(0, X))
    keys = gl.expand_dims(block_at(step, span, edges) * N + column, 0)
    queries, start = gl.expand_dims(q_at, 1), gl.expand_dims(start, 1)
    return visible(queries, keys, keys, start, t, CAUSAL, WINDOW, DOCUMENTS)


@jit
def _first_keys(
    held,
    buffers,
    barriers,
    rows,
    visits,
    t,
    factor,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    STAGES: gl.constexpr,
    X: gl.constexpr,
):
    """dS [64, N] of the first block of keys, which is masked; the second one is waited for."""
    q_tile, dout_tile = held
    tiles, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    q_at, start, base, delta = rows
    span, edges, steps = visits
    N: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = k_ring.shape[4]
    mbarrier.wait(full.index(0), 0)
    x = _scores(q_tile, k_ring.index(0).reshape([N, D]), X)
    dp = _scores(dout_tile, v_ring.index(0).reshape([N, D]), X)
    x, dp = warpgroup_mma_wait(0, deps=[x, dp])
    see = _seen_keys(x, 0, rows, visits, t, CAUSAL, WINDOW, DOCUMENTS, X)
    p = gl.exp2(x * factor - gl.expand_dims(base, 1))
    return gl.where(see, p * (dp - gl.expand_dims(delta, 1)), 0.0)


@jit
def _steps_of_queries(
    dq,
    ds,
    first,
    last,
    held,
    buffers,
    barriers,
    rows,
    visits,
    t,
    factor,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    X: gl.constexpr,
    O: gl.constexpr,
):
    """Take the keys of the step before each of first..last into dq: ds [64, N] is that step's dS.
    The first step's block has been waited for.
    """
    q_tile, dout_tile = held
    tiles, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    q_at, start, base, delta = rows
    span, edges, steps = visits
    N: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = k_ring.shape[4]
    for step in range(first, last):
        slot = step % STAGES
        before = (step + STAGES - 1) % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        dq = _add(dq, ds, k_ring.index(before).reshape([N, D]), O)
        x = _scores(q_tile, k_ring.index(slot).reshape([N, D]), X)
        x, dq = warpgroup_mma_wait(0, deps=[x, dq])
        mbarrier.arrive(empty.index(before), count=1)
        dp = _scores(dout_tile, v_ring.index(slot).reshape([N, D]), X)
        p = gl.exp2(x * factor - gl.expand_dims(base, 1))
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - gl.expand_dims(delta, 1))
        if MASKED:
            see = _seen_keys(x, step, rows, visits, t, CAUSAL, WINDOW, DOCUMENTS, X)
            ds = gl.where(see, ds, 0.0)
    return dq, ds


@jit
def _consume_keys(
    given,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer of the dq kernel: its 64 queries."""
    dq, base, delta, table, starts, buffers, barriers, sizes, padded, scale = given
    held, k_ring, v_ring, out_tiles = buffers
    q_tiles, dout_tiles = held
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    R: gl.constexpr = q_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    head, row, visits = _queries_of_program(table, sizes, CAUSAL, WINDOW, TABLE, PARTS * R, N)
    span, edges, steps = visits
    row += PART * R
    q_at = row + gl.arange(0, R, layout=gl.SliceLayout(1, X))
    inside = q_at < s
    at = gl.cast(head, gl.int64) * padded + q_at
    start = gl.load(starts + head // heads * s + q_at, mask=inside, other=0) if TABLE > 0 else q_at
    rows = (
        q_at,
        start,
        gl.load(base + at, mask=inside, other=float("inf")),
        gl.load(delta + at, mask=inside, other=0.0),
    )
    tiles = (q_tiles.index(PART).reshape([R, D]), dout_tiles.index(PART).reshape([R, D]))
    factor = scale * 1.4426950408889634
    mbarrier.wait(held_full.index(0), 0)
    ds = _first_keys(
        tiles,
        buffers,
        barriers,
        rows,
        visits,
        t,
        factor,
        CAUSAL,
        WINDOW,
        TABLE > 0,
        STAGES,
        X,
    )
    total = gl.zeros([R, D], gl.float32, O)
    for MASKED in gl.static_range(1, -1, -1):
        first, last = (1, edges) if MASKED else (edges, steps)
        total, ds = _steps_of_queries(
            total,
            ds,
            first,
            last,
            tiles,
            buffers,
            barriers,
            rows,
            visits,
            t,
            factor,
            CAUSAL,
            WINDOW,
            TABLE > 0,
            STAGES,
            MASKED,
            X,
            O,
        )
    k_tile = k_ring.index((steps - 1) % STAGES).reshape([N, D])
    total = warpgroup_mma_wait(0, deps=[_add(total, ds, k_tile, O)])
    place = [head // group, head % group, row, 0]
    store_rows(dq, out_tiles.index(PART), total * scale, place)
    tma.store_wait(0)


@partial(jit, do_not_specialize=(*RUNTIME, "padded"))
def dq_kernel(
    q,
    k,
    v,
    dout,
    dq,
    base,
    delta,
    table,
    starts,
    s,
    t,
    heads,
    group,
    members,
    section,
    padded,
    scale,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """q, dout, dq: descriptors [b g, m, s, d] of blocks [1, 1, 64, D]; k, v [b g, 1, t, d] of
    [1, 1, N, D]; base, delta [b n, padded].
    """
    held = (make_ring(q, PARTS), make_ring(dout, PARTS))
    buffers = (held, make_ring(k, STAGES), make_ring(v, STAGES), make_ring(dq, PARTS))
    barriers = (make_barriers(1, 1), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS))
    sizes = (s, t, heads, group, members, section)
    consumer = (dq, base, delta, table, starts, buffers, barriers, sizes, padded, scale)
    producer = (q, k, v, dout, table, buffers, barriers, sizes)
    gl.warp_specialize(
        [
            (_consume_keys, (consumer, 0, PARTS, CAUSAL, WINDOW, TABLE, N, STAGES)),
            (_consume_keys, (consumer, 1, PARTS, CAUSAL, WINDOW, TABLE, N, STAGES)),
            (_produce_keys, (producer, PARTS, CAUSAL, WINDOW, TABLE, N, STAGES)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


def _lines(x: Tensor, count: int) -> Any:
    """x [b, n, padded] in fp32 for the TMA unit, `count` elements of a row at a time."""
    rows = x.flatten(0, 1)
    layout = gl.NVMMASharedLayout.get_default_for([1, count], gl.float32)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, count], layout)


def _fixed(
    layout: GradientLayout, block: str, causal: bool, window: int | None, documents: bool
) -> dict[str, Any]:
    """The arguments that are compiled in; `block` is the name of the rows that the ring takes."""
    return {
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "TABLE": TILE if documents else 0,
        block: layout.block,
        "PARTS": CONSUMERS,
        "STAGES": layout.stages,
        "REGISTERS": layout.registers,
        "PRODUCER_REGISTERS": layout.producer_registers,
    }


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    mask: AttentionMask,
    options: Options,
) -> list[Tensor]:
    """Gradients of qkv, three tensors or one, from those of out [s, b, n, d] and lse [b, n, s]: one
    launch to prepare, one for dk and dv, one for dq.
    """
    assert qkv[0].shape[-1] <= 128 and mask.q_positions is None
    assert options.softcap is None and options.drop == 0
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    dq, dk, dv = (
        x.view(len(x), x.shape[1] * x.shape[2], *x.shape[3:]) for x in by_key_head(gradients)
    )
    call = prepared(dout, dlse, out, lse, qkv, mask, options, None)
    _launch_dkv(call, dk, dv)
    _launch_dq(call, dq)
    return gradients


def _launch_dkv(call: Any, dk: Tensor, dv: Tensor) -> None:
    """dk and dv [t, b g, d] of a prepared call."""
    (s, _, m, d), (t, groups, _), mask = call.q.shape, call.k.shape, call.mask
    layout = configuration("dkv", d)
    programs = -(-t // (CONSUMERS * ROWS)) * groups
    members = heads_of_a_program(programs, m, lang.multiprocessors(call.q.device))
    parts = [room_for_parts(x, m // members) for x in (dk, dv)]
    dkv_kernel[(programs * (m // members),)](
        described(call.q, layout.block),
        described(call.k.unsqueeze(2), ROWS),
        described(call.v.unsqueeze(2), ROWS),
        described(call.dout, layout.block),
        *(described(x.unsqueeze(2), ROWS) for x in parts),
        *(_lines(call.shared[name], layout.block) for name in ("base", "delta")),
        mask.by_key,
        mask.document_starts,
        s=s,
        t=t,
        heads=call.shared["heads"],
        group=m,
        members=members,
        section=section(s, d, call.q.dtype),
        scale=call.options.scale,
        **_fixed(layout, "M", mask.causal, mask.window, mask.document_starts is not None),
        num_warps=4,
    )
    for part, whole in zip(parts, (dk, dv), strict=True):
        add_parts(part, whole)


def _launch_dq(call: Any, dq: Tensor) -> None:
    """dq [s, b g, m, d] of a prepared call."""
    (s, groups, m, d), t, mask = call.q.shape, len(call.k), call.mask
    layout = configuration("dq", d)
    dq_kernel[(-(-s // (CONSUMERS * ROWS)) * groups * m,)](
        described(call.q, ROWS),
        described(call.k.unsqueeze(2), layout.block),
        described(call.v.unsqueeze(2), layout.block),
        described(call.dout, ROWS),
        described(dq, ROWS),
        call.shared["base"],
        call.shared["delta"],
        mask.by_query,
        mask.document_starts,
        s=s,
        t=t,
        heads=call.shared["heads"],
        group=m,
        members=m,
        section=section(t, d, call.q.dtype, m),
        padded=call.shared["padded"],
        scale=call.options.scale,
        **_fixed(layout, "N", mask.causal, mask.window, mask.document_starts is not None),
        num_warps=4,
    )


def _compiled(name: str, d: int, variant: str, parts: bool = False) -> lang.Compiled:
    """The row of the kernel "dkv" or "dq" in bf16; `parts`: dk and dv are parts in fp32."""
    layout = configuration(name, d)
    of_mask = {"causal": True, "window": None, "documents": False} | VARIANTS[variant]
    fixed = _fixed(layout, "M" if name == "dkv" else "N", **of_mask)
    held, ring = (1, 1, ROWS, d), (1, 1, layout.block, d)
    if name == "dkv":
        kernel, lines = dkv_kernel, block_type("fp32", (1, layout.block))
        result = block_type("fp32" if parts else "bf16", held)
        shapes = {"q": ring, "k": held, "v": held, "dout": ring}
        types = {"dk": result, "dv": result, "base": lines, "delta": lines}
    else:
        kernel = dq_kernel
        shapes = {"q": held, "k": ring, "v": ring, "dout": held, "dq": held}
        types = {"base": "*fp32", "delta": "*fp32", "padded": "i32"}
    types |= {key: block_type("bf16", shape) for key, shape in shapes.items()}
    tables = {"table": "*i32", "starts": "*i32"}
    if fixed["TABLE"]:
        types |= tables
    else:
        fixed |= dict.fromkeys(tables)
    return lang.Compiled(
        name=f"attention_gluon_{name}_{d}_{variant}{'_parts' if parts else ''}",
        kernel=kernel,
        signature=types | {"scale": "fp32"} | dict.fromkeys(RUNTIME, "i32"),
        constants=fixed,
        divisible=tuple(key for key, kind in types.items() if kind.startswith("*")),
        num_warps=4,
        matmul=True,
        row=find(f"attention gluon {name}", lang.HOPPER, d=d),
    )


def aot(arch: int = lang.HOPPER) -> Iterator[lang.Compiled]:
    """Head dimensions between take what 64 and 128 compile to. What is spilled lies outside the
    loop over whole blocks, but for one value with documents at d = 128.
    """
    if gluon is None or arch != lang.HOPPER:
        return
    for d in (64, 128):
        for name in ("dkv", "dq"):
            for variant in VARIANTS:
                yield _compiled(name, d, variant)
        yield _compiled("dkv", d, "documents", parts=True)
