"""Flash attention forward on Hopper, written out warp by warp in Gluon, the low-level language
within Triton's wheel. The backward pass is gluon_backward.py's.

q, k, v, out and lse as in attention.py, which has the definition and the operator; bf16 and fp16, d
up to 128. A block of threads takes 128 rows of one head after another (a persistent grid). In it:

- one warp loads: q of a tile, then k and v of block after block into two rings of buffers, through
  the TMA unit. A buffer has mbarriers: `full`, on which its copy ends, and `empty`, on which each
  consumer arrives when its products have read the buffer (of k each consumer has its own);
- two consumers, four warps and 64 rows each, multiply and compute exponentials. A consumer issues q
  k^T of block j + 1, then p v of block j, and while both run on the tensor cores waits for the
  first and computes p of block j + 1. They issue their products in turns (PINGPONG), so that one's
  exponentials hide behind the other's products: a turn begins when the consumer before has released
  k of its block, while its p v still runs.

Sources: Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and
low-precision", 2024 (the two overlaps); the PTX manual (mbarriers, wgmma). Edges come first and
masked, then whole blocks without masks; tiles are dealt out long ones first and back and forth, so
that all blocks of threads end together. p is carried as fp32 from one step to the next: as bf16 the
compiler shuffles each register twice.

Roofline: 4 b n s t d FLOPs, half of it when causal. A 64 x 128 block of d = 128 is 1,024 clocks of
products, 528 of exponentials and some 480 instructions a warp; d = 64 halves the products only
(docs/results/attention_kernels.md: predictions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.kernels import lang
from megatron.kernels.attention_launch import (
    Options,
    aligned,
    columns,
    descriptor,
    features,
    outputs,
    section,
)
from megatron.kernels.attention_masks import TILE, AttentionMask, keys_of_queries, schedule
from megatron.kernels.configurations import find
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit = gluon.jit
except ImportError:
    gluon = gl = fence_async_shared = mbarrier = tma = TensorDescriptor = None
    warpgroup_mma = warpgroup_mma_wait = None

    def jit(function: Any, **_: Any) -> Any:
        """The function as it is: it cannot be called."""
        return function


ROWS = 64  # of a consumer: what one wgmma takes
WRITTEN_FOR = "3.6."  # Triton's versions; Gluon is experimental and changes with each
ELEMENTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
RUNTIME = ("s", "t", "all_heads", "heads", "group", "section")  # one compilation for all values


@dataclass(frozen=True)
class TileLayout:
    """How a block of threads is laid out: consumers (2 or 3), N keys a block, buffers in each ring,
    registers of a thread in a consumer and in the producer.
    """

    consumers: int
    N: int
    stages: int
    registers: int
    producer_registers: int
    pingpong: int


def configuration(d: int, kind: str = "shipped") -> TileLayout:
    """For head dimension d, from the table; `three consumers` is there for d = 64, without
    documents, to be measured.
    """
    return TileLayout(**find("attention gluon", lang.HOPPER, d=columns(d), kind=kind).numbers)


@jit
def _count_tiles(sizes, M: gl.constexpr):
    """Tiles of this program."""
    s, t, all_heads, heads, group, section = sizes
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles = gl.cdiv(s, M) * all_heads
    rounds = tiles // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(place < tiles % programs, 1, 0)


@jit
def _tile(index, sizes, M: gl.constexpr):
    """(first row, head of all samples) of this program's tile: every other round of tiles is dealt
    out backwards.
    """
    s, t, all_heads, heads, group, section = sizes
    program, programs = gl.program_id(0), gl.num_programs(0)
    blocks = gl.cdiv(s, M)
    place = gl.where(index % 2 == 0, program, programs - 1 - program)
    block, head = schedule(index * programs + place, blocks, all_heads, section)
    return (blocks - 1 - block) * M, head


@jit
def visits_of(bounds):
    """(span, edges, steps) of a tile with these bounds: it takes `steps` blocks, of which the first
    `edges` are masked; at least one of either, for the first is.
    """
    low, full_low, full_high, high = bounds
    steps, whole = high - low, full_high - full_low
    bare = gl.where((whole > 0) & (whole == steps), 1, 0)
    full_low, whole = full_low + bare, whole - bare
    return (low, full_low, whole), gl.maximum(steps - whole, 1), gl.maximum(steps, 1)


@jit
def _blocks_of_tile(
    table, row, head, sizes, M: gl.constexpr, N: gl.constexpr, FEATURES: gl.constexpr
):
    """visits_of() the blocks of keys that the tile takes."""
    s, t, all_heads, heads, group, section = sizes
    return visits_of(keys_of_queries(table, head // heads, row, s, t, M, N, FEATURES))


@jit
def block_at(step, span, edges):
    """The block of keys that a step takes: the edges on both sides of the whole blocks, then
    those.
    """
    low, full_low, whole = span
    edge = low + step
    return gl.where(
        step < edges, edge + gl.where(edge >= full_low, whole, 0), full_low + step - edges
    )


@jit
def release(empty):
    """Arrive at a buffer's mbarrier once all warps of this partition have read the buffer.

    mbarrier.arrive would be as safe, but the compiler puts a barrier before it and another one
    before the next access to shared memory; it puts none before an arrival that expects no bytes.
    """
    gl.thread_barrier()
    mbarrier.expect(empty, 0)


@jit
def free_slot(
    barriers, count, size: gl.constexpr, STAGES: gl.constexpr, RELEASES: gl.constexpr = 1
):
    """The slot of block `count` of a ring, once its consumers have left it at each of the RELEASES
    mbarriers that it has; `size` bytes are announced.
    """
    full, empty = barriers
    slot = count % STAGES
    for each in gl.static_range(RELEASES):
        mbarrier.wait(empty.index(each * STAGES + slot), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), size)
    return slot


@jit
def _load(source, at, ring, barriers, count, STAGES: gl.constexpr, RELEASES: gl.constexpr = 1):
    """Copy block `count` of all that a ring takes, when its buffer is free."""
    full, empty = barriers
    slot = free_slot(barriers, count, source.block_type.nbytes, STAGES, RELEASES)
    tma.async_copy_global_to_shared(source, at, full.index(slot), ring.index(slot))


@jit
def _load_queries(q, at, q_tiles, q_bars, index, PARTS: gl.constexpr):
    """Copy the rows of a tile, a part for each consumer."""
    kv, member, row = at
    R: gl.constexpr = q.block_type.shape[2]
    for part in gl.static_range(PARTS):
        place = [kv, member, row + part * R, 0]
        _load(q, place, q_tiles, q_bars, index * PARTS + part, PARTS)


@jit
def _produce(given, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """The loading warp: blocks in the order in which consumers release them, k of a block before
    v of the one before it.
    """
    q, k, v, table, buffers, barriers, sizes = given
    q_tiles, k_ring, v_ring, out_tiles = buffers
    q_bars, k_bars, v_bars = barriers
    s, t, all_heads, heads, group, section = sizes
    N: gl.constexpr = LAYOUT.N
    PARTS: gl.constexpr = LAYOUT.consumers
    STAGES: gl.constexpr = LAYOUT.stages
    M: gl.constexpr = PARTS * q.block_type.shape[2]
    count = 0
    for index in range(_count_tiles(sizes, M)):
        row, head = _tile(index, sizes, M)
        kv, member = head // group, head % group
        span, edges, steps = _blocks_of_tile(table, row, head, sizes, M, N, FEATURES)
        _load_queries(q, (kv, member, row), q_tiles, q_bars, index, PARTS)
        at = block_at(0, span, edges) * N
        _load(k, [kv, 0, at, 0], k_ring, k_bars, count, STAGES, PARTS)
        for step in range(1, steps):
            after = block_at(step, span, edges) * N
            _load(k, [kv, 0, after, 0], k_ring, k_bars, count + 1, STAGES, PARTS)
            _load(v, [kv, 0, at, 0], v_ring, v_bars, count, STAGES)
            at = after
            count += 1
        _load(v, [kv, 0, at, 0], v_ring, v_bars, count, STAGES)
        count += 1


@jit
def _softmax(
    x, m, l, factor, rows, first, MASKED: gl.constexpr, FEATURES: gl.constexpr, X: gl.constexpr
):
    """(p, m, l, alpha) with the scores x of one more block, keys from `first` on: alpha is what
    came before is worth now.
    """
    if MASKED:
        q_at, start, t = rows
        column = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, X)), 0)
        beyond = (gl.minimum(q_at + 1, t) if FEATURES.causal else q_at * 0 + t) - first
        see = column < gl.expand_dims(beyond, 1)
        if FEATURES.window > 0:
            see = see & (column > gl.expand_dims(q_at - FEATURES.window - first, 1))
        if FEATURES.documents:
            see = see & (column >= gl.expand_dims(start - first, 1))
        x = gl.where(see, x, float("-inf"))
    top = gl.maximum(m, gl.max(x, 1) * factor)
    base = gl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = gl.exp2(x * factor - gl.expand_dims(base, 1))
    alpha = gl.exp2(m - base)
    return p, top, l * alpha + gl.sum(p, 1), alpha


@jit
def _carried(p, DTYPE: gl.constexpr, PARTS: gl.constexpr):
    """p from one step to the next: as fp32 where registers suffice, for of 16 bits the compiler
    swaps halves, twice.
    """
    return p if PARTS == 2 else p.to(DTYPE)


@jit
def _add_values(acc, alpha, p, v_ring, v_full, count, O: gl.constexpr, STAGES: gl.constexpr):
    """Issue alpha acc + p v of block `count`."""
    N: gl.constexpr = v_ring.shape[3]
    D: gl.constexpr = v_ring.shape[4]
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    v_tile = v_ring.index(count % STAGES).reshape([N, D])
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O)), 1)
    p = gl.convert_layout(p.to(v_ring.dtype), gl.DotOperandLayout(0, O, 2))
    return warpgroup_mma(p, v_tile, acc, is_async=True)


@jit
def _scores(q_tile, k_ring, count, X: gl.constexpr, STAGES: gl.constexpr):
    """Issue q k^T of block `count`, which has been waited for."""
    N: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = k_ring.shape[4]
    k_tile = k_ring.index(count % STAGES).reshape([N, D])
    unused = gl.full([q_tile.shape[0], N], 0.0, gl.float32, X)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), unused, use_acc=False, is_async=True)


@jit
def _wait_for_turn(k_empty, count, PART: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the consumer before this one has its scores: of block `count` + 1, or, for the
    first consumer, the last one's of block `count`.
    """
    block = count + (1 if PART > 0 else 0)
    slot = (PART + PARTS - 1) % PARTS * STAGES + block % STAGES
    mbarrier.wait(k_empty.index(slot), block // STAGES & 1)


@jit
def _steps(
    state,
    q_tile,
    buffers,
    barriers,
    rows,
    visits,
    factor,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The steps after the first that are masked, or those that are not, with the state (acc, alpha,
    p, m, l, count): p and alpha are those of the step before, whose v has not been multiplied yet;
    `count` is its block.
    """
    acc, alpha, p, m, l, count = state
    q_tiles, k_ring, v_ring, out_tiles = buffers
    q_bars, k_bars, v_bars = barriers
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    span, edges, steps = visits
    N: gl.constexpr = LAYOUT.N
    PARTS: gl.constexpr = LAYOUT.consumers
    STAGES: gl.constexpr = LAYOUT.stages
    D: gl.constexpr = k_ring.shape[4]
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    first, last = (1, edges) if MASKED else (edges, steps)
    for step in range(first, last):
        if LAYOUT.pingpong:
            _wait_for_turn(k_empty, count, PART, PARTS, STAGES)
        x = _scores(q_tile, k_ring, count + 1, X, STAGES)
        acc = _add_values(acc, alpha, p, v_ring, v_full, count, O, STAGES)
        x = warpgroup_mma_wait(1, deps=[x])
        release(k_empty.index(PART * STAGES + (count + 1) % STAGES))
        key = block_at(step, span, edges) * N
        p, m, l, alpha = _softmax(x, m, l, factor, rows, key, MASKED, FEATURES, X)
        # waited for here, not above: the branch keeps the compiler from moving the next line before
        # the exponentials
        mbarrier.wait(
            k_full.index((count + 2) % STAGES), (count + 2) // STAGES & 1, pred=step + 1 < steps
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(v_empty.index(count % STAGES))
        p = _carried(p, k_ring.dtype, PARTS)
        count += 1
    return acc, alpha, p, m, l, count


@jit
def _nothing_yet(R: gl.constexpr, ROW: gl.constexpr):
    """(m, l) [R] before the first scores."""
    return gl.full([R], float("-inf"), gl.float32, ROW), gl.zeros([R], gl.float32, ROW)


@jit
def _first_block(
    q_tile,
    k_ring,
    barriers,
    rows,
    index,
    count,
    key,
    steps,
    factor,
    PART: gl.constexpr,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(alpha [64], p [64, N], m, l [64]) of a tile's first block of keys, from `key` on, which is
    masked. q and k are waited for, and k of the second block.
    """
    q_bars, k_bars, v_bars = barriers
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    STAGES: gl.constexpr = LAYOUT.stages
    N: gl.constexpr = LAYOUT.N
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    m, l = _nothing_yet(q_tile.shape[0], gl.SliceLayout(1, X))
    mbarrier.wait(q_full.index(PART), index & 1)
    mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
    x = warpgroup_mma_wait(0, deps=[_scores(q_tile, k_ring, count, X, STAGES)])
    release(k_empty.index(PART * STAGES + count % STAGES))
    p, m, l, alpha = _softmax(x, m, l, factor, rows, key, True, FEATURES, X)
    p = _carried(p, k_ring.dtype, LAYOUT.consumers)
    gl.thread_barrier()  # else the compiler puts one into the loop, before the wait for the turn
    mbarrier.wait(k_full.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=steps > 1)
    return alpha, p, m, l


@jit
def store_rows(target, tile, rows, at):
    """Write rows [R, D] at these coordinates, through shared memory once the store before it has
    left that.
    """
    tma.store_wait(0)
    tile.reshape(rows.shape).store(rows.to(tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, at, tile)


@jit
def _store_tile(out, lse, out_tile, acc, m, l, at, q_at, s, head, O: gl.constexpr):
    """Write acc / l [64, D] to out at the coordinates `at`, and lse; rows that saw nothing get 0
    and -inf.
    """
    total = gl.where(l == 0, 1.0, l)
    result = acc * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O)), 1)
    store_rows(out, out_tile, result, at)
    value = gl.where(l == 0, float("-inf"), m * 0.6931471805599453 + gl.log(total))
    gl.store(lse + gl.cast(head, gl.int64) * s + q_at, value, mask=q_at < s)


