"""Layers compiled by torch.compile: a graph for each kind of layer, in each mode.

What a graph cannot trace, or would fuse less well, is replaced when a layer is compiled: linear
layers by an operator that hides what they do to `main_grad`, autograd functions of activations by
plain operations.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.activation import apply_function
from megatron.kernels.lang import operator, register_autograd
from megatron.model.dropout import Dropout
from megatron.model.layer import TransformerLayer
from megatron.model.linear import DEFERRED, Linear, _ColumnLinear, _Linear, _RowLinear
from megatron.model.mlp import MLP
from megatron.model.model_parallel import TensorParallel

# graphs of one rank at most: the first, a middle and the last layer, each in MODES
GRAPHS = 9
MODES = 3  # training, the forward pass that full recomputation repeats, and evaluation
# of torch.compile
BACKEND = "inductor"


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Let torch.compile fuse what is between the GEMMs of each transformer layer.

    Layers of one kind share a graph, which is made at the first forward pass. torch.compile raises
    there if it cannot trace a layer whole, or needs more than GRAPHS graphs (more where layers
    differ in windows, positions or --freeze).
    """
    torch._dynamo.reset()  # graphs of another model in this process would count, too
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    kinds = {(layer.record, next(layer.parameters()).requires_grad) for layer in layers}
    torch._dynamo.config.recompile_limit = max(GRAPHS, MODES * len(kinds))
    for layer in layers:
        _prepare(layer, device)
        compiled = torch.compile(layer.forward, backend=BACKEND, fullgraph=True, dynamic=False)
        layer.forward = compiled  # type: ignore[method-assign]


def _prepare(layer: TransformerLayer, device: torch.device) -> None:
    """Give a layer's modules traceable functions, and what differs by layer as no constant."""
    for module in layer.modules():
        if isinstance(module, Linear):
            module.weight.tensor_parallel = module.tp
            module.function = OPERATORS[module.function]
        elif isinstance(module, MLP) and not module.fuses_bias:
            module.activate = partial(apply_function, kind=module.activation)
        for site in vars(module).values():
            if isinstance(site, Dropout):
                site.keep_words_on(device)


# ---- linear layers as operators

FUNCTIONS: dict[str, Any] = {"whole": _Linear, "column": _ColumnLinear, "row": _RowLinear}


def _context(weight: Tensor, bias: Tensor | None, *saved: Tensor) -> SimpleNamespace:
    """What the autograd function of a linear layer finds in its context, in whose place it is."""
    return SimpleNamespace(
        needs_input_grad=(True, weight.requires_grad),
        weight=weight,
        bias=bias,
        tp=weight.tensor_parallel,
        saved_tensors=saved,
        save_for_backward=lambda *tensors: None,
    )


@operator(
    "linear",
    fake=lambda x, weight, bias, kind, rows: x.new_empty((rows, *x.shape[1:-1], weight.shape[0])),
)
def _opaque_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, rows: int) -> Tensor:
    tp = weight.tensor_parallel
    return FUNCTIONS[kind].forward(_context(weight, bias), x, weight, bias, tp)


@operator(
    "linear_backward",
    fake=lambda dy, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def _opaque_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str
) -> Tensor:
    if getattr(weight, DEFERRED, None) is not None:
        # a compiled graph writes something else into them as soon as it has read them
        dy, x = dy.clone(), x.clone()
    return FUNCTIONS[kind].backward(_context(weight, bias, x), dy)[0]


def _save_linear(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ctx.kind, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate_linear(ctx: Any, dy: Tensor) -> tuple:
    dx = torch.ops.megatron.linear_backward(dy, *ctx.saved_tensors, ctx.kind)
    return dx, None, None, None, None


register_autograd("linear", _differentiate_linear, _save_linear)


class LinearOperator:
    """Replaces the autograd function of a linear layer of this kind."""

    def __init__(self, kind: str):
        self.kind = kind

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        rows = x.shape[0]  # of the output: under SP a gathered sequence, or a scattered one
        if tp.sequence and self.kind != "whole":
            rows = rows * tp.size if self.kind == "column" else rows // tp.size
        return torch.ops.megatron.linear(x, weight, bias, self.kind, rows)


# one of each kind, since a graph takes them for constants
OPERATORS = {function: LinearOperator(kind) for kind, function in FUNCTIONS.items()}
