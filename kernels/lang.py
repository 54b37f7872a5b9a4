"""Triton where it is installed, and what a compile without a GPU needs to know of a kernel. CPU
builds of torch come without Triton: the plain PyTorch definitions next to the kernels work there
too.

A kernel runs compiled on CUDA tensors, and on CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1, set before Triton is imported).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
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


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


LIBRARY = torch.library.Library("megatron", "FRAGMENT")
# by the operator's name: what it calls, and what the planner runs in its place
CALLED: dict[str, Callable] = {}
FAKES: dict[str, Callable] = {}


class Operator:
    """torch.ops.megatron.NAME; without a schema, that of the function's annotations."""

    def __init__(self, name: str, function: Callable, mutates_args: Sequence[str], schema: str):
        self.name = f"megatron::{name}"
        schema = schema or torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        CALLED[self.name] = function
        self.overload = getattr(torch.ops.megatron, name).default
        functools.update_wrapper(self, function)
        if not self.overload._schema.returns:
            self.register_fake(lambda *_, **__: None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def register_fake(self, function: Callable) -> None:
        """What shapes and types the results have. The planner counts what the function allocates,
        the operator's workspace among it, unless `register_workspace` gives it another function.
        """
        FAKES.setdefault(self.name, function)
        torch.library.register_fake(self.name, function, lib=LIBRARY)

    def register_workspace(self, function: Callable) -> None:
        """A fake that allocates the operator's workspace too, where its size cannot be computed
        from the symbolic shapes of torch.compile.
        """
        FAKES[self.name] = function

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """How it is differentiated."""
        torch.library.register_autograd(
            self.name, backward, setup_context=setup_context, lib=LIBRARY
        )


def operator(
    name: str, mutates_args: Sequence[str] = (), schema: str = ""
) -> Callable[[Callable], Operator]:
    """Make an operator of a function, which torch.compile and fake tensors see as one. Autograd
    does not count its writes to `mutates_args`.

    torch.library.custom_op does the same and takes three times as long a call on the host.
    """
    return lambda function: Operator(name, function, mutates_args, schema)


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


def capability(device: torch.device) -> int:
    """The architecture that configurations are chosen for: 90 for Hopper, whose configurations
    serve where there is no GPU.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """How many blocks of threads a GPU works on at once, at least; an H200's where there is no
    GPU.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
