"""Live bytes: the sizes of all tensor storages, added up after every operator, every collective or
message, and every wait for one.

A sum is taken anew each time, so storages that are resized to nothing, by which ZeRO-3 frees a
gathered block, count as nothing. Nothing here is shared with tools/_plan: it is what the planner
is held against.

Each storage has a kind: `parameters`, `gradients`, `optimizer`, `slots` are buffers that the run's
blocks own, and `host` those of them that a GPU would not hold; of the others `scratch` is what the
optimizer's and ZeRO's own code and the forming of weight gradients made, `before` what lived when
the tracker began, `activations` the rest.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.kernels.lang import CALLED
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from megatron.distributed.collectives import ALL_GATHER, REDUCE_SCATTER
from megatron.distributed.interleaver import Interleaver

KINDS = "parameters gradients optimizer host slots scratch activations before".split()
MEGATRON = str(Path(__file__).resolve().parents[3] / "megatron") + "/"
# functions that make a gradient of a parameter
WEIGHT_GRADIENTS = frozenset(
    {"wgrad_gemm", "_add_rounded", "accumulate_gradients", "accumulate_embedding_grad"}
)
# of torch.distributed: after each the bytes are added up
CALLS = "isend irecv send recv all_reduce all_gather broadcast reduce all_to_all_single".split()
CALLS += [ALL_GATHER, REDUCE_SCATTER]


@dataclass(eq=False)
class Owner:
    """Who holds a storage, which may come out later."""

    kind: str


Sizes = list[tuple[Owner, int]]  # bytes


@dataclass
class Span:
    """Live bytes over some time, by kind and in `total`: at its end, and each kind's most.
    `at_peak`: all of them when the total was largest.
    """

    now: Counter[str]
    peak: Counter[str]
    at_peak: Counter[str]
    where: str  # line of ours that ran when the total was largest


def frames() -> Iterator[FrameType]:
    """Those that the function which asks was called from."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _origin() -> tuple[str, str]:
    """(kind by the code that is running, its line): of what is made for a weight gradient, or by
    the optimizer or ZeRO, `scratch`.
    """
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith(MEGATRON) or file.endswith("distributed/collectives.py"):
            continue
        name = file.removeprefix(MEGATRON)
        if frame.f_code.co_name == "host_memory":
            return "host", f"{name}:{frame.f_lineno}"
        scratch = name.startswith("optimizer/") or frame.f_code.co_name in WEIGHT_GRADIENTS
        return "scratch" if scratch else "activations", f"{name}:{frame.f_lineno}"
    return "activations", ""


def in_both_threads(mode: TorchDispatchMode) -> AbstractContextManager[Any]:
    """In the block, the second of two computations that take turns is under a mode of the first,
    which torch keeps by thread.
    """
    real = Interleaver._run

    def run(self: Interleaver, index: int, work: Callable[[], Any]) -> Any:
        def under_the_mode() -> Any:
            _push_mode(mode)
            try:
                return work()
            finally:
                _pop_mode()

        return real(self, index, under_the_mode if index else work)

    return mock.patch.object(Interleaver, "_run", run)


