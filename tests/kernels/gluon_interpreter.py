"""Runs a warp-specialised Gluon kernel on a CPU, and finds what it does wrong in time. Exactly the
part of Gluon that kernels/gluon_forward.py and gluon_backward.py use.

A block of threads is a Machine. Its partitions run one at a time, each in a thread; at every
operation on shared memory a seeded scheduler decides who runs next, a partition or a copy of the
TMA unit that is under way. Some seeds starve a partition, some hold copies back until nothing else
can run.

Whether an order of accesses is guaranteed does not depend on the order that happened. Each access
to a buffer is an event, and each partition has the set of events that it knows to be over: its own;
those of its products and stores once it waited for them; those known to every thread that arrived
at an mbarrier whose phase it waited for. The warps of a partition are in no order between two of
its barriers of threads: an arrival is one thread's and carries only what all of them knew at the
last one. Faults, whatever the numbers are: a read of a buffer whose last write is not known to be
over; a write or copy into one with a read or write not known to be over; use of a product's result,
or the end of a partition, before it was waited for; a phase of an mbarrier that ends while a warp
may still wait for the one before; generic writes that the TMA unit or a product reads without a
fence; an element of the result that is written twice; a deadlock. A buffer that is being copied
into holds NaN, products read their operands as late as they may, and stores to memory too.

Not modelled: layouts, what warps of a partition exchange through shared memory (the compiler orders
that), sizes of registers and shared memory (the compile-only gate has those).
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import random
import textwrap
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fragments import places
from torch import Tensor

MOST_STEPS = 200_000


class Fault(AssertionError):
    """The kernel does something whose outcome depends on timing."""


class Stopped(BaseException):
    """Ends the threads of a machine in which another one failed."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes have come."""

    def __init__(self, name: str):
        self.name, self.count, self.phase = name, 0, 0

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.bytes, self.coming, self.known = 0, set(), set()

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def arrive(self, known: set[int], count: int = 0, size: int = 0) -> None:
        if self.count == 0:
            raise Fault(f"{self.name} is used before it is initialised")
        if count > self.left:
            raise Fault(f"{self.name}: {count} arrivals in a phase that waits for {self.left}")
        self.left, self.bytes = self.left - count, self.bytes + size
        self.coming |= known
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count
            self.known, self.coming = self.coming, set()


class Buffer:
    """One slot of shared memory."""

    def __init__(self, name: str, shape: list[int], dtype: torch.dtype):
        self.name, self.data = name, torch.full(shape, float("nan"), dtype=dtype)
        self.write: int | None = None
        self.reads: set[int] = set()
        self.unfenced = False