@jit
def _accumulate(
    of_first,
    count,
    q_tile,
    buffers,
    barriers,
    rows,
    visits,
    factor,
    PART: gl.constexpr,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(acc [64, D], m, l [64], count) of a tile, from what its first block gave; the products of v
    of its last block are waited for.
    """
    alpha, p, m, l = of_first
    q_tiles, k_ring, v_ring, out_tiles = buffers
    q_bars, k_bars, v_bars = barriers
    v_full, v_empty = v_bars
    q_full, q_empty = q_bars
    STAGES: gl.constexpr = LAYOUT.stages
    R: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    state = (gl.zeros([R, D], gl.float32, O), alpha, p, m, l, count)
    for MASKED in gl.static_range(1, -1, -1):
        state = _steps(
            state, q_tile, buffers, barriers, rows, visits, factor, PART, MASKED, FEATURES, LAYOUT
        )
    acc, alpha, p, m, l, count = state
    release(q_empty.index(PART))
    acc = warpgroup_mma_wait(0, deps=[_add_values(acc, alpha, p, v_ring, v_full, count, O, STAGES)])
    release(v_empty.index(count % STAGES))
    return acc, m, l, count + 1


@jit
def _consume(given, PART: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """A consumer: its 64 rows of tile after tile. m is the greatest score so far in base 2, l the
    sum of exponentials.
    """
    out, lse, table, starts, buffers, barriers, sizes, scale = given
    q_tiles, k_ring, v_ring, out_tiles = buffers
    s, t, all_heads, heads, group, section = sizes
    N: gl.constexpr = LAYOUT.N
    R: gl.constexpr = q_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    M: gl.constexpr = LAYOUT.consumers * R
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_tile, out_tile = q_tiles.index(PART).reshape([R, D]), out_tiles.index(PART)
    factor = scale * 1.4426950408889634
    count = 0
    for index in range(_count_tiles(sizes, M)):
        row, head = _tile(index, sizes, M)
        b, kv, member = head // heads, head // group, head % group
        visits = _blocks_of_tile(table, row, head, sizes, M, N, FEATURES)
        span, edges, steps = visits
        row += PART * R
        q_at = row + gl.arange(0, R, layout=gl.SliceLayout(1, X))
        start = q_at
        if FEATURES.documents:
            start = gl.load(starts + b * s + q_at, mask=q_at < s, other=0)
        rows = (q_at, start, t)
        key = block_at(0, span, edges) * N
        of_first = _first_block(
            q_tile, k_ring, barriers, rows, index, count, key, steps, factor, PART, FEATURES, LAYOUT
        )
        acc, m, l, count = _accumulate(
            of_first, count, q_tile, buffers, barriers, rows, visits, factor, PART, FEATURES, LAYOUT
        )
        _store_tile(out, lse, out_tile, acc, m, l, [kv, member, row, 0], q_at, s, head, O)
    tma.store_wait(0)


@jit
def make_ring(x, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of x."""
    return gl.allocate_shared_memory(x.dtype, [COUNT] + x.block_type.shape, x.layout)


@jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers whose phases end with that number of arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(COUNT):
        mbarrier.init(made.index(each), count=ARRIVALS)
    return made


@partial(jit, do_not_specialize=RUNTIME)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    table,
    starts,
    s,
    t,
    all_heads,
    heads,
    group,
    section,
    scale,
    FEATURES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """q, out: descriptors [b g, m, s, d] of blocks [1, 1, 64, D]; k, v [b g, 1, t, d] of [1, 1, N,
    D]. They read zeros and write nothing beyond.
    """
    PARTS: gl.constexpr = LAYOUT.consumers
    STAGES: gl.constexpr = LAYOUT.stages
    buffers = (
        make_ring(q, PARTS),
        make_ring(k, STAGES),
        make_ring(v, STAGES),
        make_ring(out, PARTS),
    )
    barriers = (
        (make_barriers(PARTS, 1), make_barriers(PARTS, 1)),
        (make_barriers(STAGES, 1), make_barriers(PARTS * STAGES, 1)),
        (make_barriers(STAGES, 1), make_barriers(STAGES, PARTS)),
    )
    sizes = (s, t, all_heads, heads, group, section)
    consumer = (out, lse, table, starts, buffers, barriers, sizes, scale)
    producer = (q, k, v, table, buffers, barriers, sizes)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_consume, (consumer, 0, FEATURES, LAYOUT)),
                (_consume, (consumer, 1, FEATURES, LAYOUT)),
                (_produce, (producer, FEATURES, LAYOUT)),
            ],
            [4, 1],
            [LAYOUT.registers, LAYOUT.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumer, 0, FEATURES, LAYOUT)),
                (_consume, (consumer, 1, FEATURES, LAYOUT)),
                (_consume, (consumer, 2, FEATURES, LAYOUT)),
                (_produce, (producer, FEATURES, LAYOUT)),
            ],
            [4, 4, 1],
            [LAYOUT.registers, LAYOUT.registers, LAYOUT.producer_registers],
        )


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run on tensors of this kind; None when it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')}, the kernel computes bf16 and fp16"
    if device.type != "cuda":
        return "it needs a GPU, Triton's interpreter cannot run Gluon"
    if not torch.cuda.is_available():
        return None  # a plan for another machine
    if lang.capability(device) != lang.HOPPER:
        return (
            f"a GPU of architecture sm_{lang.capability(device)}, the kernel is made of "
            "sm_90's instructions"
        )
    if gluon is None or not lang.triton.__version__.startswith(WRITTEN_FOR):
        return (
            f"it is written in the Gluon of Triton {WRITTEN_FOR}x (pip install "
            f"triton=={WRITTEN_FOR}0)"
        )
    return None


