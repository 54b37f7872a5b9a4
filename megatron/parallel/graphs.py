"""Passes of transformer layers captured in CUDA graphs and replayed: one launch in place of all
those of a pass, for small, CPU-bound models.

A graph repeats kernels on the addresses that it was captured with. So everything that a pass reads
or writes has its own place: a layer's input and the gradient of its output are copied to such
places, micro-batches are copied into *slots*, of which there are as many as micro-batches between
their forward and their backward pass, and gradient buffers and weights stay where they are
(parallel/blocks.py). A layer has a forward graph for each slot, and two backward graphs, since the
first backward pass of a step overwrites main_grad and the others add to it.

What autograd keeps of a forward pass lives in the memory pool of the slot: its layers are always
replayed in the order in which they were captured, and a new micro-batch comes when nothing of the
one before is needed. A backward pass writes its result where it read the gradient of its output,
which is where the next one reads it; nothing else lives on, so that all of them share one pool.

The first step is made without graphs: kernels are compiled and libraries set up there. Embedding,
head, evaluation and a layer with the table of positions never have graphs. Called from
parallel/pipeline.py like LayerRunner. s sequence, b batch, h hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.config.errors import UserError
from megatron.model.gpt import GPTModel
from megatron.model.layer import Layer, MicroBatch, TransformerLayer
from megatron.model.linear import WeightGrad
from megatron.parallel.layer_runner import (
    LayerRunner,
    LostGradientError,
    check_all_params_got_grads,
)
from megatron.parallel.pipeline import Pipeline, StepState, StepSums, Task, aux_losses_of
from megatron.parallel.schedule import Kind, Schedule

STEPS_WITHOUT = 1


class CudaGraph:
    """Work on the GPU that was captured once, in memory of a pool that it shares with others."""

    def __init__(self, pool: Any):
        self.pool = pool
        self.graph = torch.cuda.CUDAGraph()

    @staticmethod
    def new_pool() -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; nothing of it has been computed before the first replay.

        torch.cuda.graph would wait for the whole GPU first: a message that a neighbour sends only
        after its own capture would never arrive.
        """
        # Forward and backward passes are captured on the same stream: autograd runs a node on the
        # stream of its forward pass.
        stream = capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), garbage_collector_off():
            # other threads, such as NCCL's watchdog, may query the GPU during the capture
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                found = work()
            except BaseException:
                # what is not allowed in a capture makes its end fail, too
                with contextlib.suppress(RuntimeError):
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
            return found

    def replay(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turns Python's cyclic garbage collector off, and on again if it was on.

    It may run at any allocation and destroy a graph or an event, whose CUDA calls would invalidate
    the capture.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """Of all captures: the backward pass of a layer is captured on the stream of its forward."""
    return torch.cuda.Stream()


@dataclasses.dataclass
class MicroBatchSlot:
    """The place of one micro-batch, and the memory pool of its forward graphs."""

    index: int
    micro: MicroBatch
    pool: Any


@dataclasses.dataclass
class CapturedLayer:
    """A layer's passes on the micro-batches of a slot, and the places that they read and write."""

    x: Tensor  # [s, b, h], the leaf of the layer's autograd graph
    y: Tensor  # [s, b, h], with its autograd graph
    forward: CudaGraph
    # by whether main_grad is overwritten
    backward: dict[bool, CudaGraph] = dataclasses.field(default_factory=dict)


class GraphedRunner(LayerRunner):
    """A LayerRunner that replays graphs from the second step on. `graph` is for tests.

    Raises UserError where there is no GPU.
    """

    def __init__(self, model: GPTModel, device: torch.device, graph: type[CudaGraph] = CudaGraph):
        super().__init__(aux_losses=aux_losses_of(model))
        if graph is CudaGraph and device.type != "cuda":
            raise UserError("--cuda-graphs: needs a GPU; drop the flag")
        self.graph = graph
        self.steps = 0
        # whose results other computations read, when the next replay has overwritten them
        self.first = {named[0][1] for named in model.layers_by_stage}
        self.last = {named[-1][1] for named in model.layers_by_stage}
        self.slots: dict[int, MicroBatchSlot] = {}  # by the identity of their micro-batches
        self.free: list[MicroBatchSlot] = []
        self.captured: dict[tuple[Layer, int], CapturedLayer] = {}
        self.backward_pool: Any = None
        # [s, b, h]: each backward graph reads dy there and overwrites it with dx
        self.gradient: Tensor | None = None

    def place(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch in a slot, where graphs read it."""
        if not torch.is_grad_enabled() or self.steps <= STEPS_WITHOUT:
            return micro
        # A slot is reused as soon as its micro-batch has ended, so their number is that of
        # micro-batches in flight at most.
        if self.free:
            slot = self.free.pop()
            copy_tensors(micro, slot.micro)
        else:
            copied = map_tensors(micro, torch.clone)
            slot = MicroBatchSlot(len(self.slots), copied, self.graph.new_pool())
            self.slots[id(copied)] = slot
        return slot.micro

    def free_slot(self, micro: MicroBatch) -> None:
        """A micro-batch has had its last pass."""
        if id(micro) in self.slots:
            self.free.append(self.slots[id(micro)])

    def forward(
        self,
        layer: Layer,
        x: Tensor | None,
        micro: MicroBatch,
        scalars: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        slot = self.slots.get(id(micro))
        if slot is None or not is_captured(layer):
            return super().forward(layer, x, micro, scalars)
        # Captured at first use: shapes never change in a run.
        key = layer, slot.index
        if key not in self.captured:
            self.captured[key] = self._capture_forward(layer, x, slot)
        captured = self.captured[key]
        captured.x.data.copy_(x)  # what autograd has saved of it is to be read again
        captured.forward.replay()
        # The next layer's graph reads y where it was captured. What a later pass of another stage
        # reads must outlive the next replay, so it is copied.
        y = captured.y.detach()
        return y.clone() if layer in self.last else y, captured

    def backward(
        self, kind: Kind, layer: Layer, dy: Tensor | None, saved: Any, aux_scale: float = 0.0
    ) -> tuple[Tensor | None, list[WeightGrad] | None]:
        if not isinstance(saved, CapturedLayer):
            return super().backward(kind, layer, dy, saved, aux_scale)
        assert kind is Kind.BACKWARD, "a split backward pass is not captured"
        # Whether main_grad is overwritten is part of the captured kernels: one graph for the first
        # micro-batch of a step, another for the rest.
        weights = self.parameters[layer]
        overwrites = are_overwritten(weights)
        if overwrites not in saved.backward:
            saved.backward[overwrites] = self._capture_backward(saved)
        self.gradient.copy_(dy)  # does nothing where the layer behind has a graph
        saved.backward[overwrites].replay()
        for weight in weights if overwrites else ():
            weight.overwrite_main_grad = False
        return self.gradient.clone() if layer in self.first else self.gradient, None

    def _capture_forward(self, layer: Layer, x: Tensor, slot: MicroBatchSlot) -> CapturedLayer:
        if not self.captured:
            gc.collect()  # frees memory of the first steps, which the pools can use
        # The input's place is outside of the pool: it is written by copies between replays.
        place = torch.empty_like(x).requires_grad_()
        graph = self.graph(slot.pool)
        y = graph.capture(lambda: layer(place, slot.micro))
        if self.gradient is None:
            self.gradient = torch.empty_like(y.detach())
        return CapturedLayer(place, y, graph)

    def _capture_backward(self, captured: CapturedLayer) -> CudaGraph:
        if self.backward_pool is None:
            self.backward_pool = self.graph.new_pool()
        graph = self.graph(self.backward_pool)

        def differentiate() -> None:
            # towards the input alone: gradients of parameters are in main_grad
            (dx,) = torch.autograd.grad(captured.y, captured.x, self.gradient, retain_graph=True)
            self.gradient.copy_(dx)

        try:
            with check_all_params_got_grads([get_gradient_edge(captured.y)]):
                graph.capture(differentiate)
        except LostGradientError as error:
            raise UserError(
                "--cuda-graphs: what a captured backward pass computes is in main_grad, and these "
                f"parameters leave their gradient to autograd: {error.names}; drop the flag"
            ) from error
        return graph


class GraphedPipeline(Pipeline):
    """A pipeline whose micro-batches are in slots as long as they are in flight."""

    runner: GraphedRunner

    def run(
        self, schedule: Schedule, micro_batches: Iterator[MicroBatch], *args: Any, **kwargs: Any
    ) -> StepSums:
        self.runner.steps += self.prepared(schedule).trains
        return super().run(schedule, map(self.runner.place, micro_batches), *args, **kwargs)

    def backward(self, step: StepState, task: Task) -> None:
        """A backward pass; the slots of micro-batches that have had their last pass are free."""
        super().backward(step, task)
        for micro in task.finished_micro_batches:
            self.runner.free_slot(step.micro_batches[micro])


def are_overwritten(weights: Sequence[Tensor]) -> bool:
    """Whether the next backward pass overwrites the main_grad of a layer's matrices."""
    return any(getattr(weight, "overwrite_main_grad", False) for weight in weights)


def is_captured(layer: Layer) -> bool:
    """Whether all that a layer trains lies between its input and its output."""
    return isinstance(layer, TransformerLayer) and layer.position is None


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A micro-batch, or a part of one, with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(each, function) for each in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(each, function) for name, each in fields.items()}
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a micro-batch, in the order of its fields."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def copy_tensors(source: MicroBatch, target: MicroBatch) -> None:
    """Write the tensors of a micro-batch over those of another of the same shapes."""
    for place, tensor in zip(tensors_of(target), tensors_of(source), strict=True):
        place.data.copy_(tensor)  # as of a layer's input
