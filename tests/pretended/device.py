"""A CUDA device that exists in types only, and a list of all that makes the host wait for it.

Tensors are torch's fake tensors: they have shapes, types and devices, and no memory. Operations
check all three and compute nothing; what the host reads of the device is 0. A tensor of the host in
an operation of the device raises, as it does on a GPU.

Waits are what torch's CUDA build or the CUDA runtime carries out by waiting for the device: numbers
read, results whose size depends on values, copies that are not asynchronous or whose memory on the
host is not pinned, and synchronisations of the device, of streams and of events.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.distributed.interleaver import Interleaver

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("megatron", "kernels"))

# operations whose result's size depends on values, or that end with a number on the host
SIZED_BY_VALUES = set(
    "nonzero masked_select unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 "
    "bincount equal".split()
)
# torch has no fake one; it writes into its first arguments
WITHOUT_FAKE = {"_fused_sgd_"}


def _widened_addmm(c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **rest: Any) -> Tensor:
    """The fake one of torch 2.11 takes the dtype for a factor."""
    return torch.ops.aten.addmm.out(c, a.to(dtype), b.to(dtype), **rest)


FAKES: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.addmm.dtype_out: _widened_addmm}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def _always(given: dict[str, Any]) -> bool:
    return True


# Operators that a CUDA device has no deterministic form of, of those that a language model may use
# (torch.use_deterministic_algorithms lists all) -> whether one raises with these arguments, by name
NONDETERMINISTIC: dict[str, Callable[[dict[str, Any]], bool]] = {
    "cumsum": lambda given: (given.get("dtype") or given["self"].dtype).is_floating_point,
    "scatter_reduce": lambda given: given["reduce"] == "prod",
    "put": _always,
    "histc": _always,
    "bincount": lambda given: given.get("weights") is not None,
    "median": lambda given: "dim" in given,  # without one it returns no indices
    "nll_loss_forward": _always,
    "nll_loss2d_forward": _always,
    "_embedding_bag_backward": lambda given: given["mode"] == 2,  # max
}


class Wait(NamedTuple):
    """Something that makes the host wait for the device."""

    phase: str  # of the run, see `Log.phase`
    iteration: int
    what: str
    place: str  # file:line of the product
    behind: int  # operations that the device still has when the host continues


class Log:
    """What happened on the device. `phase` and `iteration` are set by who runs the program."""

    def __init__(self) -> None:
        self.phase = "start"
        self.iteration = 0
        self.waits: list[Wait] = []
        self.operations: Counter[str] = Counter()  # by phase
        self.queued = 0
        self.pinned: set[StorageWeakRef] = set()
        self.number = 0  # that each of several numbers is which the host reads at once

    def wait(self, what: str, behind: int = 0) -> None:
        """The host waits here."""
        self.waits.append(Wait(self.phase, self.iteration, what, _place(), behind))

    def operation(self) -> None:
        """The device is given work."""
        self.queued += 1
        self.operations[self.phase] += 1

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase of the run, which may be part of another one."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def pin(self, x: Tensor) -> Tensor:
        """The same tensor, whose memory counts as pinned."""
        self.pinned.add(StorageWeakRef(x.untyped_storage()))
        return x

    def is_pinned(self, x: Tensor) -> bool:
        return StorageWeakRef(x.untyped_storage()) in self.pinned


def _place() -> str:
    """Where the product is now: the innermost of its lines on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PRODUCT):
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
    return "no line of the product"


class Event:
    """Knows how many operations had been queued when it was recorded."""

    def __init__(self, log: Log, **_: Any):
        self.log = log
        self.recorded = 0

    def record(self, *_: Any) -> None:
        self.recorded = self.log.queued

    def synchronize(self) -> None:
        self.log.wait("event", self.log.queued - self.recorded)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    """A queue of the device. All of them count together."""

    def __init__(self, log: Log, *_: Any, **__: Any):
        self.log = log
        self.cuda_stream = 0

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.log) if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        self.log.wait("stream")


def _cuda(log: Log, capability: tuple[int, int]) -> dict[str, Any]:
    """Replacements for functions of torch.cuda."""
    only = Stream(log)
    major, minor = capability
    properties = SimpleNamespace(
        multi_processor_count=132, uuid="pretended", total_memory=80 << 30, major=major, minor=minor
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "Event": partial(Event, log),
        "Stream": partial(Stream, log),
        "current_stream": lambda device=None: only,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: log.wait("device"),
    }


class Host(TorchFunctionMode):
    """Functions of torch that concern the host's memory: what is pinned, and the bytes of a fake
    tensor, which are zeros.
    """

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "pin_memory":
            return self.log.pin(args[0])
        if name == "numpy" and isinstance(args[0], FakeTensor):
            return _zeros_like(args[0])
        if name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            # torch makes it on the host and copies it
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        pinned = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        return self.log.pin(result) if pinned else result


