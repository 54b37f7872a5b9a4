"""Operators at the widths of an 8B layer (fused projection, grouped heads) against fp32, or for
attention against torch's flash kernel: a JSON object for each. Attention also runs twice: its bits
must repeat.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from device import DEVICE, HALF, IS_CUDA, message
from megatron.kernels.activation import activation, activation_backward, activation_reference
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_masks import AttentionMask
from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts
from megatron.kernels.norm import add_norm, norm_backward, norm_reference
from megatron.kernels.rotary import rotary_, rotary_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.linear import wgrad_gemm

if IS_CUDA:
    TOKENS, HIDDEN, FFN, GROUPS, HEADS, DIM, VOCAB = 8192, 4096, 14336, 8, 4, 128, 128256
else:
    TOKENS, HIDDEN, FFN, GROUPS, HEADS, DIM, VOCAB = 64, 64, 96, 2, 2, 16, 512
PADDING = 56  # entries of the vocabulary that are no tokens
BOUND = 1e-2  # relative error in the Frobenius norm: a few roundings of bf16


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


def add_norm_errors() -> list[float]:
    """Of the norm, dx and dweight of a residual addition followed by RMSNorm."""
    x, y, dy = (random(TOKENS, 1, HIDDEN) for _ in range(3))
    weight = random(HIDDEN)
    out, total, stats = add_norm(x, y, weight, None, 1e-5)
    leaf = (x.float() + y.float()).to(HALF).float().requires_grad_()
    wide_weight = weight.float().requires_grad_()
    expected = norm_reference(leaf, wide_weight, None, 1e-5)
    gradients = torch.autograd.grad(expected, (leaf, wide_weight), dy.float())
    dx, dparameters = norm_backward(dy, total, weight, stats, None)
    return [error(out, expected), error(dx, gradients[0]), error(dparameters[0], gradients[1])]


def swiglu_errors() -> list[float]:
    x, dy = random(TOKENS, 1, 2 * FFN), random(TOKENS, 1, FFN)
    leaf = x.float().requires_grad_()
    expected = activation_reference(leaf, None, "swiglu")
    (gradient,) = torch.autograd.grad(expected, leaf, dy.float())
    found = activation_backward(dy, x, None, "swiglu")[0]
    return [error(activation(x, None, "swiglu"), expected), error(found, gradient)]


def rotary_errors() -> list[float]:
    """Of queries and keys turned in the fused projection, and of the unchanged values."""
    x = random(TOKENS, 1, GROUPS, HEADS + 2, DIM)
    angle = torch.randn(TOKENS, 1, 1, DIM // 2, device=DEVICE)
    cos = torch.cat([angle.cos()] * 2, -1)
    sin = torch.cat([-angle.sin(), angle.sin()], -1)
    before = x.clone()
    rotary_(x[:, :, :, : HEADS + 1], cos, sin, 1)
    turned = before[:, :, :, : HEADS + 1].reshape(TOKENS, 1, -1, DIM).float()
    expected = rotary_reference(turned, cos, sin, 1)
    found = x[:, :, :, : HEADS + 1].reshape(TOKENS, 1, -1, DIM)
    return [error(found, expected), error(x[:, :, :, HEADS + 1], before[:, :, :, HEADS + 1])]


def loss_errors() -> list[float]:
    """Of the loss and its gradient, over a vocabulary with padding."""
    rows = min(TOKENS, 1024)
    logits = random(rows, VOCAB)
    labels = torch.randint(0, VOCAB - 2 * PADDING, (rows,), device=DEVICE)
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf[:, : VOCAB - PADDING], labels, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    top, exponentials, target = cross_entropy_parts(logits, labels, VOCAB - PADDING, None)
    lse, scale = exponentials.log() + top, torch.ones(rows, device=DEVICE)
    zero = torch.zeros_like(scale)
    cross_entropy_backward_(logits, labels, lse, scale, zero, VOCAB - PADDING, None)
    return [error(lse - target, expected), error(logits, gradient)]


def wgrad_errors() -> list[float]:
    """Of a weight gradient in fp32, written and then added to."""
    dy, x = (random(TOKENS, 1, HIDDEN).bfloat16() for _ in range(2))
    grad = torch.full((HIDDEN, HIDDEN), float("nan"), device=DEVICE)
    expected = dy.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    wgrad_gemm(dy, x, grad, True)
    written = error(grad, expected)
    wgrad_gemm(dy, x, grad, False)
    return [written, error(grad, 2 * expected)]


def ours(qkv: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the fused projection, and its gradient."""
    leaf = qkv.detach().requires_grad_()
    out, _ = flash_attention(leaf, scale=DIM**-0.5, mask=AttentionMask())
    return out, torch.autograd.grad(out, leaf, dout)[0]


def attention_errors() -> list[float]:
    """Of out, dq, dk and dv, and whether a second run has other bits (0 or 1)."""
    qkv, dout = random(TOKENS, 1, GROUPS, HEADS + 2, DIM), random(TOKENS, 1, GROUPS * HEADS, DIM)
    leaf = qkv.detach().requires_grad_()
    q, k, v = leaf[:, :, :, :HEADS].flatten(2, 3), leaf[:, :, :, HEADS], leaf[:, :, :, HEADS + 1]
    if IS_CUDA:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            expected = expected.permute(2, 0, 1, 3)
            (gradient,) = torch.autograd.grad(expected, leaf, dout)
    else:
        expected, _ = attention_reference(q, k, v, scale=DIM**-0.5, mask=AttentionMask())
        (gradient,) = torch.autograd.grad(expected, leaf, dout)
    (out, found), (_, again) = ours(qkv, dout), ours(qkv, dout)
    parts = (slice(0, HEADS), HEADS, HEADS + 1)
    errors = [error(found[:, :, :, part], gradient[:, :, :, part]) for part in parts]
    return [error(out, expected), *errors, float(not torch.equal(found, again))]


CHECKS: dict[str, Callable[[], list[float]]] = {
    "add + norm: out, dx, dweight": add_norm_errors,
    "swiglu: out, dx": swiglu_errors,
    "rotary in the fused projection: turned, values": rotary_errors,
    "loss: loss, dlogits": loss_errors,
    "weight gradient in fp32: written, added": wgrad_errors,
    "attention: out, dq, dk, dv, bits differ": attention_errors,
}


def main() -> int:
    torch.manual_seed(0)
    all_ok = True
    for name, check in CHECKS.items():
        begun = time.monotonic()
        try:
            errors = check()
            found = {
                "errors": [float(f"{each:.3g}") for each in errors],
                "ok": all(each < BOUND for each in errors),
            }
        except Exception as fault:  # one operator must not hide the others
            found = {"ok": False, "error": message(fault)}
        seconds = round(time.monotonic() - begun, 2)
        print(json.dumps({"check": name, **found, "seconds": seconds}), flush=True)
        all_ok &= bool(found["ok"])
    return int(not all_ok)


if __name__ == "__main__":
    sys.exit(main())
