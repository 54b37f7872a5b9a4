"""Live bytes: the sizes of all tensor storages, added up after every operator, every collective or message, and every wait for one.

A sum is taken anew each time, so storages that are resized to nothing, by which ZeRO-3 lets go of a gathered block, count as nothing. Nothing
here is shared with megatron/plan: it is what the planner is held against.

Each storage has a kind: `parameters`, `gradients`, `optimizer`, `slots` are buffers that the run's blocks own; of the others `scratch` is what
the optimizer's and ZeRO's own code and the forming of weight gradients made, `before` what lived when the tracker began, `activations` the rest.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer", "slots", "scratch", "activations", "before")
MEGATRON = str(Path(__file__).resolve().parents[3] / "megatron") + "/"
WEIGHT_GRADIENTS = {"linear_weight_grad", "embedding_weight_grad", "bias_grad"}
# Functions of torch.distributed, and the bytes of buffers that Gloo's own hide in them: measured by test_tracker.py.
CALLS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("isend", "irecv", "send", "recv", "all_reduce", "broadcast", "reduce", "all_to_all_single"), lambda *_, **__: 0),
    "all_gather": lambda outs, *_, **__: sum(out.nbytes for out in outs),
    "all_gather_into_tensor": lambda out, *_, **__: out.nbytes,
    "reduce_scatter_tensor": lambda _, x, *__, **___: x.nbytes,
    "all_to_all": lambda _, parts, *__, **___: 2 * sum(part.nbytes for part in parts),
}


@dataclass(eq=False)
class Storage:
    """A storage that has been seen."""

    ref: weakref.ref[torch.UntypedStorage]
    kind: str
    where: str  # line of ours that made it


@dataclass
class Span:
    """Live bytes over some time, by kind and in `total`: at its end, and each kind's most. `at_peak`: all of them when the total was largest."""

    now: Counter[str]
    peak: Counter[str]
    at_peak: Counter[str]
    peak_where: str


@dataclass
class Sample:
    """`fixed`: bytes of the kinds that a storage has for life; `open`: (storage, bytes) of those that may still turn out to be slots."""

    fixed: Counter[str]
    open: list[tuple[Storage, int]] = field(default_factory=list)
    hidden: int = 0
    where: str = ""

    def by_kind(self) -> Counter[str]:
        sums = Counter(self.fixed)
        for storage, size in self.open:
            sums[storage.kind] += size
        sums["scratch"] += self.hidden
        sums["total"] = sum(sums.values())
        return sums


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _origin() -> tuple[str, str]:
    """(kind by the code that is running, its line): of what is made for a weight gradient, or by the optimizer or ZeRO, `scratch`."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith(MEGATRON) or file.endswith(("dist/collectives.py", "dist/p2p.py")):
            continue
        name = file.removeprefix(MEGATRON)
        scratch = name.startswith("optimizer/") or name.startswith("layers/") and frame.f_code.co_name in WEIGHT_GRADIENTS
        return "scratch" if scratch else "activations", f"{name}:{frame.f_lineno}"
    return "activations", ""


class LiveBytes(TorchDispatchMode):
    """Counts while it is open: `with LiveBytes() as live`. Each `mark` ends a span and begins the next."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Storage] = {}  # by identity of torch's storage object, which lives as long as the memory does
        self.samples: list[Sample] = []
        self.most = 0
        self.blocks: list[Any] = []
        self.slots = False
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> LiveBytes:
        gc.collect()
        for tensor in gc.get_objects():
            if issubclass(type(tensor), Tensor):  # isinstance asks dead proxies too
                self._see(tensor, "before", "")
        for name, hidden in CALLS.items():
            call = self._sampling(getattr(dist, name), hidden)
            for module in (dist, distributed_c10d):  # P2POp compares with the second
                self.stack.enter_context(mock.patch.object(module, name, call))
        self.stack.enter_context(mock.patch.object(dist.Work, "wait", self._sampling(dist.Work.wait, lambda *_, **__: 0)))
        super().__enter__()
        self.sample()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        origin = None
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self.live:
                origin = origin or _origin()
                self._see(tensor, *origin)
        self.sample()
        return out

    def _sampling(self, call: Callable, hidden: Callable[..., int]) -> Callable:
        def sampled(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.sample(hidden(*args, **kwargs))
            return result

        return sampled

    def _see(self, tensor: Tensor, kind: str, where: str) -> Storage | None:
        if tensor.layout != torch.strided or (storage := tensor.untyped_storage()).device.type == "meta":
            return None
        key = id(storage)
        if key not in self.live:
            self.live[key] = Storage(weakref.ref(storage, lambda _: self.live.pop(key, None)), kind, where)
        return self.live[key]

    def own(self, blocks: Iterable[Any], states: Iterable[Tensor], *, slots: bool) -> None:
        """From now on these blocks' buffers and the optimizer's states have their kinds. `slots`: gradients come and go."""
        self.blocks, self.slots = list(blocks), slots
        buffers = [(state, "optimizer") for state in states]
        for block in self.blocks:
            buffers += [(block.master, "optimizer"), (block.grad_shard, "gradients"), (None if slots else block.grad, "gradients"),
                        (block.weight, "parameters")]  # the last one counts: a master may be a view of the weight
        for buffer, kind in buffers:
            if buffer is not None and (storage := self._see(buffer, kind, "")) is not None:
                storage.kind = kind

    def sample(self, hidden: int = 0) -> Sample:
        """Add up what is alive."""
        for block in self.blocks if self.slots else ():
            if block.grad is not None and (storage := self._see(block.grad, "slots", "")) is not None and storage.kind == "scratch":
                storage.kind = "slots"
        sample = Sample(Counter(), hidden=hidden)
        for storage in list(self.live.values()):
            memory = storage.ref()
            size = 0 if memory is None else memory.nbytes()
            if storage.kind in ("scratch", "slots"):
                sample.open.append((storage, size))
            else:
                sample.fixed[storage.kind] += size
        if (total := hidden + sum(sample.fixed.values()) + sum(size for _, size in sample.open)) > self.most:
            self.most, sample.where = total, _origin()[1]
        self.samples.append(sample)
        return sample

    def mark(self) -> Span:
        """The span since the last mark."""
        now = self.sample().by_kind()
        peak: Counter[str] = Counter()
        largest, where = Counter({"total": -1}), ""
        for sample in self.samples:
            sums = sample.by_kind()
            peak |= sums
            if sums["total"] > largest["total"]:
                largest, where = sums, sample.where
        self.samples, self.most = [], 0
        return Span(now, peak, largest, where)

    def largest(self, kind: str, count: int = 20) -> list[tuple[int, str]]:
        """(bytes, line that made it) of the largest storages of a kind that are alive: to find what should not be."""
        sizes = [(memory.nbytes(), storage.where) for storage in list(self.live.values())
                 if storage.kind == kind and (memory := storage.ref()) is not None]
        return sorted(sizes, reverse=True)[:count]
