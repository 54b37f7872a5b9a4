"""Linear layers with separate input- and weight-gradient functions, whole or shared over
tensor-parallel ranks. s sequence, b batch, i in, o out; under sequence parallelism s is this rank's
part wherever a value lies outside a pair of column- and row-parallel layers.

Tensor parallelism (Shoeybi et al. 2019): a column-parallel layer holds some of the outputs, a
row-parallel layer some of the inputs. Sequence parallelism (Korthikanti et al. 2022) splits each
all-reduce into a reduce-scatter and an all-gather along the sequence.

Gradients of our layers' parameters never appear as `.grad`: each carries main_grad, a view of its
block's gradient buffer (fp32, or fp64 in a float64 run), and backward functions add into it. Where
a weight has `overwrite_main_grad` set, main_grad holds nothing yet, and the first wgrad overwrites
it, which saves clearing and reading it. All other parameters find zeros. What an ordinary module
leaves in `.grad` is added by parallel/layer_runner.py.

Split backward (Qi et al. 2023): inside `deferring_weight_grads` a backward pass computes input and
bias gradients (B) and leaves the weight gradients to `add_weight_grads` (W). What it leaves holds
this rank's part of the sequence, never a gathered copy. Collectives of s b h elements each:

    layer        B                       W
    column       all-reduce of dx        -
    column, SP   reduce-scatter of dx    all-gather of x
    row          -                       -
    row, SP      all-gather of dy        all-gather of dy

An unsplit backward has those of B and column's of W. Weights that are marked form their GEMMs of
8-bit floats (fp8.py), which adds an all-reduce of maxima under scales of a tensor or a row.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed.collectives import (
    all_gather,
    all_reduce,
    gather_parts,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.distributed.groups import ALONE, Axis
from megatron.kernels import apex
from megatron.kernels.fp8 import Quantised
from megatron.kernels.lang import multiprocessors, operator
from megatron.model.fp8 import FP8
from megatron.model.model_parallel import NO_TP, TensorParallel
from megatron.model.spec import ParameterSpec

# rows and columns that one block of threads of a large GEMM computes on Hopper, at most
TILE = (128, 256)
# bytes of the largest temporary in which a weight gradient is formed, or summed up with others
SCRATCH_BYTES = 8 << 20
# torch.nn.functional.linear without a graph, for fp32 on a CPU: torch takes MKL there, which needs
# 5 to 20% more time than oneDNN on AMD's CPUs
linear_on_cpu = F.linear
if torch.backends.mkldnn.is_available():
    linear_on_cpu = partial(
        torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm=""
    )
# the attribute of a weight whose gradients are deferred: the list that they are put onto
DEFERRED = "deferred_grads"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear without a graph."""
    function = linear_on_cpu if x.is_cpu and x.dtype is torch.float32 else F.linear
    return function(x, weight, bias)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, of 8-bit floats where the weight is marked for them."""
    fp8 = getattr(weight, FP8, None)
    return linear(x, weight, bias) if fp8 is None else fp8.forward(x, weight, bias)


def dgrad(dy: Tensor, weight: Tensor, *, weight_grad: bool) -> tuple[Tensor, Tensor | Quantised]:
    """dy [s, b, o] times weight [o, i], and what `accumulate_weight_grad` takes as dy next."""
    fp8 = getattr(weight, FP8, None)
    if fp8 is None:
        return linear(dy, weight.t()), dy
    return fp8.input_grad(dy, weight, weight_grad=weight_grad)


# ---- gradients of parameters


def accumulate_weight_grad(
    dy: Tensor | Quantised,
    x: Tensor,
    weight: nn.Parameter,
    wgrad: Callable[..., None] | None = None,
) -> None:
    """Add the gradient dy^T x of a weight to its main_grad, or put it there if that holds nothing
    yet. `dy` is as `dgrad` returns it, or as it came; `wgrad`: in place of `wgrad_gemm`.
    """
    overwrite = getattr(weight, "overwrite_main_grad", False)
    weight.overwrite_main_grad = False
    fp8 = getattr(weight, FP8, None)
    if fp8 is not None and fp8.weight_grad:
        fp8.accumulate_weight_grad(dy, x, weight.main_grad, overwrite)
        return
    (wgrad or wgrad_gemm)(dy, x, weight.main_grad, overwrite, getattr(weight, "by_apex", False))


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
    (relative error 2^-9): as many outputs at a time as fit into SCRATCH_BYTES with a copy in fp32.
    """
    rows = max(1, SCRATCH_BYTES // (x.shape[1] * (dy.element_size() + main_grad.element_size())))
    for grad, part in zip(main_grad.split(rows), dy.split(rows, dim=1), strict=True):
        wgrad = part.t() @ x
        if overwrite:
            grad.copy_(wgrad)
        else:
            grad.add_(wgrad)


def accumulate_gradients(
    parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None], dx: Tensor
) -> None:
    """Add the gradients of norms and biases to main_grad, unless frozen; backward returns dx."""
    # A backward pass that torch.compile compiles is fixed when the forward pass is traced, before
    # main_grad is opened: an operator takes the parameter, and reads its attribute when it runs.
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        if torch.compiler.is_compiling():
            torch.ops.megatron.add_gradient_(dx, parameter, gradient)
        else:
            parameter.main_grad.add_(gradient)


