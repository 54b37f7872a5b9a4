"""The MLP: h -> f -> h with GELU, squared ReLU or a gated activation. s sequence, b batch, h
hidden, f ffn width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ACTIVATIONS, GATED, ModelConfig
from megatron.kernels.activation import FUNCTIONS, GATES, activation_backward
from megatron.kernels.activation import activation as activation_forward
from megatron.model.linear import ColumnLinear, RowLinear, accumulate_gradients
from megatron.model.model_parallel import NO_TP, TensorParallel
from megatron.model.spec import Shard, fuse, matrix, normal, vector, whole_on_every_rank


def check_tables() -> None:
    """Raises KeyError for an --activation that is not in all tables."""
    gated = {kind for kind, is_gated in ACTIVATIONS.items() if is_gated}
    # At import, so that an incomplete entry is found before a run is.
    for incomplete in sorted((ACTIVATIONS.keys() ^ FUNCTIONS.keys()) | (gated ^ GATES.keys())):
        raise KeyError(
            f"--activation {incomplete}: needs an entry of ACTIVATIONS in config/model.py, and of "
            "FUNCTIONS (and GATES, if it is gated) in kernels/activation.py"
        )


check_tables()


class _Gated(torch.autograd.Function):
    """act(gate) * up of [..., gate | up]; saves its input alone."""

    @staticmethod
    def forward(ctx, fused: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(fused)
        ctx.activation = activation
        gate, up = fused.chunk(2, dim=-1)
        # act(gate) in a new tensor, then times up in place: one tensor of width f
        value, _ = GATES[activation]
        return value(gate, out=gate.new_empty(gate.shape)).mul_(up)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (fused,) = ctx.saved_tensors
        return gated_gradients(dy, fused, ctx.activation)[0], None


def gated_gradients(
    dy: Tensor, fused: Tensor, activation: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dfused, dweights [N]) of act(gate) * up or, with weights [N], of that times the weight of
    each row: dy [N, f], fused [N, 2f].
    """
    gate, up = fused.chunk(2, dim=-1)
    value, gradient = GATES[activation]
    # Both halves are written into the gradient of the fused tensor, without a concatenation.
    dfused = torch.empty_like(fused)
    dgate, dup = dfused.chunk(2, dim=-1)
    # act(gate) lies in dup's memory until dup is formed of it.
    value(gate, out=dup)
    dweights = None
    if weights is not None:
        dweights = torch.mul(dup, up).mul_(dy).sum(1, dtype=weights.dtype)
        dy = torch.mul(dy, weights.unsqueeze(1), out=torch.empty_like(dy))
    gradient(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
    dup.mul_(dy)
    return dfused, dweights


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


class _TritonActivation(torch.autograd.Function):
    """The activation of x + bias by kernels/activation.py; saves x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: nn.Parameter | None, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias, ctx.activation = bias, activation
        return activation_forward(x, bias, activation)

    @staticmethod
    def backward(ctx, dy: Tensor):
        # The bias's gradient is summed over tokens in the pass that writes dx.
        dx, dbias = activation_backward(dy, *ctx.saved_tensors, ctx.bias, ctx.activation)
        if ctx.bias is not None:
            accumulate_gradients((ctx.bias,), (dbias,), dx)
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
        # The last piece is differentiated first: it makes the tensor, whose rows all get written.
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


def activation_function(kind: str, backend: str = "torch") -> Callable[[Tensor], Tensor]:
    """The activation on fc1's output [..., f or 2f] -> [..., f]."""
    if backend == "triton":
        return lambda fused: _TritonActivation.apply(fused, None, kind)
    if kind in GATES:
        return lambda fused: _Gated.apply(fused, kind)
    return _SquaredReLU.apply if kind == "squared-relu" else FUNCTIONS[kind]


class MLP(nn.Module):
    """x [s, b, h] -> [s, b, h]: fc1 [f or 2f, h] (of a gated activation [gate; up]), the activation
    and fc2 [h, f]. Each rank computes f / size channels. `width`: f, by default that of the flags.
    """

    recomputable = {"mlp": "inner", "mlp_act": "activate"}

    def __init__(
        self,
        config: ModelConfig,
        name: str = "mlp",
        tp: TensorParallel = NO_TP,
        width: int | None = None,
    ):
        super().__init__()
        self.activation = config.activation
        # Our activation kernel adds fc1's bias, and sums its gradient in the pass over dx.
        self.fuses_bias = config.activation_backend == "triton"
        h = config.hidden_size
        f = width or config.ffn_hidden_size
        # fc1 fuses gate and up, so that a gated MLP is one GEMM; checkpoints name them apart.
        parts = ("gate", "up") if config.activation in GATED else ("up",)
        fc1 = fuse(
            matrix(f"{name}.{part}.weight", (f, h), normal(config), shard=Shard(0))
            for part in parts
        )
        fc2 = matrix(
            f"{name}.down.weight", (h, f), normal(config, residual_output=True), shard=Shard(1)
        )
        fc1_bias = None
        fc2_bias = None
        if config.add_bias_linear:
            fc1_bias = fuse(vector(f"{name}.{part}.bias", f, shard=Shard(0)) for part in parts)
            fc2_bias = vector(f"{name}.down.bias", h, **whole_on_every_rank(tp))
        self.fc1 = ColumnLinear(fc1, fc1_bias, tp, skip_bias_add=self.fuses_bias)
        self.fc2 = RowLinear(fc2, fc2_bias, tp)
        self.activate = (
            # chosen once: a forward pass calls it without looking at the kind
            self._activate_with_bias if self.fuses_bias else activation_function(self.activation)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """fc2's input [s, b, f]."""
        return self.activate(self.fc1(x))

    def _activate_with_bias(self, fused: Tensor) -> Tensor:
        return _TritonActivation.apply(fused, self.fc1.bias, self.activation)


class TiledMLP(MLP):
    """The MLP of --tiled-mlp: over pieces of the sequence that this rank holds, one after another.

    It keeps its input alone: the backward pass makes fc1's GEMM and the activation of a piece again
    and differentiates that piece, the last one first, before it turns to the next (autograd runs
    what was recorded last first). So tensors as wide as f never exist for more than a piece, but
    for what a split backward pass keeps for weight gradients, which add up in main_grad piece by
    piece. The outputs of norms are made again too, since they are as large as the input of a layer.
    Under SP a piece is gathered from the pieces of all ranks: rows are independent, and the
    reduce-scatter hands each rank its own rows back.
    """

    def __init__(self, config: ModelConfig, name: str, tp: TensorParallel = NO_TP):
        super().__init__(config, name, tp)
        self.pieces = config.tiled_mlp

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        length = x.shape[0] // self.pieces
        for start in range(0, x.shape[0], length):
            # Pieces of the output, and of the input's gradient, are rows of one tensor.
            rows = slice(start, start + length)
            piece, x = _TakePiece.apply(x, rows)
            y = _PutPiece.apply(y, super().forward(piece), rows)
        return y
