"""Triton where it is installed, and what a compile without a GPU needs to know of a kernel. CPU
builds of torch come without Triton: the plain PyTorch definitions next to the kernels work there
too.

A kernel runs compiled on CUDA tensors, and on CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1, set before Triton is imported).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    jit: Callable = triton.jit
else:
    triton = tl = None

    def jit(function: Callable, **_: Any) -> Callable:
        """The function as it is: it cannot be called."""
        return function


HOPPER = 90
ARCH_WITHOUT_GPU = HOPPER  # where there is no GPU, configurations are those of this one


def cdiv(n: int, size: int) -> int:
    """How many blocks of this size n elements take."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


LIBRARY = torch.library.Library("megatron", "FRAGMENT")
# by the operator's name: what it calls, and what the planner runs in its place
CALLED: dict[str, Callable] = {}
FAKES: dict[str, Callable] = {}


def operator(
    name: str,
    mutates_args: Sequence[str] = (),
    schema: str = "",
    fake: Callable | None = None,
    workspace: Callable | None = None,
) -> Callable[[Callable], Any]:
    """Make torch.ops.megatron.NAME of a function, which torch.compile and fake tensors see as one
    operator. Without a schema it has that of the function's annotations. Autograd does not count
    its writes to `mutates_args`.

    On tensors without memory the function itself runs, and launches nothing: the planner counts
    what it allocates. `fake` runs in its place where torch.compile cannot run the function, and
    `workspace` in the planner, where `fake` does not allocate what the function does.

    torch.library.custom_op does the same and takes three times as long a call on the host.
    """

    def make(function: Callable) -> Any:
        full_name = f"megatron::{name}"
        declared = schema or torch.library.infer_schema(function, mutates_args=mutates_args)

        def without_memory(*args: Any, **kwargs: Any) -> Any:
            receiver = _receiver.get()
            if fake is not None and receiver is None:
                return fake(*args, **kwargs)
            with launches_to(receiver or _discard):
                return function(*args, **kwargs)

        LIBRARY.define(name + declared)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(full_name, without_memory, lib=LIBRARY)
        CALLED[full_name], FAKES[full_name] = function, workspace or without_memory
        return getattr(torch.ops.megatron, name).default

    return make


def register_autograd(name: str, backward: Callable, setup_context: Callable) -> None:
    """How an operator is differentiated."""
    torch.library.register_autograd(
        f"megatron::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )


# what is given the launches in place of the GPU
_receiver: ContextVar[Callable[..., None] | None] = ContextVar("receiver", default=None)


@contextmanager
def launches_to(receiver: Callable[..., None]) -> Iterator[None]:
    """While open, `receiver` is given the arguments of `launch`, and nothing is launched."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def _discard(*_: Any, **__: Any) -> None:
    """Takes a launch and does nothing."""


def launch(kernel: Any, grid: tuple[int, ...], row: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a kernel with the warps and options of a row of the table (configurations.py)."""
    receiver = _receiver.get()
    if receiver is None:
        kernel[grid](*args, **kwargs, **row.launch())
    else:
        receiver(kernel, grid, row, *args, **kwargs)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes CPU tensors."""
    return triton is not None and triton.knobs.runtime.interpret


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton kernels cannot run on tensors of this kind; None when they can."""
    if dtype == torch.float64:
        return "float64"
    if device.type == "cuda" and not torch.cuda.is_available():
        return None  # a plan for another machine
    if triton is None:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda":
        return None if interpreted() else "it needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8:
        return f"a GPU of compute capability {major}, the kernels need 8 or newer"
    return None


@cache  # torch asks CUDA at each call, and a layer asks tens of times
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def capability(device: torch.device) -> int:
    """The architecture that configurations are chosen for: 90 for Hopper."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ARCH_WITHOUT_GPU
    properties = _properties(device)
    return 10 * properties.major + properties.minor


def multiprocessors(device: torch.device) -> int:
    """How many blocks of threads a GPU works on at once, at least; an H200's where there is no
    GPU.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return _properties(device).multi_processor_count