# dx is not written: who reads it later keeps the operator in the graph
@operator("add_gradient_", mutates_args=("dx",), fake=lambda *_: None)
def _add_gradient(dx: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    parameter.main_grad.add_(gradient)


# ---- a split backward pass


class WeightGrad(NamedTuple):
    """A deferred weight gradient, with dy [s, b, o] and x [s, b, i], or what this rank holds of
    them: the rest is on its axis. x is detached: the graph would live on otherwise. `wgrad`: in
    place of `wgrad_gemm`.
    """

    weight: nn.Parameter
    dy: Tensor
    x: Tensor
    dy_axis: Axis = ALONE
    x_axis: Axis = ALONE
    wgrad: Callable[..., None] | None = None

    def start(self) -> Callable[[], None]:
        """Set off what is gathered; what it returns waits for that and adds the gradient."""
        dy, x = start_all_gather(self.dy, self.dy_axis), start_all_gather(self.x, self.x_axis)
        return lambda: accumulate_weight_grad(dy.wait(), x.wait(), self.weight, self.wgrad)


@torch.no_grad()
def add_weight_grads(deferred: list[WeightGrad]) -> None:
    """Add each to its main_grad and empty the list; an all-gather runs alongside each GEMM."""
    started: deque[Callable[[], None]] = deque()
    while deferred or started:
        # One all-gather ahead of the GEMM that runs.
        while deferred and len(started) < 2:
            started.append(deferred.pop(0).start())
        finish = started.popleft()
        finish()
        del finish  # or its tensors would live with those of the next one


@contextlib.contextmanager
def deferring_weight_grads(module: nn.Module) -> Iterator[list[WeightGrad]]:
    """Inside, backward passes put the weight gradients of the module onto this list."""
    deferred: list[WeightGrad] = []
    # Weights of linear layers and of experts declare that their gradient is one GEMM.
    declared = ((weight, getattr(weight, "spec", None)) for weight in module.parameters())
    weights = {weight for weight, spec in declared if spec is not None and spec.is_gemm}
    weights |= {layer.weight for layer in module.modules() if isinstance(layer, Linear)}
    for weight in weights:
        setattr(weight, DEFERRED, deferred)
    try:
        yield deferred
    finally:
        for weight in weights:
            delattr(weight, DEFERRED)


# ---- whole or shared weights


class _Linear(torch.autograd.Function):
    """A linear layer whose weight is whole on this rank; `tp` is not read. It runs for every matrix
    of an ordinary run, so `linear`, `gemm`, `dgrad` and `_add_gradients` are written out.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        fp8 = getattr(weight, FP8, None)
        if fp8 is not None:
            return fp8.forward(x, weight, bias)
        function = linear_on_cpu if x.is_cpu and x.dtype is torch.float32 else F.linear
        return function(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        deferred, fp8 = getattr(weight, DEFERRED, None), getattr(weight, FP8, None)
        frozen = not ctx.needs_input_grad[1]

        # dgrad. With 8-bit floats it quantizes dy for the wgrad that follows, too.
        dy_for_wgrad: Tensor | Quantised
        if fp8 is None:
            function = linear_on_cpu if dy.is_cpu and dy.dtype is torch.float32 else F.linear
            dx, dy_for_wgrad = function(dy, weight.t(), None), dy
        else:
            dx, dy_for_wgrad = fp8.input_grad(
                dy, weight, weight_grad=deferred is None and not frozen
            )
        if frozen:  # and so is the bias
            return dx, None, None, None

        # wgrad, added to main_grad now or by the second half of a split backward pass
        if deferred is None:
            accumulate_weight_grad(dy_for_wgrad, x, weight)
        else:
            deferred.append(WeightGrad(weight, dy, x.detach()))
        if bias is not None:  # summed over tokens in main_grad's precision
            bias.main_grad.add_(dy.flatten(0, -2).sum(0, dtype=bias.main_grad.dtype))
        return dx, None, None, None


class _ColumnLinear(torch.autograd.Function):
    """Forward: all-gather of x under SP, else nothing. Backward: the adjoint, a sum of dx over the
    axis, alongside the weight gradient's GEMM if that is not deferred; under SP x is
    gathered a second time for it, so that only this rank's part of x is kept.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp
        if not tp.sequence:
            return gemm(x, weight, bias)
        # All-gather of x along the sequence: whole, or in pieces that are multiplied as they come.
        if not worth_cutting(x, weight, weight.shape[0]):
            return gemm(all_gather(x, tp.axis), weight, bias)
        whole = x.new_empty((tp.size * x.shape[0], *x.shape[1:]))
        y = x.new_empty((*whole.shape[:-1], weight.shape[0]))
        for rows, part in gather_parts(x, tp.axis, whole):
            piece, factor = y[rows].flatten(0, -2), part.flatten(0, -2)
            if bias is None:
                torch.mm(factor, weight.t(), out=piece)
            else:
                torch.addmm(bias, factor, weight.t(), out=piece)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,), tp, weight = ctx.saved_tensors, ctx.tp, ctx.weight
        computes_wgrad = _computes_wgrad(ctx)

        # Under SP wgrad needs the whole x once more: its all-gather runs while dgrad is computed.
        # FP8 scales of a tensor or row: dgrad's all-reduce of maxima is queued behind that gather.
        x_axis = tp.axis if tp.sequence else ALONE
        gathering = start_all_gather(x, x_axis) if computes_wgrad else None

        # dgrad, and the sum over the ranks, which runs while wgrad is computed
        dx, dy_for_wgrad = dgrad(dy, weight, weight_grad=computes_wgrad)
        start = start_reduce_scatter if tp.sequence else start_all_reduce
        summing = start(dx, tp.axis)
        del dx  # under sequence parallelism it is whole, and read once

        # wgrad and the bias's gradient, of this rank's outputs
        _add_gradients(
            ctx,
            dy_for_wgrad,
            x if gathering is None else gathering.wait(),
            own_dy=dy,
            x_axis=x_axis,
        )
        return summing.wait(), None, None, None


