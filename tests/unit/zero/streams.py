"""A GPU pretended on a CPU, which knows what may run at the same time there: streams, events and
NCCL's communicators with the order that they guarantee and no other, while the operators compute on
CPU tensors and the messages go over Gloo.

Every operator, collective and message reads and writes bytes at a time on a stream. Two that touch
the same bytes, one of them writing, must be in order: on one stream, or the later one after a wait
that came after the earlier one (vector clocks; Lamport 1978, Mattern 1989). Memory that is freed
goes to the next allocation on the stream that it was allocated on, as torch's caching allocator has
it: whatever other streams do with it must be over for that stream at that point. A collective keeps
its tensors until somebody waits for it, as torch's NCCL backend does. What works on pinned host
memory alone is the host's own work, after what it has waited for and before whatever it starts
later.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.kernels import lang
from own_run import exit_code, replaced
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.checkpoint import manager
from megatron.distributed import collectives
from megatron.training import pretrain, step

MEGATRON = str(Path(__file__).resolve().parents[3] / "megatron") + "/"
# memory alone
UNWRITTEN = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.set_,
}
Times = dict["Stream", int]  # of each stream, how much is known to be over


class Device(str):
    """`cpu` to torch, a GPU to all that ask for the type."""

    type, index = "cuda", 0

    def __new__(cls) -> Device:
        return super().__new__(cls, "cpu")


def _learn(seen: Times, other: Times) -> None:
    for stream, time in other.items():
        seen[stream] = max(seen.get(stream, 0), time)


class Event:
    def __init__(self, gpu: PretendedGPU, **_: Any):
        self.gpu, self.seen = gpu, {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        self.seen = {**stream.seen, stream: stream.begin()}

    def query(self) -> bool:
        """Whether the host knows that it is over."""
        return all(self.gpu.host.get(stream, 0) >= time for stream, time in self.seen.items())

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            self.gpu.fault(f"{_line()} asks for the time between events that may not have happened")
        return 1.0

    def synchronize(self) -> None:
        if self.gpu.hears():
            _learn(self.gpu.host, self.seen)


class Stream:
    def __init__(self, gpu: PretendedGPU, name: str):
        self.gpu, self.name, self.seen = gpu, name, {self: 0}

    def wait_event(self, event: Event) -> None:
        if self.gpu.hears():
            _learn(self.seen, event.seen)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def begin(self) -> int:
        """The time of one more piece of work, which is after all that the host has waited for."""
        _learn(self.seen, self.gpu.host)
        self.seen[self] += 1
        return self.seen[self]


@dataclass(eq=False)
class Memory:
    """A storage: the stream that it was allocated on, and the last accesses to ranges of its
    bytes.
    """

    home: Stream
    where: str
    pinned: bool = False  # by torch's allocator, which gives nothing away before copies are over
    # (first, end, written): when, where
    accesses: dict[tuple[int, int, bool], dict[Stream, tuple[int, str]]] = field(
        default_factory=dict
    )
    finalizer: weakref.finalize | None = None


class Work:
    """A collective under way on a communicator's stream."""

    def __init__(self, gpu: PretendedGPU, event: Event, kept: Any, arrive: Any):
        self.gpu, self.event, self.kept, self.arrive = gpu, event, kept, arrive

    def wait(self) -> None:
        if self.arrive is not None:
            with self.gpu.untracked():
                self.arrive()
        self.arrive = self.kept = None
        self.gpu.current.wait_event(self.event)


