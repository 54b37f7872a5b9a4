"""The backward pass of flash attention: probabilities are made again from q, k and lse, tile by
tile.

With dP = dout v^T (dropped as P was) and delta = sum over d of dout out, minus the gradient of lse:

    dS = P (dP - delta),   dq = scale dS k,   dk = scale dS^T q,   dv = (P keep / (1 - drop))^T dout
    (soft-cap: dS (1 - (x / softcap)^2))

dk and dv: one program for N keys of a key head, which goes over all queries of all its query heads,
with keys along the rows of its tiles, so that P^T and dS^T are operands as they are. dq: a program
for M queries goes over their keys, so that every sum has one order and equal runs give equal bits
(7 products a tile); or the dk/dv program adds its part of dq to memory atomically (5 products, sums
in any order; where that exists: why_not_atomic).

Roofline: 10 b n s t d FLOPs (14 for what 7 products are), half of that when causal; 16 b n s d
bytes in bf16 without grouped queries. 8192 tokens, d = 128, 32 heads, causal: 1.37 TFLOP, 1.7 ms at
790 TFLOP/s; 0.54 GB, 0.12 ms at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from megatron.kernels import lang
from megatron.kernels.attention_launch import (
    RUNTIME,
    Options,
    Tiles,
    aligned,
    by_key_head,
    columns,
    configuration,
    constants,
    mask_tensors,
    numbers,
    of_mask,
    operand,
    section,
    table_key,
)
from megatron.kernels.attention_masks import (
    TILE,
    AttentionMask,
    block_of_step,
    fours_of_keys,
    keys_of_queries,
    places_of_keys,
    places_of_queries,
    queries_of_keys,
    queries_of_program,
    schedule,
    steps_of_pass,
    visible,
    visible_tile,
)
from megatron.kernels.attention_tiles import load_tile, store_tile
from megatron.kernels.configurations import find
from megatron.kernels.elements import load_fp32
from megatron.kernels.lang import jit, tl
from megatron.kernels.random import drop_of_head, drop_scores, drop_scores_transposed
from torch import Tensor


def why_not_atomic(
    d: int, softcap: float | None, drop: float, arch: int = lang.HOPPER
) -> str | None:
    """Why dq cannot be added up atomically, in the kernel that makes dk and dv; None when it
    can.
    """
    if d > 128:
        return (
            f"head dimension {d}: its tiles need more shared memory than a block of threads "
            "may have"
        )
    if d > 64 and (softcap is not None or drop > 0):
        return (
            f"{'dropout' if drop > 0 else 'soft-capping'} of attention at head dimension "
            f"{d}: registers are spilled in the loops"
        )
    if refused := find(
        "attention dkv_dq", arch, **table_key(d, Options(1.0, softcap, drop), True)
    ).refused:
        return f"compute capability {arch / 10}: {refused}"
    return None


def heads_of_a_program(programs: int, group: int, multiprocessors: int) -> int:
    """How many of a key head's `group` query heads one program takes: all of them, if that makes
    enough programs for the GPU; fewer if not.
    """
    fitting = [
        members
        for members in range(1, group + 1)
        if group % members == 0 and programs * (group // members) >= multiprocessors
    ]
    return max(fitting, default=1)


@jit
def _rows_of_head(
    x, kv, member, rows, s, step_s, step_kv, step_m, d: tl.constexpr, D: tl.constexpr
):
    """Rows [M] of one head of x [s, b g, m, d] with these strides: [M, D] in fp32, zeros beyond."""
    columns = tl.arange(0, D)
    at = x + kv * step_kv + member * step_m + rows[:, None].to(tl.int64) * step_s + columns[None, :]
    return load_fp32(at, (rows < s)[:, None] & (columns < d)[None, :])


@jit
def prepare_kernel(
    out,
    dout,
    lse,
    dlse,
    base,
    delta,
    s,
    padded,
    group,
    out_s,
    out_kv,
    out_m,
    dout_s,
    dout_kv,
    dout_m,
    d: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """For M rows of one head: base [b, n, padded], lse in base 2, and delta [b, n, padded], the sum
    of out dout over d, minus dlse if there is one.

    Rows beyond the last, and those that see nothing, get base +inf, which makes every p 0, and
    delta 0.
    """
    head = tl.program_id(1)
    kv, member = (head // group).to(tl.int64), head % group
    rows = tl.program_id(0) * M + tl.arange(0, M)
    inside = rows < s
    left = _rows_of_head(out, kv, member, rows, s, out_s, out_kv, out_m, d, D)
    right = _rows_of_head(dout, kv, member, rows, s, dout_s, dout_kv, dout_m, d, D)
    value = tl.sum(left * right, 1)
    at = head.to(tl.int64) * s + rows
    if dlse is not None:
        value -= tl.load(dlse + at, mask=inside, other=0.0)
    total = tl.load(lse + at, mask=inside, other=float("-inf"))
    blind = total == float("-inf")
    at = head.to(tl.int64) * padded + rows
    tl.store(
        base + at, tl.where(blind, float("inf"), total * 1.4426950408889634), mask=rows < padded
    )
    tl.store(delta + at, tl.where(blind, 0.0, value), mask=rows < padded)


@jit
def tanh(x):
    """2 / (1 + exp(-2x)) - 1, to 5e-7: a square of rsqrt takes a third of a division's
    instructions.
    """
    r = tl.rsqrt(1 + tl.exp2(x * -2.8853900817779268))
    return 2 * (r * r) - 1


@jit
def _probabilities(x, base, scale, SOFTCAP: tl.constexpr):
    """(p, slope): exp(scores - lse) of the products x = q k^T and base, lse in base 2; and the
    soft-capped scores' derivative by scale x.
    """
    if SOFTCAP > 0:
        part = tanh(x * (scale / SOFTCAP))
        return tl.exp2(part * (SOFTCAP * 1.4426950408889634) - base), 1 - part * part
    else:
        return tl.exp2(x * (scale * 1.4426950408889634) - base), 1.0


@jit
def _score_gradient(p, dp, delta, slope, SOFTCAP: tl.constexpr):
    """dS of a tile, but for the scale: P (dP - delta), times the soft-cap's slope."""
    ds = p * (dp - delta)
    if SOFTCAP > 0:
        ds *= slope
    return ds


