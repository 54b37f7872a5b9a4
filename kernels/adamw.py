"""AdamW on a flat segment: gradient, moments, master weights and the rounded weights in one pass.

Shapes: all [n]. master (p) in fp32; grad (g) in fp32, bf16 or fp16; exp_avg (m) and exp_avg_sq (v)
in fp32 or bf16; out, where there is one, in the precision of the model. On the device, as fp32
scalars: `coefficient` (unscaling, normalisation and clipping in one factor), `found_inf` (1 leaves
everything as it is) and `step`, t - 1: the steps taken before.

    g = coefficient g
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = p - lr (weight_decay p + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps))
    out = p

Moments narrower than fp32 are widened, used, and rounded to nearest when they are stored. The two
powers are taken in float64: 1 - beta2^t would lose four digits of fp32 at the first steps.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

Roofline: 24 bytes a parameter for master weights and moments, 4 for the gradient (2 in bf16) and 2
for out: 30 (28). 1e9 parameters at 4.3 TB/s:
7.0 ms.
"""

from __future__ import annotations

import math

import torch
from megatron.kernels.configurations import find
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import capability, cdiv, jit, launch, operator, tl
from torch import Tensor


def adamw_reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    coefficient: Tensor,
    found_inf: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New (master, exp_avg, exp_avg_sq), in the precision of `master`."""
    wide, count = master.dtype, step.double() + 1
    g = grad.to(wide) * coefficient.to(wide)
    m = beta1 * exp_avg.to(wide) + (1 - beta1) * g
    v = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * g.square()
    correction1, correction2 = ((1 - beta**count).to(wide) for beta in (beta1, beta2))
    p = master - lr * (weight_decay * master + m / correction1 / ((v / correction2).sqrt() + eps))
    skip = found_inf != 0
    return (
        torch.where(skip, master, p),
        torch.where(skip, exp_avg.to(wide), m),
        torch.where(skip, exp_avg_sq.to(wide), v),
    )


@jit
def scalars_of_step(step, coefficient, lr, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """(coefficient, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t)) in fp32; LOG1 and LOG2 are the
    logarithms of the betas to base 2.
    """
    count = tl.load(step).to(tl.float64) + 1
    rate = (lr / (1 - tl.exp2(count * LOG1))).to(tl.float32)
    widening = (1 / tl.sqrt(1 - tl.exp2(count * LOG2))).to(tl.float32)
    return tl.load(coefficient), rate, widening


@jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    out,
    step,
    coefficient,
    found_inf,
    size,
    lr,
    decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    REST1: tl.constexpr,
    REST2: tl.constexpr,
    LOG1: tl.constexpr,
    LOG2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every n-th block, so that the scalars in float64 are few."""
    if tl.load(found_inf) == 0:
        factor, rate, widening = scalars_of_step(step, coefficient, lr, LOG1, LOG2)
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            g = load_fp32(grad + at, inside) * factor
            m, v = load_fp32(exp_avg + at, inside), load_fp32(exp_avg_sq + at, inside)
            p = load_fp32(master + at, inside)
            m = BETA1 * m + REST1 * g
            v = BETA2 * v + REST2 * g * g
            p -= decay * p + rate * m / (tl.sqrt(v) * widening + EPS)
            store_rounded(exp_avg + at, m, inside)
            store_rounded(exp_avg_sq + at, v, inside)
            store_rounded(master + at, p, inside)
            if out is not None:
                store_rounded(out + at, p, inside)


def _constants(beta1: float, beta2: float, eps: float) -> dict[str, float]:
    """`1 - beta` is rounded once, not after beta was; log2 of 0 is as good as minus infinity."""
    log1, log2 = (math.log2(beta) if beta > 0 else -1e30 for beta in (beta1, beta2))
    return {
        "BETA1": beta1,
        "BETA2": beta2,
        "REST1": 1 - beta1,
        "REST2": 1 - beta2,
        "LOG1": log1,
        "LOG2": log2,
        "EPS": eps,
    }


@operator("adamw_", mutates_args=("master", "exp_avg", "exp_avg_sq", "out"))
def adamw_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    step: Tensor,
    coefficient: Tensor,
    found_inf: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step in place on a flat segment."""
    assert master.dtype == torch.float32 and coefficient.dtype == torch.float32
    assert all(
        x is None or x.is_contiguous() and x.numel() == master.numel()
        for x in (master, grad, exp_avg, exp_avg_sq, out)
    )
    if master.numel() == 0:
        return
    # on Hopper eight blocks of four warps for each of 132 multiprocessors: 128 kB in flight on each
    row = find("adamw", capability(master.device))
    block = row.numbers["block"]
    launch(
        adamw_kernel,
        (min(row.numbers["programs"], cdiv(master.numel(), block)),),
        row,
        master,
        grad,
        exp_avg,
        exp_avg_sq,
        out,
        step,
        coefficient,
        found_inf,
        master.numel(),
        lr,
        lr * weight_decay,
        **_constants(beta1, beta2, eps),
        BLOCK=block,
    )
