"""Rates of an 8B layer's parts.

    python scripts/gpu/timed.py [limits] [gemms] [attention]

`limits`: a large GEMM, and copies on the device and to the host. `gemms`: the five GEMMs forward,
dgrad and wgrad (in fp32 as they are trained, and in bf16). `attention`: 8,192 tokens, 32 query and
8 key/value heads, next to torch's flash and cuDNN kernels. Prints a JSON object for each: the
median of 15 calls, each with cold caches, in ms, and TFLOP/s or GB/s. FLOP of attention: 4 n s^2 d
/ 2 forward, 2.5 times that backward. On a CPU it runs small shapes, to try the program.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from device import DEVICE, HALF, IS_CUDA, message
from megatron.benchmarks.peers.one_call import OneCall
from megatron.kernels import attention, attention_backward
from megatron.kernels.attention_launch import Options, by_key_head
from megatron.kernels.attention_masks import AttentionMask
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP, CALLS = (3, 15) if IS_CUDA else (1, 2)
TOKENS, LARGE, COPIED, GROUPS, HEADS, DIM = (
    (8192, 8192, 1 << 30, 8, 4, 128) if IS_CUDA else (32, 32, 1 << 16, 2, 2, 16)
)
TFLOPS, GBPS = "TFLOP/s", "GB/s"
# outputs and inputs of the linear layers of Llama 3 8B, gate and up projections as one
LINEARS = {
    "qkv": (6144, 4096),
    "proj": (4096, 4096),
    "fc1": (28672, 4096),
    "fc2": (4096, 14336),
    "head": (128256, 4096),
}
SMALL = {"qkv": (48, 32), "proj": (32, 32)}
Timed = tuple[str, Callable[[], object], float, str]  # name, call, FLOP or bytes, unit


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(HALF)


def limits() -> Iterator[Timed]:
    a, b = random(LARGE, LARGE), random(LARGE, LARGE)
    yield f"GEMM of {LARGE}^3", lambda: a @ b, 2.0 * LARGE**3, TFLOPS
    source, target = (torch.empty(COPIED, dtype=torch.int8, device=DEVICE) for _ in range(2))
    yield "copy, bytes read and written", lambda: target.copy_(source), 2.0 * COPIED, GBPS
    host = torch.empty(COPIED, dtype=torch.int8, pin_memory=IS_CUDA)
    yield "copy to the host", lambda: host.copy_(source, non_blocking=True), COPIED, GBPS
    yield "copy from the host", lambda: target.copy_(host, non_blocking=True), COPIED, GBPS


def gemms() -> Iterator[Timed]:
    for name, (outputs, inputs) in (LINEARS if IS_CUDA else SMALL).items():
        x, weight, dy = random(TOKENS, inputs), random(outputs, inputs), random(TOKENS, outputs)
        grad = torch.zeros(outputs, inputs, device=DEVICE)
        flop = 2.0 * TOKENS * outputs * inputs

        def wgrad(
            beta: int, grad: Tensor = grad, dy: Tensor = dy, x: Tensor = x
        ) -> Callable[[], Tensor]:
            if IS_CUDA:
                return lambda: torch.addmm(grad, dy.t(), x, grad.dtype, beta=beta, out=grad)
            return lambda: torch.addmm(grad, dy.t(), x, beta=beta, out=grad)

        yield f"{name} forward", lambda x=x, weight=weight: F.linear(x, weight), flop, TFLOPS
        yield f"{name} dgrad", lambda dy=dy, weight=weight: dy.matmul(weight), flop, TFLOPS
        yield f"{name} wgrad in fp32, written", wgrad(0), flop, TFLOPS
        yield f"{name} wgrad in fp32, added", wgrad(1), flop, TFLOPS
        yield f"{name} wgrad in bf16", lambda dy=dy, x=x: dy.t() @ x, flop, TFLOPS


def attentions() -> Iterator[Timed]:
    qkv, dout = random(TOKENS, 1, GROUPS, HEADS + 2, DIM), random(TOKENS, 1, GROUPS * HEADS, DIM)
    q, k, v = by_key_head((qkv,))
    mask, options = AttentionMask(), Options(DIM**-0.5)
    flop = 4.0 * GROUPS * HEADS * TOKENS**2 * DIM / 2
    out, lse = attention.forward(q, k, v, mask, options)

    def backward(options: Options) -> Callable[[], object]:
        return lambda: attention_backward.backward(dout, None, out, lse, [qkv], mask, options)

    yield "attention forward, ours", lambda: attention.forward(q, k, v, mask, options), flop, TFLOPS
    yield "attention backward, ours", backward(options), 2.5 * flop, TFLOPS
    any_order = Options(DIM**-0.5, deterministic=False)
    yield "attention backward, ours, any order", backward(any_order), 2.5 * flop, TFLOPS
    if not IS_CUDA:
        return
    for name, backend, deterministic in (
        ("flash, deterministic", SDPBackend.FLASH_ATTENTION, True),
        ("flash", SDPBackend.FLASH_ATTENTION, False),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION, False),
    ):
        heads_first = [x.permute(1, 2, 0, 3) for x in (q.flatten(2, 3), k, v)]
        leaves = [x.detach().requires_grad_() for x in heads_first]

        def forward(leaves: list[Tensor] = leaves, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        yield f"attention forward, {name}", forward, flop, TFLOPS
        try:
            result = forward()
        except RuntimeError:
            continue  # the forward pass's row has the error
        dresult = torch.randn_like(result)
        yield (
            f"attention backward, {name}",
            lambda result=result, leaves=leaves, dresult=dresult: torch.autograd.grad(
                result, leaves, dresult, retain_graph=True
            ),
            2.5 * flop,
            TFLOPS,
        )
    torch.use_deterministic_algorithms(False)


PARTS = {"limits": limits, "gemms": gemms, "attention": attentions}


def main(parts: list[str]) -> int:
    unknown = set(parts) - set(PARTS)
    if unknown:
        print(f"no part {', '.join(unknown)}; they are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    once = OneCall(DEVICE, not IS_CUDA)
    failed = 0
    for part in parts or PARTS:
        for name, call, work, unit in PARTS[part]():
            try:
                times = [once.milliseconds(call) for _ in range(WARM_UP + CALLS)][WARM_UP:]
                ms = statistics.median(times)
                scale = 1e9 if unit == TFLOPS else 1e6
                found = {"ms": round(ms, 4), "rate": round(work / ms / scale, 1), "unit": unit}
            except Exception as error:  # one kernel must not hide the others
                found = {"error": message(error)}
                failed += 1
            print(json.dumps({"part": part, "name": name, **found}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