class Shared:
    """A view of slots, or of one."""

    def __init__(
        self,
        machine: Machine,
        slots: list[Any],
        shape: list[int],
        dtype: Any,
        view: Callable[[Tensor], Tensor] = lambda data: data,
    ):
        self.machine, self.slots, self.view = machine, slots, view
        self.shape, self.dtype = shape, dtype

    def index(self, slot: int) -> Any:
        if not 0 <= slot < len(self.slots):
            raise Fault(f"buffer {slot} of {len(self.slots)}")
        chosen = self.slots[slot]
        if isinstance(chosen, Barrier):
            return chosen
        return Shared(self.machine, [chosen], self.shape[1:], self.dtype)

    def _seen_as(self, shape: list[int], view: Callable[[Tensor], Tensor]) -> Shared:
        both = lambda data: view(self.view(data))  # noqa: E731
        return Shared(self.machine, self.slots, shape, self.dtype, both)

    def reshape(self, shape: list[int]) -> Shared:
        return self._seen_as(shape, lambda data: data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._seen_as([self.shape[i] for i in order], lambda data: data.permute(order))

    def load(self, layout: Any) -> Tensor:
        self.machine.pause()
        buffer, me = self.slots[0], self.machine.me()
        self.machine.may_read(buffer)
        event = self.machine.event()
        buffer.reads.add(event)
        me.known.add(event)
        return self.view(buffer.data).clone()

    def store(self, value: Tensor) -> None:
        self.machine.pause()
        assert list(value.shape) == list(self.shape) and value.dtype == self.dtype
        buffer, me = self.slots[0], self.machine.me()
        self.machine.may_write(buffer)
        buffer.write = self.machine.event()
        buffer.unfenced = True
        me.known.add(buffer.write)
        me.unfenced.append(buffer)
        self.view(buffer.data).copy_(value)


class Product:
    """The result of a product that may still run: nothing but warpgroup_mma and warpgroup_mma_wait
    may touch it.
    """

    def __init__(self, a: Any, b: Shared, before: Any, events: set[int]):
        self._a, self._b, self._before, self._events, self._result = a, b, before, events, None

    def _finish(self) -> None:
        a, b = (x.view(x.slots[0].data) if isinstance(x, Shared) else x for x in (self._a, self._b))
        before = self._before._result if isinstance(self._before, Product) else self._before
        product = a.float() @ b.float()
        self._result = product if before is None else before + product

    def _refuse(self, *_: Any) -> Any:
        raise Fault("the result of a product is used before it was waited for")

    __getattr__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = _refuse


class Partition:
    """The warps that run one function."""

    def __init__(
        self, machine: Machine, name: str, run: Callable[[], None], known: set[int], warps: int
    ):
        self.name, self.known, self.ready = name, set(known), None
        self.warps, self.shared = warps, set(known)  # shared: what all of its warps know
        self.waited: list[tuple[Barrier, int]] = []  # for which phases, since the warps met
        self.products: list[Product] = []
        self.stores: list[tuple[int, Callable[[], None]]] = []
        self.unfenced: list[Buffer] = []
        self.done, self.error, self.go = False, None, threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(machine, run), daemon=True)

    def meet(self) -> None:
        """All warps wait for each other. Until then one of them may have stood before each wait,
        and would stand there for ever if another phase of that mbarrier had ended since.
        """
        for bar, phase in self.waited:
            if self.warps > 1 and bar.phase != phase:
                raise Fault(f"{bar.name}: a phase ends before all warps have seen the last one")
        self.waited.clear()
        self.shared |= self.known

    def completed(self) -> set[int]:
        """What an arrival of one of its threads marks as complete."""
        return self.known if self.warps == 1 else self.shared

    def _run(self, machine: Machine, run: Callable[[], None]) -> None:
        self.go.acquire()
        try:
            if not machine.stopped:
                run()
                self.meet()
                for left, what in ((self.products, "a product"), (self.stores, "a store")):
                    if left:
                        raise Fault(f"the partition ends before {what} of it was waited for")
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        machine.baton.release()


