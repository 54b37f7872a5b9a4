"""Selective recomputation: tensors inside a layer that its backward pass computes again instead of
keeping them (Korthikanti et al. 2022).

Modules name the methods that can be recomputed in a class attribute `recomputable`, and know
nothing else of this file: `RecomputeContext.wrap` replaces the chosen methods of one layer by
wrapped ones. A layer that recomputes nothing runs as it is written.

Autograd saves what backward passes read. Of a wrapped method the context keeps the inputs, drops
what is saved inside, and marks the results, so that a function that saves one of them keeps a
`RecomputedTensor` instead. The first read of any of these runs the method again, once, and gives
each reader its tensor. Inputs may be results of another wrapped method, which then runs first. Same
kernels on same inputs give the same bits, and dropout masks are functions of positions, so that
gradients have the bits of those without recomputation.

The same hooks find what a forward pass may send to the host (parallel/offload.py): within `parking`
all that is kept is on a list, each tensor with the module that reads it in the forward pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# modules that are parts of others, which recompute them as well
WITHIN = {"mla_up_proj": "qkv", "mlp_act": "mlp", "moe_act": "moe"}
Function = Callable[..., Any]  # of tensors: a tensor, or several


@dataclass(eq=False)
class OffloadableTensor:
    """A saved tensor that may live on the host until backward. `module`: its reader."""

    tensor: Tensor | None
    module: str
    load: Callable[[], Tensor] | None = None  # its storage, when it has come back
    shape: tuple[Any, ...] = ()

    def release(self, load: Callable[[], Tensor]) -> None:
        """Drop the tensor, which is a view of the storage [elements] that `load` returns later."""
        self.shape = place_in_storage(self.tensor)
        self.tensor, self.load = None, load

    def read(self) -> Tensor:
        """The tensor; an offloaded one is read once."""
        return self.load().as_strided(*self.shape) if self.tensor is None else self.tensor


@dataclass(eq=False)
class RecomputedTensor:
    """Replaces a saved tensor until backward reads it, once. `shape`: of a view of a result, its
    `place_in_storage`.
    """

    source: Recomputation
    shape: tuple[Any, ...] | None = None
    tensor: Tensor | None = None  # from the recomputation on

    def read(self) -> Tensor:
        """The tensor. Raises RuntimeError the second time."""
        if self.tensor is None:
            self.source.run()
        tensor, self.tensor = self.tensor, None
        return tensor


PackedTensor = Tensor | RecomputedTensor | OffloadableTensor
# weak, since parts of a graph go unused
Readers = list[weakref.ref[RecomputedTensor]]
ParkedTensors = list[weakref.ref[OffloadableTensor]]


def place_in_storage(tensor: Tensor) -> tuple[Any, ...]:
    """What `as_strided` takes to make the tensor of its storage: sizes, strides, offset."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def unpack(packed: PackedTensor) -> Tensor:
    """What a backward pass reads."""
    return packed if isinstance(packed, Tensor) else packed.read()


def results_of(y: Any) -> tuple[Tensor, ...]:
    """A computation's results, one or several."""
    return (y,) if isinstance(y, Tensor) else tuple(y)


@dataclass(eq=False)
class Recomputation:
    """A computation of one forward pass that the backward pass makes again when it first reads one
    of its tensors. `readers`: of each tensor that it saved inside, in order, then of its results.
    """

    function: Function | None
    inputs: list[PackedTensor]
    differentiated: list[bool]
    readers: list[Readers] = field(default_factory=list)

    def drop(self, _: Tensor) -> RecomputedTensor:
        """Replaces a tensor that is saved inside."""
        reader = RecomputedTensor(self)
        self.readers.append([weakref.ref(reader)])
        return reader

    def run(self) -> None:
        """Make the computation again, and give its tensors to their readers."""
        if self.function is None:
            raise RuntimeError("a recomputed tensor is read more often than it was saved")
        function, self.function = self.function, None
        # Inputs that are results of other computations run those first.
        inputs = [
            unpack(packed).detach().requires_grad_(differentiated)
            for packed, differentiated in zip(self.inputs, self.differentiated, strict=True)
        ]
        self.inputs = []
        tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            tensors.append(tensor.detach())  # the graph lives no longer than this function

        with torch.enable_grad(), saved_tensors_hooks(keep, unpack):
            for result in results_of(function(*inputs)):
                keep(result)
        assert len(tensors) == len(self.readers), (
            "recomputation saved other tensors than the forward pass"
        )
        for tensor, readers in zip(tensors, self.readers, strict=True):
            for ref in readers:
                if (reader := ref()) is not None:
                    reader.tensor = tensor
                    if reader.shape is not None:
                        reader.tensor = tensor.as_strided(*reader.shape)


