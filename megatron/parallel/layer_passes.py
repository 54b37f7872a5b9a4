"""The passes of one layer: the only code that calls autograd.

Each layer is an autograd graph of its own, from a detached input to its output. A backward pass is
whole, or in two parts: first the gradient of the input, later the gradients of the weights of
linear layers (Qi et al. 2023). Both ways give the same bits. With full recomputation (Chen et al.
2016) a layer's input alone is kept, and the graph is built again in the backward pass: dropout
masks and all else in a layer are functions of the micro-batch, so the second forward pass has the
bits of the first.

Layers of this project add to `main_grad` themselves. What an ordinary PyTorch module leaves in
`.grad` is added to it after each pass. Called by parallel/pipeline.py. s sequence, b batch, h
hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.layers.linear import WeightGrad, add_weight_grads, deferring_weight_grads
from megatron.model.block import Layer, MicroBatch, WithScalars
from megatron.parallel.schedule import Kind

Call = tuple[Layer, Kind]  # one pass of a layer


class Inputs(NamedTuple):
    """What full recomputation keeps of a layer's forward pass."""

    x: Tensor | None
    micro: MicroBatch


class Graph(NamedTuple):
    """A layer's autograd graph: its two ends, not the output itself, which lives no longer than its
    reader needs it.
    """

    x: Tensor | None
    output: GradientEdge
    # of the scalars that are differentiated along with the loss
    objectives: list[tuple[GradientEdge, torch.dtype]]


class LayerPasses:
    """Carries out passes of layers; adds up the scalars that they return. `recompute`: keep the
    inputs of layers that allow it alone.
    """

    def __init__(self, recompute: bool = False):
        self.recompute = recompute
        self.scalars: dict[str, Tensor] = {}  # by name, of all forward passes since `begin`
        self.objectives: set[str] = set()
        self.scale = 0.0
        # of the layers that have been differentiated
        self.parameters: dict[Layer, list[nn.Parameter]] = {}

    def begin(self, scale: float, objectives: set[str]) -> None:
        """Before a step: gradients will be those of scale x objective, which scalars of these names
        are part of.
        """
        self.scale, self.objectives = scale, objectives
        self.scalars = {}

    def run(
        self, kind: Kind, layer: Layer, x: Tensor | None, held: Any
    ) -> tuple[Tensor | None, Any]:
        """One pass of a layer: (its result, what the layer's next pass on this micro-batch needs).

        `held` is what the pass before has left, for a forward pass the micro-batch. `x` and the
        result are input and output [s, b, h] of a forward pass, the gradients of output and input
        of a backward pass, None of weight gradients. `x` of an input-gradient pass is not to be
        written before the weight gradients are formed.
        """
        if kind is Kind.FORWARD:
            return self.forward(layer, x, held)
        if kind is Kind.BACKWARD:
            return self.backward(layer, held, x), None
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input(layer, held, x)
        self.backward_weight(layer, held)
        return None, None

    def forward(
        self, layer: Layer, x: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, Graph | Inputs | None]:
        """The output, detached, and what the backward pass needs (None where nothing is to be
        differentiated).
        """
        if not (self.recompute and layer.recomputed and torch.is_grad_enabled()):
            return self._build(layer, x, micro)
        with torch.no_grad():
            y, _ = self._build(layer, x, micro)
        return y, Inputs(x, micro)

    def backward(self, layer: Layer, saved: Graph | Inputs | None, dy: Tensor) -> Tensor | None:
        """Add the gradients of all parameters; the gradient of the input (None for the
        embedding).
        """
        if saved is None:  # a frozen embedding
            return None
        return self._differentiate(layer, self._graph(layer, saved), dy)

    def backward_input(
        self, layer: Layer, saved: Graph | Inputs, dy: Tensor
    ) -> tuple[Tensor | None, list[WeightGrad]]:
        """`backward` without the weight gradients of linear layers, and what those need: tensors of
        which dy may be one.
        """
        graph = self._graph(layer, saved)
        with deferring_weight_grads(layer) as left:
            dx = self._differentiate(layer, graph, dy, left)
        return dx, left

    def backward_weight(self, layer: Layer, left: list[WeightGrad]) -> None:
        """Add what `backward_input` has left out; `left` is consumed."""
        add_weight_grads(left)
        fold_grads(self.parameters[layer])

    def _build(
        self, layer: Layer, x: Tensor | None, micro: MicroBatch, again: bool = False
    ) -> tuple[Tensor, Graph | None]:
        """A forward pass, and the graph that it builds. What it returns beside its output is
        counted unless the pass is made again.
        """
        if x is not None:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        y = layer(x, micro)
        scalars: dict[str, Tensor] = {}
        if isinstance(y, WithScalars):
            y, scalars = y
        if not again:
            for name, value in scalars.items():
                self.scalars[name] = self.scalars.get(name, 0.0) + value.detach().double()
        if not y.requires_grad:
            return y.detach(), None
        objectives = [
            value
            for name, value in scalars.items()
            if name in self.objectives and value.requires_grad
        ]
        return y.detach(), Graph(
            x,
            get_gradient_edge(y),
            [(get_gradient_edge(value), value.dtype) for value in objectives],
        )

    def _graph(self, layer: Layer, saved: Graph | Inputs) -> Graph:
        """The graph of a layer, built again where its inputs alone were kept."""
        return self._build(layer, *saved, again=True)[1] if isinstance(saved, Inputs) else saved

    def _differentiate(
        self, layer: Layer, graph: Graph, dy: Tensor, left: Sequence[WeightGrad] = ()
    ) -> Tensor | None:
        """The gradient of x; those of parameters are in their main_grad, in `left`, or (where that
        is to come first) still in `.grad`.
        """
        edges, gradients = [graph.output], [dy]
        for edge, dtype in graph.objectives:
            edges.append(edge)
            gradients.append(torch.full((), self.scale, dtype=dtype, device=dy.device))
        first = layer not in self.parameters
        if first:
            self.parameters[layer] = list(layer.parameters())
        with every_gradient_arrives(edges, left) if first else contextlib.nullcontext():
            torch.autograd.backward(edges, gradients)
            fold_grads(self.parameters[layer])
        return None if graph.x is None else graph.x.grad


