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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.recompute import LAYER_INPUT
from megatron.distributed.groups import ALONE, Axis
from megatron.model.layer import Layer, MicroBatch, TransformerLayer
from megatron.model.linear import WeightGrad
from megatron.model.recompute_context import OffloadableTensor
from megatron.parallel.blocks import device_streams, host_memory
from megatron.parallel.graphs import tensors_of
from megatron.parallel.layer_runner import Inputs, LayerRunner, Pass, Saved
from megatron.parallel.pipeline import Pipeline, StepSums
from megatron.parallel.schedule import Kind, Schedule

Key = tuple[Layer, int]
READING = (Kind.REBUILD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Route:
    """The passes of a step in order: which send to the host, and which read what was there."""

    def __init__(self, passes: Sequence[Pass]):
        self.passes = passes
        self.leaves = [False] * len(passes)
        # one more than passes, so that `_begin` can look ahead of the last
        self.reads: list[Key | None] = [None] * (len(passes) + 1)
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
                if is_away and self._has_time(forward, index):
                    self.leaves[forward] = True
                    self.reads[index] = key

    def _has_time(self, forward: int, index: int) -> bool:
        """Whether a pass of a transformer layer comes between the two; forward passes of the same
        group do not count, since it is rebuilt as one.
        """
        _, _, micro = self.passes[forward]
        for layer, kind, other in map(self.passes.__getitem__, range(forward + 1, index)):
            is_first = layer.recompute.first or not layer.recompute.whole
            if layer.recomputes and (is_first or kind is not Kind.FORWARD or other != micro):
                return True
        return False


class HostPool:
    """Buffers on the host by their bytes, made when none of a size is free, and kept."""

    def __init__(self, make: Callable[[int], Any]):
        self.make = make
        self.free: defaultdict[int, list[Any]] = defaultdict(list)
        self.made: list[int] = []  # their bytes

    def take(self, size: int) -> Any:
        """A buffer of `size` bytes."""
        if self.free[size]:
            return self.free[size].pop(0)
        self.made.append(size)
        return self.make(size)

    def give(self, size: int, buffer: Any) -> None:
        """Take it back for the next one who asks."""
        self.free[size].append(buffer)


class HostBuffer(NamedTuple):
    """A buffer on the host [bytes], and the event after which it may be written again."""

    memory: Tensor
    read: Any


def host_buffer(device: torch.device, size: int) -> HostBuffer:
    """A new host buffer. A wait for its event returns at once until the event is recorded."""
    return HostBuffer(host_memory(size, torch.uint8, device), device_streams(device).Event())


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
    """What one forward pass has sent to the host, and the event after the copies."""

    storages: list[Storage]
    over: Any


class HostCopies:
    """Carries out the copies: one stream for each way, and the buffers."""

    def __init__(self, device: torch.device):
        self.device, self.streams = device, device_streams(device)
        self.pool = HostPool(functools.partial(host_buffer, device))
        self.leaving, self.returning = self.streams.Stream(), self.streams.Stream()

    def send(self, storages: list[Storage]) -> Departed:
        """Copy storages that the current stream has written. They stay until `let_go`."""
        # Buffers are taken in the order of the copies, so the pool's size is the same in every
        # step.
        for storage in storages:
            storage.buffer = self.pool.take(storage.size)
        # The copies read what the pass has written, and write where an earlier copy back may still
        # read.
        self.leaving.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.leaving):
            for storage in storages:
                memory, read = storage.buffer
                self.leaving.wait_event(read)
                # pinned memory: the copy does not block the host
                memory.view(storage.dtype).copy_(storage.tensor, non_blocking=True)
            return Departed(storages, self.leaving.record_event())

    def let_go(self, departed: Departed) -> None:
        """Free storages of the device that have been sent: what the current stream does next may
        write into their memory.
        """
        self.streams.current_stream().wait_event(departed.over)
        for storage in departed.storages:
            storage.tensor = None

    def fetch(self, departed: Departed) -> Any:
        """Start the copies back; the event after them."""
        # Allocated on the current stream, whose passes will read it, and which has used the memory
        # until now.
        for storage in departed.storages:
            storage.tensor = torch.empty(storage.elements, dtype=storage.dtype, device=self.device)
        self.returning.wait_stream(self.streams.current_stream())
        self.returning.wait_event(departed.over)
        with self.streams.stream(self.returning):
            for storage in departed.storages:
                memory, storage.buffer = storage.buffer.memory, None
                storage.tensor.copy_(memory.view(storage.dtype), non_blocking=True)
                read = self.returning.record_event()
                self.pool.give(storage.size, HostBuffer(memory, read))
            return self.returning.record_event()

    def arrive(self, event: Any) -> None:
        """What the current stream does next may read what was fetched."""
        self.streams.current_stream().wait_event(event)


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
        self.fetched: Any = None  # the event after the last copies back
        self.going: Departed | None = None  # still on the device, too
        self.one: Tensor | None = None  # element, the memory of all leaves

    def prepare_passes(self, route: Route) -> None:
        """Before a step, or an evaluation, whose passes take this route."""
        self.route, self.at = route, -1
        assert not self.away, "an offloaded tensor was never read"

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
        assert isinstance(layer, TransformerLayer)  # embedding and head are never offloaded
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
        arriving = self.fetched
        # Fetch for the next pass before this one is queued: the copy runs during this pass.
        if next_key is not None:
            self.fetched = self.copies.fetch(self.away.pop(next_key))
        # The copy back was started one pass ago; the stream waits for it, not the host.
        if key is not None:
            self.copies.arrive(arriving)

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
        of_storage: defaultdict[int, list[OffloadableTensor]] = defaultdict(list)
        for each in parked:
            of_storage[_storage_of(each.tensor)].append(each)
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
