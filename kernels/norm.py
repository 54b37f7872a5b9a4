"""RMSNorm and LayerNorm over rows of width n, forward and backward, alone or behind a residual
addition. Statistics and sums in fp32.

    t = x + r (rounded; t = x without a residual)
    RMSNorm: z = t rstd, rstd = (mean(t^2) + eps)^-1/2, y = round(z) weight
    LayerNorm: z = (t - mean(t)) rstd, rstd = (var(t) + eps)^-1/2, y = z weight + bias
    dx = dr = rstd (g - z mean(z g) - [LayerNorm] mean(g)) + dt with g = dy weight
    dweight = sum over rows of dy z,    dbias = sum of dy

x, r, y, t, dy, dx [..., n], all of one dtype with weight and bias [n]; x may be a strided view (a
norm of q or k reads the fused QKV output). Statistics [1, rows] (rstd) or [2, rows] (rstd, mean)
are saved; the backward reads t again and nothing else. Parameter gradients are summed within a
program in the order of its rows, and over programs, whose number is fixed, by one reduction: equal
inputs give equal bits.

Sources: Ba et al. 2016 (LayerNorm), Zhang and Sennrich 2019 (RMSNorm). Roofline, bf16: forward 4
bytes an element (with a residual 8), backward 6 (8 with dt) and 4 n bytes of partial sums a program
and parameter. 8192 rows of 4096 at 4.3 TB/s: forward 31 us (62), backward 47 us (62) and 2 us for
partial sums, which stay in the L2 cache. The backward reads rows wider than WIDEST_BACKWARD twice
(10 bytes).
"""

from __future__ import annotations

import torch
from megatron.kernels.configurations import KernelLaunch, find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from torch import Tensor

# the most elements of a row that a program holds in registers; wider rows have no forward pass
WIDEST = 32768
WIDEST_BACKWARD = 8192


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


