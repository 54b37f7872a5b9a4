"""The backward pass of flash attention: probabilities are made again from q, k and lse, tile by
tile.

With dP = dout v^T (dropped as P was) and delta = sum over d of dout out, minus the gradient of lse:

    dS = P (dP - delta),   dq = scale dS k,   dk = scale dS^T q,   dv = (P keep / (1 - drop))^T dout
    (soft-cap: dS (1 - (x / softcap)^2))

dk and dv: one program for N keys of a key head, which goes over all queries of all its query heads,
with keys along the rows of its tiles, so that P^T and dS^T are operands as they are. dq: a program
for M queries goes over their keys, so that every sum has one order and equal runs give equal bits
(7 products a tile); or the dk/dv program adds its part of dq to memory atomically (5 products, sums
in any order; where that exists: unsupported_atomics).

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
    aligned,
    by_key_head,
    columns,
    configuration,
    constants,
    features,
    operand,
    runtime_arguments,
    section,
    table_key,
)
from megatron.kernels.attention_masks import (
    TILE,
    AttentionMask,
    Features,
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
from megatron.kernels.configurations import Row, find
from megatron.kernels.elements import load_fp32
from megatron.kernels.lang import jit, tl
from megatron.kernels.random import drop_of_head, drop_scores, drop_scores_transposed
from torch import Tensor


def unsupported_atomics(
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
        what = "dropout" if drop > 0 else "soft-capping"
        return f"{what} of attention at head dimension {d}: registers are spilled in the loops"
    key = table_key(d, Options(1.0, softcap, drop), causal=True)
    refused = find("attention dkv_dq", arch, **key).refused
    return f"compute capability {arch / 10}: {refused}" if refused else None


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
    head = tl.program_id(0)
    kv, member = (head // group).to(tl.int64), head % group
    rows = tl.program_id(1) * M + tl.arange(0, M)
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
def _probabilities(x, base, scale, FEATURES: tl.constexpr):
    """(p, slope): exp(scores - lse) of the products x = q k^T and base, lse in base 2; and the
    soft-capped scores' derivative by scale x.
    """
    if FEATURES.softcap > 0:
        part = tanh(x * (scale / FEATURES.softcap))
        return tl.exp2(part * (FEATURES.softcap * 1.4426950408889634) - base), 1 - part * part
    else:
        return tl.exp2(x * (scale * 1.4426950408889634) - base), 1.0


@jit
def _score_gradient(p, dp, delta, slope, FEATURES: tl.constexpr):
    """dS of a tile, but for the scale: P (dP - delta), times the soft-cap's slope."""
    ds = p * (dp - delta)
    if FEATURES.softcap > 0:
        ds *= slope
    return ds


