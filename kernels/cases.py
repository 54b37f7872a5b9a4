"""A call of every operator for a row of the table of configurations or for a variant of a run, and
the definition's results for comparison, in any precision; adamw, fp8 and grad_norm use that of
their operands.

The check at start (self_check.py) runs this module in a child process, which compares the variants
of a run; kernels/tools/tune.py compares and times rows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.kernels import (
    activation,
    adamw,
    attention,
    attention_launch,
    attention_masks,
    cross_entropy,
    dropout,
    fp8,
    grad_norm,
    grouped_gemm,
    norm,
    qk_norm,
    rotary,
)
from megatron.kernels.configurations import Row
from megatron.kernels.self_check import Variant, remember
from torch import Tensor

Results = tuple[Tensor, ...]
KEY = (3, 7)  # of Philox
E4M3 = "float8_e4m3fn"
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
# relative error in the Frobenius norm, against fp32: a few roundings of the precision
BOUND = {torch.float32: 1e-5, torch.float16: 1.25e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One call of an operator, and what the definition gives in a precision; some ignore it."""

    call: Callable[[], Results]
    expected: Callable[[torch.dtype], Results]


class Draw:
    """Random operands of a device (on meta tensors without values), small ones or those that are
    timed, in `dtype` unless an operator asks for another one.
    """

    def __init__(self, device: torch.device, tiny: bool, dtype: torch.dtype = torch.bfloat16):
        self.device, self.tiny, self.dtype, self.count = device, tiny, dtype, 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        self.count += 1
        return torch.randn(
            *shape,
            device=self.device,
            generator=torch.Generator(self.device).manual_seed(self.count),
        ).to(dtype or self.dtype)

    def sizes(self, settings: dict[str, Any], **pairs: tuple[Any, Any]) -> list[Any]:
        """By name what the settings give, else of each pair the small or the large one."""
        return [settings.get(name, pair[not self.tiny]) for name, pair in pairs.items()]


def case_of(variant: Variant, device: torch.device) -> Case:
    """The small case of a variant."""
    operator, _, rest = variant.kernel.partition(" ")
    draw = Draw(device, True, getattr(torch, variant.dtype))
    return CASES[operator](draw, dict(variant.settings), rest)


