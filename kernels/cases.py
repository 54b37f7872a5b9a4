"""A call of every operator for each row of the table of configurations, and the definition's
results in fp32 to compare a small one with.

The check at start (self_check.py) compares; kernels/tools/tune.py compares and times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.kernels import (
    activation,
    adamw,
    attention,
    attention_masks,
    cross_entropy,
    dropout,
    fp8,
    grad_norm,
    grouped_gemm,
    initialise,
    norm,
    qk_norm,
    rotary,
)
from megatron.kernels.configurations import Row
from torch import Tensor

Results = tuple[Tensor, ...]
KEY = (3, 7)  # of Philox
# relative error in the Frobenius norm, against fp32: a few roundings of the precision
BOUND = {torch.float32: 1e-5, torch.float16: 1.25e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One call of an operator, and what it must give."""

    call: Callable[[], Results]
    expected: Callable[[], Results]


class Draw:
    """Random operands of a device, small ones or those that are timed, in `dtype` unless an
    operator asks for another one.
    """

    def __init__(self, device: torch.device, tiny: bool, dtype: torch.dtype = torch.bfloat16):
        self.device, self.tiny, self.dtype, self.count = device, tiny, dtype, 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.count += 1
        return torch.randn(
            *shape,
            device=self.device,
            generator=torch.Generator(self.device).manual_seed(self.count),
        ).to(dtype or self.dtype)

    def either(self, small: Any, large: Any) -> Any:
        return small if self.tiny else large


