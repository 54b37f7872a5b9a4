"""RMSNorm and LayerNorm over rows of width n, forward and backward, alone or behind a residual
addition. Statistics and sums in fp32.

    t = x + r (rounded; t = x without a residual)          RMSNorm: z = t rstd, rstd = (mean(t^2) +
    eps)^-1/2, y = round(z) weight LayerNorm: z = (t - mean(t)) rstd, rstd = (var(t) + eps)^-1/2, y
    = z weight + bias
    dx = dr = rstd (g - z mean(z g) - [LayerNorm] mean(g)) + dt with g = dy weight;    dweight = sum
    over rows of dy z;    dbias = sum of dy

x, r, y, t, dy, dx [..., n], all of one dtype with weight and bias [n]; x may be a strided view (a
norm of q or k reads the fused QKV output). Statistics [1, rows] (rstd) or [2, rows] (rstd, mean)
are saved; the backward reads t again and nothing else. Parameter gradients are summed within a
program in the order of its rows, and over programs, whose number is fixed, by one reduction: equal
inputs give equal bits.

Sources: Ba et al. 2016 (LayerNorm), Zhang and Sennrich 2019 (RMSNorm). Roofline, bf16: forward 4
bytes an element (with a residual 8), backward 6 (8 with dt) and 4 n bytes of partial sums a program
and parameter. 8192 rows of 4096 at 4.3 TB/s: forward 31 us (62), backward 47 us (62) and 2 us for
partial sums, which stay in the L2 cache. Rows wider than what a program holds in registers (WIDEST)
are read again: from the L2 cache in the forward, from memory in the backward (10 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.kernels.configurations import Row, find
from megatron.kernels.lang import HOPPER, Compiled, capability, jit, tl, triton
from torch import Tensor

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDEST = {"forward": 32768, "backward": 8192}  # elements of a row that a program holds in registers


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The definition: RMSNorm without a bias, LayerNorm with one; what is narrower than fp32 is
    computed in fp32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is None:
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight + bias).to(x.dtype)


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual)."""
    total = x + residual
    return norm_reference(total, weight, bias, eps), total


@dataclass(frozen=True)
class NormConfiguration:
    """A program takes `rows` rows at once, `block` elements of each; `programs` of the backward
    share all rows between them.
    """

    row: Row
    rows: int
    block: int
    num_warps: int
    programs: int = 0
    prefetch: int = 1  # tiles on their way from memory at once, in shared memory


