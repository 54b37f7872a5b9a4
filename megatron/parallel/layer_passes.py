"""The passes of one layer: with graphs.py the only code that calls autograd.

Each layer is an autograd graph of its own, from a detached input to its output. A backward pass is
whole, or in two parts: first the gradient of the input, later the gradients of the weights of
linear layers (Qi et al. 2023). Both ways give the same bits. With full recomputation (Chen et al.
2016) the input of a group of layers is kept alone, and their graphs are built again before the
backward pass of the last: dropout masks and all else in a layer are functions of the micro-batch,
so the second forward pass has the bits of the first. What a layer computes again by itself is
model/recompute_context.py.

Layers of this project add to `main_grad` themselves. What an ordinary PyTorch module leaves in
`.grad` is added to it after each pass. Called by parallel/pipeline.py. s sequence, b batch, h
hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.distributed.collectives import all_gather
from megatron.distributed.groups import ALONE, Axis
from megatron.distributed.turns import Turns
from megatron.model.block import Layer, MicroBatch, WithScalars
from megatron.model.linear import LaterGrad, add_weight_grads, deferring_weight_grads
from megatron.model.recompute_context import Parked
from megatron.parallel.schedule import Kind

Call = tuple[Layer, Kind]  # one pass of a layer


class Inputs(NamedTuple):
    """What full recomputation keeps of a layer's forward pass."""

    x: Tensor | Parked | None  # None but of the first layer of a group
    micro: MicroBatch
    shape: torch.Size | None = None  # of an input whose share alone is kept


class Graph(NamedTuple):
    """A layer's autograd graph: its two ends, not the output itself, which lives no longer than its
    reader needs it.
    """

    x: Tensor | None
    output: GradientEdge
    # of the scalars that are differentiated along with the loss
    objectives: list[tuple[GradientEdge, torch.dtype]]


class LostGradientError(RuntimeError):
    """Parameters of a layer whose gradient the first backward pass does not give."""

    def __init__(self, lost: Sequence[str]):
        self.names = ", ".join(lost)
        super().__init__(
            f"{self.names}: used in the forward pass, but the backward pass gave no "
            "gradient: it would never be trained. Let its "
            "autograd function return the gradient, or add it to the parameter's main_grad"
        )