@jit
def _dkv_pass(
    dk,
    dv,
    k_tile,
    v,
    q,
    dout,
    dq,
    base,
    delta,
    kv,
    member,
    bounds,
    b,
    s,
    t,
    key,
    k_at,
    q_positions,
    k_positions,
    starts,
    scale,
    drop,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Take the whole blocks of one head's queries within the bounds, or the MASKED ones, into dk,
    dv [N, D]. Tiles are [N keys, M queries].
    """
    k_index = key + tl.arange(0, N)
    fours = fours_of_keys(k_positions, key, t, N, POSITIONS) if DROPOUT else 0
    first, last = steps_of_pass(bounds, MASKED)
    for step in range(first, last):
        row = block_of_step(step, bounds, MASKED) * M
        rows = row + tl.arange(0, M)
        q_tile = load_tile(q, (kv, member), row, M, D)
        x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        p, slope = _probabilities(x, tl.load(base + rows)[None, :], scale, SOFTCAP)
        if MASKED or DROPOUT:
            q_at, start = places_of_queries(q_positions, starts, b, rows, s, POSITIONS, DOCUMENTS)
        if MASKED:
            queries, keys = q_at[None, :], k_at[:, None]
            see = visible(
                queries, keys, k_index[:, None], start[None, :], t, CAUSAL, WINDOW, DOCUMENTS
            )
            p = tl.where(see, p, 0.0)
        dout_tile = load_tile(dout, (kv, member), row, M, D)
        if DROPOUT:  # one draw of random bits for both
            dp = tl.dot(v, tl.trans(dout_tile), input_precision="ieee")
            kept, dp = drop_scores_transposed(p, dp, drop, q_at, fours, N, M)
            dv = tl.dot(kept.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        else:  # dv first: it needs no registers of dp
            dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(dout_tile), input_precision="ieee")
        ds = _score_gradient(p, dp, tl.load(delta + rows)[None, :], slope, SOFTCAP)
        if MASKED:
            ds = tl.where(see, ds, 0.0)  # a gradient that is NaN stays with the keys of its row
        ds = ds.to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision="ieee")
        if ATOMIC:  # after dk, which needs ds in registers
            part = tl.dot(tl.trans(ds), k_tile, input_precision="ieee")
            dq.atomic_add([kv, member, row, 0], tl.reshape(part, [1, 1, M, D]))
    return dk, dv


@partial(jit, do_not_specialize=RUNTIME)
def dkv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    dq,
    base,
    delta,
    table,
    q_positions,
    k_positions,
    starts,
    samples,
    s,
    padded,
    t,
    heads,
    group,
    members,
    section,
    scale,
    first_head,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    inverse_keep,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TABLE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """N keys, the first ones first (they have the most queries), and `members` query heads of
    theirs.

    ATOMIC: dq / scale [b g, m, s, d] in fp32 is added to. dk, dv [b heads / members, t, d] are
    whole where members = group, else parts in fp32.
    """
    blocks = tl.cdiv(t, N)
    block, head = schedule(tl.program_id(0), blocks, tl.num_programs(0) // blocks, section)
    b, kv = head * members // heads, head * members // group
    key = block * N
    k_index = key + tl.arange(0, N)
    k_tile, v_tile = load_tile(k, (kv,), key, N, D), load_tile(v, (kv,), key, N, D)
    k_at = places_of_keys(k_positions, k_index, t, POSITIONS)
    bounds = queries_of_keys(table, b if DOCUMENTS else 0, key, s, t, CAUSAL, WINDOW, TABLE, M, N)
    dk_tile, dv_tile = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    start = head * members - kv * group
    for member in range(start, start + members):
        row = (kv * group + member).to(tl.int64)
        of_model = first_head + row.to(tl.int32) % heads
        drop = drop_of_head(samples, b, of_model, k0, k1, threshold, inverse_keep, DROPOUT)
        for MASKED in tl.static_range(2):
            dk_tile, dv_tile = _dkv_pass(
                dk_tile,
                dv_tile,
                k_tile,
                v_tile,
                q,
                dout,
                dq,
                base + row * padded,
                delta + row * padded,
                kv,
                member,
                bounds,
                b,
                s,
                t,
                key,
                k_at,
                q_positions,
                k_positions,
                starts,
                scale,
                drop,
                D,
                M,
                N,
                MASKED,
                CAUSAL,
                WINDOW,
                DOCUMENTS,
                POSITIONS,
                SOFTCAP,
                DROPOUT,
                ATOMIC,
            )
    store_tile(dk, (head,), key, dk_tile * scale, N, D)
    store_tile(dv, (head,), key, dv_tile, N, D)


@jit
def _dq_pass(
    dq,
    q,
    dout,
    k,
    v,
    base,
    delta,
    kv,
    bounds,
    t,
    q_at,
    start,
    k_positions,
    scale,
    drop,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Take the whole blocks of keys within the bounds, or the MASKED ones, into dq [M, D]. Tiles
    are [M queries, N keys].
    """
    first, last = steps_of_pass(bounds, MASKED)
    for step in range(first, last):
        key = block_of_step(step, bounds, MASKED) * N
        k_tile = load_tile(k, (kv,), key, N, D)
        x = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        p, slope = _probabilities(x, base[:, None], scale, SOFTCAP)
        v_tile = load_tile(v, (kv,), key, N, D)
        dp = tl.dot(dout, tl.trans(v_tile), input_precision="ieee")
        if DROPOUT:
            fours = fours_of_keys(k_positions, key, t, N, POSITIONS)
            dp = drop_scores(dp, drop, q_at, fours, M, N)
        ds = _score_gradient(p, dp, delta[:, None], slope, SOFTCAP)
        if MASKED:
            see = visible_tile(
                q_at, start, key, k_positions, t, N, CAUSAL, WINDOW, DOCUMENTS, POSITIONS
            )
            ds = tl.where(see, ds, 0.0)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@partial(jit, do_not_specialize=RUNTIME)
def dq_kernel(
    q,
    k,
    v,
    dout,
    dq,
    base,
    delta,
    table,
    q_positions,
    k_positions,
    starts,
    samples,
    s,
    padded,
    t,
    heads,
    group,
    section,
    scale,
    first_head,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    inverse_keep,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TABLE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """M rows of one head, the last ones first: they see the most keys."""
    row, b, head, kv, member = queries_of_program(s, heads, group, section, M)
    rows = row + tl.arange(0, M)
    q_tile = load_tile(q, (kv, member), row, M, D)
    dout_tile = load_tile(dout, (kv, member), row, M, D)
    at = head.to(tl.int64) * padded + rows
    base_tile, delta_tile = tl.load(base + at), tl.load(delta + at)
    q_at, start = places_of_queries(q_positions, starts, b, rows, s, POSITIONS, DOCUMENTS)
    drop = drop_of_head(
        samples, b, first_head + head % heads, k0, k1, threshold, inverse_keep, DROPOUT
    )
    bounds = keys_of_queries(table, b if DOCUMENTS else 0, row, s, t, CAUSAL, WINDOW, TABLE, M, N)
    dq_tile = tl.zeros([M, D], tl.float32)
    for MASKED in tl.static_range(2):
        dq_tile = _dq_pass(
            dq_tile,
            q_tile,
            dout_tile,
            k,
            v,
            base_tile,
            delta_tile,
            kv,
            bounds,
            t,
            q_at,
            start,
            k_positions,
            scale,
            drop,
            D,
            M,
            N,
            MASKED,
            CAUSAL,
            WINDOW,
            DOCUMENTS,
            POSITIONS,
            SOFTCAP,
            DROPOUT,
        )
    store_tile(dq, (kv, member), row, dq_tile * scale, M, D)


def room_for_gradients(qkv: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Unwritten gradients of qkv, three tensors or one, and the parts that launches write: dq [s, b
    g, m, d], dk and dv [t, b g, d].
    """
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    parts = by_key_head(gradients)
    return gradients, tuple(x.view(len(x), x.shape[1] * x.shape[2], *x.shape[3:]) for x in parts)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    mask: AttentionMask,
    options: Options,
    sample_ids: Tensor | None,
) -> list[Tensor]:
    """Gradients of qkv, three tensors or one, from those of out [s, b, n, d] and lse [b, n, s]: one
    launch to prepare, one for dk and dv, one more for dq when deterministic.
    """
    gradients, (dq, dk, dv) = room_for_gradients(qkv)
    call = prepared(dout, dlse, out, lse, qkv, mask, options, sample_ids)
    if options.deterministic:
        _launch_dkv(call, dk, dv, None)
        _launch_dq(call, dq)
    else:
        sum_of_dq = torch.zeros(dq.shape, dtype=torch.float32, device=dq.device)
        _launch_dkv(call, dk, dv, sum_of_dq)
        torch.mul(sum_of_dq, options.scale, out=dq)
    return gradients


class _Call(NamedTuple):
    """What the launches of one backward pass read: q and dout [s, b g, m, d], k and v [t, b g, d].
    `shared`: arguments that all kernels take.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: AttentionMask
    options: Options
    shared: dict[str, Any]

    def tiles(self, kernel: str) -> Tiles:
        """What a kernel is launched with."""
        arch = lang.capability(self.q.device)
        how = self.options, self.mask.causal, self.q.dtype, arch
        return configuration(kernel, self.q.shape[-1], *how)


def prepared(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    mask: AttentionMask,
    options: Options,
    sample_ids: Tensor | None,
) -> _Call:
    """What `backward` was given, as its launches read it, after the launch that prepares lse and
    delta for them.
    """
    q, k, v = by_key_head(qkv)
    (s, _, g, m, _), t = q.shape, len(k)
    out, dout = out.unflatten(2, (g, m)), dout.unflatten(2, (g, m))
    q, k, v, out, dout = (aligned(x.flatten(1, 2)) for x in (q, k, v, out, dout))
    base, delta = _prepare(out, dout, lse, dlse)
    rows = {"padded": base.shape[-1], "base": base, "delta": delta}
    shared = mask_tensors(mask, sample_ids) | numbers(s, t, g * m, g, options) | rows
    return _Call(q, k, v, dout, mask, options, shared)


def _prepare(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """(base, delta) [b, n, s] in fp32, the last dimension padded to whole tiles, of out and dout
    [s, b g, m, d].
    """
    (b, n, s), (m, d) = lse.shape, out.shape[2:]
    base, delta = _room_for_rows(lse)
    rows = base.shape[2]
    prepare = find("attention prepare", lang.capability(out.device))
    prepare_kernel[(rows // prepare.numbers["M"], b * n)](
        out,
        dout,
        lse,
        None if dlse is None else dlse.contiguous(),
        base,
        delta,
        s,
        rows,
        m,
        *out.stride()[:3],
        *dout.stride()[:3],
        d=d,
        D=columns(d),
        M=prepare.numbers["M"],
        **prepare.launch(),
    )
    return base, delta


def _room_for_rows(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of each query [b, n, s], the last dimension padded to whole tiles."""
    *heads, s = lse.shape
    shape = (*heads, -(-s // TILE) * TILE)
    return torch.empty(shape, device=lse.device), torch.empty(shape, device=lse.device)


def room_for_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    causal: bool,
    options: Options,
    keys: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """(the gradients, all else that `backward` allocates). `keys`: that a program takes, by default
    those of our Triton kernel.
    """
    gradients, (dq, dk, dv) = room_for_gradients(qkv)
    q, k, v = by_key_head(qkv)
    groups = q.shape[2:4]
    read = (q, k, v, out.unflatten(2, groups), dout.unflatten(2, groups))
    room = [aligned(x.flatten(1, 2)) for x in read] + [*_room_for_rows(lse)]
    if not options.deterministic:
        room.append(torch.empty(dq.shape, dtype=torch.float32, device=dq.device))
    if not keys:
        kernel = "dkv" if options.deterministic else "dkv_dq"
        arch = lang.capability(q.device)
        keys = configuration(kernel, q.shape[-1], options, causal, q.dtype, arch).N
    (t, heads, _), m = dk.shape, q.shape[3]
    programs = -(-t // keys) * heads
    count = m // heads_of_a_program(programs, m, lang.multiprocessors(q.device))
    return gradients, [*room, room_for_parts(dk, count), room_for_parts(dv, count)]


def _launch_dkv(call: _Call, dk: Tensor, dv: Tensor, sum_of_dq: Tensor | None) -> None:
    """dk and dv [t, b g, d]; dq without its scale is added to `sum_of_dq`, where that is given."""
    (s, _, m, d), (t, groups, _) = call.q.shape, call.k.shape
    tiles = call.tiles("dkv" if sum_of_dq is None else "dkv_dq")
    programs = -(-t // tiles.N) * groups
    members = heads_of_a_program(programs, m, lang.multiprocessors(call.q.device))
    count = m // members
    dk_parts, dv_parts = room_for_parts(dk, count), room_for_parts(dv, count)
    dkv_kernel[(programs * count,)](
        operand(call.q, tiles.M),
        operand(call.k, tiles.N),
        operand(call.v, tiles.N),
        operand(call.dout, tiles.M),
        operand(dk_parts, tiles.N),
        operand(dv_parts, tiles.N),
        None if sum_of_dq is None else operand(sum_of_dq, tiles.M),
        table=call.mask.by_key,
        **call.shared,
        members=members,
        section=section(s, d, call.q.dtype),
        **constants(d, tiles, call.options, **of_mask(call.mask)),
        ATOMIC=sum_of_dq is not None,
        **tiles.launch(),
    )
    add_parts(dk_parts, dk)
    add_parts(dv_parts, dv)


def room_for_parts(whole: Tensor, count: int) -> Tensor:
    """What `count` programs write for each key head of whole [t, b g, d]: parts [t, b g count, d]
    in fp32, or the whole.
    """
    if count == 1:
        return whole
    t, groups, d = whole.shape
    return torch.empty(t, groups * count, d, dtype=torch.float32, device=whole.device)


def add_parts(parts: Tensor, whole: Tensor) -> None:
    """Make the whole of its parts, each key head's in their order."""
    if parts is whole:
        return
    *others, last = parts.unflatten(1, (whole.shape[1], -1)).unbind(2)
    torch.add(reduce(Tensor.add_, others), last, out=whole)


def _launch_dq(call: _Call, dq: Tensor) -> None:
    """dq [s, b g, m, d], each tile by one program."""
    (s, groups, m, d), t = call.q.shape, len(call.k)
    tiles = call.tiles("dq")
    dq_kernel[(-(-s // tiles.M) * groups * m,)](
        operand(call.q, tiles.M),
        operand(call.k, tiles.N),
        operand(call.v, tiles.N),
        operand(call.dout, tiles.M),
        operand(dq, tiles.M),
        table=call.mask.by_query,
        **call.shared,
        section=section(t, d, call.q.dtype, m),
        **constants(d, tiles, call.options, **of_mask(call.mask)),
        **tiles.launch(),
    )
