"""Counts the bytes of live tensors of a process, the same way whichever library made them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While open, sums the bytes of all live storages after every operator that is dispatched,
    those of backward passes and collectives included.

    Known are the storages of the tensors that Python held when it was opened, and of every argument
    and result since. A storage is known weakly and asked for its size at each sample, so that what
    is freed and what is resized to nothing count as nothing. Not seen: memory that an operator
    takes and gives back within itself, and that of libraries that are not tensors (Gloo's own
    buffers).
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0  # bytes

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.unfreeze()  # get_objects leaves out what is frozen
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._know(thing)
                if thing.is_leaf and thing.grad is not None:  # Python may never have held it
                    self._know(thing.grad)
        return super().__enter__()

    def _know(self, tensor: Tensor) -> None:
        for part in _plain(tensor):
            if part.device.type != "meta":
                self.known.add(part.untyped_storage())

    @property
    def now(self) -> int:
        """Bytes."""
        return sum(storage.nbytes() for storage in self.known)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(
            issubclass(kind, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
            for kind in types
        ):
            return NotImplemented  # a tensor made of tensors: what it does with them comes here
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._know(leaf)
        self.peak = max(self.peak, self.now)
        return out


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory that this one is made of, mostly itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(part := getattr(tensor, name), Tensor):  # not a DTensor's mesh
            yield from _plain(part)