class _RowLinear(torch.autograd.Function):
    """Forward: the sum over the axis of the ranks' outputs (under SP each rank keeps a part of the
    sequence), then the bias once. Backward: under SP an all-gather of dy, else nothing. The bias
    sees this rank's part of the sequence, so its gradient is a part of the sum.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp
        if not tp.sequence:
            # Each rank's output is a part of the sum over the inputs.
            y = all_reduce(gemm(x, weight), tp.axis)
        elif worth_cutting(x, weight, weight.shape[0] // 2):
            # the first half of the outputs is summed alongside the GEMM of the second
            halves = [start_reduce_scatter(linear(x, half), tp.axis) for half in weight.chunk(2)]
            y = torch.cat([half.wait() for half in halves], dim=-1)
        else:
            y = reduce_scatter(gemm(x, weight), tp.axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,), tp, weight = ctx.saved_tensors, ctx.tp, ctx.weight
        # Under SP this rank's part of the sequence. A deferred wgrad saves only this part, and the
        # bias, which is added after the sum, takes its gradient from it.
        own_dy = dy

        # dgrad: under SP dy is gathered along the sequence first, or piece by piece with the GEMMs
        dy_for_wgrad: Tensor | Quantised
        if tp.sequence and worth_cutting(dy, weight, weight.shape[1]):
            dy_for_wgrad = dy.new_empty((tp.size * dy.shape[0], *dy.shape[1:]))
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for rows, part in gather_parts(dy, tp.axis, dy_for_wgrad):
                torch.mm(part.flatten(0, -2), weight, out=dx[rows].flatten(0, -2))
        else:
            dy = all_gather(dy, tp.axis) if tp.sequence else dy
            dx, dy_for_wgrad = dgrad(dy, weight, weight_grad=_computes_wgrad(ctx))

        # wgrad, of the whole dy
        dy_axis = tp.axis if tp.sequence else ALONE
        _add_gradients(ctx, dy_for_wgrad, x, own_dy=own_dy, dy_axis=dy_axis)
        return dx, None, None, None


def _computes_wgrad(ctx: Any) -> bool:
    """Whether this backward pass computes wgrad: the weight is not frozen, nor wgrad deferred."""
    return ctx.needs_input_grad[1] and getattr(ctx.weight, DEFERRED, None) is None


def _add_gradients(
    ctx: Any,
    dy: Tensor | Quantised,
    x: Tensor,
    *,
    own_dy: Tensor,
    dy_axis: Axis = ALONE,
    x_axis: Axis = ALONE,
) -> None:
    """Add wgrad, of the whole dy and x, and the bias's gradient, of this rank's dy, to main_grad.
    Wgrad may be deferred to the second half of a split backward pass, which gathers over the axes.
    """
    if not ctx.needs_input_grad[1]:  # frozen, and so is the bias
        return
    deferred = getattr(ctx.weight, DEFERRED, None)
    if deferred is None:
        accumulate_weight_grad(dy, x, ctx.weight)
    else:
        deferred.append(WeightGrad(ctx.weight, own_dy, x.detach(), dy_axis, x_axis))
    if ctx.bias is not None:  # summed over tokens in main_grad's precision
        bias_grad = ctx.bias.main_grad
        bias_grad.add_(own_dy.flatten(0, -2).sum(0, dtype=bias_grad.dtype))


def worth_cutting(x: Tensor, weight: Tensor, outputs: int) -> bool:
    """Whether a GEMM of x [s, b, i] is cut into pieces of that many outputs, one of which is
    computed while others are communicated; of FP8 none is.
    """
    if getattr(weight, FP8, None) is not None:
        return False
    # A wave of tiles fills the GPU; a piece with fewer would leave multiprocessors idle.
    tiles = -(-x.shape[:-1].numel() // TILE[0]) * -(-outputs // TILE[1])
    return not x.is_cuda or tiles >= multiprocessors(x.device)


def column_function(tp: TensorParallel) -> Callable[..., Tensor]:
    """(x [s, b, i], under SP this rank's s / size; weight, bias, tp) -> [s, b, o / size]."""
    return (_Linear if tp.size == 1 else _ColumnLinear).apply


class Linear(nn.Module):
    """torch.nn.Linear whose gradients accumulate into `main_grad`: weight [o, i], bias [o].
    `skip_bias_add`: the consumer of the output adds the bias, and its gradient.
    """

    sharded: type[torch.autograd.Function] = _Linear  # over several tensor-parallel ranks

    def __init__(
        self,
        weight: ParameterSpec,
        bias: ParameterSpec | None = None,
        tp: TensorParallel = NO_TP,
        *,
        skip_bias_add: bool = False,
    ):
        super().__init__()
        self.tp, self.skip_bias_add = tp, skip_bias_add
        self.weight = weight.parameter(tp)
        self.bias = None if bias is None else bias.parameter(tp)
        self.function: Any = _Linear if tp.size == 1 else self.sharded

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.skip_bias_add else self.bias
        return self.function.apply(x, self.weight, bias, self.tp)


class ColumnLinear(Linear):
    """x [s, b, i] (under SP this rank's s / size) -> [s, b, o / size]."""

    sharded = _ColumnLinear


class RowLinear(Linear):
    """x [s, b, i / size] -> [s, b, o] (under SP this rank's s / size)."""

    sharded = _RowLinear
