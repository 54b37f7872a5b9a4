"""One rank's step, carried out by the real executor and the real ZeRO, on buffers that have a size
and no memory.

Everything is on the meta device, and nothing is sent (silent.py). Layers are not run:
plan/activations.py specifies what a pass of each keeps and takes. What else a step allocates is
made here by the code that trains, and entered in a ledger. It leaves the ledger when torch releases
it: when things live is written down nowhere but in the engine itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.tools._plan.activations import UnitBytes
from megatron.tools._plan.silent import SilentGroup
from torch import Tensor

from megatron.distributed.groups import Axis, Groups
from megatron.model.gpt import GPTModel
from megatron.model.layer import Layer
from megatron.parallel.blocks import Block
from megatron.parallel.offload import HostPool, Key, Route
from megatron.parallel.pairs import PairedPipeline
from megatron.parallel.schedule import Kind, Schedule
from megatron.parallel.zero import Zero

META = torch.device("meta")
TRANSIENT = ("gradients", "slots", "gathered", "scratch", "activations", "logits", "temporaries")


@dataclass(frozen=True)
class Peak:
    """The bytes alive at the worst moment by kind, when that is, and the most of each kind at any
    moment; and the bytes of host memory in which activations wait.
    """

    bytes: dict[str, int]
    when: str
    most: dict[str, int]
    host: int = 0


class Ledger:
    """Bytes that are alive alongside a rank's resident state, by kind."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(TRANSIENT, 0)
        self.most = dict(self.now)
        self.total = 0
        self.peak: tuple[int, dict[str, int], str] = (-1, {}, "")
        self.moment = "start of the step"  # of what is running
        # by identity of torch's storage, which lives as long as the memory
        self.known: dict[int, tuple[str, int, Any]] = {}

    def add(self, kind: str, size: int) -> None:
        """That many bytes more of a kind, or fewer."""
        self.now[kind] += size
        self.total += size

    def watch(self, kind: str, tensor: Tensor) -> None:
        """Count a tensor's storage until torch frees it; under this kind from now on where it is
        counted already.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            before, size, reference = self.known[key]
            self.known[key] = kind, size, reference
            self.add(before, -size)
            self.add(kind, size)
            return
        size = storage.nbytes()
        self.known[key] = kind, size, weakref.ref(storage, lambda _: self.forget(key))
        self.add(kind, size)

    def forget(self, key: int) -> None:
        """A storage is freed."""
        kind, size, _ = self.known.pop(key)
        self.add(kind, -size)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is counted."""
        return tensor.untyped_storage()._cdata in self.known

    def look(self, temporaries: int = 0, scratch: int = 0) -> None:
        """A moment at which so much more is alive than what has been counted."""
        now = self.now
        most = self.most
        now["temporaries"] += temporaries
        now["scratch"] += scratch
        for kind, size in now.items():
            if size > most[kind]:
                most[kind] = size
        total = self.total + temporaries + scratch
        if total > self.peak[0]:
            self.peak = total, dict(now), self.moment
        now["temporaries"] -= temporaries
        now["scratch"] -= scratch

    def result(self, host: int) -> Peak:
        """Of a step that is over; `host`: bytes of host memory in which activations wait."""
        return Peak(self.peak[1], self.peak[2], dict(self.most), host)


class Held:
    """Bytes that a ledger counts as long as this object is kept."""

    def __init__(self, ledger: Ledger, kind: str, size: int):
        self.ledger = ledger
        self.kind = kind
        self.size = size
        ledger.add(kind, size)

    def __del__(self) -> None:
        self.ledger.add(self.kind, -self.size)


class CountedGroup(SilentGroup):
    """Enters what collectives and messages make into a ledger."""

    KINDS = {
        "reduce-scatter": "gradients",
        "all-reduce": "scratch",
        "all-gather": "scratch",
        "message": "activations",
    }

    def __init__(self, gloo: bool, ledger: Ledger):
        super().__init__(gloo)
        self.ledger = ledger

    def hold(self, what: str, axis: Axis, size: int, result: Tensor, extra: int) -> Held:
        held = Held(self.ledger, "scratch", extra)
        made = not self.ledger.knows(result)
        if made:
            self.ledger.watch(self.KINDS[what], result)
        if made or extra:
            self.ledger.look()
        return held


class CountedBlock(Block):
    """A block whose gradients and gathered weights a ledger counts."""

    def __init__(self, ledger: Ledger, *args: Any):
        self.ledger = ledger
        self._summed: Tensor | None = None
        super().__init__(*args)

    def allocate(self) -> None:
        super().allocate()
        self.ledger.watch("gathered", self.weight)

    def release(self) -> None:
        if self.ledger.knows(self.weight):
            self.ledger.forget(self.weight.untyped_storage()._cdata)
        super().release()

    def open(self) -> None:
        super().open()
        self.ledger.watch("gradients" if self.zero_stage < 2 else "slots", self.grad)
        self.ledger.look()

    def open_early(self, key: Any) -> None:
        super().open_early(key)
        self.ledger.watch("activations", self.early[key])

    @property
    def summed(self) -> Tensor | None:
        return self._summed

    @summed.setter
    def summed(self, value: Tensor | None) -> None:
        if value is not None and value is not self._summed:
            self.ledger.watch("gradients", value)
            self.ledger.look()
        self._summed = value