def _zeros_like(x: Tensor) -> np.ndarray:
    """What the host finds in the memory of a fake tensor."""
    return np.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch."))


class Watch(TorchDispatchMode):
    """Enters operations of the device and waits for it into a log."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._number(function, args[0])
        if name in SIZED_BY_VALUES and on_device(args):
            self.log.wait(name)
        if function is torch.ops.aten.repeat_interleave.Tensor and on_device(args):
            if kwargs.get("output_size") is None:
                self.log.wait("repeat_interleave")
        mixed = (*args, *kwargs.values())
        if torch.are_deterministic_algorithms_enabled() and on_device(mixed):
            check_deterministic(function, args, kwargs)
        if name in INDEXED:
            self._look_at_indices(args[0], args[1])
        with _unknown(args[0] if name == "_to_copy" else None):
            fake = FAKES.get(function, function)
            result = None if name in WITHOUT_FAKE else fake(*args, **kwargs)
        if name == "_to_copy":
            self._look_at_copy(args[0], result, kwargs.get("non_blocking", False), pins=True)
        elif name == "copy_":
            free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._look_at_copy(args[1], args[0], free, pins=False)
        if on_device((result, *args)) and not is_view(function):
            self.log.operation()
        return result

    def _number(self, function, x: Tensor) -> Any:
        """A number that the host reads: 0 where nothing but the device knows it."""
        if x.device.type != "cuda":
            # torch knows the numbers that a program has written down
            with contextlib.suppress(DataDependentOutputException):
                return function(x)
        else:
            self.log.wait("number read")
        if x.dtype == torch.bool:
            return False
        return 0.0 if x.dtype.is_floating_point else 0

    def _look_at_indices(self, x: Tensor, indices: Any) -> None:
        for index in indices:
            if x.device.type != "cuda" or index is None:
                continue
            if index.device.type != "cuda":
                self.log.wait("index in the host's memory")
            if index.dtype in (torch.bool, torch.uint8):
                self.log.wait("index by a mask")

    def _look_at_copy(self, source: Any, target: Tensor, free: bool, *, pins: bool) -> None:
        """`free`: it is asked not to wait; `pins`: torch makes the target, in pinned memory where
        that is on the host.
        """
        if not isinstance(source, Tensor) or source.device.type == target.device.type:
            return
        if "meta" in (source.device.type, target.device.type):
            return
        to_host = target.device.type == "cpu"
        way = "to the host" if to_host else "to the device"
        if not free:
            self.log.wait(f"copy {way}")
        elif not (to_host and pins) and not self.log.is_pinned(target if to_host else source):
            self.log.wait(f"copy {way}, not pinned")


def check_deterministic(function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises the error of torch's CUDA build where an operator has no deterministic form."""
    raises = NONDETERMINISTIC.get(function.overloadpacket.__name__.removesuffix("_"))
    if raises is None or function.namespace != "aten":
        return
    names = (argument.name for argument in function._schema.arguments)
    if raises(dict(zip(names, args, strict=False)) | kwargs):
        raise RuntimeError(
            f"{function} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'"
        )


@contextlib.contextmanager
def _unknown(x: Tensor | None) -> Iterator[None]:
    """Torch, which would copy a number that it knows for real, does not know it."""
    if not isinstance(x, FakeTensor):
        yield
        return
    known, x.constant = x.constant, None
    yield
    x.constant = known


def on_device(values: Any) -> bool:
    """Whether any of them is a tensor of the device, or a list with one."""
    return any(
        value.device.type == "cuda"
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and on_device(value)
        for value in values
    )


def is_view(function: Any) -> bool:
    """Whether an operation gives another view of its argument, for which the device does
    nothing.
    """
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in function._schema.returns
    )


def in_both_threads(modes: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside, the second of two passes that take turns is under these modes, which torch keeps by
    thread.
    """
    real = Interleaver._run

    def run(self: Interleaver, index: int, work: Callable[[], Any]) -> Any:
        def under_the_modes() -> Any:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return work()

        return real(self, index, under_the_modes if index else work)

    return mock.patch.object(Interleaver, "_run", run)


@contextlib.contextmanager
def pretended_device(capability: tuple[int, int] = (9, 0)) -> Iterator[Log]:
    """A CUDA device, in a process that has called libraries.load_device_guard."""
    log = Log()
    of_elements = FakeTensor.tolist

    def tolist(x: FakeTensor) -> Any:
        """All numbers of a tensor, for which the host waits once."""
        if x.device.type != "cuda":
            return of_elements(x)
        log.wait("numbers read")
        return (_zeros_like(x) + log.number).tolist()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **_cuda(log, capability)))
        # which makes a real tensor of the device
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", tolist))
        modes = FakeTensorMode(allow_non_fake_inputs=True), Watch(log), Host(log)
        for mode in modes:
            stack.enter_context(mode)
        stack.enter_context(in_both_threads(modes))
        yield log
