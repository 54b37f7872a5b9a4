"""Flash attention: softmax(scale q k^T) v without the matrix of scores ever in memory, forward
here, backward in attention_backward.py.

q [s, b, n, d], k and v [t, b, g, d] with n a multiple of g (query head i reads key head i // (n /
g)); strided views will do, and so does the fused projection [s, b, g, n / g + 2, d] in their place.
Out [s, b, n, d], and lse [b, n, s] fp32, the natural logarithm of each row's sum of exponentials,
which joins parts of a row that were computed apart:

    x = softcap tanh(scale q k^T / softcap)     (scale q k^T without softcap)
    x = -inf where the query does not see the key
    lse = log sum exp x,   p = exp(x - lse)
    out = (p keep / (1 - drop)) v
    a row that sees nothing: out 0, lse -inf, gradients 0

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
ICLR 2024. Exponentials are of base 2 with the scale folded in; whole blocks come first and without
masks, then the edges (attention_masks.py); the longest rows start first.

Roofline: 4 b n s t d FLOPs forward and 10 backward (14 for what the deterministic mode computes),
half of that when causal. 8192 tokens, d = 128, 32 heads, causal: 0.55 TFLOP forward, 0.7 ms at the
790 TFLOP/s that matrix products reach on an H200; its 268 MB take 0.06 ms at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.kernels import lang, philox
from megatron.kernels.attention_backward import (
    allocate,
    backward,
    row_of_keys,
    tanh,
    unsupported_atomics,
)
from megatron.kernels.attention_launch import (
    RUNTIME,
    Options,
    aligned,
    by_key_head,
    configuration,
    constants,
    features,
    operand,
    outputs,
    runtime_arguments,
    section,
    table_key,
)
from megatron.kernels.attention_masks import (
    AttentionMask,
    block_of_step,
    fours_of_keys,
    keys_of_queries,
    places_of_queries,
    positions,
    queries_of_program,
    steps_of_pass,
    visible_tile,
)
from megatron.kernels.attention_tiles import load_tile, store_tile
from megatron.kernels.configurations import find
from megatron.kernels.dispatch import load_candidate
from megatron.kernels.lang import jit, operator, register_autograd, tl
from megatron.kernels.random import drop_of_head, drop_scores
from torch import Tensor

from megatron.config.errors import UserError


def keep_mask(
    key: philox.Key,
    sample_ids: Tensor,
    heads: Tensor,
    queries: Tensor,
    keys: int,
    drop: float,
    k_positions: Tensor | None = None,
) -> Tensor:
    """Which attention probabilities dropout keeps: bool [b, n, s, keys], of samples [b], heads [n]
    of the model and query positions [s].

    Counter (sample, head, query, key // 4), lane key % 4, of the stream `key`. k_positions [keys],
    where they are not 0, 1, 2, ...: within each four they count on, from a multiple of 4.
    """
    rows = torch.broadcast_tensors(
        sample_ids[:, None, None], heads[None, :, None], queries[None, None, :]
    )
    fours = None if k_positions is None else k_positions[::4].long() // 4
    words = [word.flatten() for word in rows]
    return philox.keep_mask(key, words, keys, drop, blocks=fours).view(*rows[0].shape, keys)


def _seen(mask: AttentionMask, x: Tensor) -> Tensor:
    """Where queries see keys, of scores x [b, n, s, t]."""
    return mask.dense(*x.shape[-2:], x.device)


def _softmax_of_seen(x: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """(lse [b, n, s], p [b, n, s, t]) of scores x [b, n, s, t] where queries see keys; of rows that
    see nothing lse is -inf and p 0.
    """
    s, t = x.shape[-2:]
    see = _seen(mask, x)
    x = x.masked_fill(~see, float("-inf"))
    if mask.q_positions is None and s <= t:  # each query sees itself
        return torch.logsumexp(x, -1), torch.softmax(x, -1)
    blind = ~see.any(-1)
    x = x.masked_fill(blind[..., None], 0.0)  # the gradient of a softmax of nothing is NaN
    lse, p = torch.logsumexp(x, -1), torch.softmax(x, -1)
    return lse.masked_fill(blind, float("-inf")), p.masked_fill(blind[..., None], 0.0)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """The definition: (out [s, b, n, d], lse [b, n, s] in fp32 or fp64), of any dtype and
    differentiable. `fields` are those of Options. Dropout is that of `keep_mask`.
    """
    options = Options(**fields)
    q, k, v = _by_query_head(q, k, v)
    x, _ = _scores(q, k, options)
    lse, p = _softmax_of_seen(x, mask)
    if options.drop > 0:
        # autograd saves the mask as bools, where a factor in p's precision takes 4 bytes
        p = p * _kept(p, mask, options) * (1 / (1 - options.drop))
    return (p.to(v.dtype) @ v).permute(2, 0, 1, 3), lse


def attention_reference_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """What keys k and values v [t, b, g, d] give to the gradients (dq, dk, dv), where they may be a
    part of those that out [s, b, n, d] and lse [b, n, s] are of: the parts' dq add up. By the
    formulas of attention_backward.py.
    """
    group, wide = q.shape[2] // k.shape[2], lse.dtype
    dout, out = (x.permute(1, 2, 0, 3) for x in (dout, out))
    q, k, v = _by_query_head(q, k, v)
    x, tanh_of_x = _scores(q, k, options)
    p = torch.exp(x - lse[..., None]).masked_fill(~_seen(mask, x), 0.0)
    factor = _dropout_factor(p, mask, options)
    dp = (dout @ v.transpose(-1, -2)).to(wide) * factor
    ds = p * (dp - (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)) * options.scale
    if tanh_of_x is not None:
        ds = ds * (1 - tanh_of_x.square())
    ds = ds.to(q.dtype)
    dk, dv = _of_keys(ds, q, group), _of_keys((p * factor).to(v.dtype), dout, group)
    return (ds @ k).permute(2, 0, 1, 3), dk, dv


def _of_keys(weights: Tensor, rows: Tensor, group: int) -> Tensor:
    """[t, b, g, d]: the sums of rows [b, n, s, d] of the queries, with weights [b, n, s, t], over
    queries and over the query heads of each key head.
    """
    summed = weights.transpose(-1, -2) @ rows
    return summed.unflatten(1, (-1, group)).sum(2).permute(2, 0, 1, 3)


def _dropout_factor(p: Tensor, mask: AttentionMask, options: Options) -> Tensor | float:
    """What dropout multiplies probabilities p [b, n, s, t] by."""
    if options.drop == 0:
        return 1.0
    return _kept(p, mask, options).to(p.dtype) * (1 / (1 - options.drop))


def _kept(p: Tensor, mask: AttentionMask, options: Options) -> Tensor:
    """Which of the probabilities p [b, n, s, t] dropout keeps (bool)."""
    assert options.sample_ids is not None
    n, s, t = p.shape[1:]
    at = positions(mask.q_positions, s, p.device).long()
    heads = torch.arange(options.first_head, options.first_head + n, device=p.device)
    samples, key, drop = options.sample_ids, options.key, options.drop
    return keep_mask(key, samples, heads, at, t, drop, mask.k_positions)


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, n, length, d] of each, keys and values repeated for their queries."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _scores(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """(scores [b, n, s, t] in fp32 or fp64, the tanh of their soft-cap)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    x = (q @ k.transpose(-1, -2)).to(wide) * options.scale
    if options.softcap is None:
        return x, None
    tanh_of_x = torch.tanh(x / options.softcap)
    return options.softcap * tanh_of_x, tanh_of_x


@jit
def capped(x, scale, FEATURES: tl.constexpr):
    """(y, factor): y factor are the scores q k^T scale in base 2, soft-capped where they are."""
    if FEATURES.softcap > 0:
        y = (FEATURES.softcap * 1.4426950408889634) * tanh(x * (scale / FEATURES.softcap))
        factor = 1.0
    else:
        y = x
        factor = scale * 1.4426950408889634
    return y, factor


@jit
def online_softmax(x, factor, m, l, MASKED: tl.constexpr):
    """(p [M, N], m, l, alpha [M]) with the scores x factor [M, N] of one more block of keys: the
    greatest score so far, the sum so far, and alpha, what sums over the blocks before are worth
    now.
    """
    top = tl.maximum(m, tl.max(x, 1) * factor)
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(x * factor - base[:, None])
    alpha = tl.exp2(m - base)
    return p, top, l * alpha + tl.sum(p, 1), alpha


@jit
def _forward_pass(
    sums,
    q,
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
    """Take the whole blocks of keys within the bounds, or the MASKED ones, into the sums (acc
    [M, D], m [M] the greatest score so far, l [M] the sum).

    queries: (positions, starts of their documents) [M]; keys: (k, v, their head, positions, t).
    """
    acc, m, l = sums
    k, v, kv, k_positions, t = keys
    first, last = steps_of_pass(bounds, MASKED)
    for step in range(first, last):
        key = block_of_step(step, bounds, MASKED) * N
        k_tile = load_tile(k, (kv,), key, N, D)
        x, factor = capped(tl.dot(q, tl.trans(k_tile), input_precision="ieee"), scale, FEATURES)
        if MASKED:
            see = visible_tile(queries, key, k_positions, t, N, FEATURES)
            x = tl.where(see, x, float("-inf"))
        p, m, l, alpha = online_softmax(x, factor, m, l, MASKED)
        if FEATURES.dropout:
            fours = fours_of_keys(k_positions, key, t, N, FEATURES)
            p = drop_scores(p, drop, queries[0], fours)
        v_tile = load_tile(v, (kv,), key, N, D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, m, l


@jit
def _store_output(out, lse, sums, at, row, head, s, D: tl.constexpr):
    """Write acc / l [M, D] of the sums to out, rows from `row` on at the coordinates `at`, and lse
    of this head.
    """
    acc, m, l = sums
    total = tl.where(l == 0, 1.0, l)
    store_tile(out, at, row, acc / total[:, None], acc.shape[0], D)
    value = tl.where(l == 0, float("-inf"), m * 0.6931471805599453 + tl.log(total))
    rows = row + tl.arange(0, acc.shape[0])
    tl.store(lse + head.to(tl.int64) * s + rows, value, mask=rows < s)


@partial(jit, do_not_specialize=RUNTIME)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    table,
    q_positions,
    k_positions,
    starts,
    samples,
    s,
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
    """M rows of one head. q, out: descriptors [b g, m, s, d] of blocks [1, 1, M, D]; k, v [b g, t,
    d] of [1, N, D]. They read zeros and write nothing beyond.
    """
    row, b, head, kv, member = queries_of_program(s, heads, group, section, M)
    rows = row + tl.arange(0, M)
    q_tile = load_tile(q, (kv, member), row, M, D)
    queries = places_of_queries(q_positions, starts, b, rows, s, FEATURES)
    drop = drop_of_head(
        samples, b, first_head + head % heads, k0, k1, threshold, inverse_keep, FEATURES.dropout
    )
    bounds = keys_of_queries(table, b, row, s, t, M, N, FEATURES)
    sums = (
        tl.zeros([M, D], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
    )
    keys = (k, v, kv, k_positions, t)
    for MASKED in tl.static_range(2):
        sums = _forward_pass(
            sums, q_tile, queries, keys, bounds, scale, drop, D, N, MASKED, FEATURES
        )
    _store_output(out, lse, sums, (kv, member), row, head, s, D)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, options: Options
) -> tuple[Tensor, Tensor]:
    """(out [s, b, n, d], lse [b, n, s]) of q [s, b, g, m, d], k and v [t, b, g, d], by one
    launch.
    """
    (s, b, g, m, d), t = q.shape, len(k)
    out, lse = outputs(q)
    given = runtime_arguments(q, t, mask, options)
    q, k, v = (aligned(x.flatten(1, 2)) for x in (q, k, v))
    tiles = configuration("forward", d, options, mask.causal, q.dtype, lang.capability(q.device))
    fixed = constants(d, tiles, features(mask, options))
    lang.launch(
        forward_kernel,
        (lang.cdiv(s, fixed["M"]) * b * g * m,),
        tiles,
        operand(q, fixed["M"]),
        operand(k, fixed["N"]),
        operand(v, fixed["N"]),
        operand(out.view(q.shape), fixed["M"]),
        lse,
        mask.by_query,
        section=section(t, d, q.dtype, m),
        **given,
        **fixed,
    )
    return out, lse


def unsupported_heads(
    d: int,
    arch: int = lang.HOPPER,
    dtype: torch.dtype = torch.bfloat16,
    *,
    softcap: float | None = None,
    drop: float = 0.0,
) -> str | None:
    """Why the kernels cannot take heads of dimension d on a GPU of this architecture; None when
    they can.
    """
    if d > 256 or d % 8:
        return f"head dimension {d}, which is no multiple of 8 up to 256"
    if dtype == torch.float32:
        return None  # its tiles fit every GPU
    options = Options(1.0, softcap, drop)
    for kernel in ("forward", "dkv", "dq"):
        for causal in (True, False):
            row = find(f"attention {kernel}", arch, **table_key(d, options, causal))
            if reason := row.unsupported_reason(arch):
                return reason
    return None


# What both operators take behind their tensors: the fields of AttentionMask, those of Options and
# the backend.
OTHERS = (
    "bool causal, SymInt? window, Tensor? q_positions, Tensor? k_positions, "
    "Tensor? document_starts, Tensor? by_query, Tensor? by_key, float scale, float? softcap, "
    "float drop, SymInt[] key, SymInt first_head, bool deterministic, SymInt tile, "
    "Tensor? sample_ids, str backend"
)


@operator(
    "flash_attention",
    schema=f"(Tensor[] qkv, {OTHERS}) -> (Tensor, Tensor)",
    fake=lambda qkv, *_: outputs(by_key_head(qkv)[0]),
)
def _flash_attention(qkv: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    mask, options, backend = _parsed(others)
    q, k, v = by_key_head(qkv)
    compute = forward if backend == "triton" else load_candidate(backend).forward
    return compute(q, k, v, mask, options)


def _backward_workspace(
    dout: Tensor, _: Tensor | None, out: Tensor, lse: Tensor, qkv: Sequence[Tensor], *others: Any
) -> list[Tensor]:
    mask, options, backend = _parsed(others)
    if backend == "triton":
        keys, ordered = row_of_keys(qkv, mask.causal, options).numbers["N"], options.deterministic
    else:
        keys, ordered = load_candidate(backend).KEYS, True
    return allocate(dout, out, lse, qkv, keys, ordered).gradients


@operator(
    "flash_attention_backward",
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] qkv, {OTHERS}) -> "
    "Tensor[]",
    fake=lambda dout, dlse, out, lse, qkv, *_: [x.new_empty(x.shape) for x in qkv],
    workspace=_backward_workspace,
)
def _flash_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    *others: Any,
) -> list[Tensor]:
    mask, options, backend = _parsed(others)
    differentiate = backward if backend == "triton" else load_candidate(backend).backward
    return differentiate(dout, dlse, out, lse, qkv, mask, options)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *qkv, *(x for x in rest if isinstance(x, Tensor)))
    ctx.count, ctx.others = len(qkv), [None if isinstance(x, Tensor) else (x,) for x in rest]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors
    qkv, rest = tensors[: ctx.count], iter(tensors[ctx.count :])
    others = [next(rest) if other is None else other[0] for other in ctx.others]
    gradients = torch.ops.megatron.flash_attention_backward(
        torch.zeros_like(out) if dout is None else dout, dlse, out, lse, qkv, *others
    )
    return gradients, *(None for _ in others)