class Machine:
    """One block of threads."""

    def __init__(self, seed: int, program: int, programs: int, written: dict[int, Tensor]):
        self.random = random.Random(seed * 1000 + program)
        self.program, self.programs, self.written = program, programs, written
        self.partitions: list[Partition] = []
        self.copies: list[Callable[[], None]] = []
        self.baton, self.stopped, self.events, self.allocated = threading.Semaphore(0), False, 0, 0

    def me(self) -> Partition:
        return next(each for each in self.partitions if each.thread is threading.current_thread())

    def event(self) -> int:
        self.events += 1
        return self.events

    def pause(self, ready: Callable[[], bool] | None = None) -> None:
        """Let others go on, and come back when it is ready."""
        me = self.me()
        me.ready = ready
        self.baton.release()
        me.go.acquire()
        if self.stopped:
            raise Stopped

    def may_read(self, buffer: Buffer) -> None:
        if buffer.write is None:
            raise Fault(f"{buffer.name} is read, nothing was written to it")
        if buffer.write not in self.me().known:
            raise Fault(f"{buffer.name} is read, and the write before it is not known to be over")

    def may_write(self, buffer: Buffer) -> None:
        known = self.me().known
        before = "read" if not buffer.reads <= known else "write"
        if before == "read" or buffer.write is not None and buffer.write not in known:
            raise Fault(
                f"{buffer.name} is written, and a {before} before it is not known to be over"
            )
        buffer.reads = set()

    def specialize(
        self, functions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]
    ) -> None:
        assert len(warps) == len(registers)
        parent = self.partitions[0]
        counts = [parent.warps, *warps]
        for i, ((function, args), count) in enumerate(zip(functions, counts, strict=True)):
            name, run = f"partition {i} ({function.__name__})", partial(function, *args)
            self.partitions.append(Partition(self, name, run, parent.known, count))
        children = self.partitions[1:]
        for each in children:
            each.thread.start()
        self.pause(lambda: all(each.done for each in children))
        if self.copies:
            raise Fault(f"the kernel ends, and {len(self.copies)} copies are under way")

    def run(self, kernel: Callable[[], None], warps: int) -> None:
        self.partitions = [Partition(self, "the kernel", kernel, set(), warps)]
        self.partitions[0].thread.start()
        weights: dict[int, float] = {}
        copies = self.random.choice((0.001, 1.0, 100.0))
        try:
            for _ in range(MOST_STEPS):
                failed = next((each for each in self.partitions if each.error), None)
                if failed:
                    failed.error.add_note(f"in {failed.name}")
                    raise failed.error
                if self.partitions[0].done:
                    return
                left = [each for each in self.partitions if not each.done]
                able: list[Any] = [each for each in left if each.ready is None or each.ready()]
                for each in able:
                    weights.setdefault(id(each), self.random.choice((0.01, 1.0, 1.0)))
                if not able and not self.copies:
                    raise Fault(f"deadlock: {', '.join(each.name for each in left[1:])} wait")
                chosen = self.random.choices(
                    able + self.copies,
                    [weights[id(each)] for each in able] + [copies] * len(self.copies),
                )[0]
                if isinstance(chosen, Partition):
                    chosen.go.release()
                    self.baton.acquire()
                else:
                    self.copies.remove(chosen)
                    chosen()
            raise Fault(f"no end after {MOST_STEPS} steps")
        finally:
            self.stopped = True
            for each in self.partitions:
                if not each.done:
                    each.go.release()
            for each in self.partitions:
                if each.thread.ident is not None:
                    each.thread.join(10)


