"""Makes the passes of one layer. Next to graphs.py, and to the activation of experts, the only code
that calls autograd.

Each layer is a separate autograd graph, from a detached input to its output. A backward pass is
whole, or in two parts: first the gradient of the input, later the gradients of the weights of
linear layers (Qi et al. 2023). Both ways give the same bits. With full recomputation (Chen et al.
2016) the input of a group of layers is kept alone, and their graphs are built again before the
backward pass of the last: dropout masks and all else in a layer are functions of the micro-batch,
so the second forward pass has the bits of the first. What a layer computes again by itself is
model/recompute_context.py.

Layers of this project add to `main_grad` themselves. What an ordinary PyTorch module leaves in
`.grad` is added to it after each pass. s sequence, b batch, h hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.distributed.collectives import all_gather
from megatron.distributed.groups import ALONE, Axis
from megatron.model.layer import Layer, MicroBatch, WithScalars
from megatron.model.linear import WeightGrad, add_weight_grads, deferring_weight_grads
from megatron.model.recompute_context import OffloadableTensor
from megatron.parallel.schedule import Kind

Pass = tuple[Layer, Kind, int]  # the layer, what is computed, the index of the micro-batch


class Inputs(NamedTuple):
    """What full recomputation keeps of a layer's forward pass."""

    x: Tensor | OffloadableTensor | None  # None but of the first layer of a group
    micro_batch: MicroBatch
    shape: torch.Size | None = None  # of an input whose share alone is kept


class Graph(NamedTuple):
    """A layer's autograd graph: its two ends, not the output itself, which lives no longer than its
    reader needs it.
    """

    x: Tensor | None
    edges: list[GradientEdge]  # of the output, then of the scalars in the objective
    aux_dtypes: list[torch.dtype]  # of these scalars


# What a layer saves for its next pass: its graph; its input, where it is recomputed; the weight
# gradients that the first half of a split backward pass leaves; None where nothing is
# differentiated. With CUDA graphs also a CapturedLayer.
Saved = Graph | Inputs | list[WeightGrad] | None


class LostGradientError(RuntimeError):
    """Parameters of a layer whose gradient the first backward pass does not give."""

    def __init__(self, lost: Sequence[str]):
        self.names = ", ".join(lost)
        super().__init__(
            f"{self.names}: used in the forward pass, but the backward pass gave no "
            "gradient: it would never be trained. Let its "
            "autograd function return the gradient, or add it to the parameter's main_grad"
        )