def case(row: Row, device: torch.device, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The case of a row in a precision, or in that of its key; in small shapes where `tiny`."""
    dtype = torch.float32 if row.key.get("bytes") == 4 else dtype
    operator, _, rest = row.operator.partition(" ")
    return CASES[operator](Draw(device, tiny, dtype), dict(row.key), rest)


def wrong(case: Case) -> str:
    """What is wrong with a case's results, compared with the definition's; nothing: ""."""
    for actual, expected in zip(case.call(), case.expected(torch.float32), strict=True):
        wide = expected.double()
        error = float((actual.double() - wide).norm() / wide.norm())
        if not error < BOUND.get(actual.dtype, BOUND[torch.float32]):
            return f"off by {error:.2g} of the norm"
    return ""


def _to(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Results:
    return tuple(each.to(dtype) for each in tensors)


def _against(function: Callable[..., Tensor], call: Callable[[], Results], *inputs: Tensor) -> Case:
    """The case of a forward pass whose definition is `function`."""
    return Case(call, lambda dtype: (function(*_to(dtype, inputs)),))


def _gradients(
    dtype: torch.dtype, function: Callable[..., Tensor], dout: Tensor, *inputs: Tensor
) -> Results:
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dout.to(dtype))


def _attention_options(key: dict[str, Any], s: int, b: int, device: torch.device) -> dict[str, Any]:
    """What a call takes after its tensors."""
    kind, places = key.get("kind", "causal"), torch.arange(s, device=device)
    half = torch.where(places >= s // 2, s // 2, 0).expand(b, -1)
    given: dict[str, Any] = {
        "scale": key.get("scale", key.get("d", 128) ** -0.5),
        "softcap": key.get("softcap", 50.0 if kind == "softcap" else None),
        "mask": attention_masks.attention_mask(
            s,
            s,
            causal=key.get("causal", kind != "full"),
            window=key.get("window"),
            document_starts=half if key.get("documents") else None,
            **({"q_positions": places, "k_positions": places} if key.get("positions") else {}),
        ),
    }
    if drop := key.get("drop", 0.1 if kind == "dropout" else 0.0):
        given |= {"drop": drop, "key": KEY, "sample_ids": torch.arange(b, device=device)}
    return given


def _attention_operands(draw: Draw, key: dict[str, Any], d: int) -> tuple[Results, Tensor]:
    """(q, k, v or the fused projection, the output's gradient)."""
    s, b, m, g = draw.sizes(key, s=(192, 4096), b=(1, 4), m=(2, 1), g=(1, 2048 // d))
    q, k, v, dout = (draw(s, b, heads, d) for heads in (m * g, g, g, m * g))
    if not key.get("fused"):
        return (q, k, v), dout
    parts = q.unflatten(2, (g, m)), k.unsqueeze(3), v.unsqueeze(3)
    return (torch.cat(parts, dim=3),), dout


def _attention(draw: Draw, key: dict[str, Any], kernel: str) -> Case:
    operands, dout = _attention_operands(draw, key, key.get("d", 128))
    s, b = dout.shape[:2]
    given = _attention_options(key, s, b, draw.device)
    attend = partial(attention.flash_attention, backend=key.get("backend", "triton"), **given)

    def definition(*operands: Tensor) -> Tensor:
        q, k, v = attention_launch.by_key_head(operands)
        return attention.attention_reference(q.flatten(2, 3), k, v, **given)[0]

    if kernel == "forward":
        return _against(definition, lambda: attend(*operands)[:1], *operands)
    leaves = [x.requires_grad_() for x in operands]
    out, _ = attend(*leaves, deterministic=kernel != "dkv_dq")
    return Case(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        lambda dtype: _gradients(dtype, definition, dout, *leaves),
    )


def _activation(draw: Draw, key: dict[str, Any], direction: str) -> Case:
    kind = key.get("activation", "swiglu" if key.get("kind") == "gated" else "gelu")
    rows, width = draw.sizes(key, rows=(6, 8192), width=(80, 16384))
    fused = width * (2 if kind in activation.GATED else 1)
    biased = key.get("bias", key.get("kind") == "bias")
    x, dy = draw(rows, fused), draw(rows, width)
    bias = draw(fused) if biased else None
    operands = (x,) if bias is None else (x, bias)

    def definition(x: Tensor, *bias: Tensor) -> Tensor:
        return activation.activation_reference(x, bias[0] if bias else None, kind)

    if direction == "forward":
        call = partial(activation.activation, x, bias, kind)
        return _against(definition, lambda: (call(),), *operands)
    return Case(
        lambda: activation.activation_backward(dy, x, bias, kind)[: len(operands)],
        lambda dtype: _gradients(dtype, definition, dy, *operands),
    )


def _adam_state(draw: Draw, key: dict[str, Any]) -> list[Tensor]:
    """master, grad, exp_avg, exp_avg_sq."""
    (size,) = draw.sizes(key, size=(3000, 1 << 27))
    dtypes = {"exp_avg": "float32", "exp_avg_sq": "float32"} | key
    grad = getattr(torch, key["grad"]) if "grad" in key else draw.dtype
    master, gradient = draw(size, dtype=torch.float32), draw(size, dtype=grad)
    moments = [draw(size, dtype=getattr(torch, dtypes[name])) for name in ("exp_avg", "exp_avg_sq")]
    return [master, gradient, moments[0], moments[1].abs_()]


def _adamw(draw: Draw, key: dict[str, Any], _rest: str) -> Case:
    state = _adam_state(draw, key)
    before = [x.clone() for x in state] if draw.tiny else []
    out = torch.empty_like(state[0], dtype=draw.dtype) if key.get("out", True) else None
    one, zero = (torch.full((), value, device=draw.device) for value in (1.0, 0.0))
    numbers = {name: key.get(name, value) for name, value in ADAM.items()}

    def call() -> Results:
        adamw.adamw_(*state, out, zero, one, zero, *numbers.values())
        master, _, *moments = state
        return (master, *moments) if out is None else (master, *moments, out)

    def expected(dtype: torch.dtype) -> Results:
        found = adamw.adamw_reference(*before, zero, one, zero, **numbers)
        return found if out is None else (*found, found[0])

    return Case(call, expected)


def _cross_entropy(draw: Draw, key: dict[str, Any], _rest: str) -> Case:
    """Forward and backward in a row, in place: what is timed a second time are other numbers, the
    same work.
    """
    tokens, width = draw.sizes(key, tokens=(3, 8192), width=(700, 131072))
    given = key.get("columns", width), key.get("softcap")
    logits = draw(tokens, width)
    labels = torch.arange(tokens, device=draw.device)
    ones = torch.ones(tokens, device=draw.device)
    before = logits.clone() if draw.tiny else logits

    def call() -> Results:
        top, exponentials, target = cross_entropy.cross_entropy_parts(logits, labels, *given)
        lse = exponentials.log() + top
        cross_entropy.cross_entropy_backward_(logits, labels, lse, ones, 0 * ones, *given)
        return lse - target, logits

    def expected(dtype: torch.dtype) -> Results:
        wide = before.to(dtype, copy=True).requires_grad_()
        loss, _ = cross_entropy.cross_entropy_reference(wide, labels, *given)
        return loss.detach(), *torch.autograd.grad(loss.sum(), wide)

    return Case(call, expected)


def _dropout(draw: Draw, key: dict[str, Any], _rest: str) -> Case:
    """With the residual, and without, as backward."""
    s, b, h = draw.sizes(key, s=(4, 2048), b=(2, 4), width=(300, 4096))
    x, residual, drop = draw(s, b, h), draw(s, b, h), key.get("drop", 0.1)
    at = torch.arange(b, device=draw.device), torch.arange(s, device=draw.device)

    def call() -> Results:
        added = dropout.dropout_add(x, residual, *at, *KEY, drop)
        return added, dropout.dropout_add(x, None, *at, *KEY, drop)

    def expected(dtype: torch.dtype) -> Results:
        wide, added = _to(dtype, (x, residual))
        addends = added, torch.zeros_like(wide)
        both = [dropout.dropout_add_reference(wide, each, *at, KEY, drop) for each in addends]
        return tuple(both)

    return Case(call, expected)


def _fp8(draw: Draw, key: dict[str, Any], part: str) -> Case:
    """What comes out, widened: the definition's bits."""
    x = draw(*draw.sizes(key, rows=(130, 8192), width=(300, 4096)))
    scaling = key.get("scaling", "row" if part == "rows" else "block")
    turned, kind = key.get("transposed", part == "tiles"), getattr(torch, key.get("to", E4M3))
    plain, given = key.get("plain", True), key.get("maxima", False)

    def call() -> Results:
        maxima = fp8.find_maxima(x, scaling) if given else None
        found = fp8.quantise(x, kind, scaling, plain=plain, transposed=turned, maxima=maxima)
        return tuple(each.float() if draw.tiny else each for each in found if each is not None)

    def expected(dtype: torch.dtype) -> Results:
        sources = (x,) * plain + (x.t(),) * turned
        return tuple(
            each.float()
            for source in sources
            for each in fp8.quantise_reference(source, kind, scaling)
        )

    return Case(call, expected)


def _grad_norm(draw: Draw, key: dict[str, Any], _rest: str) -> Case:
    dtype = getattr(torch, key.get("grad", "float32"))
    (size,) = draw.sizes(key, size=(9000, 1 << 28))
    pieces = [draw(size, dtype=dtype) for _ in range(key.get("pieces", 1))]
    return Case(
        lambda: (grad_norm.sum_of_squares(pieces),),
        lambda _: (grad_norm.sum_of_squares_reference(pieces),),
    )


def _grouped_gemm(draw: Draw, key: dict[str, Any], what: str) -> Case:
    """Experts of a fine-grained mixture, some of which have no row."""
    many = (2048, 0, *range(512, 3584, 256))
    few = [(70, 0, 5)[expert % 3] for expert in range(key.get("experts", 3))]
    counts, o, i = draw.sizes(key, counts=(few, many), o=(72, 1536), i=(48, 2048))
    ends = torch.tensor(counts, device=draw.device).cumsum(0, dtype=torch.int32)
    x, dy, weight = draw(sum(counts), i), draw(sum(counts), o), draw(len(counts), o, i)
    if what == "weight":
        return _grouped_weight(x, dy, torch.zeros_like(weight), ends, key)

    def products(call: Callable[..., Tensor], x: Tensor, dy: Tensor, weight: Tensor) -> Results:
        return call(x, weight, ends, True), call(dy, weight, ends, False)

    return Case(
        lambda: products(grouped_gemm.grouped_gemm, x, dy, weight),
        lambda dtype: products(grouped_gemm.grouped_gemm_reference, *_to(dtype, (x, dy, weight))),
    )


def _grouped_weight(
    x: Tensor, dy: Tensor, zeros: Tensor, ends: Tensor, key: dict[str, Any]
) -> Case:
    grad = zeros.to(getattr(torch, key.get("grad", "float32")))

    def add() -> Results:
        grouped_gemm.grouped_weight_grad_(grad, dy, x, ends, key.get("overwrite", True))
        return (grad,)

    def expected(dtype: torch.dtype) -> Results:
        return (grouped_gemm.grouped_weight_grad_reference(*_to(dtype, (dy, x)), ends),)

    return Case(add, expected)


def _norm_operands(draw: Draw, key: dict[str, Any]) -> tuple[Tensor, ...]:
    """x, the residual or its gradient, dy, and the parameters. Rows of x lie `stride` apart, or in
    groups of `inner` with others between.
    """
    if key.get("kind") == "wide":  # than a program of the backward pass holds
        rows, width = draw.sizes(key, rows=(5, 1024), width=(9000, 65536))
    else:
        rows, width = draw.sizes(key, rows=(5, 8192), width=(300, 4096))
    if inner := key.get("inner"):
        x = draw(rows // inner, inner + 1, width)[:, :inner]
    else:
        x = draw(rows, key.get("stride", width))[:, :width]
    parameters = (draw(width) for _ in range(2 if key.get("centre") else 1))
    return x, draw(*x.shape), draw(*x.shape), *parameters


def _norm(draw: Draw, key: dict[str, Any], direction: str) -> Case:
    """A LayerNorm where the setting `centre` is true, with a residual (backward: the gradient of
    the sum) where `add` is.
    """
    added, eps = key.get("add", False), key.get("eps", 1e-5)
    x, other, dy, *parameters = _norm_operands(draw, key)
    pair = (*parameters, None)[:2]

    def definition(x: Tensor, *parameters: Tensor) -> Tensor:
        return norm.norm_reference(x, *(*parameters, None)[:2], eps)

    if direction == "backward":
        return _norm_backward(definition, dy, x, other if added else None, parameters, eps)
    if not added:
        return _against(definition, lambda: norm.norm(x, *pair, eps)[:1], x, *parameters)

    def expected(dtype: torch.dtype) -> Results:
        total = (x + other).to(dtype)
        return definition(total, *_to(dtype, parameters)), total

    return Case(lambda: norm.add_norm(x, other, *pair, eps)[:2], expected)


def _norm_backward(
    definition: Callable[..., Tensor],
    dy: Tensor,
    x: Tensor,
    dtotal: Tensor | None,
    parameters: Sequence[Tensor],
    eps: float,
) -> Case:
    _, statistics = norm.norm(x, *(*parameters, None)[:2], eps)

    def call() -> Results:
        dx, gradients = norm.norm_backward(dy, x, parameters[0], statistics, dtotal)
        return dx, *gradients

    def expected(dtype: torch.dtype) -> Results:
        dx, *rest = _gradients(dtype, definition, dy, x, *parameters)
        return dx if dtotal is None else dx + dtotal.to(dtype), *rest

    return Case(call, expected)


def _qk_norm_operands(draw: Draw, key: dict[str, Any]) -> tuple[Tensor, ...]:
    """qkv, the output's gradient and the parameters."""
    s, b = draw.sizes(key, s=(3, 4096), b=(2, 4))
    g, m, d = draw.sizes(key, g=(2, 8), m=(2, 4), d=(32, 128))
    parameters = (draw(d) for _ in range(4 if key.get("centre") else 2))
    return draw(s, b, g, m + 2, d), draw(s, b, g, m + 2, d), *parameters


def _qk_norm(draw: Draw, key: dict[str, Any], direction: str) -> Case:
    """Norms of heads that turn, unless `rotary` is 0: LayerNorms where `centre` is true."""
    qkv, dy, *parameters = _qk_norm_operands(draw, key)
    (s, b, *_, d), eps = qkv.shape, key.get("eps", 1e-5)
    width = key.get("rotary", d)
    tables = _tables(draw, s, b, width) if width else None
    given = (*(*parameters, None, None)[:4], *(tables or (None, None)))
    y, statistics = qk_norm.qk_norm(qkv, *given, eps)

    def definition(qkv: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:2], parameters[2:] or None
        angles = tables and _to(torch.promote_types(qkv.dtype, torch.float32), tables)
        return qk_norm.qk_norm_reference(qkv, weights, biases, angles, eps)

    if direction == "forward":
        call = partial(qk_norm.qk_norm, qkv, *given, eps)
        return _against(definition, lambda: call()[:1], qkv, *parameters)

    def backward() -> Results:
        dx, gradients = qk_norm.qk_norm_backward(dy, qkv, *parameters[:2], *given[4:], statistics)
        return dx, *gradients

    return Case(backward, lambda dtype: _gradients(dtype, definition, dy, qkv, *parameters))


def _tables(draw: Draw, s: int, b: int, d: int) -> tuple[Tensor, Tensor]:
    """cos and sin [s, b, 1, d] of random angles, as model/attention/rotary.py makes them."""
    angles = draw(s, b, 1, d // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _rotary(draw: Draw, key: dict[str, Any], _rest: str) -> Case:
    """In place: a second turn is the same work. Query and key heads of a projection where its
    groups `g` of `m` query heads are given.
    """
    s, b, n, d = draw.sizes(key, s=(5, 4096), b=(2, 4), n=(3, 40), d=(32, 128))
    m = key.get("m")
    x = draw(s, b, n, d) if m is None else draw(s, b, key["g"], m + 2, d)[:, :, :, : m + 1]
    cos, sin = _tables(draw, s, b, key.get("rotary", d))
    direction = key.get("direction", 1)
    before = x.flatten(2, -2).clone()

    def call() -> Results:
        rotary.rotary_(x, cos, sin, direction)
        return (x.flatten(2, -2),)

    def expected(dtype: torch.dtype) -> Results:
        tables = _to(torch.promote_types(dtype, torch.float32), (cos, sin))
        return (rotary.rotary_reference(before.to(dtype), *tables, direction),)

    return Case(call, expected)


CASES: dict[str, Callable[[Draw, dict[str, Any], str], Case]] = {
    "attention": _attention,
    "activation": _activation,
    "adamw": _adamw,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "fp8": _fp8,
    "grad_norm": _grad_norm,
    "grouped_gemm": _grouped_gemm,
    "norm": _norm,
    "qk_norm": _qk_norm,
    "rotary": _rotary,
}


def main() -> None:
    """The child: reads a request from stdin, writes a line when it is ready and a JSON line for
    each variant to stdout. Ends after an error, which may have cost it its CUDA context, and by an
    alarm when a variant takes too long.
    """
    parent = os.getppid()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers print to stdout; send that to stderr
    request = json.loads(sys.stdin.read())
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    answers.write("ready\n")
    for each, file in zip(request["variants"], request["files"]):
        if os.getppid() != parent:  # the run has ended
            return
        signal.alarm(request["limit"])
        try:
            fault = wrong(case_of(Variant(**each), device))
        except Exception as error:  # whatever a compiler or a launch raises
            sys.exit(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        if not fault:
            remember(Path(file))
        answers.write(json.dumps({"fault": fault}) + "\n")