# Inside torch.compile alone: torch.library's own function takes 0.2 ms of host time a call.
register_autograd("flash_attention", _differentiate, _save)


class _FlashAttention(torch.autograd.Function):
    """The operators as a function of autograd: (out, lse) of q, k, v or the fused projection."""

    @staticmethod
    def forward(ctx: Any, others: tuple[Any, ...], *qkv: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.ops.megatron.flash_attention(qkv, *others)
        _save(ctx, (qkv, *others), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        gradients, *_ = _differentiate(ctx, dout, dlse)
        return None, *gradients


def flash_attention(
    *qkv: Tensor, mask: AttentionMask, backend: str = "triton", **fields: Any
) -> tuple[Tensor, Tensor]:
    """(out [s, b, n, d], lse [b, n, s]) as of attention_reference, by the kernels; both have
    gradients. `backend`: triton, or one of dispatch.CANDIDATES; `fields` are those of Options.

    Given are q, k, v, or the fused projection [s, b, g, m + 2, d] alone: each key head's m query
    heads, the key, the value. They are read where they are, and the gradient of the fused one is
    written whole, so that nothing is copied on either way.

    The model makes the mask once a micro-batch by attention_masks.attention_mask, for all layers:

        mask = attention_mask(s, t, window=..., document_starts=...)
        out, lse = flash_attention(qkv, scale=d**-0.5, mask=mask)

    Raises UserError if deterministic=False is not supported. Candidates are always deterministic.
    """
    options = Options(**fields)
    if not options.deterministic and backend == "triton":
        d, arch = qkv[0].shape[-1], lang.capability(qkv[0].device)
        if reason := unsupported_atomics(d, options.softcap, options.drop, arch):
            raise UserError(
                f"attention that is not deterministic: {reason}; take --deterministic-mode"
            )
    assert qkv[0].ndim == (5 if len(qkv) == 1 else 4)
    q, k, v = by_key_head(qkv)
    assert options.scale > 0 and k.shape == v.shape and q.shape[1] == k.shape[1] and q.shape[3]
    assert options.drop == 0 or options.sample_ids is not None
    assert mask.by_query is not None or (
        mask.q_positions is None and mask.document_starts is None
    ), "make the mask with attention_mask()"
    others = _arguments(mask, options, backend)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.ops.megatron.flash_attention(list(qkv), *others)
    return _FlashAttention.apply(others, *qkv)


def flash_attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: Options,
    backend: str = "triton",
) -> tuple[Tensor, Tensor, Tensor]:
    """As attention_reference_backward, by the kernels."""
    arguments = _arguments(mask, options, backend)
    dq, dk, dv = torch.ops.megatron.flash_attention_backward(
        dout, None, out, lse.contiguous(), [q, k, v], *arguments
    )
    return dq, dk, dv


def _arguments(mask: AttentionMask, options: Options, backend: str) -> tuple[Any, ...]:
    """What both operators take behind their tensors, in the order of OTHERS."""
    return *vars(mask).values(), *vars(options).values(), backend


def _parsed(others: Sequence[Any]) -> tuple[AttentionMask, Options, str]:
    """What `_arguments` was given."""
    count = len(vars(AttentionMask()))
    *fields, backend = others
    return AttentionMask(*fields[:count]), Options(*fields[count:]), backend
