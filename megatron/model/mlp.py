"""The MLP: h -> f -> h with GELU, squared ReLU or a gated activation. s sequence, b batch, h
hidden, f ffn width.

Under --tiled-mlp N it runs over N pieces of the sequence that this rank holds, one after another,
and keeps its input alone: the backward pass makes fc1's product and the activation of a piece again
and differentiates that piece, the last one first, before it turns to the next (autograd runs what
was recorded last first). So tensors as wide as f never exist for more than a piece. Pieces of the
output, and of the gradient of the input, are written into their places in one tensor; weight
gradients add up in main_grad piece by piece. What the norms in front of attention and MLP give is
made again too, since it is as large as the input of a layer. Under sequence parallelism a piece is
gathered from the pieces of all ranks, which hold other tokens than a piece of the whole sequence
would: products of rows do not mind, and the reduce-scatter hands each rank its own rows back.

Called from model/block.py, once a layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.derive import GATED
from megatron.config.groups import ModelConfig
from megatron.kernels.activation import activation as activation_forward
from megatron.kernels.activation import activation_backward, apply_function
from megatron.model.linear import ColumnLinear, RowLinear, column_linear
from megatron.model.opaque import add_gradient
from megatron.model.recompute_context import RecomputeContext
from megatron.model.spec import ParameterSpec, Shard, TensorSpec, normal, parts_under, vector
from megatron.model.tensor_parallel import DENSE, TensorParallel

_ATEN = torch.ops.aten  # whose forms with `out` write into a half of the fused tensor
_GATES = {
    "swiglu": (_ATEN.silu.out, _ATEN.silu_backward.grad_input),
    "geglu": (_ATEN.gelu.out, _ATEN.gelu_backward.grad_input),
}


class _Gated(torch.autograd.Function):
    """act(gate) * up from the fused [..., gate | up]; saves its input alone and recomputes the
    activation.
    """

    @staticmethod
    def forward(ctx, fused: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(fused)
        ctx.activation = activation
        gate, up = fused.chunk(2, dim=-1)
        value, _ = _GATES[activation]
        return value(gate, out=gate.new_empty(gate.shape)).mul_(up)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (fused,) = ctx.saved_tensors
        gate, up = fused.chunk(2, dim=-1)
        value, gradient = _GATES[ctx.activation]
        dfused = torch.empty_like(fused)
        dgate, dup = dfused.chunk(2, dim=-1)
        gradient(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
        value(gate, out=dup).mul_(dy)
        return dfused, None


class _SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2; saves its input alone, and takes one tensor in either pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(dy).mul_(2)


def weighed_gated_gradients(
    dy: Tensor, fused: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """(dfused [N, 2f], dweights [N]) of act(gate) * up * weight for each row, with dy [N, f]: what
    autograd makes of `_Gated` and the product, with the activation computed once.
    """
    gate, up = fused.chunk(2, dim=-1)
    value, gradient = _GATES[activation]
    dfused = torch.empty_like(fused)
    dgate, dup = dfused.chunk(2, dim=-1)
    dweights = torch.mul(value(gate, out=dup), up).mul_(dy).sum(1, dtype=weights.dtype)
    weighted = (dy * weights.unsqueeze(1)).to(fused.dtype)
    gradient(torch.mul(weighted, up, out=dgate), gate, grad_input=dgate)
    dup.mul_(weighted)
    return dfused, dweights


class _TritonActivation(torch.autograd.Function):
    """The activation of x + bias by kernels/activation.py; saves x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: nn.Parameter | None, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias, ctx.activation = bias, activation
        return activation_forward(x, bias, activation)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx, dbias = activation_backward(dy, *ctx.saved_tensors, ctx.bias, ctx.activation)
        if ctx.needs_input_grad[1]:  # else there is none, or it is frozen
            add_gradient(ctx.bias, dbias, dx)
        return dx, None, None