def case(row: Row, device: torch.device, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The case of a row in a precision; small enough for the definition where `tiny`."""
    operator, _, rest = row.operator.partition(" ")
    return CASES[operator](Draw(device, tiny, dtype), dict(row.key), rest)


def wrong(case: Case) -> str:
    """What is wrong with a case's results beside the definition's; nothing: ""."""
    for actual, expected in zip(case.call(), case.expected(), strict=True):
        wide = expected.double()
        error = float((actual.double() - wide).norm() / wide.norm())
        if not error < BOUND.get(actual.dtype, BOUND[torch.float32]):
            return f"off by {error:.2g} of the norm"
    return ""


def _gradients(function: Callable[..., Tensor], dout: Tensor, *inputs: Tensor) -> Results:
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dout.float())


def _of_kind(kind: str, samples: int, device: torch.device) -> dict[str, Any]:
    """The settings of attention that a row's kind names."""
    given: dict[str, Any] = {"mask": attention_masks.AttentionMask(causal=kind != "full")}
    if kind == "softcap":
        given["softcap"] = 50.0
    if kind == "dropout":
        given |= {"drop": 0.1, "key": KEY, "sample_ids": torch.arange(samples, device=device)}
    return given


def _attention(draw: Draw, key: dict[str, Any], kernel: str) -> Case:
    d, kind = key.get("d", 128), key.get("kind", "causal")
    s, b, n, g = draw.either((192, 1, 2, 1), (4096, 4, 2048 // d, 2048 // d))
    q, k, v, dout = (draw(s, b, heads, d) for heads in (n, g, g, n))
    given = {"scale": d**-0.5, **_of_kind(kind, b, draw.device)}

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attention_reference(q, k, v, **given)[0]

    if kernel == "forward":
        return Case(
            lambda: attention.flash_attention(q, k, v, **given)[:1],
            lambda: (definition(q.float(), k.float(), v.float()),),
        )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attention.flash_attention(*leaves, deterministic=kernel != "dkv_dq", **given)
    return Case(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        lambda: _gradients(definition, dout, *leaves),
    )


def _activation(draw: Draw, key: dict[str, Any], direction: str) -> Case:
    kind = "swiglu" if key["kind"] == "gated" else "gelu"
    rows, width = draw.either((6, 80), (8192, 16384))
    x, dy, bias = (
        draw(rows, width * (2 if kind == "swiglu" else 1)),
        draw(rows, width),
        draw(width) if key["kind"] == "bias" else None,
    )

    def definition(x: Tensor, *bias: Tensor) -> Tensor:
        return activation.activation_reference(x, bias[0] if bias else None, kind)

    if direction == "forward":
        return Case(
            lambda: (activation.activation(x, None, kind),), lambda: (definition(x.float()),)
        )
    operands = (x,) if bias is None else (x, bias)
    return Case(
        lambda: activation.activation_backward(dy, x, bias, kind)[: len(operands)],
        lambda: _gradients(definition, dy, *operands),
    )


def _adamw(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    size = draw.either(3000, 1 << 27)
    master, grad, m, v = (
        draw(size, dtype=torch.float32),
        draw(size),
        draw(size, dtype=torch.float32),
        draw(size, dtype=torch.float32).square(),
    )
    before, out = [x.clone() for x in (master, m, v)] if draw.tiny else [], torch.empty_like(grad)
    one, zero = (torch.full((), value, device=draw.device) for value in (1.0, 0.0))
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def call() -> Results:
        adamw.adamw_(master, grad, m, v, out, zero, one, zero, *settings.values())
        return master, m, v

    return Case(
        call,
        lambda: adamw.adamw_reference(
            before[0], grad, before[1], before[2], zero, one, zero, **settings
        ),
    )


def _cross_entropy(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    """Forward and backward in a row, in place: what is timed a second time are other numbers, the
    same work.
    """
    tokens, width = draw.either((3, 700), (8192, 131072))
    logits, labels, ones = (
        draw(tokens, width),
        torch.arange(tokens, device=draw.device),
        torch.ones(tokens, device=draw.device),
    )
    before = logits.clone() if draw.tiny else logits

    def call() -> Results:
        top, exponentials, target = cross_entropy.cross_entropy_parts(logits, labels, width, None)
        lse = exponentials.log() + top
        cross_entropy.cross_entropy_backward_(
            logits, labels, lse, ones, torch.zeros_like(ones), width, None
        )
        return lse - target, logits

    def expected() -> Results:
        wide = before.float().requires_grad_()
        loss, _ = cross_entropy.cross_entropy_reference(wide, labels, width)
        return loss.detach(), *torch.autograd.grad(loss.sum(), wide)

    return Case(call, expected)


def _dropout(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    s, b, h = draw.either((4, 2, 300), (2048, 4, 4096))
    x, residual, samples, tokens = (
        draw(s, b, h),
        draw(s, b, h),
        torch.arange(b, device=draw.device),
        torch.arange(s, device=draw.device),
    )
    return Case(
        lambda: (dropout.dropout_add(x, residual, samples, tokens, *KEY, 0.1),),
        lambda: (
            dropout.dropout_add_reference(x.float(), residual.float(), samples, tokens, KEY, 0.1),
        ),
    )


def _fp8(draw: Draw, _key: dict[str, Any], part: str) -> Case:
    """What comes out, widened: the definition's bits."""
    x, scaling = draw(*draw.either((130, 300), (8192, 4096))), "row" if part == "rows" else "block"

    def call() -> Results:
        found = fp8.quantise(x, scaling=scaling, transposed=part == "tiles")
        return tuple(each.float() if draw.tiny else each for each in found if each is not None)

    def expected() -> Results:
        sources = (x, x.t()) if part == "tiles" else (x,)
        return tuple(
            each.float()
            for source in sources
            for each in fp8.quantise_reference(source, torch.float8_e4m3fn, scaling)
        )

    return Case(call, expected)


def _grad_norm(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    pieces = [draw(draw.either(9000, 1 << 28), dtype=torch.float32)]
    return Case(
        lambda: (grad_norm.sum_of_squares(pieces),),
        lambda: (grad_norm.sum_of_squares_reference(pieces),),
    )


def _grouped_gemm(draw: Draw, _key: dict[str, Any], what: str) -> Case:
    """Experts of a fine-grained mixture, one of which has no row."""
    counts = draw.either((5, 0, 70), (2048, 0, *range(512, 3584, 256)))
    o, i = draw.either((72, 48), (1536, 2048))
    ends = torch.tensor(counts, device=draw.device).cumsum(0, dtype=torch.int32)
    x, dy, weight = draw(sum(counts), i), draw(sum(counts), o), draw(len(counts), o, i)
    if what == "weight":
        grad = torch.zeros(weight.shape, device=draw.device)

        def add() -> Results:
            grouped_gemm.grouped_weight_grad_(grad, dy, x, ends, True)
            return (grad,)

        return Case(
            add,
            lambda: (grouped_gemm.grouped_weight_grad_reference(dy.float(), x.float(), ends),),
        )

    def products(call: Callable[..., Tensor], *operands: Tensor) -> Results:
        x, dy, weight = operands
        return call(x, weight, ends, True), call(dy, weight, ends, False)

    return Case(
        lambda: products(grouped_gemm.grouped_gemm, x, dy, weight),
        lambda: products(
            grouped_gemm.grouped_gemm_reference, x.float(), dy.float(), weight.float()
        ),
    )


def _initialise(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    out = torch.empty(*draw.either((3, 70), (16384, 4096)), device=draw.device)

    def call() -> Results:
        initialise.normal_(out, *KEY, 5, 2, 0.02)
        return (out,)

    def expected() -> Results:
        other = torch.empty_like(out)
        initialise.normal_reference(other, KEY, 5, 2, 0.02)
        return (other,)

    return Case(call, expected)


def _norm(draw: Draw, key: dict[str, Any], direction: str) -> Case:
    wide, dtype = key["kind"] == "wide", torch.float32 if key.get("bytes") == 4 else draw.dtype
    # just wider than a program holds
    small = (33000 if direction == "forward" else 9000) if wide else 300
    rows, width = draw.either((5, small), (1024, 65536) if wide else (8192, 4096))
    x, weight, dy = (
        draw(rows, width, dtype=dtype),
        draw(width, dtype=dtype),
        draw(rows, width, dtype=dtype),
    )

    def definition(x: Tensor, weight: Tensor) -> Tensor:
        return norm.norm_reference(x, weight, None, 1e-5)

    y, statistics = norm.norm(x, weight, None, 1e-5)
    if direction == "forward":
        return Case(
            lambda: norm.norm(x, weight, None, 1e-5)[:1],
            lambda: (definition(x.float(), weight.float()),),
        )

    def call() -> Results:
        dx, dweight = norm.norm_backward(dy, x, weight, statistics, None)
        return dx, dweight[0]

    return Case(call, lambda: _gradients(definition, dy, x, weight))


def _qk_norm(draw: Draw, _key: dict[str, Any], direction: str) -> Case:
    """RMSNorms of heads that turn."""
    s, b, g, heads, d = draw.either((3, 2, 2, 4, 32), (4096, 4, 8, 6, 128))
    qkv, dy, weights = draw(s, b, g, heads, d), draw(s, b, g, heads, d), (draw(d), draw(d))
    tables = _tables(draw, s, b, d)
    y, statistics = qk_norm.qk_norm(qkv, *weights, None, None, *tables, 1e-5)

    def definition(qkv: Tensor, *weights: Tensor) -> Tensor:
        return qk_norm.qk_norm_reference(qkv, weights, None, tables, 1e-5)

    if direction == "forward":
        return Case(
            lambda: qk_norm.qk_norm(qkv, *weights, None, None, *tables, 1e-5)[:1],
            lambda: (definition(qkv.float(), *(weight.float() for weight in weights)),),
        )

    def call() -> Results:
        dx, gradients = qk_norm.qk_norm_backward(dy, qkv, *weights, *tables, statistics)
        return dx, *gradients

    return Case(call, lambda: _gradients(definition, dy, qkv, *weights))


def _tables(draw: Draw, s: int, b: int, d: int) -> tuple[Tensor, Tensor]:
    """cos and sin [s, b, 1, d] of random angles, as layers/rotary.py makes them."""
    angles = draw(s, b, 1, d // 2, dtype=torch.float32)
    return (
        torch.cat([angles.cos()] * 2, -1),
        torch.cat([-angles.sin(), angles.sin()], -1),
    )


def _rotary(draw: Draw, _key: dict[str, Any], _rest: str) -> Case:
    """In place: a second turn is the same work."""
    s, b, n, d = draw.either((5, 2, 3, 32), (4096, 4, 40, 128))
    x, (cos, sin) = draw(s, b, n, d), _tables(draw, s, b, d)
    before = x.to(torch.float32, copy=True)

    def call() -> Results:
        rotary.rotary_(x, cos, sin, 1)
        return (x,)

    return Case(call, lambda: (rotary.rotary_reference(before, cos, sin, 1),))


CASES: dict[str, Callable[[Draw, dict[str, Any], str], Case]] = {
    "attention": _attention,
    "activation": _activation,
    "adamw": _adamw,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "fp8": _fp8,
    "grad_norm": _grad_norm,
    "grouped_gemm": _grouped_gemm,
    "initialise": _initialise,
    "norm": _norm,
    "qk_norm": _qk_norm,
    "rotary": _rotary,
}
