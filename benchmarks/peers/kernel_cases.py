"""The cases of benchmarks/kernels.py: what is computed, by whom, and how much work it is.

A case builds its tensors, hands over one call for each implementation, and frees them. What is
checked before a case is timed uses the same calls.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.kernels import lang
from megatron.kernels.activation import activation, activation_backward, activation_reference
from megatron.kernels.adamw import adamw_
from megatron.kernels.attention import flash_attention
from megatron.kernels.attention_launch import Options, by_key_head
from megatron.kernels.attention_masks import AttentionMask
from megatron.kernels.candidates import gluon, gluon_forward
from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts
from megatron.kernels.fp8 import quantise, quantise_reference
from megatron.kernels.grad_norm import sum_of_squares
from megatron.kernels.grouped_gemm import grouped_gemm, grouped_weight_grad_
from megatron.kernels.norm import add_norm, norm, norm_backward
from megatron.kernels.rotary import rotary_
from torch import Tensor

from megatron.model.attention.rotary import apply_rotary
from megatron.model.dropout import Dropout, DropoutState
from megatron.model.linear import wgrad_gemm
from megatron.optimizer.optimizer import sum_of_squares as torch_sum

Calls = dict[str, Callable[[], Any]]  # by implementation
COPY_SHARE = 0.85  # of the copy's bandwidth: what the predictions of memory-bound operators assume
# FLOP/s of (head dimension, forward), expected from models of the hardware before any measurement
EXPECTED = {(64, True): 380e12, (128, True): 440e12, (64, False): 260e12, (128, False): 360e12}
DETERMINISTIC = "torch flash, deterministic"
# forward, of (head dimension, causal)
EXPECTED_GLUON = {
    (64, True): 400e12,
    (64, False): 430e12,
    (128, True): 600e12,
    (128, False): 630e12,
}
# backward, of (head dimension, causal)
EXPECTED_GLUON_BACKWARD = {
    (64, True): 350e12,
    (64, False): 370e12,
    (128, True): 425e12,
    (128, False): 450e12,
}
GLUON_CHECK = """  # small shapes of each kind, against fp64
import torch
from megatron.kernels.attention import attention_reference
from megatron.kernels.candidates.gluon import backward, forward
from megatron.kernels.candidates.gluon_forward import configuration
from megatron.kernels.attention_launch import Options, by_key_head
from megatron.kernels.attention_masks import AttentionMask
for d in (64, 128):
    cases = [(2112, 2112, AttentionMask()), (1000, 3000, AttentionMask(causal=False))]
    if d == 128:
        cases.append((1500, 1500, AttentionMask(window=300)))
    for s, t, mask in cases:
        q, k, v = (
            torch.randn(length, 2, heads, d, device="cuda", dtype=torch.bfloat16)
            for length, heads in ((s, 8), (t, 2), (t, 2))
        )
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        exact = attention_reference(*leaves, scale=d**-0.5, mask=mask)
        dout = torch.randn_like(q)
        gradients = torch.autograd.grad((exact[0] * dout).sum(), leaves)
        exact = [x.detach() for x in exact]
        for kind in ("shipped", "three consumers")[: 2 if d == 64 else 1]:
            options, chosen = Options(d**-0.5), configuration(d, kind)
            found = forward(*by_key_head((q, k, v)), mask, options, chosen)
            for ours, want in zip(found, exact):
                error = float((ours.double() - want).norm() / want.norm())
                assert error < 5e-3, f"d {d}, {mask}, {kind}: off by {error:.2g} of the norm"
        for name, ours, want in zip(
            ("dq", "dk", "dv"),
            backward(dout, None, *found, (q, k, v), mask, Options(d**-0.5)),
            gradients,
        ):
            error = float((ours.double() - want).norm() / want.norm())
            assert error < 5e-3, f"{name}, d {d}, {mask}: off by {error:.2g} of the norm"