class _TakePiece(torch.autograd.Function):
    """(some rows of x [s, b, h], x for who takes the next ones). Backward: the gradient of the rows
    is written into that of x, which the last one to be taken makes and the others are handed.
    """

    @staticmethod
    def forward(ctx, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.shape = rows, x.shape
        ctx.set_materialize_grads(False)
        return x[rows], x.view_as(x)

    @staticmethod
    def backward(ctx, drows: Tensor, dx: Tensor | None):
        dx = drows.new_empty(ctx.shape) if dx is None else dx
        dx[ctx.rows] = drows
        return dx, None


class _PutPiece(torch.autograd.Function):
    """y [s, b, h], with some of its rows written: in place."""

    @staticmethod
    def forward(ctx, y: Tensor, piece: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows
        y[rows] = piece
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy if ctx.needs_input_grad[0] else None, dy[ctx.rows], None


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation on fc1's output [s, b, f or 2f] -> [s, b, f]."""
    if torch.compiler.is_compiling():
        return apply_function(x, activation)
    if activation in _GATES:
        return _Gated.apply(x, activation)
    if activation == "squared-relu":
        return _SquaredReLU.apply(x)
    return apply_function(x, activation)


def activate_by(
    backend: str, x: Tensor, activation: str, bias: nn.Parameter | None = None
) -> Tensor:
    """The same by an implementation. Ours adds fc1's bias, which others have added before."""
    if backend == "triton":
        return _TritonActivation.apply(x, bias, activation)
    return activate(x, activation)


def mlp_parameters(
    config: ModelConfig, name: str, sequence: bool = False, width: int | None = None
) -> dict[str, ParameterSpec]:
    """fc1 [f or 2f, h], of a gated activation [gate; up], and fc2 [h, f], with their biases where
    there are any. `width`: f, by default that of the MLP.
    """
    h, f = config.hidden_size, width or config.ffn_hidden_size
    parts = ("gate", "up") if config.activation in GATED else ("up",)
    matrices = tuple(
        TensorSpec(f"{name}.{part}.weight", (f, h), normal(config), "matrix", shard=Shard(0))
        for part in parts
    )
    down = TensorSpec(
        f"{name}.down.weight",
        (h, f),
        normal(config, residual_output=True),
        "matrix",
        shard=Shard(1),
    )
    made = {
        "fc1.weight": ParameterSpec(matrices, product=True),
        "fc2.weight": ParameterSpec((down,), product=True),
    }
    if config.add_bias_linear:
        biases = tuple(vector(f"{name}.{part}.bias", f, shard=Shard(0)) for part in parts)
        made["fc1.bias"] = ParameterSpec(biases)
        made["fc2.bias"] = ParameterSpec(
            (vector(f"{name}.down.bias", h, copies="tp", grad_sum=parts_under(sequence)),)
        )
    return made


def always_rebuilt(model: ModelConfig) -> frozenset[str]:
    """Modules of `RecomputeContext` that a layer makes again whatever else it recomputes: the MLP
    in pieces and, as large as all the rest alongside attention, the outputs of norms.
    """
    return frozenset({"layernorm", "mlp"} if model.tiled_mlp > 1 else ())


def saved_widths(model: ModelConfig) -> tuple[int, int]:
    """Elements a token of what the MLP of this rank's `model` keeps: (fc1's output, fc2's
    input).
    """
    f = model.ffn_hidden_size
    return (2 * f if model.activation in GATED else f), f


class MLP(nn.Module):
    """x [s, b, h] -> [s, b, h]; each rank computes f / size channels. `recompute_context`: the
    layer's; `width`: f, by default that of the flags.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str = "mlp",
        tp: TensorParallel = DENSE,
        recompute_context: RecomputeContext | None = None,
        width: int | None = None,
    ):
        super().__init__()
        self.recompute_context = recompute_context or RecomputeContext()
        self.activation, self.backend = config.activation, config.activation_backend
        self.pieces = config.tiled_mlp
        parameters = mlp_parameters(config, name, tp.sequence, width)
        self.fc1 = ColumnLinear(parameters["fc1.weight"], parameters.get("fc1.bias"), tp)
        self.fc2 = RowLinear(parameters["fc2.weight"], parameters.get("fc2.bias"), tp)

    def forward(self, x: Tensor) -> Tensor:
        if self.pieces == 1:
            return self._piece(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        length = x.shape[0] // self.pieces
        for start in range(0, x.shape[0], length):
            rows = slice(start, start + length)
            piece, x = _TakePiece.apply(x, rows)
            y = _PutPiece.apply(y, self._piece(piece), rows)
        return y

    def _piece(self, x: Tensor) -> Tensor:
        """The MLP of some tokens [s, b, h] -> [s, b, h]."""
        self.recompute_context.enter("mlp_fc1")
        inner = self.recompute_context("mlp", self._inner, x)
        self.recompute_context.enter("mlp_fc2")
        return self.fc2(inner)

    def _inner(self, x: Tensor) -> Tensor:
        """fc2's input [s, b, f]."""
        # our activation adds the bias, and sums up its gradient in the pass that it makes over dx
        # anyway
        ours = self.backend == "triton"
        fused = column_linear(x, self.fc1.weight, None, self.fc1.tp) if ours else self.fc1(x)
        self.recompute_context.enter("mlp_act")
        return self.recompute_context("mlp_act", self._activate, fused)

    def _activate(self, fused: Tensor) -> Tensor:
        """The activation of fc1's output [s, b, f or 2f]."""
        return activate_by(self.backend, fused, self.activation, self.fc1.bias)
