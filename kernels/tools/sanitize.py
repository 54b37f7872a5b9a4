"""Every kernel once or twice in small shapes whose ends are no block's end, for compute-sanitizer.

    bash scripts/gpu.sh settle memcheck racecheck
    compute-sanitizer --tool memcheck python kernels/tools/sanitize.py
    compute-sanitizer --tool racecheck python kernels/tools/sanitize.py
    compute-sanitizer --tool memcheck python kernels/tools/sanitize.py gluon    # on Hopper

The last is of the kernels in Gluon, alone since they may hang.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor its own allocation, without which memcheck
sees the allocator's blocks and not their ends. Without a GPU the same calls run in Triton's
interpreter, to try the tool. Results are not looked at: tests/kernels does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path[0] = str(ROOT)

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import interpreter

    interpreter.patch()

from megatron.kernels.activation import KINDS, activation, activation_backward
from megatron.kernels.adamw import adamw_
from megatron.kernels.attention import flash_attention
from megatron.kernels.attention_gluon import unfit
from megatron.kernels.attention_masks import attention_mask
from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts
from megatron.kernels.dropout import dropout, dropout_add
from megatron.kernels.fp8 import find_maxima, quantise
from megatron.kernels.grad_norm import sum_of_squares
from megatron.kernels.grouped_gemm import grouped_gemm, grouped_weight_grad_
from megatron.kernels.initialise import normal_
from megatron.kernels.norm import WIDEST, add_norm, norm, norm_backward
from megatron.kernels.qk_norm import qk_norm, qk_norm_backward
from megatron.kernels.rotary import rotary_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter's bf16 is wrong

Calls = Iterator[tuple[str, Callable[[], object]]]  # what is run, and how


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def whole(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, device=DEVICE)


def attend(s: int, n: int, g: int, d: int, has: dict | None = None, **options: object) -> None:
    """Forward and backward of two samples."""
    q, k, v = (random(s, 2, heads, d).requires_grad_() for heads in (n, g, g))
    out, lse = flash_attention(
        q, k, v, scale=d**-0.5, mask=attention_mask(s, s, **(has or {})), **options
    )
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])


def attention_calls() -> Calls:
    positions = torch.arange(150, device=DEVICE)
    starts = torch.where(positions >= 70, 70, 0).expand(2, -1)
    samples = torch.tensor([3, 2**31 + 1], device=DEVICE)
    yield "attention, causal, d 64", lambda: attend(150, 4, 2, 64)
    yield "attention, causal, d 128, atomic", lambda: attend(150, 2, 1, 128, deterministic=False)
    yield (
        "attention, full, d 96, soft cap",
        lambda: attend(90, 2, 2, 96, {"causal": False}, softcap=5.0),
    )
    yield (
        "attention, window, dropout",
        lambda: attend(150, 2, 2, 64, {"window": 40}, drop=0.1, key=(1, 2), sample_ids=samples),
    )
    yield (
        "attention, documents and positions",
        lambda: attend(
            150,
            2,
            2,
            64,
            {"document_starts": starts, "q_positions": positions, "k_positions": positions},
        ),
    )
    if DEVICE.type == "cuda":
        yield "attention, d 256", lambda: attend(90, 1, 1, 256)


def gluon_calls() -> Calls:
    """Nothing where the kernels cannot run."""
    for d, has in (
        ((64, {}), (128, {"causal": False}), (96, {"window": 40}))
        if unfit(DEVICE, HALF) is None
        else ()
    ):
        yield f"attention in Gluon, d {d}", partial(attend, 150, 4, 2, d, has, gluon=True)


def norm_call(rows: int, width: int, bias: bool, residual: bool) -> None:
    x, weight, shift = (
        random(rows, 2, width + 8)[..., :width],
        random(width),
        random(width) if bias else None,
    )
    y, *kept = (
        add_norm(x, random(rows, 2, width), weight, shift, 1e-5)
        if residual
        else norm(x, weight, shift, 1e-5)
    )
    total, statistics = kept if residual else (x, *kept)
    norm_backward(torch.ones_like(y), total, weight, statistics, y if residual else None)


def norm_calls() -> Calls:
    """Norms of rows that one program holds, and of wider ones."""
    widths = [72, WIDEST["backward"] + 40]
    if DEVICE.type == "cuda":
        widths += [1000, WIDEST["forward"] + 40]
    for width in widths:
        for both in (False, True):
            yield (
                f"norm of {width}, {'bias and residual' if both else 'alone'}",
                partial(norm_call, 5, width, both, both),
            )


def activation_call(x: Tensor, bias: Tensor | None, kind: str) -> None:
    activation_backward(activation(x, bias, kind), x, bias, kind)


def loss_call(logits: Tensor, labels: Tensor, cap: float | None) -> None:
    numbers = torch.ones(labels.shape, device=DEVICE)
    cross_entropy_parts(logits, labels, 1500, cap)
    cross_entropy_backward_(logits, labels, numbers, numbers, numbers, 1500, cap)


def norms_of_heads(bias: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    qkv, weight = random(7, 2, 3, 5, 64), random(64)
    _, statistics = qk_norm(qkv, weight, weight, bias, bias, cos, sin, 1e-5)
    qk_norm_backward(qkv, qkv, weight, weight, cos, sin, statistics)


def row_calls() -> Calls:
    """Rotary embedding, activations, dropout and the loss."""
    cos, sin = (random(7, 2, 1, 48, dtype=torch.float32) for _ in range(2))
    yield (
        "rotary embedding of fused heads",
        lambda: rotary_(random(7, 2, 3, 5, 64)[:, :, :, :4], cos, sin, 1),
    )
    for shift in (None, random(64)):
        yield (
            f"norms of heads{'' if shift is None else ' with a bias'}",
            partial(norms_of_heads, shift, cos, sin),
        )
    for kind in KINDS:
        for shift in (None, random(2 * 1100)):
            x = random(3, 2, 2 * 1100) if kind.endswith("glu") else random(3, 2, 1100)
            bias = shift if shift is None else shift[: x.shape[-1]]
            yield (
                f"{kind}, {'bias' if bias is not None else 'no bias'}",
                partial(activation_call, x, bias, kind),
            )
    hidden, where = (
        random(5, 2, 1100),
        (whole(2, below=100), torch.arange(5, device=DEVICE), 1, 2, 0.1),
    )
    yield "dropout", lambda: (dropout_add(hidden, hidden, *where), dropout(hidden, *where))
    labels = whole(6, below=1500)
    for cap in (None, 30.0):
        yield (
            f"cross-entropy, cap {cap}",
            partial(loss_call, random(6, 1504), labels, cap),
        )


def expert_calls() -> Calls:
    """Products of experts, of which one has no row, and the last tiles are partly empty."""
    ends = torch.tensor([70, 70, 201, 205], dtype=torch.int32, device=DEVICE)
    x, dy, weight = random(205, 72), random(205, 136), random(4, 136, 72)
    grad = torch.ones(weight.shape, device=DEVICE)
    for turned in (True, False):
        yield (
            f"grouped products, {'forward' if turned else 'backward'}",
            partial(grouped_gemm, x if turned else dy, weight, ends, turned),
        )
    for overwrite in (True, False):
        yield (
            f"grouped weight gradients, {'written' if overwrite else 'added'}",
            partial(grouped_weight_grad_, grad, dy, x, ends, overwrite),
        )


def optimizer_calls() -> Calls:
    size, wide = 5000, torch.float32
    master, m, v = (torch.ones(size, device=DEVICE) for _ in range(3))
    scalars = [torch.tensor(value, device=DEVICE) for value in (3.0, 1.0, 0.0)]
    settings = 1e-3, 0.9, 0.95, 1e-8, 0.1
    for grad in (random(size), random(size, dtype=wide)):
        yield (
            f"AdamW, {grad.dtype}",
            partial(adamw_, master, grad, m, v, torch.empty_like(grad), *scalars, *settings),
        )
        yield (
            f"sum of squares, {grad.dtype}",
            partial(sum_of_squares, [grad, grad[:1], grad[16:4099].clone()]),
        )
    for scaling in ("tensor", "row", "block"):
        for transposed in (False, True):
            yield (
                f"8-bit floats, {scaling}, {'both ways' if transposed else 'one way'}",
                partial(quantise, random(70, 150), scaling=scaling, transposed=transposed),
            )
    for scaling in ("tensor", "row"):
        yield f"maxima of 8-bit floats, {scaling}", partial(find_maxima, random(70, 150), scaling)
    yield "initial weights", lambda: normal_(torch.empty(5, 1030, device=DEVICE), 1, 2, 3, 7, 0.02)


def main(words: list[str]) -> int:
    torch.manual_seed(0)
    count = 0
    for calls in (
        (gluon_calls,)
        if words == ["gluon"]
        else (attention_calls, norm_calls, row_calls, expert_calls, optimizer_calls)
    ):
        for name, call in calls():
            print(name, flush=True)  # a fault that comes now is of this
            call()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            count += 1
    print(f"{count} calls on {DEVICE.type}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