class Passes:
    """What the executor asks of passes beside carrying them out, where nothing keeps a place."""

    def place(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch that passes are to be given in place of this one, from its first forward
        pass on.
        """
        return micro

    def leave(self, micro: MicroBatch) -> None:
        """What `place` returned has had its last pass."""

    def expect(self, passes: Sequence[tuple[Layer, Kind, int]]) -> None:
        """Before a step, or an evaluation: these passes on these micro-batches come, in this
        order.
        """

    def together(self, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        """A backward pass of one layer and a forward pass of one, on another micro-batch."""
        forward()
        backward()

    def handed_on(self, x: Tensor | None) -> Tensor | None:
        """The result of a stage's last layer as something that may live as long as it is read."""
        return x


class LayerPasses(Passes):
    """Carries out passes of layers; adds up the scalars that they return. `sharing`: the ranks that
    hold the same input of a layer, and keep a share of it each where it is recomputed.
    """

    def __init__(self, sharing: Axis = ALONE):
        self.sharing = sharing
        self.scalars: dict[str, Tensor] = {}  # by name, of all forward passes since `begin`
        self.objectives: set[str] = set()
        self.scale = 0.0
        self.turns: Turns | None = None
        # of the layers that have been differentiated
        self.parameters: dict[Layer, list[nn.Parameter]] = {}

    def begin(self, scale: float, objectives: set[str]) -> None:
        """Before a step: gradients will be those of scale x objective, which scalars of these names
        are part of.
        """
        self.scale, self.objectives = scale, objectives
        self.scalars = {}

    def together(self, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        """Each runs while the exchanges of the other one travel."""
        if self.turns is None:
            self.turns = Turns()
        # what a backward pass sends first needs little before it
        self.turns.together(backward, forward)

    def forward(
        self, layer: Layer, x: Tensor | None, micro: MicroBatch, again: bool = False
    ) -> tuple[Tensor, Graph | Inputs | None]:
        """The output [s, b, h], detached, and what the backward pass needs: the layer's graph, its
        inputs alone where it is recomputed, None where nothing is to be differentiated.

        `again`: the second forward pass of recomputation, which always builds the graph. What a
        layer returns beside its output has been counted by then.
        """
        differentiated = torch.is_grad_enabled()
        keeps_inputs = differentiated and layer.recompute.whole and not again
        with torch.set_grad_enabled(differentiated and not keeps_inputs):
            leaf, own = self._entry(x)
            y = layer(own, micro)
            del own
        scalars: dict[str, Tensor] = {}
        if isinstance(y, WithScalars):
            y, scalars = y
        for name, value in scalars.items() if not again else ():
            self.scalars[name] = self.scalars.get(name, 0.0) + value.detach().double()
        if keeps_inputs:
            return y, self._inputs(x, micro) if layer.recompute.first else Inputs(None, micro)
        if not y.requires_grad:
            return y.detach(), None
        objectives = [
            (get_gradient_edge(value), value.dtype)
            for name, value in scalars.items()
            if name in self.objectives and value.requires_grad
        ]
        return y.detach(), Graph(leaf, get_gradient_edge(y), objectives)

    def _entry(self, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(the leaf whose gradient is that of x [s, b, h], x as the layer reads it)."""
        own = None if x is None else x.detach().requires_grad_(torch.is_grad_enabled())
        return own, own

    def rebuild(self, layer: Layer, saved: Inputs, following: Inputs) -> tuple[Any, Inputs]:
        """The forward pass of a layer once more, before the backward pass of another layer of its
        group: (what its own backward pass needs, the same of the layer that reads its output).
        """
        y, graph = self.forward(layer, self._input_of(saved), saved.micro, again=True)
        return graph, following._replace(x=y)

    def _inputs(self, x: Tensor | None, micro: MicroBatch) -> Inputs:
        """What is kept of a layer's input [s, b, h], and of its micro-batch."""
        if x is None or self.sharing.size == 1:
            return Inputs(x, micro)
        share = x.flatten().chunk(self.sharing.size)[self.sharing.rank].clone()
        return Inputs(share, micro, x.shape)

    def _input_of(self, saved: Inputs) -> Tensor | None:
        """The layer's input [s, b, h] of what is kept of it."""
        assert not isinstance(saved.x, Parked)
        if saved.x is None or saved.shape is None:
            return saved.x
        return all_gather(saved.x, self.sharing).view(saved.shape)

    def backward(
        self, kind: Kind, layer: Layer, dy: Tensor | None, saved: Any
    ) -> tuple[Tensor | None, list[LaterGrad] | None]:
        """A backward pass, whole or one half of a split one: (the gradient of the input [s, b, h],
        what the second half needs). Both are None where there is no such thing.

        `dy` is the gradient of the output, None of the second half; `saved` is what `forward`, or
        the first half, has left. The first half adds all gradients but those of linear layers'
        weights. What it leaves may hold dy, which is not to be written before the second half.
        """
        if kind is Kind.BACKWARD_WEIGHT:
            add_weight_grads(saved)
            fold_grads(self.parameters[layer])
            return None, None
        if saved is None:  # a frozen embedding
            return None, None
        if isinstance(saved, Inputs):
            # the output has no name here: it would live as long as the backward pass
            saved = self.forward(layer, self._input_of(saved), saved.micro, again=True)[1]
        if kind is Kind.BACKWARD:
            return self._differentiate(layer, saved, dy), None
        with deferring_weight_grads(layer) as left:
            return self._differentiate(layer, saved, dy, left), left

    def _differentiate(
        self, layer: Layer, graph: Graph, dy: Tensor, left: Sequence[LaterGrad] = ()
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
    edges: Sequence[GradientEdge], left: Sequence[LaterGrad]
) -> Iterator[None]:
    """Around a backward pass from `edges`: LostGradientError when a parameter that the graph uses
    was given no gradient.

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
        raise LostGradientError(lost)


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