class LayerRunner:
    """Makes passes of layers. `sharing`: the ranks that hold the same input of a layer, and
    keep a share of it each where it is recomputed; `aux_losses`: the scalars of layers that are
    differentiated along with the loss.
    """

    def __init__(self, sharing: Axis = ALONE, aux_losses: Iterable[str] = ()):
        self.sharing, self.aux_losses = sharing, frozenset(aux_losses)
        # of layers that have had a backward pass, which gave all of them gradients
        self.parameters: dict[Layer, list[nn.Parameter]] = {}

    def forward(
        self,
        layer: Layer,
        x: Tensor | None,
        micro_batch: MicroBatch,
        scalars: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Saved]:
        """The output [s, b, h], detached, and what the backward pass needs: the layer's graph, its
        inputs alone where it is recomputed, None where nothing is differentiated. The layer's
        scalars are added to `scalars`.
        """
        # A recomputed layer runs without a graph now, and with one when its backward pass comes.
        if torch.is_grad_enabled() and layer.recompute.whole:
            with torch.no_grad():
                y, _ = self.graph_of(None, layer(x, micro_batch), scalars)
            first = layer.recompute.first
            return y, self._inputs(x, micro_batch) if first else Inputs(None, micro_batch)
        # Detached: each layer is a separate graph, so its memory is freed with its own backward
        # pass.
        leaf = None if x is None else x.detach().requires_grad_(torch.is_grad_enabled())
        y = layer(leaf, micro_batch)
        if isinstance(y, WithScalars) or not y.requires_grad:
            return self.graph_of(leaf, y, scalars)
        return y.detach(), Graph(leaf, [get_gradient_edge(y)], [])  # the usual case, without a call

    def graph_of(
        self, leaf: Tensor | None, y: Tensor | WithScalars, scalars: dict[str, Tensor] | None
    ) -> tuple[Tensor, Graph | None]:
        """The output of a layer, detached, and its graph, whose input gradient is that of `leaf`.
        `scalars`: None in a second forward pass, whose scalars have been counted.
        """
        aux: list[Tensor] = []
        if isinstance(y, WithScalars):
            y, own = y
            add_scalars(scalars, own)
            aux = [x for name, x in own.items() if name in self.aux_losses and x.requires_grad]
        if not y.requires_grad:
            return y.detach(), None
        edges = [get_gradient_edge(x) for x in (y, *aux)]
        return y.detach(), Graph(leaf, edges, [x.dtype for x in aux])

    # ---- full recomputation

    def recompute_forward(self, layer: Layer, saved: Inputs) -> tuple[Tensor, Graph | None]:
        """The second forward pass: the output [s, b, h], and the layer's graph."""
        x = self._input_of(saved)
        leaf = None if x is None else x.detach().requires_grad_()
        return self.graph_of(leaf, layer(leaf, saved.micro_batch), None)

    def rebuild(self, layer: Layer, saved: Saved, following: Saved) -> tuple[Saved, Saved]:
        """The second forward pass of a layer, before the backward pass of another layer of its
        group: (what its own backward pass needs, the same of the layer that reads its output).
        """
        assert isinstance(saved, Inputs) and isinstance(following, Inputs)
        y, graph = self.recompute_forward(layer, saved)
        return graph, following._replace(x=y)

    def _inputs(self, x: Tensor | None, micro_batch: MicroBatch) -> Inputs:
        """What is kept of a layer's input [s, b, h], and of its micro-batch."""
        if x is None or self.sharing.size == 1:
            return Inputs(x, micro_batch)
        # All ranks of the group have the same x: each keeps a part, and one all-gather restores it.
        # The clone frees the whole storage.
        share = x.flatten().chunk(self.sharing.size)[self.sharing.rank].clone()
        return Inputs(share, micro_batch, x.shape)

    def _input_of(self, saved: Inputs) -> Tensor | None:
        """The layer's input [s, b, h] of what is kept of it."""
        assert not isinstance(saved.x, OffloadableTensor)
        if saved.x is None or saved.shape is None:
            return saved.x
        return all_gather(saved.x, self.sharing).view(saved.shape)

    # ---- backward passes

    def backward(
        self, kind: Kind, layer: Layer, dy: Tensor | None, saved: Saved, aux_scale: float = 0.0
    ) -> tuple[Tensor | None, list[WeightGrad] | None]:
        """A backward pass, whole or one half of a split one: (the gradient of the input [s, b, h],
        what the second half needs). Both are None where there is no such thing.

        `dy` is the gradient of the output, None of the second half; `saved` is what `forward`, or
        the first half, has left; `aux_scale` multiplies the layer's part of the objective. The
        first half adds all gradients but those of linear layers' weights. What it leaves may hold
        dy, which is not to be written before the second half.
        """
        if kind is Kind.BACKWARD_WEIGHT:
            assert isinstance(saved, list)
            add_weight_grads(saved)
            accumulate_into_main_grad(self.parameters[layer])
            return None, None
        if saved is None:  # a frozen embedding
            return None, None
        if isinstance(saved, Inputs):
            # the output has no name here: it would live as long as the backward pass
            saved = self.recompute_forward(layer, saved)[1]
        assert isinstance(saved, Graph)
        # One call of autograd for the output and all auxiliary losses, so that each node runs once.
        gradients = [dy]
        for dtype in saved.aux_dtypes:
            gradients.append(torch.full((), aux_scale, dtype=dtype, device=dy.device))
        deferring: AbstractContextManager[Any] = contextlib.nullcontext()
        if kind is Kind.BACKWARD_INPUT:
            deferring = deferring_weight_grads(layer)
        with deferring as deferred:
            if layer in self.parameters:
                torch.autograd.backward(saved.edges, gradients)
            else:
                # The first backward pass of this layer proves that each parameter in the graph gets
                # a gradient; the set of parameters does not change afterwards.
                self.parameters[layer] = list(layer.parameters())
                with check_all_params_got_grads(saved.edges, deferred):
                    torch.autograd.backward(saved.edges, gradients)
        # our layers have added to main_grad themselves
        if any(parameter.grad is not None for parameter in self.parameters[layer]):
            accumulate_into_main_grad(self.parameters[layer])
        return None if saved.x is None else saved.x.grad, deferred


def add_scalars(totals: dict[str, Tensor] | None, scalars: dict[str, Tensor]) -> None:
    """Add the scalars of a layer, in float64; nothing where they have been counted."""
    if totals is not None:
        for name, value in scalars.items():
            totals[name] = totals.get(name, 0.0) + value.detach().double()


@torch.no_grad()
def accumulate_into_main_grad(parameters: Sequence[nn.Parameter]) -> None:
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
def check_all_params_got_grads(
    edges: Sequence[GradientEdge], deferred: Sequence[WeightGrad] | None = None
) -> Iterator[None]:
    """Around a backward pass from `edges`, which fills `deferred`: LostGradientError when a
    parameter that the graph uses was given no gradient.

    Each main_grad gets its own version counter for the time, which counts whatever is written
    to it.
    """
    parameters = _parameters_in(edges)
    for parameter in parameters:
        # `.data` shares the memory and has a separate version counter, which begins at 0
        if parameter.main_grad is not None:
            parameter.main_grad = parameter.main_grad.data
    yield
    to_come = {id(each.weight) for each in deferred or ()}
    lost = [
        parameter.label
        for parameter in parameters
        if parameter.grad is None
        and id(parameter) not in to_come
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
