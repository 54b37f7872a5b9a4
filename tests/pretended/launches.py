"""Every operator of kernels/ launched for a GPU that is not there.

    python tests/pretended/launches.py --arch 90 --out FILE --log FILE [GROUP...]

Triton compiles each kernel for the architecture and launches it through its own launcher, into the
driver of driver.c. That checks what the launcher hands over and computes nothing; pointers are of
tensors in the host's memory. The calls are those of kernels/tools/sanitize.py. FILE of --out gets
what was launched, that of --log the driver's lines.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that a block of threads may have
GROUPS = ("attention", "gluon", "row", "other")


def load_driver(log: str, arch: int) -> None:
    """Make Triton find the pretended driver, in this process, before Triton is imported."""
    from pretended import libraries

    library = libraries.driver()
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    os.environ["PRETENDED_LOG"] = log
    os.environ["PRETENDED_SHARED_MEMORY"] = str(SHARED_MEMORY[arch])
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def use_driver(arch: int) -> None:
    """A device of this architecture is Triton's, and all that kernels/ knows of."""
    from megatron.kernels import lang
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class Pretended(CudaDriver):
        def __init__(self) -> None:
            # what the class itself asks torch's CUDA build for
            self.utils = CudaUtils()
            self.launcher_cls = CudaLauncher
            self.get_device_capability = lambda device=0: divmod(arch, 10)
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

    driver.set_active(Pretended())
    lang.ARCH_WITHOUT_GPU = arch


def compiled_kernels(arch: int) -> list[str]:
    """Names of all kernels that are shipped for an architecture."""
    from megatron.kernels.tools import manifest

    return sorted({_name(row.kernel) for row in manifest.rows().values() if row.arch == arch})


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('megatron.kernels.')}.{kernel.fn.__name__}"


@contextlib.contextmanager
def misaligned() -> Iterator[None]:
    """Every operand of attention lies two bytes off where a descriptor may begin, and nothing of
    Triton's looks before the driver does.
    """
    from megatron.kernels import attention, attention_backward
    from triton.tools.tensor_descriptor import TensorDescriptor

    def misaligned(x: Any) -> Any:
        room = x.new_zeros(x.numel() + 1)
        return room[1:].view(x.shape)

    with contextlib.ExitStack() as stack:
        for module in (attention, attention_backward):
            stack.enter_context(mock.patch.object(module, "aligned", misaligned))
        unchecked = mock.patch.object(TensorDescriptor, "__post_init__", lambda self: None)
        stack.enter_context(unchecked)
        yield


def run(groups: list[str], most: int | None) -> dict[str, Any]:
    """Make the calls, at most `most` of a group: what was launched, and what failed."""
    import torch
    from megatron.kernels.cases import case_of
    from megatron.kernels.self_check import Variant
    from megatron.kernels.tools import sanitize
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    failed: dict[str, str] = {}
    real = JITFunction.run

    def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(_name(kernel))
        return real(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", watched):
        for group in groups:
            made = itertools.islice(getattr(sanitize, f"{group}_calls")(), most)
            calls = [(sanitize.DTYPE, *call) for call in made]
            if most is None:  # the first call in the other precisions too; Gluon has 16 bits alone
                others = ("float16",) if group == "gluon" else ("float16", "float32")
                calls += [(dtype, *call[1:]) for dtype in others for call in calls[:1]]
            for dtype, kernel, settings in calls:
                variant = Variant(kernel, dtype, settings)
                try:
                    case_of(variant, torch.device("cpu")).call()
                except Exception as error:  # all that a first launch may meet
                    failed[str(variant)] = f"{type(error).__name__}: {error}"[:500]
    return {"launched": sorted(launched), "failed": failed}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="launch every operator into a pretended driver")
    parser.add_argument("groups", nargs="*", help=", ".join(GROUPS))
    parser.add_argument("--arch", type=int, choices=list(SHARED_MEMORY), default=90)
    parser.add_argument("--fault", choices=["misaligned"], help="put a fault in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", required=True)
    arguments = parser.parse_args(words)
    load_driver(arguments.log, arguments.arch)
    use_driver(arguments.arch)
    with misaligned() if arguments.fault else contextlib.nullcontext():
        found = run(arguments.groups or list(GROUPS), 1 if arguments.fault else None)
    found["compiled"] = compiled_kernels(arguments.arch)
    arguments.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    sys.exit(main(sys.argv[1:]))