"""
H200_COPY = 4.3e12  # bytes per second, for predictions alone


def limits(bench: Any) -> None:
    """What the device can do: the unit of every fraction."""
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device, dtype=bench.dtype) for _ in range(2))
    bench.measure(
        "limits", f"{size} x {size} product", {"torch": lambda: a @ b}, 2.0 * size**3, "FLOP"
    )
    count = 1 << (12 if bench.tiny else 29)
    source = torch.empty(count, device=bench.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    bench.measure(
        "limits",
        f"copy of {2 * count >> 20} MiB",
        {"torch": lambda: target.copy_(source)},
        4.0 * count,
        "byte",
    )
    for row in bench.rows[-2:]:
        bench.limits[row.unit] = bench.rate(row)


class AttentionShape(NamedTuple):
    """Causal or full self-attention of [s, b] tokens. `fused`: operands lie in the projection
    [s, b, g, n / g + 2, d], as the model has them.
    """

    s: int
    b: int
    n: int  # query heads
    g: int  # key heads
    d: int
    causal: bool
    fused: bool = False

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        fused = f", {self.n}/{self.g} heads, fused" if self.fused else ""
        return f"d {self.d}, {kind}, {self.s}{fused}"


def attention_shapes(tiny: bool) -> list[AttentionShape]:
    """A layer of Llama 3 8B, then 16384 tokens and 2048 channels of separate operands."""
    tokens, channels, lengths = (256, 128, (128,)) if tiny else (16384, 2048, (8192, 4096, 2048))
    shapes = [
        AttentionShape(s, tokens // s, channels // d, channels // d, d, causal)
        for d in (64, 128)
        for causal in (True, False)
        for s in lengths
    ]
    llama = (32, 1, 4, 2) if tiny else (8192, 1, 32, 8)
    return [AttentionShape(*llama, 128, True, fused=True), *shapes]


def attention(bench: Any) -> None:
    """Every shape, ours against torch's backends, then the candidates in Gluon."""
    layouts = None
    for shape in attention_shapes(bench.tiny):
        attention_case(bench, shape, None)
    with bench.checking("attention forward", "ours in Gluon"):
        layouts = _gluon(bench)
    for shape in attention_shapes(bench.tiny) if layouts else ():
        attention_case(bench, shape, layouts)


