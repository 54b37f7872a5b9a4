"""The GEMMs of a linear layer formed of 8-bit floats (Micikevicius et al., "FP8 formats for deep
learning", 2022): weights and inputs in e4m3, gradients of outputs in e4m3 or e5m2, each GEMM
scaled back, summed in fp32 and rounded once.

    y = x W^T      x and W      as they are
    dx = dy W      dy           as it is, W transposed
    dW = dy^T x    dy and x     transposed

Hopper takes both factors with the summed dimension contiguous: hence the transposed copies. What
shares a scale is kernels/fp8.py's matter. Scales are those of the whole layer, in every layout:
where ranks hold parts of what shares one (a tensor, or a row that is cut), the greatest number is
found over all of them first. So a layout changes no quantised number, except that under scales of
a whole tensor the tensor is a micro-batch's.

On a GPU kernels/fp8.py quantises and torch._scaled_mm multiplies; on a CPU both are done by their
definitions, on fp32 or fp64 numbers. **Never run on a GPU.** s sequence, b batch, i in, o out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import PrecisionConfig
from megatron.distributed.collectives import all_reduce_max
from megatron.distributed.groups import ALONE, Axis
from megatron.kernels.fp8 import (
    Maxima,
    Quantised,
    dequantise,
    find_maxima,
    maxima_reference,
    quantise,
    quantise_by_definition,
)

SCALINGS = {"tensorwise": "tensor", "rowwise": "row", "blockwise": "block"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# of a weight's gradient on a GPU, which is formed in pieces of its rows before it is added: two
# tiles of 128 x 256 for each multiprocessor of Hopper, which stay in its cache of 50 MB
PIECE_BYTES = 32 << 20
# the attribute of a weight whose GEMMs are formed so
FP8 = "fp8"


class Factor(NamedTuple):
    """A matrix [m, n] of a GEMM, and what is wanted of it. `axes`: those whose ranks hold parts of
    what shares a scale.
    """

    x: Tensor
    dtype: torch.dtype
    axes: list[Axis]
    plain: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Fp8Gemms:
    """How the GEMMs of one weight [o, i] are formed. `split`: the dimension of the weight that
    the ranks of `axis` share; `cp`: the ranks that hold other tokens of the same samples.
    """

    scaling: str  # tensor, row or block
    grad_dtype: torch.dtype
    weight_grad: bool  # of 8-bit floats, too
    split: int | None = None
    axis: Axis = ALONE
    cp: Axis = ALONE

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i] -> [..., o]."""
        # Both factors have the summed dimension i contiguous as they are.
        q, w = self._quantise(self._input(x, plain=True), self._weight(weight, 1, plain=True))
        y = scaled_gemm(q.q, q.scale, w.q, w.scale, x.dtype, bias)
        return y.view(*x.shape[:-1], -1)

    def input_grad(
        self, dy: Tensor, weight: Tensor, *, weight_grad: bool
    ) -> tuple[Tensor, Tensor | Quantised]:
        """dx [..., i] of dy [..., o], and what `accumulate_weight_grad` takes in place of dy if
        that is called next, as `weight_grad` specifies.
        """
        # dy is quantized once for both GEMMs: as it is for dx, transposed for dW.
        keeps = weight_grad and self.weight_grad
        own = self._output_grad(dy, plain=True, transposed=keeps)
        q, w = self._quantise(own, self._weight(weight, 0, transposed=True))
        dx = scaled_gemm(q.q, q.scale, w.q_t, w.scale_t, dy.dtype)
        # The copy for dx is dropped before dW is computed.
        kept = Quantised(None, None, q.q_t, q.scale_t) if keeps else dy
        return dx.view(*dy.shape[:-1], -1), kept

    def accumulate_weight_grad(
        self, dy: Tensor | Quantised, x: Tensor, main_grad: Tensor, overwrite: bool
    ) -> None:
        """main_grad [o, i] += dy^T x, or = where it is to `overwrite`: see `input_grad`."""
        own = self._input(x, transposed=True)
        if isinstance(dy, Quantised):
            (q,) = self._quantise(own)
        else:
            dy, q = self._quantise(self._output_grad(dy, transposed=True), own)
        # A GEMM of 8-bit floats cannot accumulate in fp32 main_grad: pieces of its rows are
        # computed, and added while they are in cache.
        row_bytes = main_grad.shape[1] * main_grad.element_size()
        rows = max(PIECE_BYTES // row_bytes // 128, 1) * 128  # whole tiles of 128 rows
        pieces = main_grad.split(rows)
        # one scale for all rows, or one (or a block of them) a row
        is_one = self.scaling == "tensor"
        scales = [dy.scale_t] * len(pieces) if is_one else dy.scale_t.split(rows)
        for into, factor, scale in zip(pieces, dy.q_t.split(rows), scales, strict=True):
            part = scaled_gemm(factor, scale, q.q_t, q.scale_t, main_grad.dtype)
            if overwrite:
                into.copy_(part)
            else:
                into.add_(part)

    def _weight(self, weight: Tensor, summed: int, **wanted: bool) -> Factor:
        """The weight as a factor. `summed`: the dimension that the GEMM sums over, which a row's
        scale spans; a tensor's scale spans both.
        """
        is_tensor = self.scaling == "tensor"
        is_cut = self.split is not None if is_tensor else self.split == summed
        return self._factor(weight.detach(), E4M3, is_cut, of_tokens=False, **wanted)

    def _input(self, x: Tensor, **wanted: bool) -> Factor:
        """x as a factor, cut where the weight's inputs are."""
        return self._factor(x, E4M3, self.split == 1, **wanted)

    def _output_grad(self, dy: Tensor, **wanted: bool) -> Factor:
        """dy as a factor, cut where the weight's outputs are."""
        return self._factor(dy, self.grad_dtype, self.split == 0, **wanted)

    def _factor(
        self,
        x: Tensor,
        dtype: torch.dtype,
        is_cut: bool,
        of_tokens: bool = True,
        **wanted: bool,
    ) -> Factor:
        """x [..., n] as a matrix, with the axes that share its scales. `is_cut`: tensor-parallel
        ranks hold parts of what shares a scale of a tensor or row.
        """
        axes = [self.axis] if is_cut and self.scaling != "block" else []
        # Context-parallel ranks hold other rows: only a scale of the whole tensor spans them.
        if of_tokens and self.scaling == "tensor" and self.cp.size > 1:
            axes.append(self.cp)
        return Factor(x.flatten(0, -2), dtype, axes, **wanted)

    def _quantise(self, *factors: Factor) -> list[Quantised]:
        """The factors in 8 bits, scaled by the maxima of the whole tensors."""
        # Maxima first: one all-reduce an axis serves all factors. Where no other rank has parts,
        # what quantises finds them itself.
        maxima: list[Maxima | None] = []
        for factor in factors:
            find = find_maxima if factor.x.is_cuda else maxima_reference
            maxima.append(find(factor.x, self.scaling) if factor.axes else None)
        for axis in (self.axis, self.cp):
            parts: list[Tensor] = []
            for factor, found in zip(factors, maxima, strict=True):
                if axis in factor.axes:
                    parts += compress(found, (factor.plain, factor.transposed))
            if parts:
                greatest = all_reduce_max(torch.cat(parts), axis)
                for part, whole in zip(parts, greatest.split([len(part) for part in parts])):
                    part.copy_(whole)
        quantised = []
        for factor, found in zip(factors, maxima, strict=True):
            function = quantise if factor.x.is_cuda else quantise_by_definition
            wanted = {"plain": factor.plain, "transposed": factor.transposed}
            quantised.append(function(factor.x, factor.dtype, self.scaling, **wanted, maxima=found))
        return quantised


def scaled_gemm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(a scale_a) (b scale_b)^T + bias of a [m, k] and b [n, k] in 8 bits -> [m, n] in `dtype`."""
    if not a.is_cuda:
        # The definition: both factors scaled back, multiplied in fp32 or wider.
        wide = torch.promote_types(dtype, torch.float32)
        y = dequantise(a, scale_a).to(wide) @ dequantise(b, scale_b).to(wide).t()
        return (y if bias is None else y.add_(bias)).to(dtype)
    if scale_a.shape[1] > 1:
        # of a piece of the rows too: columns of scales are contiguous
        scale_a = scale_a.t().contiguous().t()
    return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), bias=bias, out_dtype=dtype)


def mark_fp8(
    weight: nn.Parameter, precision: PrecisionConfig, split: int, axis: Axis, cp: Axis = ALONE
) -> None:
    """Let the linear layer of this weight, of which the ranks of `axis` share dimension `split`,
    form its GEMMs of 8-bit floats. `cp`: the context-parallel ranks.
    """
    gemms = Fp8Gemms(
        SCALINGS[precision.fp8_recipe],
        E5M2 if precision.fp8_format == "hybrid" else E4M3,
        # Row scales of dW's factors would span the tokens; `_factor` takes those of a row to span
        # the inputs or outputs.
        precision.fp8_wgrad and precision.fp8_recipe != "rowwise",
        split if axis.size > 1 else None,
        axis,
        cp,
    )
    setattr(weight, FP8, gemms)