class RecomputeContext:
    """Decides what a layer's forward pass keeps."""

    def __init__(self) -> None:
        # the methods that are wrapped, and what the instance had under their names (None: nothing,
        # the method is its class's)
        self.wrapped: list[tuple[nn.Module, str, Function | None]] = []
        # in a forward pass, by storage: results that are not kept. A weak reference keeps the
        # storage's identity from being given to another.
        self.results: dict[int, tuple[StorageWeakRef, Recomputation, Readers]] | None = None
        # in a forward pass whose tensors may leave
        self.parked: ParkedTensors | None = None
        self.reader = ""  # the module that reads what is saved now

    # ---- wrapping, once for all forward passes to come

    def wrap(self, layer: nn.Module, modules: frozenset[str], norms: Sequence[nn.Module]) -> None:
        """Let forward passes of the layer keep no more than is needed to compute `modules` again.
        `norms`: those whose outputs are recomputed under the name "layernorm".
        """
        # A layer may be given another choice: first it gets its own methods back.
        while self.wrapped:
            owner, method, original = self.wrapped.pop()
            if original is None:
                delattr(owner, method)
            else:
                setattr(owner, method, original)
        if not modules:
            return
        self._replace(layer, "forward", self._intercepted)
        for module in layer.modules():
            for name, method in getattr(module, "recomputable", {}).items():
                if name in modules and WITHIN.get(name) not in modules:
                    self._replace(module, method, self._recomputed)
        for norm in norms if "layernorm" in modules else ():
            self._replace(norm, "forward", self._discarding)

    def _replace(
        self, owner: nn.Module, method: str, wrapper: Callable[[Function], Function]
    ) -> None:
        self.wrapped.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, wrapper(getattr(owner, method)))

    def _intercepted(self, forward: Function) -> Function:
        """The layer's forward pass, with what autograd saves of it going through `_pack`."""

        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled() or self.results is not None:
                return forward(*inputs)
            with self._packing():
                return forward(*inputs)

        return run

    def _recomputed(self, function: Function) -> Function:
        """The function, of whose forward pass the inputs alone are kept. Tensors are given by
        position; what is given by name is a constant of the recomputation.
        """

        def run(*inputs: Tensor, **constants: Any) -> Any:
            call = partial(function, **constants)
            if self.results is None:
                return call(*inputs)
            recomputation = self._computation(call, inputs)
            # What is saved inside is dropped.
            with saved_tensors_hooks(recomputation.drop, unpack):
                y = call(*inputs)
            self._mark(recomputation, y)
            return y

        return run

    def _discarding(self, forward: Function) -> Function:
        """A norm whose output is not kept by the linear layers that read it. The norm keeps its own
        input, the residual stream, which is saved anyway.
        """

        @torch.no_grad()  # what the norm saves is its input
        def norm_of(stream: Tensor) -> Tensor:
            return forward(stream)[0]

        def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            y, stream = forward(*inputs)
            if self.results is not None:
                self._mark(self._computation(norm_of, (stream,)), y)
            return y, stream

        return run

    # ---- during a forward pass

    @contextlib.contextmanager
    def parking(
        self, readers: Iterable[tuple[nn.Module, str, str | None]]
    ) -> Iterator[ParkedTensors]:
        """Around a forward pass whose tensors may leave the device: all that it saves. `readers`:
        for a module the name under which tensors are filed when it is called, and the name from its
        end on (None: as before).
        """
        parked: ParkedTensors = []
        with contextlib.ExitStack() as hooks, self._packing(parked):
            for module, name, after in readers:
                file = partial(self._file_under, name)
                hooks.enter_context(module.register_forward_pre_hook(file))
                if after is not None:
                    file = partial(self._file_under, after)
                    hooks.enter_context(module.register_forward_hook(file))
            yield parked

    def _file_under(self, name: str, *_: Any) -> None:
        """A forward hook: from here on the forward pass saves what this module reads."""
        self.reader = name

    @contextlib.contextmanager
    def _packing(self, parked: ParkedTensors | None = None) -> Iterator[None]:
        """Around the forward pass of the layer."""
        assert self.results is None, "two forward passes of a layer at a time"
        self.results, self.parked, self.reader = {}, parked, ""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self.results = self.parked = None

    def _computation(self, function: Function, inputs: tuple[Tensor, ...]) -> Recomputation:
        differentiated = [x.requires_grad for x in inputs]
        return Recomputation(function, [self._pack(x) for x in inputs], differentiated)

    def _mark(self, recomputation: Recomputation, y: Any) -> None:
        """From here on a function that saves a result of the computation does not keep it."""
        for result in results_of(y):
            storage = result.untyped_storage()
            readers: Readers = []
            recomputation.readers.append(readers)
            self.results[storage._cdata] = StorageWeakRef(storage), recomputation, readers

    def _pack(self, tensor: Tensor) -> PackedTensor:
        """What is kept of a tensor that is saved."""
        storage = tensor.untyped_storage()._cdata
        if storage in self.results:
            _, recomputation, readers = self.results[storage]
            reader = RecomputedTensor(recomputation, place_in_storage(tensor))
            readers.append(weakref.ref(reader))
            return reader
        kept = tensor.detach()  # with its graph it could be its own owner
        if self.parked is None:
            return kept
        place = OffloadableTensor(kept, self.reader)
        self.parked.append(weakref.ref(place))
        return place