class NCCL:
    """torch.distributed as the modules of megatron/distributed see it: what they start runs on the
    communicator's stream.
    """

    def __init__(self, gpu: PretendedGPU):
        self.gpu = gpu
        self.streams: dict[Any, Stream] = {}
        setattr(self, collectives.ALL_GATHER, self._all_gather)
        setattr(self, collectives.REDUCE_SCATTER, self._reduce_scatter)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _start(
        self, group: Any, reads: Iterable[Tensor], writes: Iterable[Tensor], begin: Any
    ) -> Work:
        gpu, reads, writes = self.gpu, list(reads), list(writes)
        stream = self.streams.setdefault(group, Stream(gpu, f"NCCL {len(self.streams)}"))
        _learn(stream.seen, gpu.current.seen)
        gpu.work(stream, reads, writes, "collective")
        with gpu.untracked():
            arrive = begin()
        return Work(gpu, stream.record_event(), (reads, writes), arrive)

    def all_reduce(
        self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work:
        begin = partial(dist.all_reduce, x, op, group=group, async_op=True)
        work = self._start(group, [x], [x], lambda: begin().wait)
        return work if async_op else work.wait()

    def _all_gather(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Work:
        assert async_op
        begin = partial(getattr(dist, collectives.ALL_GATHER), out, group=group, async_op=True)
        return self._start(group, [x], [out], lambda: begin(x.clone()).wait)

    def _reduce_scatter(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Work:
        assert async_op

        def begin():
            whole = x.clone()
            work = dist.all_reduce(whole, group=group, async_op=True)

            def arrive():
                work.wait()
                out.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])

            return arrive

        return self._start(group, [x], [out], begin)

    def isend(self, x: Tensor, dst: int, group: Any, tag: int = 0) -> Work:
        begin = partial(dist.isend, x, dst=dst, group=group, tag=tag)
        return self._start(group, [x], [], lambda: begin().wait)

    def irecv(self, x: Tensor, src: int, group: Any, tag: int = 0) -> Work:
        begin = partial(dist.irecv, x, src=src, group=group, tag=tag)
        return self._start(group, [], [x], lambda: begin().wait)

    def P2POp(self, operation: Any, x: Tensor, peer: int, group: Any) -> partial[Work]:
        return partial(operation, x, peer, group)

    def all_gather_object(self, values: list[Any], value: Any, group: Any) -> None:
        with self.gpu.untracked():
            dist.all_gather_object(values, value, group=group)

    def broadcast_object_list(self, values: list[Any], src: int, group: Any) -> None:
        with self.gpu.untracked():
            dist.broadcast_object_list(values, src=src, group=group)

    def batch_isend_irecv(self, operations: list[partial[Work]]) -> list[Work]:
        return [begin() for begin in operations]


class PretendedGPU(TorchDispatchMode):
    """While it is open there is a GPU; `faults` are the races that were found, a line each."""

    def __init__(self, deaf: str | None = None) -> None:
        super().__init__()
        self.deaf = deaf
        self.host: Times = {}
        self.names = itertools.count(1)
        self.current, self.cpu = Stream(self, "the default stream"), Stream(self, "the host")
        self.hosted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.memories: weakref.WeakKeyDictionary[torch.UntypedStorage, Memory] = (
            weakref.WeakKeyDictionary()
        )
        self.freed: defaultdict[Stream, list[Memory]] = defaultdict(list)
        self.faults: dict[str, None] = {}
        self.operations, self.hidden, self.pinning = 0, 0, False

    def __enter__(self) -> PretendedGPU:
        # torch.compile learns once which functions are torch's: not what replaces them here
        torch.compile(torch.square, backend="eager")(torch.ones(1))
        self.patches = contextlib.ExitStack()

        def put(target: Any, **values: Any) -> None:
            self.patches.enter_context(mock.patch.multiple(target, **values))

        put(
            Tensor,
            # the plan's tensors have no memory
            device=property(lambda x: torch.device("meta") if x.is_meta else Device()),
            is_cuda=property(lambda x: not self.hidden and not x.is_meta),
        )
        counters = "memory_reserved", "memory_allocated", "max_memory_allocated"
        sizes = mock.Mock(total_memory=80 << 30, multi_processor_count=1)
        put(
            torch.cuda,
            Stream=lambda device=None: Stream(self, f"stream {next(self.names)}"),
            Event=partial(Event, self),
            current_stream=lambda device=None: self.current,
            stream=self._on,
            get_device_name=lambda device=None: "pretended GPU",
            get_device_properties=lambda device=None: sizes,
            cudart=lambda: mock.Mock(cudaHostRegister=lambda *_: 0),
            **dict.fromkeys(counters, lambda device=None: 0),
        )
        put(
            torch,
            empty=self._marking(torch.empty),
            zeros=self._marking(torch.zeros),
            frombuffer=self._marking(torch.frombuffer, always=True),
        )
        put(torch.UntypedStorage, resize_=self._resizing(torch.UntypedStorage.resize_))
        put(collectives, is_gloo=lambda axis: False, dist=NCCL(self))
        put(manager.Staging, hand_over=self._reading(manager.Staging.hand_over))
        put(
            pretrain,
            choose_device=lambda launch, config: (Device(), "gloo"),
            set_determinism=lambda device, wanted: None,
        )
        # they would run in Triton's interpreter, for minutes
        put(lang, unsupported_reason=lambda device, dtype: "a pretended GPU")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _marking(self, real: Any, always: bool = False) -> Any:
        """A factory without pinned memory, of which the CPU has none; what would be pinned, or lies
        in memory of the host's, is.
        """

        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            self.pinning = pin_memory or always
            x = real(*args, **kwargs)
            self.pinning = False
            if pin_memory or always:  # frombuffer is no operator
                self.hosted.add(x.untyped_storage())
            if pin_memory and (memory := self.memories.get(x.untyped_storage())) is not None:
                memory.pinned = True
            return x

        return make

    def _reading(self, hand_over: Any) -> Any:
        """The writer process reads the staging memory from here on."""

        def handed_over(staging: manager.Staging) -> None:
            taken = staging.memory[: staging.end]
            hand_over(staging)
            self.work(self.cpu, [taken], [], "the writer process")

        return handed_over

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """What Gloo does in the place of NCCL is no work of the GPU's."""
        self.hidden += 1
        try:
            yield
        finally:
            self.hidden -= 1

    def _resizing(self, real: Any) -> Any:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if (memory := self.memories.pop(storage, None)) is not None:
                (memory.finalizer or partial(self._free, memory))()
            result = real(storage, size)
            if size and storage.device.type != "meta":
                self._allocate(storage)
            return result

        return resize

    def hears(self) -> bool:
        """Whether the function of ours that waits shall do so."""
        return self.deaf is None or _place().f_code.co_name != self.deaf

    # ---- what happens

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.hidden or function.namespace == "c10d" or isinstance(out, Tensor) and out.is_meta:
            return out
        # 1. What it reads, writes and makes.
        names = [argument.name for argument in function._schema.arguments]
        given, is_unwritten = dict(zip(names, args)) | kwargs, function.overloadpacket in UNWRITTEN
        writes, reads = [], []
        for argument in function._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(given.get(argument.name)))
        if is_unwritten:
            writes = []
        known = {tensor.untyped_storage() for tensor in (*reads, *writes)}
        outs = _tensors(out)
        made = [tensor for tensor in outs if tensor.untyped_storage() not in known]
        if not made and not writes and outs:
            return out  # a view
        # 2. Where it runs.
        on_host = self.pinning or bool(known) and all(storage in self.hosted for storage in known)
        for tensor in made:
            if on_host:
                self.hosted.add(tensor.untyped_storage())
            self._allocate(tensor.untyped_storage())
        written = writes if is_unwritten else [*writes, *made]
        self.work(self.cpu if on_host else self.current, reads, written, function.name())
        # 3. The host waits for a number, and for a copy to it that is not asynchronous.
        is_number = function is torch.ops.aten._local_scalar_dense.default
        to_host = any(tensor.untyped_storage() in self.hosted for tensor in writes)
        runs_on = function.overloadpacket is torch.ops.aten.copy_ and given.get("non_blocking")
        if is_number or to_host and not on_host and not runs_on:
            self.current.synchronize()
        return out

    def work(
        self, stream: Stream, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str
    ) -> None:
        """One piece of work on a stream."""
        self.operations += 1
        time = stream.begin()
        if stream is self.cpu:
            _learn(self.host, stream.seen)
        where = f"{what} at {_line()} on {stream.name}"
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(stream, time, tensor, written, where)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        """New memory, which may be any that was freed on this stream before."""
        stream = self.cpu if storage in self.hosted else self.current
        stream.begin()
        for memory in self.freed.pop(stream, ()):
            for (_, _, written), times in memory.accesses.items():
                for other, (time, where) in times.items():
                    if stream.seen.get(other, 0) < time:
                        self.fault(
                            f"memory made at {memory.where} is used again while {where} may "
                            f"still {'write' if written else 'read'} it"
                        )
        self.memories[storage] = memory = Memory(stream, _line())
        memory.finalizer = weakref.finalize(storage, self._free, memory)  # is called once
        memory.finalizer.atexit = False

    def _free(self, memory: Memory) -> None:
        if not memory.pinned:
            self.freed[memory.home].append(memory)

    def _access(self, stream: Stream, time: int, tensor: Tensor, written: bool, where: str) -> None:
        memory = self.memories.get(tensor.untyped_storage())
        if memory is None:  # from before there was a GPU
            memory = self.memories[tensor.untyped_storage()] = Memory(stream, "the start")
        item, dimensions = tensor.element_size(), zip(tensor.shape, tensor.stride(), strict=True)
        first = tensor.storage_offset() * item
        end = first + (sum((size - 1) * step for size, step in dimensions) + 1) * item
        for (low, high, wrote), times in list(memory.accesses.items()):
            if (wrote or written) and low < end and first < high:
                for other, (then, there) in times.items():
                    if other is not stream and stream.seen.get(other, 0) < then:
                        self.fault(
                            f"{where} {'writes' if written else 'reads'} what {there} may "
                            f"still {'write' if wrote else 'read'}"
                        )
                if written and first <= low and high <= end:
                    # whatever comes later is compared with this one
                    del memory.accesses[low, high, wrote]
        memory.accesses.setdefault((first, end, written), {})[stream] = time, where

    def fault(self, text: str) -> None:
        self.faults[text] = None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place() -> FrameType | None:
    """Where our code runs, but for the modules that send."""
    frame = sys._getframe(2)
    while frame is not None and not (
        frame.f_code.co_filename.startswith(MEGATRON)
        and "/distributed/" not in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame


def _line() -> str:
    frame = _place()
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.removeprefix(MEGATRON)}:{frame.f_lineno}"


def losses_of(flags: tuple[str, ...], gpu: PretendedGPU | None = None) -> list[float]:
    """Each step's loss in a run through pretrain.py on this rank."""
    reports = []

    def read(pending: step.PendingStep) -> step.StepMetrics:
        reports.append(real_read(pending))
        return reports[-1]

    real_read = step.PendingStep.read
    with replaced((step.PendingStep, "read", read)), gpu or contextlib.nullcontext():
        assert exit_code(flags) == 0
    return [report.loss for report in reports]


def races(flags: tuple[str, ...], deaf: str | None = None) -> tuple[list[str], list[float]]:
    """(races of this rank in such a run on a pretended GPU, losses). In functions of ours called
    `deaf` no stream waits for anything.
    """
    gpu = PretendedGPU(deaf)
    losses = losses_of(flags, gpu)
    assert gpu.operations > 1000, "hardly anything was looked at"
    return list(gpu.faults), losses
