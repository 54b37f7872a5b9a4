"""Activations that wait on the host between a layer's forward pass and its backward pass.

Which pass comes when is fixed by the schedule, so nothing is learnt in a first step. A forward
pass ends with copies of what its layer keeps to pinned buffers, on a stream of their own. They have
the time of the next pass: after that one the memory on the device is freed. What a pass will read
comes back during the pass before it, on a third stream. What would have to come back before it has
left stays on the device, and so does what is read with no pass of a transformer layer in between.

The host waits for nothing: streams wait for events. A storage that several tensors share goes once.
Buffers go by their bytes from one layer to the next and from step to step; the copy into one waits
for the copy out of it. On a CPU the copies are made at once, in the same order and number. Never
run on a GPU. s sequence, b batch, h hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron.config.recompute import LAYER_INPUT
from megatron.distributed.groups import ALONE, Axis
from megatron.model.layer import Layer, MicroBatch
from megatron.model.linear import WeightGrad
from megatron.model.recompute_context import OffloadableTensor
from megatron.parallel.graphs import tensors_of
from megatron.parallel.layer_runner import Inputs, LayerRunner, Pass, Saved
from megatron.parallel.pipeline import Pipeline, StepSums
from megatron.parallel.schedule import Kind, Schedule

Key = tuple[Layer, int]
READING = (Kind.REBUILD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Route:
    """The passes of a step in their order, and which of them send to the host or read what has
    been there.
    """

    def __init__(self, passes: Sequence[Pass]):
        self.passes = passes
        self.leaves = [False] * len(passes)
        # one more than passes, so that `_begin` can look ahead of the last
        self.reads: list[Key | None] = [None] * (len(passes) + 1)
        # How many passes of transformer layers precede each pass: the time that copies have.
        before = [0]
        for layer, *_ in passes:
            before.append(before[-1] + layer.recomputes)
        # Pair each forward pass with the pass that reads what it keeps.
        forwards: dict[Key, int] = {}
        for index, (layer, kind, micro) in enumerate(passes):
            key = layer, micro
            if kind is Kind.FORWARD and layer.offloaded:
                forwards[key] = index
            elif kind in READING and key in forwards:
                forward = forwards.pop(key)
                # freed after the next pass, and fetched before the last
                is_away = index > forward + 2
                if is_away and before[index] > before[self._end(forward)]:
                    self.leaves[forward] = True
                    self.reads[index] = key

    def _end(self, forward: int) -> int:
        """Behind the forward passes that need nothing of their own for their backward passes."""
        micro = self.passes[forward][2]
        for end in range(forward + 1, len(self.passes)):
            layer, kind, other = self.passes[end]
            again = layer.recompute.whole and not layer.recompute.first
            if not (again and kind is Kind.FORWARD and other == micro):
                return end
        return len(self.passes)


Buffer = TypeVar("Buffer")


class HostPool(Generic[Buffer]):
    """Buffers on the host by their bytes, made when none of a size is free, and kept."""

    def __init__(self, make: Callable[[int], Buffer]):
        self.make = make
        self.free: dict[int, list[Buffer]] = {}
        self.made: list[int] = []  # their bytes

    def take(self, size: int) -> Buffer:
        """A buffer of `size` bytes."""
        free = self.free.get(size)
        if free:
            return free.pop(0)
        self.made.append(size)
        return self.make(size)

    def give(self, size: int, buffer: Buffer) -> None:
        """Take it back for the next one who asks."""
        self.free.setdefault(size, []).append(buffer)

    def pinned(self, device: str) -> int:
        """Bytes of host memory in all: for a `cuda` device torch takes powers of two."""
        return sum(1 << (size - 1).bit_length() if device == "cuda" else size for size in self.made)


def host_buffer(size: int, device: torch.device) -> Tensor:
    """Memory of the host [bytes] that a GPU reads and writes by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class HostBuffer:
    """A buffer on the host [bytes], and when it may be written again."""

    def __init__(self, size: int, device: torch.device):
        self.memory = host_buffer(size, device)
        self.read: torch.cuda.Event | None = None  # the last copy out of it is over


class Storage:
    """A storage of the device: all of it [elements] while it is there, else on the host.
    `readers`: those to come.
    """

    def __init__(self, whole: Tensor, readers: int):
        self.tensor: Tensor | None = whole
        self.dtype, self.elements, self.size = whole.dtype, whole.numel(), whole.nbytes
        self.readers = readers
        self.buffer: HostBuffer | None = None

    def read(self) -> Tensor:
        """All of it; nothing is kept when its last reader has had it."""
        assert self.tensor is not None, "an offloaded tensor is read before it has come back"
        tensor = self.tensor
        self.readers -= 1
        if not self.readers:
            self.tensor = None
        return tensor


