"""Selective recomputation: tensors inside a layer that its backward pass computes again instead of
keeping them (Korthikanti et al. 2022).

Autograd saves what backward passes read. A `RecomputeContext` intervenes: of a computation that is
to be made again it keeps the inputs, drops what is saved inside, and marks the results, so that a
function that saves one of them keeps a `SavedPlace` instead. The first read of any of these runs
the computation again, once, and gives each reader its tensor. A tensor goes when its last reader
has had it. Inputs may be results of another such computation, which then runs first.

Same kernels on same inputs give the same bits, and dropout masks are functions of positions, so
that gradients have the bits of those without recomputation. A split backward pass reads a linear
layer's input in its first half, and what it leaves for the second holds the tensor.

The same hooks find what a forward pass may send to the host (parallel/offload.py): within
`parking` all that is kept is on a list, each tensor with the module that reads it in the forward
pass.

Called from model/block.py, model/attention/attention.py and model/mlp.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Function = Callable[..., Any]  # of tensors: a tensor, or several


class SavedPlace(NamedTuple):
    """Where a tensor comes from that is not kept: a view of a result, or what a computation saved
    inside (`shape` None).
    """

    source: RecomputedTensor
    number: int
    shape: tuple[Any, Any, Any] | None  # sizes, strides, offset in the result's storage

    def read(self) -> Tensor:
        """The tensor; each place is read once."""
        tensor = self.source.read(self.number)
        return tensor if self.shape is None else tensor.as_strided(*self.shape)


class OffloadableTensor:
    """A saved tensor that may live on the host until backward. `module`:
    what reads it in the forward pass.
    """

    def __init__(self, tensor: Tensor, module: str):
        self.tensor: Tensor | None = tensor
        self.module = module
        self.whole: Callable[[], Tensor] | None = None
        self.shape: tuple[Any, Any, Any] | None = None

    def leave(self, whole: Callable[[], Tensor]) -> None:
        """Hold nothing any more; who reads the tensor asks `whole` for its storage [elements]."""
        assert self.tensor is not None
        self.shape = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self.tensor, self.whole = None, whole

    def read(self) -> Tensor:
        """The tensor; what has been away is read once."""
        if self.tensor is not None:
            return self.tensor
        assert self.whole is not None and self.shape is not None
        return self.whole().as_strided(*self.shape)


Saved = Tensor | SavedPlace | OffloadableTensor


def unpack(saved: Saved) -> Tensor:
    """What a backward pass reads."""
    return saved if isinstance(saved, Tensor) else saved.read()


class RecomputedTensor:
    """A computation of one forward pass that the backward pass makes again when it first reads one
    of its tensors: results by the numbers -1, -2, ..., what it saved inside by 0, 1, ...
    """

    def __init__(self, function: Function, inputs: list[Saved], differentiated: list[bool]):
        self.function: Function | None = function
        self.inputs, self.differentiated = inputs, differentiated
        self.inside = 0  # tensors that were saved inside
        self.reads: Counter[int] = Counter()  # to come
        self.tensors: dict[int, Tensor] = {}

    def place(self, number: int, shape: tuple[Any, Any, Any] | None = None) -> SavedPlace:
        """One more reader of a tensor."""
        self.reads[number] += 1
        return SavedPlace(self, number, shape)

    def drop(self, _: Tensor) -> SavedPlace:
        """In the place of a tensor that is saved inside."""
        self.inside += 1
        return self.place(self.inside - 1)

    def read(self, number: int) -> Tensor:
        """A tensor for one of its readers. Raises RuntimeError when all have had it."""
        if not self.reads[number]:
            raise RuntimeError("a recomputed tensor is read more often than it was saved")
        if self.function is not None:
            self._run()
        self.reads[number] -= 1
        return self.tensors[number] if self.reads[number] else self.tensors.pop(number)

    def _run(self) -> None:
        """Make the computation again, and keep what will be read."""
        function, self.function = self.function, None
        inputs = [
            unpack(saved).detach().requires_grad_(differentiated)
            for saved, differentiated in zip(self.inputs, self.differentiated, strict=True)
        ]
        self.inputs = []
        inside = 0

        def record(tensor: Tensor) -> None:
            nonlocal inside
            if self.reads[inside]:
                self.tensors[inside] = tensor.detach()
            inside += 1

        # autograd saves nothing where it is off
        with torch.set_grad_enabled(self.inside > 0), saved_tensors_hooks(record, unpack):
            results = results_of(function(*inputs))
        assert inside == self.inside, "recomputation saved other tensors than the forward pass"
        for index, result in enumerate(results):
            if self.reads[-1 - index]:
                self.tensors[-1 - index] = result.detach()


def results_of(y: Any) -> tuple[Tensor, ...]:
    """A computation's results, one or several."""
    return (y,) if isinstance(y, Tensor) else tuple(y)


