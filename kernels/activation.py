"""Activations of the MLP, forward and backward by recomputation: from fc1's output x, and its bias
where the matrix product left that out.

    a = x + bias            gelu           a Phi(a)
                            gelu-tanh      a (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))) / 2
                            squared-relu   max(a, 0)^2
    [a | u] = x + bias      swiglu         a sigmoid(a) u
                            geglu          a Phi(a) u

x [..., f], or gated and fused [..., 2f]; bias of x's width or None; y, dy [..., f]. fp32 inside,
rounded once. The backward keeps x alone and yields dx and dbias, the sum over rows of dx before its
rounding: within a program in the order of its rows, over programs, whose number is fixed, by one
reduction.

Sources: Hendrycks and Gimpel 2016 (GELU), Shazeer 2020 (gated units), So et al. 2021 (squared
ReLU). Roofline, bf16: 4 bytes an element of y forward and 6 backward; gated 6 and 10. 8192 tokens,
f = 14336, SwiGLU at 4.3 TB/s: 164 and 273 us; f = 16384, GELU: 125 and 187 us.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.kernels.configurations import KernelLaunch, find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, next_power_of_2, operator, tl
from torch import Tensor

# kind -> the function of a
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "squared-relu": lambda a: F.relu(a).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
}
# of a gated kind, torch's operators that write the function of a, and dy times its derivative
GATES = {
    "swiglu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
    "geglu": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input),
}
GATED = tuple(GATES)
KINDS = tuple(FUNCTIONS)


def apply_function(x: Tensor, kind: str) -> Tensor:
    """The activation of x by differentiable operators, in x's precision."""
    function = FUNCTIONS[kind]
    if kind not in GATED:
        return function(x)
    a, u = x.chunk(2, dim=-1)
    return function(a) * u


def activation_reference(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The definition; what is narrower than fp32 is computed in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return apply_function(wide if bias is None else wide + bias, kind).to(x.dtype)


def configuration(direction: str, kind: str, width: int, bias: bool, arch: int) -> KernelLaunch:
    """Of y's width, "forward" or "backward", where a bias is summed: two or four loads of 16 bytes
    a thread, eight programs a processor for the sums.
    """
    form = "gated" if kind in GATED else "plain"
    if bias and direction == "backward":
        form = "bias"
    row = find(f"activation {direction}", arch, kind=form)
    block = min(next_power_of_2(width), row.numbers["block"])
    programs = max(row.numbers.get("programs", 0) // cdiv(width, block), 1)
    prefetch = row.numbers.get("prefetch", 1)
    return KernelLaunch(row, block, row.numbers["num_warps"], programs=programs, prefetch=prefetch)


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
        tl.static_assert((KIND == "gelu") | (KIND == "geglu"), "an activation without a kernel")
        p, rise = normal(a)
        return a * p, p + a * rise


@jit
def columns_of_program(width, BLOCK: tl.constexpr):
    """What this program has of y's columns: (column [BLOCK]; which of them are there; its number
    among the programs of these columns; how many those are).
    """
    blocks = tl.cdiv(width, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return column, column < width, tl.program_id(0) // blocks, tl.num_programs(0) // blocks


@jit
def load_biases(bias, width, column, known, GATE: tl.constexpr, BIAS: tl.constexpr):
    """The biases [BLOCK] of a and u at these columns, as they are in memory; zeros for what there
    is not.
    """
    first, second = 0.0, 0.0
    if BIAS:
        first = tl.load(bias + column, mask=known, other=0.0)
        if GATE:
            second = tl.load(bias + width + column, mask=known, other=0.0)
    return first, second


@jit
def load_biased(x, bias, known, BIAS: tl.constexpr):
    """x + bias in fp32, at a block of pointers x [BLOCK]."""
    value = load_fp32(x, known)
    if BIAS:
        value += bias.to(tl.float32)
    return value


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
    """A block of columns of one row a program."""
    column, known, row, _ = columns_of_program(width, BLOCK)
    row = row.to(tl.int64)
    at = x + row * width * (2 if GATE else 1) + column
    bias_a, bias_u = load_biases(bias, width, column, known, GATE, BIAS)
    result, _ = act(load_biased(at, bias_a, known, BIAS), KIND)
    if GATE:
        result *= load_biased(at + width, bias_u, known, BIAS)
    store_rounded(y + row * width + column, result, known)


@jit
def store_sums(partials, sum_a, sum_u, width, known, GATE: tl.constexpr):
    """This program's parts [BLOCK] of dbias, gated that of u `width` further on."""
    tl.store(partials, sum_a, mask=known)
    if GATE:
        tl.store(partials + width, sum_u, mask=known)


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
    """A block of columns of every n-th row a program; without a bias of one row."""
    column, known, program, programs = columns_of_program(width, BLOCK)
    whole = width * (2 if GATE else 1)
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_u = tl.zeros([BLOCK], tl.float32)
    bias_a, bias_u = load_biases(bias, width, column, known, GATE, BIAS)
    for row in tl.range(program, rows, programs, num_stages=PREFETCH):
        at = tl.cast(row, tl.int64) * whole + column
        a = load_biased(x + at, bias_a, known, BIAS)
        grad = load_fp32(dy + tl.cast(row, tl.int64) * width + column, known)
        value, slope = act(a, KIND)
        if GATE:
            u = load_biased(x + at + width, bias_u, known, BIAS)
            up = grad * value
            store_rounded(dx + at + width, up, known)
            sum_u += up
            grad *= u
        grad *= slope
        store_rounded(dx + at, grad, known)
        sum_a += grad
    if BIAS:
        store_sums(partials + program * whole + column, sum_a, sum_u, width, known, GATE)


def _width(x: Tensor, bias: Tensor | None, kind: str) -> int:
    assert kind in KINDS and x.dtype != torch.float64, "float64: the definition serves it"
    if bias is not None:
        assert bias.shape == x.shape[-1:] and bias.dtype == x.dtype and bias.is_contiguous()
    return x.shape[-1] // (2 if kind in GATED else 1)


@operator("activation")
def activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """y of one of KINDS."""
    width = _width(x, bias, kind)
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if y.numel():
        form = configuration("forward", kind, width, bias is not None, capability(x.device))
        launch(
            forward_kernel,
            (cdiv(width, form.block) * (y.numel() // width),),
            form,
            x.contiguous(),
            x if bias is None else bias,
            y,
            width,
            KIND=kind,
            GATE=kind in GATED,
            BIAS=bias is not None,
            BLOCK=form.block,
        )
    return y


@operator("activation_backward")
def activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """(dx, dbias in fp32: empty without a bias)."""
    width, rows = _width(x, bias, kind), x.numel() // x.shape[-1]
    form = configuration("backward", kind, width, bias is not None, capability(x.device))
    programs = rows if bias is None else min(form.programs, rows)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # the parts of dbias
    shape = (0, 0) if bias is None else (programs, x.shape[-1])
    partials = torch.empty(shape, device=x.device)
    if dx.numel():
        launch(
            backward_kernel,
            (cdiv(width, form.block) * programs,),
            form,
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
        )
    # without a bias nothing is launched for the sum
    return dx, partials.new_empty(0) if bias is None else partials.sum(0)