class Departed(NamedTuple):
    """What one forward pass has sent to the host."""

    storages: list[Storage]
    over: Any  # the event after the copies


class NoStream:
    """A CPU's: work is over when its call returns."""

    def wait_stream(self, stream: NoStream) -> None:
        """Do nothing."""

    def wait_event(self, event: None) -> None:
        """Do nothing."""

    def record_event(self) -> None:
        """Do nothing."""


class HostCopies:
    """Carries out the copies: one stream for each way, and the buffers."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = HostPool(lambda size: HostBuffer(size, device))
        on_gpu = device.type == "cuda"
        self.leaving: Any = torch.cuda.Stream(device) if on_gpu else NoStream()
        self.returning: Any = torch.cuda.Stream(device) if on_gpu else NoStream()
        self.on_stream: Callable[..., Any] = torch.cuda.stream if on_gpu else nullcontext
        self.current: Callable[[], Any] = torch.cuda.current_stream if on_gpu else NoStream

    def send(self, storages: list[Storage]) -> Departed:
        """Copy storages that the current stream has written. They stay until `let_go`."""
        # Buffers are taken in the order of the copies, so the pool's size is the same in every
        # step.
        for storage in storages:
            storage.buffer = self.pool.take(storage.size)
        # The copies read what the pass has written, and write where an earlier copy back may still
        # read.
        self.leaving.wait_stream(self.current())
        with self.on_stream(self.leaving):
            for storage in storages:
                if storage.buffer.read is not None:
                    self.leaving.wait_event(storage.buffer.read)
                # pinned memory: the copy does not block the host
                storage.buffer.memory.view(storage.dtype).copy_(storage.tensor, non_blocking=True)
            return Departed(storages, self.leaving.record_event())

    def let_go(self, departed: Departed) -> None:
        """Free storages of the device that have been sent: what the current stream does next may
        write into their memory.
        """
        self.current().wait_event(departed.over)
        for storage in departed.storages:
            storage.tensor = None

    def fetch(self, departed: Departed) -> Any:
        """Start the copies back; the event after them."""
        # Allocated on the current stream, whose passes will read it, and which has used the memory
        # until now.
        for storage in departed.storages:
            storage.tensor = torch.empty(storage.elements, dtype=storage.dtype, device=self.device)
        self.returning.wait_stream(self.current())
        self.returning.wait_event(departed.over)
        with self.on_stream(self.returning):
            for storage in departed.storages:
                buffer, storage.buffer = storage.buffer, None
                storage.tensor.copy_(buffer.memory.view(storage.dtype), non_blocking=True)
                buffer.read = self.returning.record_event()
                self.pool.give(storage.size, buffer)
            return self.returning.record_event()

    def arrive(self, event: Any) -> None:
        """What the current stream does next may read what was fetched."""
        self.current().wait_event(event)


class _LayerInput(torch.autograd.Function):
    """x [s, b, h], with a graph that ends in a leaf of this shape without its own memory: who
    saves x keeps x, and the graph does not.
    """

    @staticmethod
    def forward(ctx, leaf: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


class OffloadingRunner(LayerRunner):
    """LayerRunner that keep on the host what the layers' choices (`Layer.offloaded`) specify.
    Tensors of fewer elements than `smallest` stay.
    """

    def __init__(
        self,
        device: torch.device,
        smallest: int,
        sharing: Axis = ALONE,
        aux_losses: Iterable[str] = (),
    ):
        super().__init__(sharing, aux_losses)
        self.smallest = smallest
        self.copies = HostCopies(device)
        self.route, self.at = Route(()), -1  # of this step; the pass that runs
        self.away: dict[Key, Departed] = {}
        self.coming: dict[Key, Any] = {}  # the events of what has been fetched
        self.going: Departed | None = None  # still on the device, too
        self.one: Tensor | None = None  # element, the memory of all leaves

    def prepare_passes(self, route: Route) -> None:
        """Before a step, or an evaluation, whose passes take this route."""
        self.route, self.at = route, -1
        assert not self.away and not self.coming, "an offloaded tensor was never read"

    def forward(
        self,
        layer: Layer,
        x: Tensor | None,
        micro: MicroBatch,
        scalars: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Saved]:
        self._begin()
        # 1. The pass. 2. Copies of what it keeps begin. 3. What the pass before has sent is freed,
        # so that a copy has the time of one pass.
        departed = None
        if self.route.leaves[self.at] and torch.is_grad_enabled():
            y, kept, parked = self._forward_parking(layer, x, micro, scalars)
            _, _, number = self.route.passes[self.at]
            departed = self.copies.send(self._going(layer, micro, parked))
            self.away[layer, number] = departed
        else:
            y, kept = super().forward(layer, x, micro, scalars)
        self._end(departed)
        return y, kept

    def _forward_parking(
        self, layer: Layer, x: Tensor | None, micro: MicroBatch, scalars: dict[str, Tensor] | None
    ) -> tuple[Tensor, Saved, list[OffloadableTensor]]:
        """A forward pass, and the tensors it saves that may move to the host."""
        if layer.recompute.whole:
            y, inputs = super().forward(layer, x, micro, scalars)
            assert isinstance(inputs, Inputs) and isinstance(inputs.x, Tensor)
            parked = [OffloadableTensor(inputs.x, LAYER_INPUT)]
            return y, inputs._replace(x=parked[0]), parked
        with layer.parking() as saved:
            leaf, own = self._entry(x)
            output = layer(own, micro)
            del own
        y, graph = self.graph_of(leaf, output, scalars)
        del output
        return y, graph, [each for place in saved if (each := place()) is not None]

    def rebuild(self, layer: Layer, saved: Saved, following: Saved) -> tuple[Saved, Saved]:
        self._begin()
        found = super().rebuild(layer, saved, following)
        self._end()
        return found

    def backward(
        self, kind: Kind, layer: Layer, dy: Tensor | None, saved: Saved, aux_scale: float = 0.0
    ) -> tuple[Tensor | None, list[WeightGrad] | None]:
        self._begin()
        found = super().backward(kind, layer, dy, saved, aux_scale)
        self._end()
        return found

    def _begin(self) -> None:
        """Before a pass: what it reads has come, and what the next one reads is on its way."""
        self.at += 1
        key, next_key = self.route.reads[self.at : self.at + 2]
        # Fetch for the next pass before this one is queued: the copy runs during this pass.
        if next_key is not None:
            self.coming[next_key] = self.copies.fetch(self.away.pop(next_key))
        # The copy back was started one pass ago; the stream waits for it, not the host.
        if key is not None:
            self.copies.arrive(self.coming.pop(key))

    def _end(self, departed: Departed | None = None) -> None:
        """After a pass, which has sent this: what the pass before has sent leaves the device."""
        if self.going is not None:
            self.copies.let_go(self.going)
        self.going = departed

    def _entry(self, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(the leaf whose gradient is that of x [s, b, h], x as the layer reads it). The leaf takes
        no memory: x lives in the saved tensors alone, which may move.
        """
        if x is None:
            return None, None
        if self.one is None:
            self.one = x.new_empty(())
        leaf = self.one.expand(x.shape).requires_grad_()
        return leaf, _LayerInput.apply(leaf, x)

    def _input_of(self, saved: Inputs) -> Tensor | None:
        if isinstance(saved.x, OffloadableTensor):
            saved = saved._replace(x=saved.x.read())
        return super()._input_of(saved)

    def _going(
        self, layer: Layer, micro: MicroBatch, parked: Iterable[OffloadableTensor]
    ) -> list[Storage]:
        """The storages of a forward pass that leave: those that the chosen modules alone keep,
        neither weights nor parts of the micro-batch.
        """
        # Weights and the micro-batch are needed by other passes and stay on the device.
        staying = storages_of(tensors_of(micro)) | storages_of(layer.parameters())
        of_storage: dict[int, list[OffloadableTensor]] = {}
        for each in parked:
            of_storage.setdefault(_storage_of(each.tensor), []).append(each)
        found = []
        for key, sharing in of_storage.items():
            tensor = sharing[0].tensor
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            # A storage that a module outside of the choice keeps would stay anyway.
            chosen = all(each.module in layer.offloaded for each in sharing)
            if chosen and key not in staying and elements >= max(1, self.smallest):
                storage = Storage(tensor.as_strided((elements,), (1,), 0), len(sharing))
                for each in sharing:
                    each.release(storage.read)
                found.append(storage)
        return found


class OffloadingPipeline(Pipeline):
    """A pipeline whose passes know their order, which decides what leaves the device."""

    runner: OffloadingRunner

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.route_of = functools.cache(lambda schedule: Route(self.prepared(schedule).passes()))

    def run(self, schedule: Schedule, *args: Any, **kwargs: Any) -> StepSums:
        self.runner.prepare_passes(self.route_of(schedule))
        return super().run(schedule, *args, **kwargs)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storages_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The identities of tensors' storages."""
    return frozenset(map(_storage_of, tensors))