def unsupported_heads(
    d: int | None, *, softcap: float | None = None, drop: float = 0.0
) -> str | None:
    """What the kernels, of either pass, cannot compute of this; None when they can all."""
    if d is not None and (not 32 < d <= 128 or d % 8):
        return f"head dimension {d}, which is no multiple of 8 from 40 to 128"
    if softcap is not None:
        return "soft-capping (--attn-logit-softcapping)"
    return "attention dropout (use --attention-dropout 0)" if drop > 0 else None


def block_type(kind: str, block: Sequence[int]) -> str:
    """The type of a descriptor's argument, of blocks of bf16, fp16 or fp32."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, ELEMENTS[kind]))
    return f"tensordesc<{kind}[{', '.join(map(str, block))}],{layout!r}>"


def described(x: Tensor, rows: int) -> Any:
    """x for the TMA unit, in blocks of `rows`, laid out in shared memory as wgmma reads them."""
    plain = descriptor(x, rows)
    element = getattr(gl, str(x.dtype).removeprefix("torch."))
    return TensorDescriptor(
        plain.base,
        plain.shape,
        plain.strides,
        plain.block_shape,
        gl.NVMMASharedLayout.get_default_for(plain.block_shape, element),
    )


def _check(q: Tensor, mask: AttentionMask, options: Options, layout: TileLayout | None) -> None:
    assert (
        mask.document_starts is None or layout is None or TILE % (layout.consumers * ROWS) == 0
    ), "a row of the mask's table serves whole tiles"
    assert q.shape[4] <= 128 and mask.q_positions is None
    assert unsupported_heads(None, softcap=options.softcap, drop=options.drop) is None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: Options,
    layout: TileLayout | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [s, b, n, d], lse [b, n, s]) of q [s, b, g, m, d], k and v [t, b, g, d], by one
    launch.
    """
    _check(q, mask, options, layout)
    (s, b, g, m, d), t = q.shape, len(k)
    n, layout, (out, lse) = g * m, layout or configuration(d), outputs(q)
    q, k, v = aligned(q.flatten(1, 2)), *(aligned(x.flatten(1, 2).unsqueeze(2)) for x in (k, v))
    programs = min(lang.multiprocessors(q.device), -(-s // (layout.consumers * ROWS)) * b * n)
    forward_kernel[(programs,)](
        described(q, ROWS),
        described(k, layout.N),
        described(v, layout.N),
        described(out.view(q.shape), ROWS),
        lse,
        mask.by_query,
        mask.document_starts,
        s=s,
        t=t,
        all_heads=b * n,
        heads=n,
        group=m,
        section=section(t, d, q.dtype, m),
        scale=options.scale,
        FEATURES=features(mask, options),
        LAYOUT=layout,
        num_warps=4,
    )
    return out, lse
