"""Activations of the MLP, forward and backward by recomputation: from fc1's output x, and its bias
where the matrix product left that out.

    a = x + bias;  gelu a Phi(a), gelu-tanh a (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))) / 2,
    squared-relu max(a, 0)^2
    [a | u] = x + bias;  swiglu a sigmoid(a) u, geglu a Phi(a) u

x [..., f], or gated and fused [..., 2f]; bias of x's width or None; y, dy [..., f]. fp32 inside,
rounded once. The backward keeps x alone and yields dx and dbias, the sum over rows of dx before its
rounding: within a program in the order of its rows, over programs, whose number is fixed, by one
reduction.

Sources: Hendrycks and Gimpel 2016 (GELU), Shazeer 2020 (gated units), So et al. 2021 (squared
ReLU). Roofline, bf16: 4 bytes an element of y forward and 6 backward; gated 6 and 10. 8192 tokens,
f = 14336, SwiGLU at 4.3 TB/s: 164 and 273 us; f = 16384, GELU: 125 and 187 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.kernels.configurations import Row, find
from megatron.kernels.lang import HOPPER, Compiled, capability, jit, tl, triton
from torch import Tensor

GATED = ("swiglu", "geglu")
KINDS = (*GATED, "gelu", "gelu-tanh", "squared-relu")


def activation_reference(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The definition; what is narrower than fp32 is computed in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if bias is None else wide + bias
    if kind in GATED:
        a, u = wide.chunk(2, dim=-1)
        return ((F.silu(a) if kind == "swiglu" else F.gelu(a)) * u).to(x.dtype)
    if kind == "squared-relu":
        return F.relu(wide).square().to(x.dtype)
    return F.gelu(wide, approximate="tanh" if kind == "gelu-tanh" else "none").to(x.dtype)


@dataclass(frozen=True)
class ActivationConfiguration:
    """`block` columns a program; `programs` of the backward with a bias share all rows between
    them, so many tiles ahead of the sums.
    """

    row: Row
    block: int
    num_warps: int
    programs: int
    prefetch: int


def configuration(
    direction: str, kind: str, width: int, bias: bool, arch: int = HOPPER
) -> ActivationConfiguration:
    """Of y's width, "forward" or "backward", where a bias is summed: two or four loads of 16 bytes
    a thread, eight programs a processor for the sums.
    """
    row = find(
        f"activation {direction}",
        arch,
        kind="bias" if bias and direction == "backward" else "gated" if kind in GATED else "plain",
    )
    block = min(triton.next_power_of_2(width), row.numbers["block"])
    programs = max(row.numbers.get("programs", 0) // triton.cdiv(width, block), 1)
    return ActivationConfiguration(
        row, block, row.numbers["num_warps"], programs, row.numbers.get("prefetch", 1)
    )


@jit
def logistic(z):
    """p = sigmoid(z) and its derivative p (1 - p), which near p = 1 has digits that 1 - p has
    not.
    """
    e = tl.exp(-tl.abs(z))
    r = 1 / (1 + e)
    return tl.where(z < 0, e * r, r), e * r * r


@jit
def normal(a):
    """Phi(a) and its derivative. With t = 1 / (1 + |a| / 4), exp(a^2 / 2) Phi(-|a|) is t times a
    polynomial in t, fitted: off by 7e-9 at most, by 1e-5 of Phi at a = -5 and 1e-4 of it further
    out, and by roundings. Two thirds of the instructions of erf, which in bf16 take longer than
    memory.
    """
    bell = tl.exp2(-0.7213475204444817 * a * a)
    t = 1 / (1 + 0.25 * tl.abs(a))
    tail = t * (-0.274827778339386 + t * (0.34626758098602295 + t * -0.09270460903644562))
    tail = (
        t
        * (
            0.09880474209785461
            + t
            * (0.11269718408584595 + t * (0.022017480805516243 + t * (0.2877453863620758 + tail)))
        )
        * bell
    )
    return tl.where(a < 0, tail, 1 - tail), 0.3989422804014327 * bell


@jit
def act(a, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == "swiglu":
        p, rise = logistic(a)
        return a * p, p + a * rise
    elif KIND == "gelu-tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2z)
        p, rise = logistic(1.5957691216057308 * a * (1 + 0.044715 * a * a))
        return a * p, p + a * rise * (1.5957691216057308 + 0.21406444881780075 * a * a)
    elif KIND == "squared-relu":
        r = tl.where(a < 0, 0.0, a)  # NaN stays
        return r * r, 2 * r
    else:
        p, rise = normal(a)
        return a * p, p + a * rise


@jit
def forward_kernel(
    x,
    bias,
    y,
    width,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    known = column < width
    at = x + row * width * (2 if GATE else 1) + column
    a = tl.load(at, mask=known, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    result, _ = act(a, KIND)
    if GATE:
        u = tl.load(at + width, mask=known, other=0.0).to(tl.float32)
        if BIAS:
            u += tl.load(bias + width + column, mask=known, other=0.0).to(tl.float32)
        result *= u
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=known)


@jit
def backward_kernel(
    dy,
    x,
    bias,
    dx,
    partials,
    rows,
    width,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """A block of columns of every so many rows a program; without a bias of one row."""
    blocks = tl.cdiv(width, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    program, programs = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    known = column < width
    whole = width * (2 if GATE else 1)
    dbias = tl.zeros([BLOCK], tl.float32)
    dbias_up = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=known, other=0.0)
        if GATE:
            shift_up = tl.load(bias + width + column, mask=known, other=0.0)
    for row in tl.range(program, rows, programs, num_stages=PREFETCH):
        at = tl.cast(row, tl.int64) * whole + column
        a = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        grad = tl.load(dy + tl.cast(row, tl.int64) * width + column, mask=known, other=0.0).to(
            tl.float32
        )
        if BIAS:
            a += shift.to(tl.float32)
        value, slope = act(a, KIND)
        if GATE:
            u = tl.load(x + at + width, mask=known, other=0.0).to(tl.float32)
            if BIAS:
                u += shift_up.to(tl.float32)
            up = grad * value
            tl.store(dx + at + width, up.to(dx.dtype.element_ty), mask=known)
            dbias_up += up
            grad *= u
        grad *= slope
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=known)
        dbias += grad
    if BIAS:
        mine = partials + program * whole + column
        tl.store(mine, dbias, mask=known)
        if GATE:
            tl.store(mine + width, dbias_up, mask=known)


def _width(x: Tensor, bias: Tensor | None, kind: str) -> int:
    assert kind in KINDS and x.dtype != torch.float64, "float64: the definition serves it"
    assert (
        bias is None
        or bias.shape == x.shape[-1:]
        and bias.dtype == x.dtype
        and bias.is_contiguous()
    )
    return x.shape[-1] // (2 if kind in GATED else 1)


@torch.library.custom_op("megatron::activation", mutates_args=())
def activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """y of one of KINDS."""
    width = _width(x, bias, kind)
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if y.numel():
        form = configuration("forward", kind, width, bias is not None, capability(x.device))
        forward_kernel[(triton.cdiv(width, form.block) * (y.numel() // width),)](
            x.contiguous(),
            x if bias is None else bias,
            y,
            width,
            KIND=kind,
            GATE=kind in GATED,
            BIAS=bias is not None,
            BLOCK=form.block,
            num_warps=form.num_warps,
        )
    return y


@activation.register_fake
def _(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _width(x, bias, kind)))


@torch.library.custom_op("megatron::activation_backward", mutates_args=())
def activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """(dx, dbias in fp32: empty without a bias)."""
    width = _width(x, bias, kind)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(0 if bias is None else x.shape[-1], device=x.device)
    form = configuration("backward", kind, width, bias is not None, capability(x.device))
    rows = dy.numel() // width
    programs = rows if bias is None else min(form.programs, rows)
    partials = torch.empty(0 if bias is None else programs, x.shape[-1], device=x.device)
    backward_kernel[(triton.cdiv(width, form.block) * programs,)](
        dy.contiguous(),
        x.contiguous(),
        x if bias is None else bias,
        dx,
        partials,
        rows,
        width,
        KIND=kind,
        GATE=kind in GATED,
        BIAS=bias is not None,
        BLOCK=form.block,
        PREFETCH=form.prefetch,
        num_warps=form.num_warps,
    )
    return dx, partials.new_empty(0) if bias is None else partials.sum(0)


@activation_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(
        0 if bias is None else x.shape[-1], dtype=torch.float32
    )


def aot(arch: int = HOPPER) -> Iterator[Compiled]:
    """Every kind in bf16, with a bias a gated one and GELU, which in fp32 too."""
    for dtype, kind in (*(("bf16", kind) for kind in KINDS), ("fp32", "gelu")):
        width = 14336 if kind in GATED else 16384
        for bias in (False, True) if kind in ("swiglu", "gelu") else (False,):
            name, pointer = f"{kind}_{'bias_' * bias}{dtype}", f"*{dtype}"
            types = {"x": pointer, "bias": pointer, "width": "i32"}
            constants = {"KIND": kind, "GATE": kind in GATED, "BIAS": bias}
            form = configuration("forward", kind, width, bias, arch)
            yield Compiled(
                name,
                forward_kernel,
                types | {"y": pointer},
                constants | {"BLOCK": form.block},
                ("x", "bias", "y", "width"),
                form.num_warps,
                row=form.row,
            )
            form = configuration("backward", kind, width, bias, arch)
            yield Compiled(
                f"{name}_backward",
                backward_kernel,
                types | {"dy": pointer, "dx": pointer, "partials": "*fp32", "rows": "i32"},
                constants | {"BLOCK": form.block, "PREFETCH": form.prefetch},
                ("dy", "x", "bias", "dx", "partials", "width"),
                form.num_warps,
                row=form.row,
            )