class RecomputeContext:
    """Decides for one layer what is kept. `modules`: names of computations that are made again; it
    is the caller of each, which names it.
    """

    def __init__(self) -> None:
        self.modules: frozenset[str] = frozenset()
        # in a forward pass, by storage: results that are not kept. A weak reference keeps the
        # storage's identity from being given to another.
        self.results: dict[int, tuple[StorageWeakRef, RecomputedTensor, int]] | None = None
        # in a forward pass whose tensors may leave; weak, since parts of a graph go unused
        self.parked: list[weakref.ref[OffloadableTensor]] | None = None
        self.module = ""  # that reads what is saved now

    @contextlib.contextmanager
    def parking(self) -> Iterator[list[weakref.ref[OffloadableTensor]]]:
        """Around a forward pass whose tensors may leave the device: all that it saves."""
        parked: list[weakref.ref[OffloadableTensor]] = []
        self.parked = parked
        try:
            yield parked
        finally:
            self.parked = None

    def enter(self, module: str) -> None:
        """From here on the forward pass saves what this module reads ("": none of them)."""
        if self.parked is not None:
            self.module = module

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around the forward pass of the layer."""
        if not (self.modules or self.parked is not None) or not torch.is_grad_enabled():
            yield
            return
        assert self.results is None, "two forward passes of a layer at a time"
        self.results = {}
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self.results = None

    def __call__(self, module: str, function: Function, *inputs: Tensor) -> Any:
        """function(*inputs); if `module` is recomputed, its inputs alone are kept."""
        if self.results is None or module not in self.modules:
            return function(*inputs)
        rebuilt = self._rebuilt(function, inputs)
        results, self.results = self.results, None  # nothing inside is a separate choice
        try:
            with saved_tensors_hooks(rebuilt.drop, unpack):
                y = function(*inputs)
        finally:
            self.results = results
        self._mark(rebuilt, y)
        return y

    def discard(self, module: str, y: Tensor, function: Function, *inputs: Tensor) -> None:
        """If `module` is recomputed, a function that saves y keeps nothing: it is
        function(*inputs).
        """
        if self.results is not None and module in self.modules:
            self._mark(self._rebuilt(function, inputs), y)

    def _rebuilt(self, function: Function, inputs: tuple[Tensor, ...]) -> RecomputedTensor:
        differentiated = [x.requires_grad for x in inputs]
        return RecomputedTensor(function, [self._pack(x) for x in inputs], differentiated)

    def _mark(self, rebuilt: RecomputedTensor, y: Any) -> None:
        assert self.results is not None
        for index, result in enumerate(results_of(y)):
            storage = result.untyped_storage()
            self.results[storage._cdata] = StorageWeakRef(storage), rebuilt, -1 - index

    def _pack(self, tensor: Tensor) -> Saved:
        """What is kept of a tensor that is saved."""
        assert self.results is not None
        found = self.results.get(tensor.untyped_storage()._cdata)
        if found is None:
            kept = tensor.detach()  # with its graph it could be its own owner
            if self.parked is None:
                return kept
            place = OffloadableTensor(kept, self.module)
            self.parked.append(weakref.ref(place))
            return place
        shape = tensor.size(), tensor.stride(), tensor.storage_offset()
        return found[1].place(found[2], shape)