@jit
def _dkv_pass(
    sums,
    of_keys,
    of_head,
    of_queries,
    bounds,
    scale,
    drop,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Take the whole blocks of one head's queries within the bounds, or the MASKED ones, into the
    sums dk and dv [N, D]. Score tiles are [N keys, M queries].

    of_keys: (k and v [N, D], the first key, positions [N], those of all keys, t); of_head: (q,
    dout, dq, base, delta, key head, member); of_queries: (positions, starts of documents, sample,
    s).
    """
    dk, dv = sums
    k_tile, v, key, k_at, k_positions, t = of_keys
    q, dout, dq, base, delta, kv, member = of_head
    q_positions, starts, b, s = of_queries
    k_index = key + tl.arange(0, N)
    fours = fours_of_keys(k_positions, key, t, N, FEATURES) if FEATURES.dropout else 0
    first, last = steps_of_pass(bounds, MASKED)
    for step in range(first, last):
        row = block_of_step(step, bounds, MASKED) * M
        rows = row + tl.arange(0, M)
        q_tile = load_tile(q, (kv, member), row, M, D)
        x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        p, slope = _probabilities(x, tl.load(base + rows)[None, :], scale, FEATURES)
        if MASKED or FEATURES.dropout:
            q_at, start = places_of_queries(q_positions, starts, b, rows, s, FEATURES)
        if MASKED:
            queries, keys = q_at[None, :], k_at[:, None]
            see = visible(queries, keys, k_index[:, None], start[None, :], t, FEATURES)
            p = tl.where(see, p, 0.0)
        dout_tile = load_tile(dout, (kv, member), row, M, D)
        if FEATURES.dropout:  # one draw of random bits for both
            dp = tl.dot(v, tl.trans(dout_tile), input_precision="ieee")
            kept, dp = drop_scores_transposed(p, dp, drop, q_at, fours)
            dv = tl.dot(kept.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        else:  # dv first: it needs no registers of dp
            dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(dout_tile), input_precision="ieee")
        ds = _score_gradient(p, dp, tl.load(delta + rows)[None, :], slope, FEATURES)
        if MASKED:
            ds = tl.where(see, ds, 0.0)  # a gradient that is NaN stays with the keys of its row
        ds = ds.to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision="ieee")
        if dq is not None:  # after dk, which needs ds in registers
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
    FEATURES: tl.constexpr,
):
    """N keys, the first ones first (they have the most queries), and `members` query heads of
    theirs.

    dq, unless it is None: dq / scale [b g, m, s, d] in fp32, which is added to. dk, dv [b heads /
    members, t, d] are whole where members = group, else parts in fp32.
    """
    blocks = tl.cdiv(t, N)
    block, head = schedule(tl.program_id(0), blocks, tl.num_programs(0) // blocks, section)
    b, kv = head * members // heads, head * members // group
    key = block * N
    k_tile, v_tile = load_tile(k, (kv,), key, N, D), load_tile(v, (kv,), key, N, D)
    k_at = places_of_keys(k_positions, key + tl.arange(0, N), t, FEATURES)
    of_keys = (k_tile, v_tile, key, k_at, k_positions, t)
    of_queries = (q_positions, starts, b, s)
    bounds = queries_of_keys(table, b, key, s, t, M, N, FEATURES)
    sums = (tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32))
    start = head * members - kv * group
    for member in range(start, start + members):
        row = (kv * group + member).to(tl.int64)
        of_model = first_head + row.to(tl.int32) % heads
        drop = drop_of_head(samples, b, of_model, k0, k1, threshold, inverse_keep, FEATURES.dropout)
        of_head = (q, dout, dq, base + row * padded, delta + row * padded, kv, member)
        for MASKED in tl.static_range(2):
            sums = _dkv_pass(
                sums, of_keys, of_head, of_queries, bounds, scale, drop, D, M, N, MASKED, FEATURES
            )
    dk_tile, dv_tile = sums
    store_tile(dk, (head,), key, dk_tile * scale, N, D)
    store_tile(dv, (head,), key, dv_tile, N, D)


@jit
def _dq_pass(
    dq,
    rows,
    queries,
    keys,
    bounds,
    scale,
    drop,
    D: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Take the whole blocks of keys within the bounds, or the MASKED ones, into dq [M, D]. Score
    tiles are [M queries, N keys].

    rows: (q and dout [M, D], base and delta [M]); queries and keys as of attention._forward_pass.
    """
    q, dout, base, delta = rows
    k, v, kv, k_positions, t = keys
    first, last = steps_of_pass(bounds, MASKED)
    for step in range(first, last):
        key = block_of_step(step, bounds, MASKED) * N
        k_tile = load_tile(k, (kv,), key, N, D)
        x = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        p, slope = _probabilities(x, base[:, None], scale, FEATURES)
        v_tile = load_tile(v, (kv,), key, N, D)
        dp = tl.dot(dout, tl.trans(v_tile), input_precision="ieee")
        if FEATURES.dropout:
            fours = fours_of_keys(k_positions, key, t, N, FEATURES)
            dp = drop_scores(dp, drop, queries[0], fours)
        ds = _score_gradient(p, dp, delta[:, None], slope, FEATURES)
        if MASKED:
            see = visible_tile(queries, key, k_positions, t, N, FEATURES)
            ds = tl.where(see, ds, 0.0)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@jit
def _load_of_rows(base, delta, head, padded, rows):
    """base and delta [M] of these rows of a head."""
    at = head.to(tl.int64) * padded + rows
    return tl.load(base + at), tl.load(delta + at)


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
    FEATURES: tl.constexpr,
):
    """M rows of one head, the last ones first: they see the most keys."""
    row, b, head, kv, member = queries_of_program(s, heads, group, section, M)
    rows = row + tl.arange(0, M)
    q_tile = load_tile(q, (kv, member), row, M, D)
    dout_tile = load_tile(dout, (kv, member), row, M, D)
    base_tile, delta_tile = _load_of_rows(base, delta, head, padded, rows)
    held = (q_tile, dout_tile, base_tile, delta_tile)
    queries = places_of_queries(q_positions, starts, b, rows, s, FEATURES)
    drop = drop_of_head(
        samples, b, first_head + head % heads, k0, k1, threshold, inverse_keep, FEATURES.dropout
    )
    bounds = keys_of_queries(table, b, row, s, t, M, N, FEATURES)
    keys = (k, v, kv, k_positions, t)
    dq_tile = tl.zeros([M, D], tl.float32)
    for MASKED in tl.static_range(2):
        dq_tile = _dq_pass(
            dq_tile, held, queries, keys, bounds, scale, drop, D, N, MASKED, FEATURES
        )
    store_tile(dq, (kv, member), row, dq_tile * scale, M, D)