class LiveBytes(TorchDispatchMode):
    """Counts while it is open; what lives when it is made is `before`. Each `mark` ends a span and
    begins the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: weakref.WeakKeyDictionary[torch.UntypedStorage, Owner] = (
            weakref.WeakKeyDictionary()
        )
        self.blocks: list[Any] = []
        self.slots = False
        self.stack = contextlib.ExitStack()
        self._begin_span()
        gc.collect()
        self._walk("before")

    def __enter__(self) -> LiveBytes:
        self._walk("activations")
        for name in CALLS:
            call = self._sampling(getattr(dist, name))
            for module in (dist, distributed_c10d):  # P2POp compares with the second
                self.stack.enter_context(mock.patch.object(module, name, call))
        wait = self._sampling(dist.Work.wait)
        self.stack.enter_context(mock.patch.object(dist.Work, "wait", wait))
        self.stack.enter_context(in_both_threads(self))
        super().__enter__()
        self.sample()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()
        self.blocks = []  # a module that was imported later may hold our functions, so us

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # of an operator of ours: what its launcher allocates, too
        if function.namespace == "megatron":
            with self._inside():
                out = CALLED[function.name()](*args, **(kwargs or {}))
        else:
            out = function(*args, **(kwargs or {}))
        kind = None
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.owners:
                kind = kind or _origin()[0]
                self._owner(tensor, kind)
        self.sample()
        return out

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Count what the operator that has come runs itself."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _sampling(self, call: Callable) -> Callable:
        def sampled(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.sample()
            return result

        return sampled

    def _walk(self, kind: str) -> None:
        for tensor in gc.get_objects():
            if issubclass(type(tensor), Tensor):  # isinstance asks dead proxies too
                self._owner(tensor, kind)

    def _owner(self, tensor: Tensor, kind: str) -> Owner:
        """That of a tensor's storage, which is known from now on; of this kind if it is new."""
        memory = tensor.untyped_storage() if tensor.layout == torch.strided else None
        if memory is None or memory.device.type == "meta":
            return Owner(kind)
        return self.owners.setdefault(memory, Owner(kind))

    def own(
        self,
        blocks: Iterable[Any],
        states: Iterable[Tensor],
        *,
        slots: bool,
        host: Iterable[Tensor] = (),
    ) -> None:
        """From now on these blocks' buffers and the optimizer's states have their kinds. `slots`:
        whole gradients come and go in a step; `host`: those of them that are in host memory.
        """
        self.blocks, self.slots = list(blocks), slots
        buffers = [(state, "optimizer") for state in states]
        for block in self.blocks:  # the last one counts: a master may be a view of the weight
            buffers += [
                (block.master, "optimizer"),
                (block.rounded, "parameters"),
                (block.weight, "parameters"),
            ]
        self._label([*buffers, *((each, "host") for each in host)])

    def _label(self, buffers: Iterable[tuple[Tensor | None, str]]) -> None:
        """These are of such kinds from now on."""
        for buffer, kind in buffers:
            if buffer is not None:
                self._owner(buffer, kind).kind = kind

    def sample(self) -> Counter[str]:
        """Add up what is alive."""
        for block in self.blocks:
            whole = "slots" if self.slots else "gradients"
            self._label([(block.grad, whole), (block.summed, "gradients")])
        sizes = [(owner, memory.nbytes()) for memory, owner in self.owners.items()]
        now = _by_kind(sizes)
        now["total"] = now.total()
        # which of these are slots, and which scratch, is known at the end of the span
        opened = [each for each in sizes if each[0].kind in ("scratch", "slots")]
        if opened and opened != self.open[-1]:
            self.open.append(opened)
        for kind in ("parameters", "gradients", "optimizer", "host", "activations", "before"):
            self.peak[kind] = max(self.peak[kind], now[kind])
        if now["total"] > self.peak["total"]:
            self.peak["total"] = now["total"]
            self.at_peak = now, self.open[-1], _origin()[1]
        return now

    def _begin_span(self) -> None:
        self.peak: Counter[str] = Counter()
        self.at_peak: tuple[Counter[str], Sizes, str] = Counter(), [], ""
        self.open: list[Sizes] = [[]]

    def mark(self) -> Span:
        """The span since the last mark."""
        now = self.sample()
        for opened in self.open:
            self.peak |= _by_kind(opened)  # by what they are known to be now
        at_peak, opened, where = self.at_peak
        if at_peak["scratch"] or at_peak["slots"]:
            then = _by_kind(opened)
            at_peak.update(
                scratch=then["scratch"] - at_peak["scratch"],
                slots=then["slots"] - at_peak["slots"],
                gradients=then["gradients"],
            )
        span = Span(now, self.peak, at_peak, where)
        self._begin_span()
        return span


def _by_kind(sizes: Sizes) -> Counter[str]:
    sums: Counter[str] = Counter()
    for owner, size in sizes:
        sums[owner.kind] += size
    return sums
