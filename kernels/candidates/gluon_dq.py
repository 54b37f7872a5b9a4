"""The kernel for dq of attention's backward pass in Gluon (gluon_backward.py).

A block of threads holds q and dout of 128 queries, 64 for each consumer, and goes over the keys and
values that they see; dS is an operand of dq += dS k as it lies in registers.

A consumer's step: the product of dq for the block before and the scores of this one, then dP, and
next to the exponentials. dP is not issued with the scores: with both in flight next to dq, 64
queries x 128 keys need more registers than a thread has.
"""

from __future__ import annotations

from functools import partial

from megatron.kernels.attention_masks import keys_of_queries, schedule, visible
from megatron.kernels.candidates.gluon_dkv import (
    RUNTIME,
    add_product,
    load_held,
    product_with,
)
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
    warpgroup_mma_wait,
)


@jit
def _queries_of_program(table, sizes, M: gl.constexpr, N: gl.constexpr, FEATURES: gl.constexpr):
    """(head of all samples, first row, (span, edges, steps)) of this block of threads: the last
    rows start first, which see the most keys.
    """
    s, t, heads, group, members, section = sizes
    blocks = gl.cdiv(s, M)
    block, head = schedule(gl.program_id(0), blocks, gl.num_programs(0) // blocks, section)
    row = (blocks - 1 - block) * M
    bounds = keys_of_queries(table, head // heads, row, s, t, M, N, FEATURES)
    return head, row, visits_of(bounds)


@jit
def _produce_keys(given, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """The loading warp of the dq kernel: k and v."""
    q, k, v, dout, table, buffers, barriers, sizes = given
    held, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    M: gl.constexpr = LAYOUT.consumers * q.block_type.shape[2]
    N: gl.constexpr = LAYOUT.block
    SIZE: gl.constexpr = 2 * k.block_type.nbytes
    head, row, visits = _queries_of_program(table, sizes, M, N, FEATURES)
    span, edges, steps = visits
    kv, member = head // group, head % group
    load_held(q, dout, held, held_full, (kv, member, row), LAYOUT.consumers)
    for step in range(steps):
        key = block_at(step, span, edges) * N
        slot = free_slot((full, empty), step, SIZE, LAYOUT.stages)
        bar = full.index(slot)
        tma.async_copy_global_to_shared(k, [kv, 0, key, 0], bar, k_ring.index(slot))
        tma.async_copy_global_to_shared(v, [kv, 0, key, 0], bar, v_ring.index(slot))


@jit
def _seen_keys(x, step, rows, visits, FEATURES: gl.constexpr, X: gl.constexpr):
    """Which of this step's keys the queries see, of the shape of x."""
    q_at, start, base, delta, t = rows
    span, edges, steps = visits
    N: gl.constexpr = x.shape[1]
    column = gl.arange(0, N, layout=gl.SliceLayout(0, X))
    keys = gl.expand_dims(block_at(step, span, edges) * N + column, 0)
    queries, start = gl.expand_dims(q_at, 1), gl.expand_dims(start, 1)
    return visible(queries, keys, keys, start, t, FEATURES)


@jit
def _first_keys(held, memory, rows, visits, factor, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """dS [64, N] of the first block of keys, which is masked; the second one is waited for."""
    q_tile, dout_tile = held
    buffers, barriers = memory
    tiles, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    q_at, start, base, delta, t = rows
    N: gl.constexpr = LAYOUT.block
    D: gl.constexpr = k_ring.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    mbarrier.wait(full.index(0), 0)
    x = product_with(q_tile, k_ring.index(0).reshape([N, D]), X)
    dp = product_with(dout_tile, v_ring.index(0).reshape([N, D]), X)
    x, dp = warpgroup_mma_wait(0, deps=[x, dp])
    see = _seen_keys(x, 0, rows, visits, FEATURES, X)
    p = gl.exp2(x * factor - gl.expand_dims(base, 1))
    gl.thread_barrier()  # else the compiler puts one into the loop, before the wait for a block
    return gl.where(see, p * (dp - gl.expand_dims(delta, 1)), 0.0)


@jit
def _steps_of_queries(
    sums,
    held,
    memory,
    rows,
    visits,
    factor,
    MASKED: gl.constexpr,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Take the keys of the step before each of the MASKED or the other steps into dq: sums are (dq,
    ds) and ds [64, N] is that step's dS. The first step's block has been waited for.
    """
    dq, ds = sums
    q_tile, dout_tile = held
    buffers, barriers = memory
    tiles, k_ring, v_ring, out_tiles = buffers
    held_full, full, empty = barriers
    q_at, start, base, delta, t = rows
    span, edges, steps = visits
    N: gl.constexpr = LAYOUT.block
    D: gl.constexpr = k_ring.shape[4]
    STAGES: gl.constexpr = LAYOUT.stages
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    first, last = (1, edges) if MASKED else (edges, steps)
    for step in range(first, last):
        slot = step % STAGES
        before = (step + STAGES - 1) % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        dq = add_product(dq, ds, k_ring.index(before).reshape([N, D]), O)
        x = product_with(q_tile, k_ring.index(slot).reshape([N, D]), X)
        x, dq = warpgroup_mma_wait(0, deps=[x, dq])
        dp = product_with(dout_tile, v_ring.index(slot).reshape([N, D]), X)
        release(empty.index(before))
        p = gl.exp2(x * factor - gl.expand_dims(base, 1))
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - gl.expand_dims(delta, 1))
        if MASKED:
            see = _seen_keys(x, step, rows, visits, FEATURES, X)
            ds = gl.where(see, ds, 0.0)
    return dq, ds


@jit
def _consume_keys(given, PART: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """A consumer of the dq kernel: its 64 queries."""
    dq, base, delta, table, starts, buffers, barriers, sizes, padded, scale = given
    held, k_ring, v_ring, out_tiles = buffers
    q_tiles, dout_tiles = held
    held_full, full, empty = barriers
    s, t, heads, group, members, section = sizes
    N: gl.constexpr = LAYOUT.block
    R: gl.constexpr = q_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    head, row, visits = _queries_of_program(table, sizes, LAYOUT.consumers * R, N, FEATURES)
    span, edges, steps = visits
    row += PART * R
    q_at = row + gl.arange(0, R, layout=gl.SliceLayout(1, X))
    inside = q_at < s
    at = gl.cast(head, gl.int64) * padded + q_at
    start = q_at
    if FEATURES.documents:
        start = gl.load(starts + head // heads * s + q_at, mask=inside, other=0)
    base_tile = gl.load(base + at, mask=inside, other=float("inf"))
    rows = (q_at, start, base_tile, gl.load(delta + at, mask=inside, other=0.0), t)
    tiles = (q_tiles.index(PART).reshape([R, D]), dout_tiles.index(PART).reshape([R, D]))
    memory = (buffers, barriers)
    factor = scale * 1.4426950408889634
    mbarrier.wait(held_full.index(0), 0)
    ds = _first_keys(tiles, memory, rows, visits, factor, FEATURES, LAYOUT)
    sums = (gl.zeros([R, D], gl.float32, O), ds)
    for MASKED in gl.static_range(1, -1, -1):
        sums = _steps_of_queries(
            sums, tiles, memory, rows, visits, factor, MASKED, FEATURES, LAYOUT
        )
    total, ds = sums
    k_tile = k_ring.index((steps - 1) % LAYOUT.stages).reshape([N, D])
    total = warpgroup_mma_wait(0, deps=[add_product(total, ds, k_tile, O)])
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
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """q, dout, dq: descriptors [b g, m, s, d] of blocks [1, 1, 64, D]; k, v [b g, 1, t, d] of
    [1, 1, N, D]; base, delta [b n, padded].
    """
    PARTS: gl.constexpr = LAYOUT.consumers
    STAGES: gl.constexpr = LAYOUT.stages
    held = (make_ring(q, PARTS), make_ring(dout, PARTS))
    buffers = (held, make_ring(k, STAGES), make_ring(v, STAGES), make_ring(dq, PARTS))
    barriers = (make_barriers(1, 1), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS))
    sizes = (s, t, heads, group, members, section)
    consumer = (dq, base, delta, table, starts, buffers, barriers, sizes, padded, scale)
    producer = (q, k, v, dout, table, buffers, barriers, sizes)
    gl.warp_specialize(
        [
            (_consume_keys, (consumer, 0, FEATURES, LAYOUT)),
            (_consume_keys, (consumer, 1, FEATURES, LAYOUT)),
            (_produce_keys, (producer, FEATURES, LAYOUT)),
        ],
        [4, 1],
        [LAYOUT.registers, LAYOUT.producer_registers],
    )