class Descriptor:
    """A tensor in memory, in blocks."""

    def __init__(self, given: Any):
        self.data = torch.as_strided(
            given.base, list(given.shape), list(given.strides), given.base.storage_offset()
        )
        self.dtype, self.layout = given.base.dtype, given.layout
        size = torch.Size(given.block_shape).numel() * given.base.element_size()
        self.block_type = SimpleNamespace(shape=list(given.block_shape), nbytes=size)

    def cut(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a block lies in the tensor, and that part in the block. Along a dimension of which
        a block has one element it may not lie beyond.
        """
        sizes = list(zip(at, self.block_type.shape, self.data.shape, strict=True))
        if any(start < 0 or size == 1 and start >= length for start, size, length in sizes):
            raise Fault(f"block {at} of a tensor {list(self.data.shape)}: it lies beyond")
        ends = [min(start + size, length) for start, size, length in sizes]
        return (
            tuple(slice(min(start, end), end) for start, end in zip(at, ends, strict=True)),
            tuple(slice(0, max(0, end - start)) for start, end in zip(at, ends, strict=True)),
        )


class Pointer:
    """An address in a contiguous tensor: of its beginning, or of many elements."""

    def __init__(self, base: Tensor, offset: Any = 0):
        assert base.is_contiguous()
        self.base, self.offset = base, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + more)

    def elements(self, mask: Tensor | None) -> Tensor:
        offset = torch.as_tensor(self.offset)
        offset = offset if mask is None else offset[mask]
        if ((offset < 0) | (offset >= self.base.numel())).any():
            raise Fault("an address outside its tensor")
        return offset.long()


def _language(machine: Machine) -> dict[str, Any]:
    """What the kernel's globals mean on this machine."""

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
        machine.allocated += 1
        name = f"{'mbarrier' if layout is None else 'buffer'} {machine.allocated}"
        made = [
            Barrier(f"{name}[{i}]") if layout is None else Buffer(f"{name}[{i}]", shape[1:], dtype)
            for i in range(shape[0])
        ]
        return Shared(machine, made, list(shape), dtype)

    def wait(bar: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            machine.pause(lambda: bar.passed(phase))
            machine.me().known |= bar.known
            machine.me().waited.append((bar, bar.phase))

    def expect(bar: Barrier, size: int) -> None:
        machine.pause()
        bar.arrive(set(), 0, size)
        bar.arrive(machine.me().completed(), 1)

    def meet() -> None:
        machine.pause()
        machine.me().meet()

    def copy_in(source: Descriptor, at: list[int], bar: Barrier, target: Shared) -> None:
        machine.pause()
        buffer, event = target.slots[0], machine.event()
        assert list(target.shape) == source.block_type.shape
        machine.may_write(buffer)
        buffer.write, buffer.unfenced = event, False
        buffer.data.fill_(float("nan"))

        def finish() -> None:
            inside, part = source.cut(at)
            buffer.data.zero_()
            buffer.data[part] = source.data[inside]
            bar.arrive({event}, 0, -source.block_type.nbytes)

        machine.copies.append(finish)

    def copy_out(target: Descriptor, at: list[int], source: Shared) -> None:
        machine.pause()
        buffer, event = source.slots[0], machine.event()
        machine.may_read(buffer)
        if buffer.unfenced:
            raise Fault(f"{buffer.name} is stored by the TMA unit, its generic write has no fence")
        buffer.reads.add(event)

        def finish() -> None:
            inside, part = target.cut(at)
            _once(machine.written, target.data[inside])
            target.data[inside] = buffer.data[part]

        machine.me().stores.append((event, finish))

    def store_wait(pendings: int) -> None:
        machine.pause()
        me = machine.me()
        while len(me.stores) > pendings:
            event, finish = me.stores.pop(0)
            finish()
            me.known.add(event)

    def fence() -> None:
        for buffer in machine.me().unfenced:
            buffer.unfenced = False
        machine.me().unfenced.clear()

    def multiply(
        a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async and a.dtype == b.dtype and a.dtype.itemsize == 2
        assert a.shape[1] == b.shape[0]
        machine.pause()
        me, events = machine.me(), set()
        for operand in (a, b):
            if isinstance(operand, Shared):
                machine.may_read(operand.slots[0])
                if (buffer := operand.slots[0]).unfenced:
                    fault = "is read by a product, its generic write has no fence"
                    raise Fault(f"{buffer.name} {fault}")
                events.add(event := machine.event())
                operand.slots[0].reads.add(event)
        me.products.append(Product(a, b, acc if use_acc else None, events))
        return me.products[-1]

    def multiply_wait(outstanding: int, deps: list[Product]) -> Any:
        machine.pause()
        me = machine.me()
        while len(me.products) > outstanding:
            product = me.products.pop(0)
            product._finish()
            me.known |= product._events
        found = [each._refuse() if each._result is None else each._result for each in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def load(pointer: Pointer, mask: Tensor | None = None, other: Any = 0) -> Any:
        values = pointer.base.view(-1)[pointer.elements(mask)]
        if mask is None and values.dim() == 0:
            return values.item()
        return torch.full(mask.shape, other, dtype=pointer.base.dtype).masked_scatter(mask, values)

    def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        at = pointer.elements(mask)
        _once(machine.written, pointer.base.view(-1), at)
        pointer.base.view(-1)[at] = value[mask]

    def opaque(*_: Any) -> str:
        return "layout"

    def either(tensors: Callable, scalars: Callable) -> Callable:
        def call(a: Any, b: Any) -> Any:
            if isinstance(a, Tensor) or isinstance(b, Tensor):
                return tensors(*(torch.as_tensor(x) for x in (a, b)))
            return scalars(a, b)

        return call

    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, Tensor):
            return torch.where(condition, a, b)
        return a if condition else b

    meanings = {
        "program_id": lambda _: machine.program,
        "num_programs": lambda _: machine.programs,
        "cdiv": lambda a, b: -(-a // b),
        "static_range": range,
        "cast": lambda x, _: x,
        "thread_barrier": meet,
        "arange": lambda first, last, layout=None: torch.arange(first, last, dtype=torch.int32),
        "expand_dims": lambda x, axis: x.unsqueeze(axis),
        "full": lambda shape, value, dtype, layout: torch.full(list(shape), value, dtype=dtype),
        "zeros": lambda shape, dtype, layout: torch.zeros(list(shape), dtype=dtype),
        "convert_layout": lambda x, _: x,
        "exp2": torch.exp2,
        "log": torch.log,
        "max": lambda x, axis: torch.where(x.isnan(), -torch.inf, x).amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "where": where,
        "maximum": either(torch.fmax, max),
        "minimum": either(torch.fmin, min),
        "load": load,
        "store": store,
        "allocate_shared_memory": allocate,
        "warp_specialize": machine.specialize,
        "float32": torch.float32,
        "int64": torch.int64,
        "constexpr": None,
        "SliceLayout": opaque,
        "DotOperandLayout": opaque,
        "NVMMADistributedLayout": opaque,
    }
    gl = SimpleNamespace(**meanings)
    mbarrier = SimpleNamespace(
        init=Barrier.init, wait=wait, expect=expect, MBarrierLayout=lambda: None
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=copy_in,
        async_copy_shared_to_global=copy_out,
        store_wait=store_wait,
    )
    return {
        "gl": gl,
        "tl": gl,
        "mbarrier": mbarrier,
        "tma": tma,
        "fence_async_shared": fence,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": multiply_wait,
    }


def _once(written: dict[int, Tensor], target: Tensor, at: Tensor | None = None) -> None:
    """Note that these elements of a tensor are written; none may be twice."""
    start = target.storage_offset()
    if at is None:
        at = sum(
            torch.arange(size).view([-1 if i == j else 1 for j in range(target.dim())])
            * target.stride(i)
            for i, size in enumerate(target.shape)
        )
    at = (at + start).flatten()
    seen = written.setdefault(
        target.untyped_storage().data_ptr(),
        torch.zeros(target.untyped_storage().nbytes() // target.element_size(), dtype=torch.bool),
    )
    if seen[at].any():
        raise Fault("an element of the result is written twice")
    seen[at] = True


def _functions(kernel: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The kernel's function and all that it calls, by name."""
    found[kernel.fn.__name__] = kernel.fn
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if hasattr(called, "fn") and found.get(name) is not called.fn:
            assert name not in found, f"two functions are called {name}"
            _functions(called, found)
    return found


def _operand(x: Any) -> Any:
    """An argument as the kernel sees it."""
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return Pointer(x) if isinstance(x, Tensor) else x


class Interpreted:
    """Replaces a Gluon kernel: `Interpreted(kernel, seed)[grid](...)` runs it. `changes` maps
    pieces of its code (by their tokens) to what replaces them.
    """

    def __init__(self, kernel: Any, seed: int = 0, changes: Mapping[str, str] | None = None):
        self.kernel, self.seed, self.codes, left = kernel, seed, [], set(changes or {})
        for name, function in _functions(kernel, {}).items():
            source = textwrap.dedent(inspect.getsource(function))
            for old, new in (changes or {}).items():
                for start, end in reversed(places(source, old)):
                    left.discard(old)
                    source = source[:start] + new.strip() + source[end:]
            tree, file = ast.parse(source), f"<gluon {name}>"
            tree.body[0].decorator_list = []
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
            flags = __future__.annotations.compiler_flag
            self.codes.append(compile(tree, file, "exec", flags=flags, dont_inherit=True))
        assert not left, f"the kernel has no {left}"

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **named: Any) -> None:
            bound = inspect.signature(self.kernel.fn).bind(*args, **named).arguments
            written: dict[int, Tensor] = {}
            for program in range(grid[0]):
                machine = Machine(self.seed, program, grid[0], written)
                space = _language(machine)
                for code in self.codes:
                    exec(code, space)
                given = {name: _operand(x) for name, x in bound.items()}
                machine.run(partial(space[self.kernel.fn.__name__], **given), num_warps)

        return launch