@torch.no_grad()
def fold_grads(parameters: Sequence[nn.Parameter]) -> None:
    """Add what autograd accumulated in `.grad` to `main_grad`. Where a split backward pass has no
    main_grad yet it stays, for the second half.
    """
    for parameter in parameters:
        if parameter.grad is None or parameter.main_grad is None:
            continue
        if getattr(parameter, "overwrite_main_grad", False):
            parameter.main_grad.copy_(parameter.grad)
            parameter.overwrite_main_grad = False
        else:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


@contextlib.contextmanager
def every_gradient_arrives(
    edges: Sequence[GradientEdge], left: Sequence[WeightGrad]
) -> Iterator[None]:
    """Around a backward pass from `edges`: RuntimeError when a parameter that the graph uses was
    given no gradient, naming it.

    Each main_grad gets a version counter of its own for the time, which counts whatever is written
    to it.
    """
    parameters = _parameters_in(edges)
    for parameter in parameters:
        if parameter.main_grad is not None:
            parameter.main_grad = parameter.main_grad.data
    yield
    arrived = {id(each.weight) for each in left}
    lost = [
        parameter.label
        for parameter in parameters
        if parameter.grad is None
        and id(parameter) not in arrived
        and not (parameter.main_grad is not None and parameter.main_grad._version)
    ]
    if lost:
        raise RuntimeError(
            f"{', '.join(lost)}: used in the forward pass, but the backward pass gave no "
            "gradient: it would never be trained. Let its "
            "autograd function return the gradient, or add it to the parameter's main_grad"
        )


def _parameters_in(edges: Sequence[GradientEdge]) -> list[nn.Parameter]:
    """The parameters that a graph differentiates with respect to, each once."""
    found, seen, ahead = [], set(), [edge.node for edge in edges]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            found.append(leaf)
        ahead += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found
