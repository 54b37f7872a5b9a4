"""The kernel for dk and dv of attention's backward pass in Gluon (gluon_backward.py), and
the steps that it shares with the one for dq.

A block of threads holds k and v of 128 keys, 64 for each consumer, and goes over q and dout, with
lse and delta, of all queries that see them. Scores are transposed (k q^T, keys along the rows), so
that P^T and dS^T are operands of dv += P^T dout and dk += dS^T q as they lie in registers.

A consumer's step: the product of dk for the block before, the scores and dP of this one; while dP
is multiplied the exponentials, while dv is, dS. dS goes from step to step in fp32, and no product
does: one that is under way at the end of a step with an operand in registers makes the compiler
wait for every wgmma (C7512).
"""

from __future__ import annotations

from functools import partial

from megatron.kernels.attention_masks import queries_of_keys, schedule, visible
from megatron.kernels.candidates.gluon_forward import (
    block_at,
    free_slot,
    gl,
    jit,
    make_barriers,
    make_ring,
    mbarrier,
    release,
    store_rows,
    tma,
    visits_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RUNTIME = ("s", "t", "heads", "group", "members", "section")  # one compilation for all values


@jit
def load_held(first, second, tiles, full, at, PARTS: gl.constexpr):
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
def product_with(held, tile, X: gl.constexpr):
    """Issue held tile^T: q k^T or dout v^T of a block, or its transpose."""
    unused = gl.full([held.shape[0], tile.shape[0]], 0.0, gl.float32, X)
    return warpgroup_mma(held, tile.permute((1, 0)), unused, use_acc=False, is_async=True)


@jit
def add_product(total, factor, tile, O: gl.constexpr):
    """Issue total + factor tile; the factor [64, rows] is in registers."""
    factor = gl.convert_layout(factor.to(tile.dtype), gl.DotOperandLayout(0, O, 2))
    return warpgroup_mma(factor, tile, total, is_async=True)


@jit
def _keys_of_program(table, sizes, M: gl.constexpr, N: gl.constexpr, FEATURES: gl.constexpr):
    """((head among all parts, sample, key head, first member), first key, (span, edges, steps)) of
    this block of threads: the first keys start first, which have the most queries.
    """
    s, t, heads, group, members, section = sizes
    blocks = gl.cdiv(t, N)
    block, head = schedule(gl.program_id(0), blocks, gl.num_programs(0) // blocks, section)
    b, kv = head * members // heads, head * members // group
    key = block * N
    bounds = queries_of_keys(table, b, key, s, t, M, N, FEATURES)
    return (head, b, kv, head * members - kv * group), key, visits_of(bounds)


@jit
def _load_slot(sources, buffers, bar, slot, at, group):
    """Copy q, dout, lse and delta of the queries of a head from a row on."""
    q, dout, base, delta = sources
    held, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    kv, member, row = at
    line = [kv * group + member, row]
    tma.async_copy_global_to_shared(q, [kv, member, row, 0], bar, q_ring.index(slot))
    tma.async_copy_global_to_shared(base, line, bar, base_ring.index(slot))
    tma.async_copy_global_to_shared(dout, [kv, member, row, 0], bar, dout_ring.index(slot))
    tma.async_copy_global_to_shared(delta, line, bar, delta_ring.index(slot))


@jit
def _produce_queries(given, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """The loading warp of the dk, dv kernel: q, dout, lse and delta of all query heads."""
    q, k, v, dout, base, delta, table, buffers, barriers, sizes = given
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    M: gl.constexpr = LAYOUT.block
    N: gl.constexpr = LAYOUT.consumers * k.block_type.shape[2]
    SIZE: gl.constexpr = 2 * q.block_type.nbytes + 2 * base.block_type.nbytes
    place, key, visits = _keys_of_program(table, sizes, M, N, FEATURES)
    head, b, kv, start = place
    span, edges, steps = visits
    load_held(k, v, buffers[0], held_full, (kv, 0, key), LAYOUT.consumers)
    count = 0
    for member in range(start, start + members):
        for step in range(steps):
            row = block_at(step, span, edges) * M
            slot = free_slot((full, empty), count, SIZE, LAYOUT.stages)
            sources = (q, dout, base, delta)
            _load_slot(sources, buffers, full.index(slot), slot, (kv, member, row), group)
            count += 1


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
def _seen_by_queries(x, step, keys, visits, FEATURES: gl.constexpr, X: gl.constexpr):
    """Which of the keys (the first, starts of the sample's documents, s, t) the queries of this
    step see, of the shape of x. Rows beyond the last one see nothing: the lse of a block beyond all
    rows reads as 0.
    """
    key, starts, s, t = keys
    span, edges, steps = visits
    R: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    rows = block_at(step, span, edges) * M + gl.arange(0, M, layout=gl.SliceLayout(0, X))
    start = rows
    if FEATURES.documents:
        start = gl.load(starts + rows, mask=rows < s, other=0)
    k_at = gl.expand_dims(key + gl.arange(0, R, layout=gl.SliceLayout(1, X)), 1)
    queries, start = gl.expand_dims(rows, 0), gl.expand_dims(start, 0)
    return visible(queries, k_at, k_at, start, t, FEATURES) & (queries < s)


@jit
def _first_queries(
    held, memory, keys, visits, factor, FEATURES: gl.constexpr, LAYOUT: gl.constexpr
):
    """(dS^T [64, M], dv [64, D]) of the first block of queries, which is masked."""
    k_tile, v_tile = held
    buffers, barriers = memory
    tiles, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    M: gl.constexpr = LAYOUT.block
    R: gl.constexpr = k_tile.shape[0]
    D: gl.constexpr = q_ring.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_tile, dout_tile = _tiles_of_slot(buffers, barriers, 0, LAYOUT.stages)
    x = warpgroup_mma_wait(0, deps=[product_with(k_tile, q_tile, X)])
    dp = product_with(v_tile, dout_tile, X)
    see = _seen_by_queries(x, 0, keys, visits, FEATURES, X)
    p = gl.where(see, gl.exp2(x * factor - base_ring.index(0).load(X)), 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = gl.zeros([R, D], gl.float32, O)
    dv = warpgroup_mma_wait(0, deps=[add_product(dv, p, dout_tile, O)])
    ds = gl.where(see, p * (dp - delta_ring.index(0).load(X)), 0.0)
    gl.thread_barrier()  # else the compiler puts one into the loop, before the wait for a block
    return ds, dv


@jit
def _steps_of_keys(
    sums,
    member,
    held,
    memory,
    keys,
    visits,
    factor,
    MASKED: gl.constexpr,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Take the MASKED or the other queries of a head into dv, and those of the step before each
    into dk: sums are (dk, dv, ds, count) and ds [64, M] is dS^T of block `count`, whose q has not
    been multiplied yet.
    """
    dk, dv, ds, count = sums
    k_tile, v_tile = held
    buffers, barriers = memory
    tiles, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    held_full, full, empty = barriers
    span, edges, steps = visits
    M: gl.constexpr = LAYOUT.block
    D: gl.constexpr = q_ring.shape[4]
    STAGES: gl.constexpr = LAYOUT.stages
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # the very first block has been taken
    first = gl.where(member == 0, 1, 0) if MASKED else edges
    for step in range(first, edges if MASKED else steps):
        before = count % STAGES
        count += 1
        slot = count % STAGES
        q_tile, dout_tile = _tiles_of_slot(buffers, barriers, count, STAGES)
        dk = add_product(dk, ds, q_ring.index(before).reshape([M, D]), O)
        x = product_with(k_tile, q_tile, X)
        dp = product_with(v_tile, dout_tile, X)
        x, dk = warpgroup_mma_wait(1, deps=[x, dk])
        p = gl.exp2(x * factor - base_ring.index(slot).load(X))
        if MASKED:
            see = _seen_by_queries(x, step, keys, visits, FEATURES, X)
            p = gl.where(see, p, 0.0)
        dv = add_product(dv, p, dout_tile, O)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta_ring.index(slot).load(X))
        if MASKED:
            ds = gl.where(see, ds, 0.0)  # a gradient that is NaN stays with the keys of its row
        dv = warpgroup_mma_wait(0, deps=[dv])
        release(empty.index(before))
    return dk, dv, ds, count


@jit
def _consume_queries(given, PART: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """A consumer of the dk, dv kernel: its 64 keys."""
    dk, dv, table, starts, buffers, barriers, sizes, scale = given
    held, q_ring, dout_ring, base_ring, delta_ring, out_tiles = buffers
    k_tiles, v_tiles = held
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    M: gl.constexpr = LAYOUT.block
    R: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    place, key, visits = _keys_of_program(table, sizes, M, LAYOUT.consumers * R, FEATURES)
    head, b, kv, start = place
    key += PART * R
    tiles = (k_tiles.index(PART).reshape([R, D]), v_tiles.index(PART).reshape([R, D]))
    keys = (key, starts + b * s if FEATURES.documents else starts, s, t)
    memory = (buffers, barriers)
    factor = scale * 1.4426950408889634
    mbarrier.wait(held_full.index(0), 0)
    ds, dv_sum = _first_queries(tiles, memory, keys, visits, factor, FEATURES, LAYOUT)
    sums = (gl.zeros([R, D], gl.float32, O), dv_sum, ds, 0)
    for member in range(members):
        for MASKED in gl.static_range(1, -1, -1):
            sums = _steps_of_keys(
                sums, member, tiles, memory, keys, visits, factor, MASKED, FEATURES, LAYOUT
            )
    dk_sum, dv_sum, ds, count = sums
    q_tile = q_ring.index(count % LAYOUT.stages).reshape([M, D])
    dk_sum = warpgroup_mma_wait(0, deps=[add_product(dk_sum, ds, q_tile, O)])
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
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """q, dout: descriptors [b g, m, s, d] of blocks [1, 1, M, D]; k, v [b g, 1, t, d] and dk, dv
    [b g parts, 1, t, d] of [1, 1, 64, D]; base, delta [b n, padded] of [1, M]. Each key head's
    query heads are taken `members` by one block of threads.
    """
    PARTS: gl.constexpr = LAYOUT.consumers
    STAGES: gl.constexpr = LAYOUT.stages
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
            (_consume_queries, (consumer, 0, FEATURES, LAYOUT)),
            (_consume_queries, (consumer, 1, FEATURES, LAYOUT)),
            (_produce_queries, (producer, FEATURES, LAYOUT)),
        ],
        [4, 1],
        [LAYOUT.registers, LAYOUT.producer_registers],
    )