def attention_case(
    bench: Any, shape: AttentionShape, layouts: Callable[[int, int], dict[str, Any]] | None
) -> None:
    """Times one shape, with `layouts` that in Gluon. torch gets views of the fused projection."""
    if bench.is_late():  # before the case compiles anything
        name = "ours in Gluon" if layouts else "ours"
        return bench.measure("attention", str(shape), {name: str}, 0.0, "FLOP", None, "attention")
    s, b, n, g, d, causal, fused = shape
    mask, random = AttentionMask(causal=causal), partial(torch.randn, device=bench.device)
    dout = random(s, b, n, d, dtype=bench.dtype)
    if fused:
        ours = (random(s, b, g, n // g + 2, d, dtype=bench.dtype),)
        q, k, v = by_key_head(ours)
        q = q.flatten(2, 3)
    else:
        ours = q, k, v = tuple(random(s, b, n, d, dtype=bench.dtype) for _ in range(3))
    flops = 4.0 * b * n * s**2 * d / (2 if causal else 1)
    calls = (
        _gluon_calls(ours, dout, mask, layouts(d, s))
        if layouts
        else _attention_calls(bench, shape, mask, ours, (q, k, v), dout)
    )
    for direction, systems in calls.items():
        is_forward = direction == "forward"
        work = flops if is_forward else 2.5 * flops
        case = "attention", f"{direction}, {shape}", systems, work, "FLOP"
        if layouts:
            rates = EXPECTED_GLUON if is_forward else EXPECTED_GLUON_BACKWARD
            bench.measure(*case, 1e3 * work / rates[d, causal])
        else:
            predicted = 1e3 * work / EXPECTED[d, is_forward]
            bench.measure(*case, predicted, "attention", DETERMINISTIC)


def _attention_calls(
    bench: Any,
    shape: AttentionShape,
    mask: AttentionMask,
    ours: tuple[Tensor, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
) -> dict[str, Calls]:
    """Calls by direction and implementation, whose outputs are checked first. `ours`: the operands
    of our kernels, the fused projection or `qkv`.
    """
    expected = _attention_expected(*qkv, shape.causal)
    calls: dict[str, Calls] = {"forward": {}, "backward": {}}
    for name, call in _attention_systems(bench.device, shape, mask).items():
        operands = ours if name.startswith("ours") else qkv
        inputs = [x.detach().requires_grad_() for x in operands]
        with bench.checking(f"attention forward {shape}", name, "attention"):
            out = call(*inputs)
            bench.check(out, expected)
            held = _held if name == DETERMINISTIC else lambda call: call
            backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
            calls["backward"][name] = held(backward)
            if "atomic" not in name:  # it differs in the backward pass alone
                calls["forward"][name] = held(partial(call, *operands))
    return calls


def _gluon_calls(
    ours: tuple[Tensor, ...], dout: Tensor, mask: AttentionMask, configurations: Mapping[str, Any]
) -> dict[str, Calls]:
    """Calls of the candidate in Gluon by direction; one forward pass for each configuration."""
    q, k, v = by_key_head(ours)
    options = Options(dout.shape[-1] ** -0.5)
    forwards: Calls = {
        name: partial(gluon.forward, q, k, v, mask, options, configuration)
        for name, configuration in configurations.items()
    }
    backward = _gluon_backward(ours, dout, mask)
    return {"forward": forwards, "backward": {"ours in Gluon": backward}}


def _attention_systems(
    device: torch.device, shape: AttentionShape, mask: AttentionMask
) -> dict[str, Callable[..., Tensor]]:
    """Implementations by name: functions of ours' operands, or of q, k and v [s, b, heads, d]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    scale = shape.d**-0.5

    def ours(*qkv: Tensor, deterministic: bool = True) -> Tensor:
        return flash_attention(*qkv, scale=scale, mask=mask, deterministic=deterministic)[0]

    def torchs(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
                    is_causal=shape.causal,
                    enable_gqa=shape.n != shape.g,
                ).permute(2, 0, 1, 3)

        return call

    systems = {"ours": ours, "ours, atomic dq": partial(ours, deterministic=False)}
    if device.type != "cuda":
        return systems | {DETERMINISTIC: torchs(SDPBackend.MATH)}
    systems |= {
        DETERMINISTIC: torchs(SDPBackend.FLASH_ATTENTION),
        "torch flash": torchs(SDPBackend.FLASH_ATTENTION),
        "torch cuDNN": torchs(SDPBackend.CUDNN_ATTENTION),
    }
    if shape.fused:  # each shape is a compilation
        systems["flex_attention"] = _flex(shape, device)
    return systems


def _held(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as under --deterministic-mode: torch's flash kernel then adds up dq in a fixed
    order.
    """

    def called() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    torch.utils.deterministic.fill_uninitialized_memory = False
    return called


def _gluon(bench: Any) -> Callable[[int, int], dict[str, Any]] | None:
    """(head dimension, length) -> what is measured in Gluon. It has never run and may hang: a
    separate process tries it, until the deadline.
    """
    if reason := gluon.unsupported_reason(bench.device, torch.bfloat16):
        print(f"ours in Gluon is not measured: {reason}")
        return None
    done = subprocess.run(
        [sys.executable, "-c", GLUON_CHECK],
        cwd=Path(__file__).resolve().parents[2],
        timeout=max(bench.deadline - time.monotonic(), 0.0),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stderr.strip().splitlines() or ["it died"])[-1]

    def layouts(d: int, length: int) -> dict[str, Any]:
        shipped = gluon_forward.configuration(d)
        found = {"ours in Gluon": shipped}
        if d == 64:
            three = gluon_forward.configuration(d, "three consumers")
            found["ours in Gluon, three consumers"] = three
        if length == 8192:
            found["ours in Gluon, consumers in no order"] = replace(shipped, pingpong=0)
        return found

    return layouts


def _gluon_backward(
    qkv: tuple[Tensor, ...], dout: Tensor, mask: AttentionMask
) -> Callable[[], Any]:
    """The backward pass in Gluon of what its forward pass has made."""
    options = Options(dout.shape[-1] ** -0.5)
    out, lse = gluon.forward(*by_key_head(qkv), mask, options)
    return lambda: gluon.backward(dout, None, out, lse, qkv, mask, options)


def _flex(shape: AttentionShape, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sizes = (None, None, shape.s, shape.s)
    block = (
        create_block_mask(lambda b, h, i, j: i >= j, *sizes, device=device)
        if shape.causal
        else None
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
        block_mask=block,
        enable_gqa=shape.n != shape.g,
    ).permute(2, 0, 1, 3)


def _attention_expected(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In fp32, with a key head for each query head: torch then needs no matrix of scores."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    wide = (x.permute(1, 2, 0, 3).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(*wide, is_causal=causal).permute(2, 0, 1, 3)


EXPERT_SHARE = 0.55  # of the limit of products, in the predictions
EXPERTS = {  # of a rank: how many, rows of a mean one, fc1's output and input
    "16 experts of Qwen3-30B": (16, 2048, 1536, 2048),
    "128 experts of Qwen3-30B": (128, 256, 1536, 2048),
    "one expert of Mixtral 8x7B": (1, 8192, 28672, 4096),
}


def experts(bench: Any) -> None:
    """Products of experts with uneven numbers of rows: ours in one launch, and the two ways of
    torch: a loop of products, and its grouped product.
    """
    for title, (count, mean, o, i) in EXPERTS.items():
        if bench.tiny:
            mean, o, i = 24, 64, 32
        rows = [mean + (expert % 5 - 2) * mean // 8 for expert in range(count)]
        work = 2.0 * sum(rows) * o * i
        predicted = 1e3 * work / (EXPERT_SHARE * bench.limits["FLOP"])
        for what, systems in _expert_passes(bench, rows, o, i).items():
            case = f"{title}, {what}"
            with bench.checking(case, "ours", "grouped-gemm"):
                if what != "weight gradient":
                    bench.check(systems["ours"](), systems["torch"]().float())
            bench.measure("experts", case, systems, work, "FLOP", predicted, "grouped-gemm")


def _expert_passes(bench: Any, rows: list[int], o: int, i: int) -> dict[str, Calls]:
    """Calls by pass and implementation: experts with `rows` each and weights [o, i]."""
    random = partial(torch.randn, device=bench.device, dtype=bench.dtype)
    x, dy, weight = random(sum(rows), i), random(sum(rows), o), random(len(rows), o, i)
    grad = torch.zeros(weight.shape, device=bench.device)
    out, dx = torch.empty_like(dy), torch.empty_like(x)
    ends = torch.tensor(rows, device=bench.device).cumsum(0, dtype=torch.int32)
    # of each expert, for the loop
    parts = list(zip(x.split(rows), dy.split(rows), weight, grad, strict=True))
    forwards = [(each_x, each_weight.t()) for each_x, _, each_weight, _ in parts]
    backwards = [(each_dy, each_weight) for _, each_dy, each_weight, _ in parts]
    return {
        "forward": {
            "ours": partial(grouped_gemm, x, weight, ends, True),
            "torch": partial(_each, forwards, out.split(rows)),
            "torch, grouped": partial(F.grouped_mm, x, weight.mT, offs=ends),
        },
        "input gradient": {
            "ours": partial(grouped_gemm, dy, weight, ends, False),
            "torch": partial(_each, backwards, dx.split(rows)),
            "torch, grouped": partial(F.grouped_mm, dy, weight, offs=ends),
        },
        "weight gradient": {
            "ours": partial(grouped_weight_grad_, grad, dy, x, ends, False),
            "torch": partial(_each_grad, parts),
        },
    }


def _each(operands: list[tuple[Tensor, Tensor]], outs: tuple[Tensor, ...]) -> Tensor:
    """A product for each expert, into slices of one tensor, which is returned."""
    for (a, b), out in zip(operands, outs, strict=True):
        torch.mm(a, b, out=out)
    return outs[0]._base


def _each_grad(parts: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    """A weight gradient for each expert, added as the layer adds it."""
    for x, dy, _, grad in parts:
        wgrad_gemm(dy, x, grad, False, False)


def memory(bench: Any) -> None:
    """Operators that only move bytes."""
    for operator, case, work, systems, expected in _memory_cases(bench):
        for name, call in systems.items():
            if expected is not None and name.startswith("ours") and not bench.is_late():
                with bench.checking(case, name, operator):
                    bench.check(call(), expected())
        bench.measure(
            "memory", case, systems, work, "byte", 1e3 * work / (COPY_SHARE * H200_COPY), operator
        )


# operator of the dispatch table, case, bytes that must be moved, implementations, the first result
# in fp32
MemoryCase = tuple[str, str, float, dict[str, Callable[[], Any]], Callable[[], Tensor] | None]
Random = Callable[..., Tensor]


def _memory_cases(bench: Any) -> Iterator[MemoryCase]:
    def random(*shape: int, kind: torch.dtype = bench.dtype) -> Tensor:
        return torch.randn(*shape, device=bench.device, dtype=kind)

    for cases in (
        _norm_cases,
        _rotary_cases,
        _swiglu_cases,
        _gelu_cases,
        _quantise_cases,
        _dropout_cases,
        _loss_cases,
        _optimizer_cases,
    ):
        yield from cases(bench, random)


def _matrix(bench: Any) -> tuple[int, int]:
    """Rows and columns of hidden states."""
    return (8, 64) if bench.tiny else (8192, 4096)


def _mlp(bench: Any) -> tuple[int, int]:
    """Tokens, and channels inside of an MLP."""
    return (8, 64) if bench.tiny else (8192, 14336)


def _norm_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    rows, width = _matrix(bench)
    item = bench.dtype.itemsize
    x, residual, dy = (random(rows, width) for _ in range(3))
    weight, bias = random(width), random(width)
    for title, shift, of_liger in (("RMSNorm", None, "norm"), ("LayerNorm", bias, "layer_norm")):
        _, statistics = norm(x, weight, shift, 1e-5)
        inputs = (x, weight) if shift is None else (x, weight, shift)

        def plain(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
            return (
                F.rms_norm(x, (width,), weight, 1e-5)
                if shift is None
                else F.layer_norm(x, (width,), weight, shift, 1e-5)
            )

        peers = {"torch": plain, **_compiled(bench, plain), **_liger(of_liger)}
        yield (
            "norm",
            f"{title} forward {rows} x {width}",
            2.0 * item * x.numel(),
            {"ours": lambda shift=shift: norm(x, weight, shift, 1e-5)[0], **_calls(peers, inputs)},
            lambda inputs=inputs, plain=plain: plain(*(each.float() for each in inputs)),
        )
        added = {
            "torch": lambda x, residual, *rest, plain=plain: plain(x + residual, *rest),
            **(_liger("add_norm") if shift is None else {}),
        }
        yield (
            "norm",
            f"{title} forward with residual {rows} x {width}",
            4.0 * item * x.numel(),
            {
                "ours": lambda shift=shift: add_norm(x, residual, weight, shift, 1e-5),
                **_calls(added, (x, residual, *inputs[1:])),
            },
            None,
        )
        yield (
            "norm",
            f"{title} backward {rows} x {width}",
            3.0 * item * x.numel(),
            {
                "ours": lambda statistics=statistics: norm_backward(
                    dy, x, weight, statistics, None
                ),
                **_gradients(peers, inputs, dy),
            },
            None,
        )


def _rotary_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    item, dtype = bench.dtype.itemsize, bench.dtype
    s, b, n, d = (8, 1, 2, 16) if bench.tiny else (4096, 4, 32, 128)
    heads, cos, sin = (
        random(s, b, n, d),
        random(s, b, 1, d, kind=torch.float32),
        random(s, b, 1, d, kind=torch.float32),
    )
    q, k = (random(b, n // 2, s, d) for _ in range(2))
    turned = _liger("rope")
    yield (
        "rotary",
        f"rotary embedding {s} x {b} x {n} x {d}",
        2.0 * item * heads.numel(),
        {
            "ours": lambda: rotary_(heads, cos, sin, 1),
            "torch": lambda: apply_rotary(heads, (cos, sin)),
            **_calls(
                turned,
                (
                    q,
                    k,
                    *(
                        angles[:, 0, 0].expand(b, s, d).to(dtype).contiguous()
                        for angles in (cos, sin)
                    ),
                ),
            ),
        },
        None,
    )


def _swiglu_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    tokens, ffn = _mlp(bench)
    item = bench.dtype.itemsize
    fused, dout = random(tokens, 2 * ffn), random(tokens, ffn)

    def swiglu(fused: Tensor) -> Tensor:
        gate, up = fused.chunk(2, -1)
        return F.silu(gate) * up

    peers, halves = (
        {"torch": swiglu, **_compiled(bench, swiglu)},
        tuple(half.contiguous() for half in fused.chunk(2, -1)),
    )
    yield (
        "activation",
        f"SwiGLU forward {tokens} x {ffn}",
        3.0 * item * dout.numel(),
        {
            "ours": lambda: activation(fused, None, "swiglu"),
            **_calls(peers, (fused,)),
            **_calls(_liger("swiglu"), halves),
        },
        lambda: activation_reference(fused.float(), None, "swiglu"),
    )
    yield (
        "activation",
        f"SwiGLU backward {tokens} x {ffn}",
        5.0 * item * dout.numel(),
        {
            "ours": lambda: activation_backward(dout, fused, None, "swiglu"),
            **_gradients(peers, (fused,), dout),
            **_gradients(_liger("swiglu"), halves, dout),
        },
        None,
    )


def _gelu_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    tokens, ffn = _mlp(bench)
    item = bench.dtype.itemsize
    one, shift, dout = random(tokens, ffn), random(ffn), random(tokens, ffn)

    def gelu(one: Tensor, shift: Tensor) -> Tensor:
        return F.gelu(one + shift)

    peers = {"torch": gelu, **_compiled(bench, gelu)}
    yield (
        "activation",
        f"bias and GELU forward {tokens} x {ffn}",
        2.0 * item * dout.numel(),
        {"ours": lambda: activation(one, shift, "gelu"), **_calls(peers, (one, shift))},
        lambda: F.gelu(one.float() + shift.float()),
    )
    yield (
        "activation",
        f"bias and GELU backward {tokens} x {ffn}",
        3.0 * item * dout.numel(),
        {
            "ours": lambda: activation_backward(dout, one, shift, "gelu"),
            **_gradients(peers, (one, shift), dout),
        },
        None,
    )


def _quantise_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    """To 8 bits, where there are kernels for them."""
    if bench.device.type != "cpu" and lang.capability(bench.device) < lang.HOPPER:
        return
    rows, width = _matrix(bench)
    item, x = bench.dtype.itemsize, random(rows, width)
    for scaling, transposed, passes in (
        ("row", False, 3),
        ("block", True, 4),
        ("tensor", True, 6),
    ):
        definition = _calls(
            _compiled(
                bench,
                lambda x, scaling=scaling: quantise_reference(x, torch.float8_e4m3fn, scaling),
            ),
            (x,),
        )
        yield (
            "",
            f"to e4m3, scales of a {scaling}{', and transposed' * transposed} {rows} x {width}",
            passes / 2 * item * x.numel(),
            {
                "ours": lambda scaling=scaling, transposed=transposed: quantise(
                    x, scaling=scaling, transposed=transposed
                )[0],
                **({} if transposed else definition),
            },
            None,
        )


def _dropout_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    rows, width = _matrix(bench)
    item, device = bench.dtype.itemsize, bench.device
    x, residual = random(rows, width), random(rows, width)
    hidden = x.view(-1, 1, width)
    state = DropoutState(
        torch.zeros(1, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    )
    drop = {
        name: Dropout(0.1, 0, "benchmark", backend=backend)
        for name, backend in (("ours", "triton"), ("torch", "torch"))
    }
    yield (
        "dropout",
        f"dropout and addition {rows} x {width}",
        3.0 * item * x.numel(),
        {
            name: lambda site=site: site.add(hidden, residual.view_as(hidden), state)
            for name, site in drop.items()
        },
        None,
    )


def _loss_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    tokens, vocabulary = (4, 100) if bench.tiny else (8192, 131072)
    logits, labels = (
        random(tokens, vocabulary),
        torch.randint(vocabulary, (tokens,), device=bench.device),
    )
    ones, zeros = torch.ones(tokens, device=bench.device), torch.zeros(tokens, device=bench.device)

    def lse() -> Tensor:
        top, exponentials, _ = cross_entropy_parts(logits, labels, vocabulary, None)
        return top + exponentials.log()

    def both() -> None:
        cross_entropy_backward_(logits, labels, lse(), ones, zeros, vocabulary, None)

    def plain(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def torchs() -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(plain(leaf), leaf)[0]

    item = logits.element_size()
    yield (
        "cross-entropy",
        f"cross-entropy forward {tokens} x {vocabulary}",
        1.0 * item * logits.numel(),
        {"ours": lse, **_calls({"torch": plain, **_compiled(bench, plain)}, (logits,))},
        lambda: torch.logsumexp(logits.float(), -1),
    )
    systems = {"torch": torchs, "ours": both}  # ours last: it writes over the logits
    with suppress(ImportError):
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def liger() -> None:
            leaf = logits.clone().requires_grad_()
            LigerCrossEntropyFunction.apply(leaf, labels, None)[0].backward()

        systems = {"torch": torchs, "liger (and a copy of the logits)": liger, "ours": both}
    yield (
        "cross-entropy",
        f"cross-entropy forward and backward {tokens} x {vocabulary}",
        3.0 * item * logits.numel(),
        systems,
        None,
    )


def _optimizer_cases(bench: Any, random: Random) -> Iterator[MemoryCase]:
    count = 1 << (10 if bench.tiny else 30)
    wide = torch.float32
    master, grad, m, v = (
        torch.full((count,), value, device=bench.device, dtype=wide)
        for value in (1.0, 1e-3, 0.0, 1e-6)
    )
    out = torch.empty(count, device=bench.device, dtype=torch.bfloat16)
    step, coefficient, found = (
        torch.tensor(value, device=bench.device) for value in (10.0, 1.0, 0.0)
    )

    def ours() -> None:
        adamw_(master, grad, m, v, out, step, coefficient, found, 1e-4, 0.9, 0.95, 1e-8, 0.1)

    def torchs() -> None:
        torch._fused_adamw_(
            [master],
            [grad],
            [m],
            [v],
            [],
            [step + 1],
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=found,
        )
        out.copy_(master)

    yield (
        "adam",
        (
            f"AdamW of {count / 1e9:.3g}B parameters, fp32 gradients and moments (torch: fused, "
            "and a copy)"
        ),
        30.0 * count,
        {"ours": ours, "torch": torchs},
        None,
    )
    yield (
        "grad-norm",
        f"norm of {count / 1e9:.3g}B fp32 gradients in float64",
        4.0 * count,
        {
            "ours": lambda: sum_of_squares([grad]),
            "torch": lambda: torch_sum([grad], bench.device),
            "torch, fp32": lambda: torch.linalg.vector_norm(grad),
        },
        None,
    )


def _compiled(bench: Any, function: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return (
        {"torch.compile": torch.compile(function, dynamic=False)}
        if bench.device.type == "cuda"
        else {}
    )


def _calls(
    functions: dict[str, Callable[..., Any]], inputs: tuple[Tensor, ...]
) -> dict[str, Callable[[], Any]]:
    return {name: partial(function, *inputs) for name, function in functions.items()}


def _gradients(
    functions: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...], dy: Tensor
) -> dict[str, Callable[[], Any]]:
    """Backward passes alone, of all inputs; the forward pass is that of the first call, which is
    not timed.
    """

    def backward(function: Callable[..., Tensor]) -> Callable[[], Any]:
        @cache
        def graph() -> tuple[Tensor, list[Tensor]]:
            leaves = [x.detach().requires_grad_() for x in inputs]
            return function(*leaves), leaves

        return lambda: torch.autograd.grad(*graph(), dy, retain_graph=True)

    return {name: backward(function) for name, function in functions.items()}


def _liger(operator: str) -> dict[str, Callable[..., Any]]:
    """Liger's function, by the name "liger", where the package is there."""
    with suppress(ImportError):
        from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm, rope, swiglu

        functions = {
            "norm": lambda x, weight: rms_norm.LigerRMSNormFunction.apply(
                x, weight, 1e-5, 0.0, "llama", False, None
            ),
            "add_norm": lambda x, residual, weight: (
                fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply(
                    x, residual, weight, 1e-5, 0.0, "llama", False
                )
            ),
            "layer_norm": lambda x, weight, bias: layer_norm.LigerLayerNormFunction.apply(
                x, weight, bias, 1e-5
            ),
            "rope": rope.LigerRopeFunction.apply,
            "swiglu": swiglu.LigerSiLUMulFunction.apply,
        }
        apart = {"rope": " (q and k apart)", "swiglu": " (two tensors)"}.get(operator, "")
        return {f"liger{apart}": functions[operator]}
    return {}


PARTS: dict[str, Callable[[Any], None]] = {
    "limits": limits,
    "attention": attention,
    "experts": experts,
    "memory": memory,
}
