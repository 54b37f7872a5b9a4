"""How backward functions of layers write a parameter's `main_grad`.

Their gradients never appear as `.grad`: each parameter carries main_grad, a view of its block's
gradient buffer (fp32, or fp64 in a float64 run), and the functions here add into it. Where a
weight's attribute `overwrite_main_grad` is set, main_grad holds nothing to add to: the first wgrad
overwrites it, which saves clearing and reading it (`accumulate_weight_grad`). All other parameters
find zeros. Embeddings and routers add to theirs themselves; what an ordinary module leaves in
`.grad` is added by parallel/layer_runner.py.

A backward pass that torch.compile compiles is a graph of tensors, fixed when the forward pass was
traced. main_grad is not among them: it is opened after the forward pass, moves from step to step,
and is overwritten or added to, at once or later. So what adds to it there is an operator that takes
the parameter, and reads its attributes when it runs. s sequence, b batch, i in, o out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megatron.config.workspace import SCRATCH_BYTES
from megatron.kernels import apex
from megatron.kernels.fp8 import Quantised
from megatron.kernels.lang import operator
from megatron.model.fp8 import FP8


def accumulate_weight_grad(
    dy: Tensor | Quantised,
    x: Tensor,
    weight: nn.Parameter,
    gemm: Callable[..., None] | None = None,
) -> None:
    """Add the gradient dy^T x of a weight to its main_grad, or put it there if that holds nothing
    yet. `dy` is as `dgrad` returns it, or as it came; `gemm`: in place of `wgrad_gemm`.
    """
    overwrite = getattr(weight, "overwrite_main_grad", False)
    weight.overwrite_main_grad = False
    fp8 = getattr(weight, FP8, None)
    if fp8 is not None and fp8.weight_grad:
        fp8.accumulate_weight_grad(dy, x, weight.main_grad, overwrite)
        return
    (gemm or wgrad_gemm)(dy, x, weight.main_grad, overwrite, getattr(weight, "by_apex", False))


def wgrad_gemm(
    dy: Tensor,
    x: Tensor,
    main_grad: Tensor,
    overwrite: bool = False,
    by_apex: bool = False,
    rows_vary: bool = False,
) -> None:
    """main_grad [o, i] += dy^T x (= where it is to `overwrite`), with dy [s, b, o] and x [s, b, i]:
    one GEMM that accumulates in main_grad itself, except on a CPU, where bf16 gradients are rounded
    once before they are added, and fp16 factors are widened, in temporaries of at most
    SCRATCH_BYTES. `rows_vary`: s b differs from call to call, and bf16 factors are widened too.
    """
    # [tokens, o] and [tokens, i]
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    if by_apex and main_grad.dtype == torch.float32 and dy.dtype != torch.float32:
        apex.accumulate_weight_grad(dy, x, main_grad.zero_() if overwrite else main_grad)
        return
    beta = 0 if overwrite else 1
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy.t(), x, beta=beta)
        return
    if dy.is_cuda:
        # reads bf16 or fp16, adds into fp32
        torch.addmm(main_grad, dy.t(), x, main_grad.dtype, beta=beta, out=main_grad)
        return
    if dy.dtype == torch.bfloat16 and not rows_vary:
        _add_rounded(dy, x, main_grad, overwrite)
        return
    # No CPU GEMM reads fp16 and adds into fp32. One of bf16 with a new number of rows generates
    # code first, which takes longer than the GEMM.
    step = max(1, SCRATCH_BYTES // (main_grad.element_size() * max(x.shape[1], dy.shape[1])))
    for token in range(0, x.shape[0], step):
        piece = slice(token, token + step)
        main_grad.addmm_(
            dy[piece].t().to(main_grad.dtype),
            x[piece].to(main_grad.dtype),
            beta=0 if overwrite and token == 0 else 1,
        )


def _add_rounded(dy: Tensor, x: Tensor, main_grad: Tensor, overwrite: bool) -> None:
    """main_grad [o, i] += dy^T x by bf16 GEMMs that accumulate in fp32 and round their result once
    (relative error 2^-9), some outputs at a time: as many as fit into SCRATCH_BYTES with their copy
    in fp32.
    """
    rows = max(1, SCRATCH_BYTES // (x.shape[1] * (dy.element_size() + main_grad.element_size())))
    for grad, part in zip(main_grad.split(rows), dy.split(rows, dim=1), strict=True):
        # rounded to bf16 once, behind the sum over tokens in fp32
        wgrad = part.t() @ x
        if overwrite:
            grad.copy_(wgrad)
        else:
            grad.add_(wgrad)


def accumulate_gradients(
    parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor], dx: Tensor
) -> None:
    """main_grad += gradient of each parameter, in a backward pass that returns dx."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if torch.compiler.is_compiling():
            torch.ops.megatron.add_gradient_(dx, parameter, gradient)
        else:
            parameter.main_grad.add_(gradient)


# dx is not written: who reads it later keeps the operator in the graph
@operator("add_gradient_", mutates_args=("dx",))
def _add_gradient(dx: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    parameter.main_grad.add_(gradient)