def configuration(
    direction: str, width: int, dtype: torch.dtype, arch: int = HOPPER
) -> NormConfiguration:
    """Of "forward", 32 bytes of x a thread, or "backward": 16 elements a thread, 16 warps at once
    on each of 132 processors, which is what its registers allow. What that leaves to hide memory's
    latency behind are two rows (fp32: one) of each operand on their way.
    """
    block = triton.next_power_of_2(width)
    if block > WIDEST[direction]:  # pieces of a row at once
        row = find(f"norm {direction}", arch, kind="wide")
        return NormConfiguration(
            row, 1, row.numbers["block"], row.numbers["num_warps"], row.numbers.get("programs", 0)
        )
    if direction == "forward":
        row = find("norm forward", arch, kind="whole")
        rows = max(1, row.numbers["block"] // block)
        return NormConfiguration(
            row,
            rows,
            block,
            min(rows * block * dtype.itemsize // (32 * row.numbers["thread_bytes"]), 32),
        )
    row = find("norm backward", arch, kind="whole", bytes=dtype.itemsize)
    rows = max(1, row.numbers["block"] // block)
    warps = rows * block // (32 * row.numbers["per_thread"])
    return NormConfiguration(
        row, rows, block, warps, row.numbers["warps"] // warps, row.numbers["prefetch"]
    )


@jit
def row_start(row, INNER, outer_stride, inner_stride):
    """Where rows of a view with two levels of strides begin."""
    return (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride


@jit
def forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    statistics,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    eps,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    known = column < width
    inside = (row < rows)[:, None] & known[None, :]
    out = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(
        x + row_start(row, inner, outer_stride, inner_stride)[:, None] + column[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    if ADD:
        value += tl.load(residual + out, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(y.dtype.element_ty)
        tl.store(total + out, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRE:
        mean = tl.sum(value, 1) / width
        tl.store(statistics + rows + row, mean, mask=row < rows)
        value = tl.where(inside, value - mean[:, None], 0)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(statistics + row, rstd, mask=row < rows)
    w = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)[None, :]
    normed = value * rstd[:, None]
    if CENTRE:
        result = normed * w + tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    else:
        result = normed.to(y.dtype.element_ty).to(tl.float32) * w
    tl.store(y + out, result.to(y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(
    dy,
    x,
    weight,
    statistics,
    dtotal,
    dx,
    partials,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    known = column < width
    w = tl.load(weight + column, mask=known, other=0.0)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=PREFETCH):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        out = row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(
            x + row_start(row, inner, outer_stride, inner_stride)[:, None] + column[None, :],
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        grad = tl.load(dy + out, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        if CENTRE:
            value = tl.where(
                inside,
                value - tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None],
                0,
            )
            dbias += grad
        normed = value * rstd
        dweight += grad * normed
        grad *= w.to(tl.float32)[None, :]
        change = normed * (tl.sum(grad * normed, 1) / width)[:, None]
        if CENTRE:
            change += (tl.sum(grad, 1) / width)[:, None]
        result = (grad - change) * rstd
        if ADD:
            result += tl.load(dtotal + out, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + out, result.to(dx.dtype.element_ty), mask=inside)
    mine = partials + program * width + column
    tl.store(mine, tl.sum(dweight, 0), mask=known)
    if CENTRE:
        tl.store(mine + programs * width, tl.sum(dbias, 0), mask=known)


@jit
def wide_value(x, residual, at, out, inside, ADD: tl.constexpr):
    """A piece of t = x + residual as it was rounded, in fp32."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (
            (value + tl.load(residual + out, mask=inside, other=0.0).to(tl.float32))
            .to(x.dtype.element_ty)
            .to(tl.float32)
        )
    return value


@jit
def wide_forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    statistics,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    eps,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, read again for each statistic and for the result."""
    row = tl.program_id(0)
    begin, begin_out = row_start(row, inner, outer_stride, inner_stride), row.to(tl.int64) * width
    mean = 0.0
    if CENTRE:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            sums += wide_value(x, residual, begin + column, begin_out + column, column < width, ADD)
        mean = tl.sum(sums) / width
        tl.store(statistics + rows + row, mean)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.where(
            column < width,
            wide_value(x, residual, begin + column, begin_out + column, column < width, ADD) - mean,
            0,
        )
        squares += value * value
    rstd = tl.rsqrt(tl.sum(squares) / width + eps)
    tl.store(statistics + row, rstd)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        known = column < width
        value = wide_value(x, residual, begin + column, begin_out + column, known, ADD)
        if ADD:
            tl.store(total + begin_out + column, value.to(y.dtype.element_ty), mask=known)
        normed = (value - mean) * rstd
        w = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
        if CENTRE:
            result = normed * w + tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
        else:
            result = normed.to(y.dtype.element_ty).to(tl.float32) * w
        tl.store(y + begin_out + column, result.to(y.dtype.element_ty), mask=known)


@jit
def projection_kernel(
    dy,
    x,
    weight,
    statistics,
    projections,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean(z g) and mean(g) of one row a program."""
    row = tl.program_id(0)
    begin, begin_out = row_start(row, inner, outer_stride, inner_stride), row.to(tl.int64) * width
    rstd, mean = tl.load(statistics + row), 0.0
    if CENTRE:
        mean = tl.load(statistics + rows + row)
    along = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        known = column < width
        grad = tl.load(dy + begin_out + column, mask=known, other=0.0).to(tl.float32) * tl.load(
            weight + column, mask=known, other=0.0
        ).to(tl.float32)
        along += (
            grad * (tl.load(x + begin + column, mask=known, other=0.0).to(tl.float32) - mean) * rstd
        )
        sums += grad
    tl.store(projections + row, tl.sum(along) / width)
    if CENTRE:
        tl.store(projections + rows + row, tl.sum(sums) / width)


@jit
def wide_backward_kernel(
    dy,
    x,
    weight,
    statistics,
    projections,
    dtotal,
    dx,
    partials,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of every so many rows a program; the rows' projections are known."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program, programs = tl.program_id(1), tl.num_programs(1)
    known = column < width
    w = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, programs):
        out = tl.cast(row, tl.int64) * width + column
        value = tl.load(
            x + row_start(row, inner, outer_stride, inner_stride) + column, mask=known, other=0.0
        ).to(tl.float32)
        grad = tl.load(dy + out, mask=known, other=0.0).to(tl.float32)
        rstd = tl.load(statistics + row)
        if CENTRE:
            value -= tl.load(statistics + rows + row)
            dbias += grad
        normed = value * rstd
        dweight += grad * normed
        change = normed * tl.load(projections + row)
        if CENTRE:
            change += tl.load(projections + rows + row)
        result = (grad * w - change) * rstd
        if ADD:
            result += tl.load(dtotal + out, mask=known, other=0.0).to(tl.float32)
        tl.store(dx + out, result.to(dx.dtype.element_ty), mask=known)
    mine = partials + program * width + column
    tl.store(mine, dweight, mask=known)
    if CENTRE:
        tl.store(mine + programs * width, dbias, mask=known)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x and its rows as inner rows `inner_stride` apart within outer ones `outer_stride` apart; a
    copy of x where they are not.
    """
    # (size, stride) of the leading dimensions, merged where one continues the next
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if x.stride(-1) != 1 or len(levels) > 2:
        return x.contiguous(), 1, x.shape[-1], 0
    if len(levels) < 2:
        return x, 1, levels[0][1] if levels else x.shape[-1], 0
    return x, levels[1][0], levels[0][1], levels[1][1]


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.dtype in TORCH.values() and weight.dtype == x.dtype and weight.shape == x.shape[-1:], (
        x.dtype,
        weight.dtype,
        x.shape,
        weight.shape,
    )


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else y
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    statistics = torch.empty(1 if bias is None else 2, rows, device=x.device)
    if rows:
        form = configuration("forward", width, x.dtype, capability(x.device))
        kernel = forward_kernel if form.block >= width else wide_forward_kernel
        x, *view = _rows(x)
        added, shift = (
            x if residual is None else residual.contiguous(),
            weight if bias is None else bias,
        )
        kernel[(triton.cdiv(rows, form.rows),)](
            x,
            added,
            weight,
            shift,
            y,
            total,
            statistics,
            rows,
            *view,
            width,
            eps,
            ADD=residual is not None,
            CENTRE=bias is not None,
            ROWS=form.rows,
            BLOCK=form.block,
            num_warps=form.num_warps,
        )
    return y, total, statistics


@torch.library.custom_op("megatron::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(y, statistics): RMSNorm without a bias, LayerNorm with one."""
    y, _, statistics = _forward(x, None, weight, bias, eps)
    return y, statistics


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(
        1 if bias is None else 2, x.numel() // x.shape[-1], dtype=torch.float32
    )


@torch.library.custom_op("megatron::add_norm", mutates_args=())
def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, statistics)."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return _forward(x, residual, weight, bias, eps)


@add_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(
        1 if bias is None else 2, x.numel() // x.shape[-1], dtype=torch.float32
    )
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics


@torch.library.custom_op("megatron::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, total: Tensor, weight: Tensor, statistics: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, fp32 parameter gradients [dweight] or [dweight, dbias] of shape [1 or 2, n]); total is
    what was normed, dtotal its own gradient.
    """
    _check(total, weight)
    assert dy.shape == total.shape and dy.dtype == total.dtype
    width, rows, kinds = total.shape[-1], total.numel() // total.shape[-1], statistics.shape[0]
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    if not rows:
        return dx, torch.zeros(kinds, width, device=dx.device)
    form = configuration("backward", width, dy.dtype, capability(dy.device))
    programs = min(form.programs, triton.cdiv(rows, form.rows))
    partials = torch.empty(kinds, programs, width, device=dx.device)
    dy, (x, *view) = dy.contiguous(), _rows(total)
    flags = {
        "ADD": dtotal is not None,
        "CENTRE": kinds == 2,
        "BLOCK": form.block,
        "num_warps": form.num_warps,
    }
    dtotal = dy if dtotal is None else dtotal.contiguous()
    if form.block >= width:
        backward_kernel[(programs,)](
            dy,
            x,
            weight,
            statistics,
            dtotal,
            dx,
            partials,
            rows,
            *view,
            width,
            ROWS=form.rows,
            PREFETCH=form.prefetch,
            **flags,
        )
    else:
        projections = torch.empty_like(statistics)
        fixed = {name: flags[name] for name in ("CENTRE", "BLOCK", "num_warps")}
        projection_kernel[(rows,)](
            dy, x, weight, statistics, projections, rows, *view, width, **fixed
        )
        wide_backward_kernel[(triton.cdiv(width, form.block), programs)](
            dy,
            x,
            weight,
            statistics,
            projections,
            dtotal,
            dx,
            partials,
            rows,
            *view,
            width,
            **flags,
        )
    return dx, partials.sum(1)


@norm_backward.register_fake
def _(
    dy: Tensor, total: Tensor, weight: Tensor, statistics: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), total.new_empty(
        statistics.shape[0], total.shape[-1], dtype=torch.float32
    )


def _row(
    name: str, kernel: Any, dtype: str, constants: dict[str, Any], form: NormConfiguration
) -> Compiled:
    types = dict.fromkeys(("rows", "inner", "outer_stride", "inner_stride", "width"), "i32") | {
        "eps": "fp32"
    }
    types |= dict.fromkeys(("statistics", "projections", "partials"), "*fp32")
    constants = {
        argument: value for argument, value in constants.items() if argument in kernel.arg_names
    }
    left = [argument for argument in kernel.arg_names if argument not in constants]
    divisible = tuple(argument for argument in left if argument not in ("rows", "inner", "eps"))
    return Compiled(
        name,
        kernel,
        {argument: types.get(argument, f"*{dtype}") for argument in left},
        constants,
        divisible,
        form.num_warps,
        row=form.row,
    )


def aot(arch: int = HOPPER) -> Iterator[Compiled]:
    """Both norms at hidden sizes and, of strided views, at a head's width."""
    for dtype, width in (
        ("bf16", 128),
        ("bf16", 4096),
        ("bf16", 8192),
        ("bf16", 16384),
        ("bf16", 65536),
        ("fp32", 8192),
    ):
        for centre, add in ((False, False), (False, True), (True, False), (True, True)):
            if add and width == 128 or not add and width > 4096:
                continue
            name = f"{'add_' * add}{'layer' if centre else 'rms'}_norm_{dtype}_{width}"
            flags = {"ADD": add, "CENTRE": centre} | (
                {} if width == 128 else {"inner": 1, "inner_stride": 0}
            )
            form = configuration("forward", width, TORCH[dtype], arch)
            kernel = forward_kernel if form.block >= width else wide_forward_kernel
            yield _row(name, kernel, dtype, flags | {"ROWS": form.rows, "BLOCK": form.block}, form)
            if kernel is wide_forward_kernel:
                continue  # its backward is that of 16384
            form = configuration("backward", width, TORCH[dtype], arch)
            flags |= {"ROWS": form.rows, "BLOCK": form.block, "PREFETCH": form.prefetch}
            if form.block >= width:
                yield _row(f"{name}_backward", backward_kernel, dtype, flags, form)
            else:
                yield _row(f"{name}_backward", wide_backward_kernel, dtype, flags, form)
                yield _row(f"{name}_projection", projection_kernel, dtype, flags, form)