class Kept:
    """What a pass leaves for the next one of its layer and micro-batch: the layer's input, if it
    is kept itself, and bytes. `has_input`: the layer has one; `is_graph`: and its graph is there.
    """

    def __init__(
        self, x: Tensor | None, *held: Held, has_input: bool = False, is_graph: bool = True
    ):
        self.x = x
        self.held = held
        self.has_input = has_input
        self.is_graph = is_graph

    def let_go(self) -> None:
        """Free all of it."""
        self.x = None
        self.held = ()


@dataclass
class PlannedPasses:
    """In place of LayerRunner: passes that compute nothing. `units`: what a micro-batch keeps of
    each layer; `shape` [s, b, h].
    """

    ledger: Ledger
    units: Mapping[Layer, UnitBytes]
    names: Mapping[Layer, str]
    senders: set[Layer]
    shape: tuple[int, int, int]
    dtype: torch.dtype
    aux_losses: frozenset[str] = frozenset()
    route: Route = field(default_factory=lambda: Route(()))
    at: int = -1  # the pass that runs
    pool: HostPool = field(default_factory=lambda: HostPool(int))
    paired: UnitBytes | None = None  # the layer whose forward pass runs alongside a backward pass
    is_paired: bool = False
    coming: dict[Key, Kept] = field(default_factory=dict)  # what is on its way back
    going: Kept | None = None  # what the pass before has sent to the host

    def prepare_passes(self, route: Route) -> None:
        """Before a step, whose passes take this route."""
        self.route, self.at = route, -1

    def run_overlapped(self, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        """The two passes of a pair: each is at its worst moment while the tokens of the other one
        travel.
        """
        self.is_paired = True
        forward()
        self.is_paired = False
        backward()
        self.paired = None

    def _begin(self) -> Kept:
        """Before a pass, as OffloadingRunner._begin; what it reads has come."""
        self.at += 1
        key, next_key = self.route.reads[self.at : self.at + 2]
        if next_key is not None:
            self.coming[next_key] = self._fetched(next_key[0])
            self.ledger.look()
        return Kept(None) if key is None else self.coming.pop(key)

    def _fetched(self, layer: Layer) -> Kept:
        """What was on the host of a forward pass of a layer."""
        leaving = self.units[layer].leaving
        assert leaving is not None
        for size in leaving.storages:
            self.pool.give(size, size)
        x = self._hidden("activations") if leaving.input_leaves else None
        rest = leaving.total - (0 if x is None else x.nbytes)
        return Kept(x, Held(self.ledger, "activations", rest))

    def _end(self, going: Kept | None = None) -> None:
        """After a pass, as OffloadingRunner._end."""
        if self.going is not None:
            self.going.let_go()
        self.going = going

    def _send(self, layer: Layer, kept: Kept) -> Kept:
        """What leaves of all that a forward pass keeps, which keeps the rest."""
        leaving = self.units[layer].leaving
        assert leaving is not None
        for size in leaving.storages:
            self.pool.take(size)
        x = kept.x if leaving.input_leaves else None
        size = leaving.total - (0 if x is None else x.nbytes)
        kept.held = (*kept.held, Held(self.ledger, "activations", -size))
        if leaving.input_leaves or leaving.input_is_unread:
            kept.x = None
        return Kept(x, Held(self.ledger, "activations", size))

    def forward(
        self, layer: Layer, x: Tensor | None, micro: Any, scalars: dict[str, Tensor]
    ) -> tuple[Tensor, Kept]:
        """A forward pass, as LayerRunner.forward. What a layer keeps includes its input, which is
        counted as long as it is there.
        """
        self.ledger.moment = f"forward pass of {self.names[layer]}"
        self._begin()
        unit = self.units[layer]
        kept = self._kept(unit, x, "activations")
        if self.is_paired:
            self.paired = unit
        else:
            self.ledger.look(unit.forward)
        y = torch.empty(2, device=META) if unit.head else self._hidden("activations")
        self._end(self._send(layer, kept) if self.route.leaves[self.at] else None)
        return y, kept

    def rebuild(self, layer: Layer, saved: Kept, following: Kept) -> tuple[Kept, Kept]:
        """A second forward pass, as LayerRunner.rebuild."""
        self.ledger.moment = f"recomputation of {self.names[layer]}"
        self._come(saved, self._begin())
        graph = self._graph_of(layer, saved)
        x = self._hidden("temporaries")
        self._end()
        return graph, Kept(x, *following.held, has_input=True, is_graph=False)

    def _kept(self, unit: UnitBytes, x: Tensor | None, kind: str) -> Kept:
        """What a forward pass leaves; what it keeps includes its input, which is counted already
        where it is kept itself.
        """
        own = unit.saved - (0 if x is None or not unit.keeps_input else x.nbytes)
        return Kept(
            x if unit.keeps_input else None,
            Held(self.ledger, kind, own),
            Held(self.ledger, "logits", unit.logits),
            has_input=x is not None,
            is_graph=unit.rebuilt is None,
        )

    def _graph_of(self, layer: Layer, saved: Kept) -> Kept:
        """The graph of a layer that is recomputed whole."""
        unit = self.units[layer].rebuilt
        assert unit is not None and not saved.is_graph
        self.ledger.moment = f"recomputation of {self.names[layer]}"
        x = saved.x
        if x is None:  # the shares of its input are gathered
            x = self._hidden("temporaries")
        graph = self._kept(unit, x, "temporaries")
        saved.let_go()
        self.ledger.look(unit.forward)
        if self.paired is not None:
            self.ledger.look(unit.combined + self.paired.forward)
        return graph

    def backward(
        self, kind: Kind, layer: Layer, dy: Tensor | None, saved: Kept, aux_scale: float = 0.0
    ) -> tuple[Tensor | None, Kept | None]:
        """A backward pass, as LayerRunner.backward."""
        name = self.names[layer]
        self.ledger.moment = f"backward pass of {name}"
        self._come(saved, self._begin())
        if not saved.is_graph:
            saved = self._graph_of(layer, saved)
        unit = self.units[layer].rebuilt or self.units[layer]
        if kind is Kind.BACKWARD_WEIGHT:
            self.ledger.moment = f"weight gradients of {name}"
            self.ledger.look(unit.weight)
            saved.let_go()
            self._end()
            return None, None
        self.ledger.moment = f"backward pass of {name}"
        left = None
        waiting = self._beside(unit)
        if kind is Kind.BACKWARD_INPUT:
            self.ledger.look(unit.split)
            left = Kept(None, Held(self.ledger, "activations", unit.deferred))
        else:
            self.ledger.look(unit.backward + waiting)
        dx = None
        saved.let_go()
        if saved.has_input:
            dx = self._hidden("activations" if layer in self.senders else "temporaries")
        self.ledger.look()
        self._end()
        return dx, left

    def _beside(self, unit: UnitBytes) -> int:
        """What the forward pass alongside a backward pass holds more than it keeps, while its
        tokens travel. Looks at its worst moment, while those of the backward pass do.
        """
        if self.paired is None:
            return 0
        self.ledger.look(unit.dispatched + self.paired.forward)
        if self.paired.rebuilt is not None:  # it is over before
            return 0
        output = math.prod(self.shape) * self.dtype.itemsize  # which is not there yet
        return self.paired.dispatched - output

    @staticmethod
    def _come(saved: Kept, arrived: Kept) -> None:
        """What a pass has left is whole again."""
        if arrived.held:
            saved.x = saved.x if arrived.x is None else arrived.x
            saved.held = (*saved.held, *arrived.held)

    def _hidden(self, kind: str) -> Tensor:
        x = torch.empty(self.shape, dtype=self.dtype, device=META)
        self.ledger.watch(kind, x)
        return x


def run_step(
    ledger: Ledger,
    model: GPTModel,
    zero: Zero,
    schedule: Schedule,
    groups: Groups,
    units: Sequence[Sequence[UnitBytes]],
    shape: tuple[int, int, int],
    inputs: int,
    device: str = "cuda",
) -> Peak:
    """The worst moment of one step. `units`: of the layers of each stage of this rank; `inputs`:
    bytes of a micro-batch; `device`: cuda or cpu.
    """
    names = {}
    of_layer = {}
    senders = set()
    own = [stage for stage, rank in enumerate(schedule.placement) if rank == groups.pp.rank]
    for stage, chunk, sizes in zip(own, model.layers_by_stage, units, strict=True):
        for (name, layer), unit in zip(chunk, sizes, strict=True):
            names[layer], of_layer[layer] = name.replace("layers.", "layer "), unit
        if stage > 0:
            senders.add(chunk[0][1])
    passes = PlannedPasses(ledger, of_layer, names, senders, shape, model.dtype)
    # what replaces layers' passes and for micro-batches has their methods alone
    stand_in: Any = passes
    pipeline = PairedPipeline(
        model,
        zero,
        stand_in,
        schedule.placement,
        shape,
        groups,
        META,
        run_overlapped=passes.run_overlapped,
    )
    passes.prepare_passes(Route(pipeline.prepared(schedule).passes()))
    micro_batches: Any = (
        Held(ledger, "activations", inputs) for _ in range(schedule.micro_batches)
    )
    pipeline.run(schedule, micro_batches, 1.0)
    ledger.moment = "end of the step"
    zero.finish_gradients()
    ledger.look()
    _check_all_freed(ledger)
    return ledger.result(_pinned_bytes(passes.pool.made, device))


def _pinned_bytes(sizes: list[int], device: str) -> int:
    """Bytes of host memory for buffers of these sizes: on `cuda` torch takes powers of two."""
    return sum(1 << (size - 1).bit_length() if device == "cuda" else size for size in sizes)


def _check_all_freed(ledger: Ledger) -> None:
    """Behind a step nothing but gradients is alive."""
    left = {
        kind: size
        for kind, size in ledger.now.items()
        if size and kind not in ("gradients", "scratch")
    }
    assert not left, left