class BackwardTensors(NamedTuple):
    """The operands of a backward pass, where descriptors can address them, and all that it
    allocates.
    """

    # operands, and the gradients in which dq, dk and dv lie
    q: Tensor  # [s, b g, m, d], as out, dout and dq
    k: Tensor  # [t, b g, d], as v, dk and dv
    v: Tensor
    out: Tensor
    dout: Tensor
    gradients: list[Tensor]  # of qkv: three, or that of the fused projection
    dq: Tensor
    dk: Tensor
    dv: Tensor
    # what programs write, each for `members` of the m query heads of a key head
    members: int
    dk_parts: Tensor  # [t, b g m / members, d] in fp32; dk itself where members = m
    dv_parts: Tensor
    dq_sum: Tensor | None  # in fp32, to which atomics add
    base: Tensor  # [b, n, s padded to whole tiles]: lse in base 2
    delta: Tensor  # likewise: dout out - dlse


def allocate(
    dout: Tensor, out: Tensor, lse: Tensor, qkv: Sequence[Tensor], keys: int, deterministic: bool
) -> BackwardTensors:
    """The tensors of a backward pass whose programs take `keys` keys."""
    q, k, v = by_key_head(qkv)
    heads, m = q.shape[2:4], q.shape[3]
    by_head = (q, k, v, out.unflatten(2, heads), dout.unflatten(2, heads))
    q, k, v, out, dout = (aligned(x.flatten(1, 2)) for x in by_head)
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    dq, dk, dv = (x.view(len(x), -1, *x.shape[3:]) for x in by_key_head(gradients))
    parts = _allocate_parts(dk, dv, m, keys)
    dq_sum = None if deterministic else torch.zeros(dq.shape, device=dq.device)
    *rows, s = lse.shape
    base, delta = (torch.empty(*rows, -(-s // TILE) * TILE, device=lse.device) for _ in range(2))
    operands = (q, k, v, out, dout)
    return BackwardTensors(*operands, gradients, dq, dk, dv, *parts, dq_sum, base, delta)


def _allocate_parts(dk: Tensor, dv: Tensor, m: int, keys: int) -> tuple[int, Tensor, Tensor]:
    """(query heads of a program, what programs write of dk and dv): the m query heads of a key head
    are split over programs where those of `keys` keys alone would leave the GPU idle.
    """
    t, groups, d = dk.shape
    members = heads_of_a_program(lang.cdiv(t, keys) * groups, m, lang.multiprocessors(dk.device))
    if members == m:
        return members, dk, dv
    shape = (t, groups * (m // members), d)
    # Two tensors, so that tests see what a program writes beyond one of them.
    dk_parts, dv_parts = (torch.empty(shape, device=dk.device) for _ in range(2))
    return members, dk_parts, dv_parts


def prepare(tensors: BackwardTensors, lse: Tensor, dlse: Tensor | None) -> dict[str, Any]:
    """Fill base and delta, which are arguments of the kernels."""
    (b, n, s), (m, d), padded = lse.shape, tensors.out.shape[2:], tensors.base.shape[2]
    row = find("attention prepare", lang.capability(lse.device))
    lang.launch(
        prepare_kernel,
        (b * n, padded // row.numbers["M"]),  # a GPU takes 65535 of the second at most
        row,
        tensors.out,
        tensors.dout,
        lse,
        None if dlse is None else dlse.contiguous(),
        tensors.base,
        tensors.delta,
        s,
        padded,
        m,
        *tensors.out.stride()[:3],
        *tensors.dout.stride()[:3],
        d=d,
        D=columns(d),
        M=row.numbers["M"],
    )
    return {"padded": padded, "base": tensors.base, "delta": tensors.delta}


def row_of_keys(qkv: Sequence[Tensor], causal: bool, options: Options) -> Row:
    """What the kernel for dk and dv, or for all three, is launched with."""
    kernel, x = "dkv" if options.deterministic else "dkv_dq", qkv[0]
    arch = lang.capability(x.device)
    return configuration(kernel, x.shape[-1], options, causal, x.dtype, arch)


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
    launch to prepare, one for dk and dv, one more for dq when deterministic.
    """
    q, k, _ = by_key_head(qkv)
    row = row_of_keys(qkv, mask.causal, options)
    tensors = allocate(dout, out, lse, qkv, row.numbers["N"], options.deterministic)
    given = runtime_arguments(q, len(k), mask, options) | prepare(tensors, lse, dlse)
    compiled_in = features(mask, options)
    _launch_dkv(tensors, row, compiled_in, given | {"table": mask.by_key})
    if tensors.dq_sum is None:
        arch = lang.capability(q.device)
        row = configuration("dq", q.shape[-1], options, mask.causal, q.dtype, arch)
        _launch_dq(tensors, row, compiled_in, given | {"table": mask.by_query})
    else:
        torch.mul(tensors.dq_sum, options.scale, out=tensors.dq)
    return tensors.gradients


def _operands(tensors: BackwardTensors, fixed: dict[str, Any]) -> tuple[Any, ...]:
    """q, k, v and dout in blocks of these sizes."""
    sizes = (fixed[name] for name in ("M", "N", "N", "M"))
    return tuple(map(operand, (tensors.q, tensors.k, tensors.v, tensors.dout), sizes))


def _launch_dkv(
    tensors: BackwardTensors, row: Row, compiled_in: Features, given: dict[str, Any]
) -> None:
    """Fill dk and dv; dq without its scale is added to its sum, where there is one."""
    (s, _, m, d), (t, groups, _) = tensors.q.shape, tensors.k.shape
    fixed = constants(d, row, compiled_in)
    lang.launch(
        dkv_kernel,
        (lang.cdiv(t, fixed["N"]) * groups * (m // tensors.members),),
        row,
        *_operands(tensors, fixed),
        operand(tensors.dk_parts, fixed["N"]),
        operand(tensors.dv_parts, fixed["N"]),
        None if tensors.dq_sum is None else operand(tensors.dq_sum, fixed["M"]),
        members=tensors.members,
        section=section(s, d, tensors.q.dtype),
        **given,
        **fixed,
    )
    add_parts(tensors)


def add_parts(tensors: BackwardTensors) -> None:
    """Make dk and dv of their parts, each key head's in their order."""
    for parts, whole in ((tensors.dk_parts, tensors.dk), (tensors.dv_parts, tensors.dv)):
        if parts is not whole:
            *others, last = parts.unflatten(1, (whole.shape[1], -1)).unbind(2)
            torch.add(reduce(Tensor.add_, others), last, out=whole)


def _launch_dq(
    tensors: BackwardTensors, row: Row, compiled_in: Features, given: dict[str, Any]
) -> None:
    """Fill dq, each tile by one program."""
    (s, groups, m, d), t = tensors.q.shape, len(tensors.k)
    fixed = constants(d, row, compiled_in)
    lang.launch(
        dq_kernel,
        (lang.cdiv(s, fixed["M"]) * groups * m,),
        row,
        *_operands(tensors, fixed),
        operand(tensors.dq, fixed["M"]),
        section=section(t, d, tensors.q.dtype, m),
        **given,
        **fixed,
    )