def configuration(direction: str, width: int, dtype: torch.dtype, arch: int) -> KernelLaunch:
    """Of "forward", 32 bytes of x a thread, or "backward": 16 elements a thread, 16 warps at once
    on each of 132 processors, which is what its registers allow. What that leaves to hide memory's
    latency behind are two rows (fp32: one) of each operand on their way.
    """
    block = next_power_of_2(width)
    if direction == "forward":
        row = find("norm forward", arch, kind="whole")
        rows = max(1, row.numbers["block"] // block)
        warps = rows * block * dtype.itemsize // (32 * row.numbers["thread_bytes"])
        return KernelLaunch(row, block, min(warps, 32), rows)
    if block > WIDEST_BACKWARD:  # pieces of a row at once
        row = find("norm backward", arch, kind="wide")
        numbers = row.numbers
        return KernelLaunch(
            row, numbers["block"], numbers["num_warps"], programs=numbers["programs"]
        )
    row = find("norm backward", arch, kind="whole", bytes=dtype.itemsize)
    rows = max(1, row.numbers["block"] // block)
    warps = rows * block // (32 * row.numbers["per_thread"])
    programs = row.numbers["warps"] // warps
    return KernelLaunch(row, block, warps, rows, programs, row.numbers["prefetch"])


@jit
def row_start(row, INNER, outer_stride, inner_stride):
    """Where rows of a view with two levels of strides begin."""
    return (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride


@jit
def tile_of_rows(tile, column, rows, width, ROWS: tl.constexpr):
    """Of the tile of ROWS whole rows with this number: (row [ROWS]; inside [ROWS, BLOCK], whether
    an element is there; out [ROWS, BLOCK], its place in a contiguous tensor).
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return row, inside, row.to(tl.int64)[:, None] * width + column[None, :]


@jit
def load_rows(x, row, column, inside, inner, outer_stride, inner_stride):
    """A tile [ROWS, BLOCK] of whole rows of the view x, in fp32."""
    start = row_start(row, inner, outer_stride, inner_stride)
    return load_fp32(x + start[:, None] + column[None, :], inside)


@jit
def row_means(values, width):
    """The mean of each row [ROWS] of values [ROWS, BLOCK], zeros beyond the width."""
    return tl.sum(values, 1) / width


@jit
def scaled(value, rstd, weight, bias, y, column, known, CENTRE: tl.constexpr):
    """What y is of z = value rstd [..., BLOCK], before its rounding: RMSNorm rounds z and
    multiplies it by the weight, LayerNorm adds a bias.
    """
    w = load_fp32(weight + column, known)
    normed = value * rstd
    if CENTRE:
        return normed * w + load_fp32(bias + column, known)
    else:
        return normed.to(y.dtype.element_ty).to(tl.float32) * w


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
    """ROWS whole rows a program."""
    tile = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    row, inside, out = tile_of_rows(tile, column, rows, width, ROWS)
    value = load_rows(x, row, column, inside, inner, outer_stride, inner_stride)
    if ADD:
        value += load_fp32(residual + out, inside)
        rounded = value.to(y.dtype.element_ty)
        tl.store(total + out, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRE:
        mean = row_means(value, width)
        tl.store(statistics + rows + row, mean, mask=row < rows)
        value = tl.where(inside, value - mean[:, None], 0)
    rstd = tl.rsqrt(row_means(value * value, width) + eps)
    tl.store(statistics + row, rstd, mask=row < rows)
    result = scaled(value, rstd[:, None], weight, bias, y, column, column < width, CENTRE)
    store_rounded(y + out, result, inside)


@jit
def normed_rows(value, statistics, row, rows, inside, CENTRE: tl.constexpr):
    """(z [ROWS, BLOCK], rstd [ROWS, 1]) of a tile of whole rows, by the statistics that the forward
    pass has kept.
    """
    rstd = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
    if CENTRE:
        mean = tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
        value = tl.where(inside, value - mean, 0)
    return value * rstd, rstd


@jit
def store_input_gradient(
    dx,
    dtotal,
    out,
    inside,
    grad,
    normed,
    rstd,
    along,
    level,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """dx = dr at `out` [..., BLOCK], of g and z [..., BLOCK] there and of each row's rstd, along =
    mean(z g) and, LayerNorm, level = mean(g).
    """
    change = normed * along
    if CENTRE:
        change += level
    result = (grad - change) * rstd
    if ADD:
        result += load_fp32(dtotal + out, inside)
    store_rounded(dx + out, result, inside)


@jit
def store_parameter_gradients(
    partials, dweight, dbias, column, width, AXIS: tl.constexpr, CENTRE: tl.constexpr
):
    """This program's sums [BLOCK] of dweight and dbias into partials [1 or 2, programs, width];
    programs that share rows between them are numbered along AXIS.
    """
    mine = partials + tl.program_id(AXIS) * width + column
    tl.store(mine, dweight, mask=column < width)
    if CENTRE:
        tl.store(mine + tl.num_programs(AXIS) * width, dbias, mask=column < width)


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
    """Every n-th tile of ROWS whole rows a program, whose parameter gradients it adds up."""
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=PREFETCH
    ):
        row, inside, out = tile_of_rows(tile, column, rows, width, ROWS)
        value = load_rows(x, row, column, inside, inner, outer_stride, inner_stride)
        grad = load_fp32(dy + out, inside)
        normed, rstd = normed_rows(value, statistics, row, rows, inside, CENTRE)
        if CENTRE:
            dbias += grad
        dweight += grad * normed
        grad *= w.to(tl.float32)
        along = row_means(grad * normed, width)[:, None]
        level = row_means(grad, width)[:, None]  # RMSNorm: unused, so nothing is compiled for it
        store_input_gradient(dx, dtotal, out, inside, grad, normed, rstd, along, level, ADD, CENTRE)
    store_parameter_gradients(
        partials, tl.sum(dweight, 0), tl.sum(dbias, 0), column, width, 0, CENTRE
    )


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
        grad = load_fp32(dy + begin_out + column, known) * load_fp32(weight + column, known)
        along += grad * (load_fp32(x + begin + column, known) - mean) * rstd
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
    """Some columns of every n-th row a program; the rows' projections are known."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = column < width
    w = load_fp32(weight + column, known)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        out = tl.cast(row, tl.int64) * width + column
        start = row_start(row, inner, outer_stride, inner_stride)
        value, grad = load_fp32(x + start + column, known), load_fp32(dy + out, known)
        rstd = tl.load(statistics + row)
        if CENTRE:
            value -= tl.load(statistics + rows + row)
            dbias += grad
        normed = value * rstd
        dweight += grad * normed
        along = tl.load(projections + row)
        level = tl.load(projections + rows + row) if CENTRE else 0.0
        store_input_gradient(
            dx, dtotal, out, known, grad * w, normed, rstd, along, level, ADD, CENTRE
        )
    store_parameter_gradients(partials, dweight, dbias, column, width, 1, CENTRE)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x and its rows as inner rows `inner_stride` apart within outer ones `outer_stride` apart; a
    copy of x where they are not.
    """
    # (size, stride) of the leading dimensions, merged where one continues the next
    levels = [(1, x.shape[-1])]
    for size, stride in zip(x.shape[:-1], x.stride()):
        outer, above = levels[-1]
        if outer == 1 or size == 1 or above == size * stride:
            levels[-1] = (outer * size, stride if size > 1 else above)
        else:
            levels.append((size, stride))
    if x.stride(-1) != 1 or len(levels) > 2:
        return x.contiguous(), 1, x.shape[-1], 0
    (_, outer_stride), (inner, inner_stride) = (*levels, (1, 0))[:2]
    return x, inner, outer_stride, inner_stride


def _check(x: Tensor, weight: Tensor) -> None:
    # float64: the definition serves it
    fits = x.dtype != torch.float64 and weight.dtype == x.dtype and weight.shape == x.shape[-1:]
    assert fits and len(weight) <= WIDEST, (x.dtype, weight.dtype, x.shape, weight.shape)


def allocate_outputs(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, statistics)."""
    kinds, rows = 1 if bias is None else 2, x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(kinds, rows, device=x.device)


def allocate_gradients(x: Tensor, form: KernelLaunch, kinds: int) -> tuple[Tensor, Tensor]:
    """(dx, the partial sums [kinds, programs, n] of that many parameters)."""
    width = x.shape[-1]
    programs = min(form.programs, cdiv(x.numel() // width, form.rows))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, torch.empty(kinds, programs, width, device=x.device)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight)
    y, statistics = allocate_outputs(x, bias)
    total = torch.empty_like(y) if residual is not None else y
    width, rows = x.shape[-1], statistics.shape[1]
    if rows:
        form = configuration("forward", width, x.dtype, capability(x.device))
        x, *view = _rows(x)
        launch(
            forward_kernel,
            (cdiv(rows, form.rows),),
            form,
            x,
            x if residual is None else residual.contiguous(),
            weight,
            weight if bias is None else bias,
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
        )
    return y, total, statistics


@operator("norm")
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(y, statistics): RMSNorm without a bias, LayerNorm with one."""
    y, _, statistics = _forward(x, None, weight, bias, eps)
    return y, statistics


@operator("add_norm")
def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, statistics)."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return _forward(x, residual, weight, bias, eps)


def _launch_backward(
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    dtotal: Tensor | None,
    dx: Tensor,
    partials: Tensor,
    form: KernelLaunch,
) -> None:
    """Fill dx and the partial sums [1 or 2, programs, n]: by one kernel, or by two where no program
    holds a row, of which the first finds mean(z g) and mean(g) of whole rows.
    """
    (kinds, programs, width), rows = partials.shape, statistics.shape[1]
    dy, (x, *view) = dy.contiguous(), _rows(total)
    read, shape = (dy, x, weight, statistics), (rows, *view, width)
    written = (dy if dtotal is None else dtotal.contiguous(), dx, partials)
    whole = {"CENTRE": kinds == 2, "BLOCK": form.block}
    fixed = whole | {"ADD": dtotal is not None}
    if form.block >= width:
        fixed |= {"ROWS": form.rows, "PREFETCH": form.prefetch}
        launch(backward_kernel, (programs,), form, *read, *written, *shape, **fixed)
    else:
        projections = torch.empty_like(statistics)
        launch(projection_kernel, (rows,), form, *read, projections, *shape, **whole)
        grid = cdiv(width, form.block), programs
        launch(wide_backward_kernel, grid, form, *read, projections, *written, *shape, **fixed)


@operator("norm_backward")
def norm_backward(
    dy: Tensor, total: Tensor, weight: Tensor, statistics: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, fp32 parameter gradients [dweight] or [dweight, dbias] of shape [1 or 2, n]); total is
    what was normed, dtotal its own gradient.
    """
    _check(total, weight)
    assert dy.shape == total.shape and dy.dtype == total.dtype
    form = configuration("backward", total.shape[-1], total.dtype, capability(total.device))
    dx, partials = allocate_gradients(total, form, len(statistics))
    if dx.numel():
        _launch_backward(dy, total, weight, statistics, dtotal, dx, partials, form)
    return dx, partials.sum(1)
