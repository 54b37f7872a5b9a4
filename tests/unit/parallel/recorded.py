"""A stand-in for a CUDA graph on a CPU: it notes the operators of what it captures, with the
tensors that they read, and a replay carries the same operators out on the same tensors and writes
the results where those of the capture are.

So it has the properties of a graph that matter for correctness: no Python runs at a replay, what is
read and written lies at the addresses of the capture, and a capture leaves everything as it was,
with nothing of use in what it made. Of a pool it has the worst case: what a graph needed for a
while and gave back is where graphs that were captured later keep theirs, so that its replay
destroys it. It knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.parallel.graphs import CudaGraph


class _Operators(TorchDispatchMode):
    """Notes every operator while it is open."""

    def __init__(self) -> None:
        super().__init__()
        # the operator, what it is given, and where its results are
        self.calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self.made: set[int] = set()  # addresses of memory that did not exist before
        self.before: list[tuple[Tensor, Tensor]] = []  # what was written: all of its memory, a copy

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = [argument.name for argument in function._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors(given.get(argument.name)):
                    self._remember(tensor)
        known = {memory(tensor) for tensor in tensors((args, kwargs))}
        result = function(*args, **kwargs)
        self.made |= {memory(tensor) for tensor in tensors(result)} - known
        args, kwargs = tree_map_only(Tensor, untracked, (args, kwargs))
        self.calls.append((function, args, kwargs, [*map(untracked, tensors(result))]))
        return result

    def _remember(self, written: Tensor) -> None:
        remembered = {memory(whole) for whole, _ in self.before}
        if memory(written) not in self.made | remembered:
            storage = written.untyped_storage()
            length = storage.nbytes() // written.element_size()
            whole = written.data.as_strided((length,), (1,), 0)
            self.before.append((whole, whole.clone()))

    def undo(self) -> None:
        """Put back what was written, and leave nothing of use in what is new."""
        for whole, copy in self.before:
            whole.copy_(copy)
        self.poison()

    def poison(self) -> None:
        """Destroy what was made."""
        for _, _, _, results in self.calls:
            for result in results:
                if memory(result) in self.made and result.is_floating_point():
                    result.fill_(float("nan"))


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def untracked(tensor: Tensor) -> Tensor:
    """The same memory, of which autograd counts no writes: nor does it of a CUDA graph's."""
    return tensor.data


class RecordedGraph(CudaGraph):
    count = 0  # of replays, of all graphs

    def __init__(self, pool: Any):
        self.operators = _Operators()
        self.pool: list[RecordedGraph] = pool
        self.number = len(pool)
        pool.append(self)

    @staticmethod
    def new_pool() -> Any:
        return []

    def capture(self, work: Callable[[], Any]) -> Any:
        with self.operators:
            result = work()
        with torch.no_grad():
            self.operators.undo()
        return result

    @torch.no_grad()
    def replay(self) -> None:
        RecordedGraph.count += 1
        for later in self.pool[self.number + 1 :]:
            later.operators.poison()
        for function, args, kwargs, places in self.operators.calls:
            results = tensors(function(*args, **kwargs))
            for place, result in zip(places, results, strict=True):
                if place.data_ptr() != result.data_ptr():
                    place.copy_(result)
