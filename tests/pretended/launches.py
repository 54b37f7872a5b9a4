"""Every operator of kernels/ launched for a GPU that is not there.

    python tests/pretended/launches.py --arch 90 --out FILE --log FILE GROUP...
    python tests/pretended/launches.py --arch 80 --out FILE --log FILE --quick

Triton compiles each kernel for the architecture and launches it through its own launcher, into the
driver of driver.c. That checks what the launcher hands over and computes nothing; pointers are of
tensors in the host's memory. FILE of --out gets what was launched, that of --log the driver's
lines.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that a block of threads may have

BF16, F16, F32 = "bfloat16", "float16", "float32"
# Calls of kernels/cases.py: (row of the table, precision, settings, whether every run of the tests
# makes it)
Calls = Iterator[tuple[str, str, dict[str, Any], bool]]


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
    # before the other modules take it by name
    lang.capability = lambda device: arch


def attention_calls(arch: int) -> Calls:
    """Shapes whose ends are no block's end, then every option; backward passes, which run forward
    first.
    """
    for s, b, g, m, d in (
        (1, 1, 1, 1, 64),
        (257, 2, 1, 7, 128),
        (128, 1, 8, 1, 128),
        (1000, 3, 2, 4, 64),
        (300, 1, 2, 2, 96),
        (100, 1, 1, 1, 40),
    ):
        for fused in (True, False):
            sizes = {"s": s, "b": b, "g": g, "m": m, "d": d, "fused": fused}
            yield "attention dq", BF16, sizes, s == 300 and fused
    sizes = {"s": 384, "b": 2, "g": 2, "m": 2, "d": 128, "fused": True}
    for option in (
        {"window": 100},
        {"documents": True},
        {"positions": True},
        {"causal": False},
        {"softcap": 30.0},
        {"drop": 0.1},
        {"d": 256},
    ):
        yield "attention dq", BF16, sizes | option, False
    for dtype in (F16, F32):
        yield "attention dq", dtype, sizes, False
    for d in (128, 64) if arch >= 90 else ():
        yield "attention dkv_dq", BF16, sizes | {"d": d}, False


def gluon_calls(arch: int) -> Calls:
    """Of Hopper alone."""
    if arch != 90:
        return
    for s, b, g, m, d in ((257, 2, 1, 7, 128), (1000, 3, 2, 4, 64), (300, 1, 2, 2, 96)):
        sizes = {"s": s, "b": b, "g": g, "m": m, "d": d, "fused": True, "backend": "gluon"}
        yield "attention dq", BF16, sizes, s == 300
    for d in (64, 128):
        sizes = {"s": 384, "b": 2, "g": 2, "m": 2, "d": d, "fused": True, "backend": "gluon"}
        for option in ({"causal": False}, {"window": 100}, {"documents": True}):
            yield "attention dq", BF16, sizes | option, False
        yield "attention dq", F16, sizes, False


def norm_calls(arch: int) -> Calls:
    """Rows that one program holds, and wider ones."""
    from megatron.kernels.norm import WIDEST

    quick = (72, WIDEST["backward"] + 40, WIDEST["forward"] + 40)
    for width in (1000, 4096, *quick):
        for dtype in (BF16, F16, F32):
            for both in (False, True):
                given = {"rows": 10, "width": width, "stride": width + 8}
                given |= {"centre": both, "add": both}
                for direction in ("forward", "backward"):
                    often = width in quick and dtype == BF16 and both
                    yield f"norm {direction}", dtype, given, often


def row_calls(arch: int) -> Calls:
    """Activations, rotary embedding, dropout and the loss."""
    from megatron.kernels.activation import KINDS

    for dtype in (BF16, F16, F32):
        is_bf16 = dtype == BF16
        for kind in KINDS:
            for bias in (False, True):
                given = {"rows": 6, "width": 1100, "activation": kind, "bias": bias}
                quick = is_bf16 and bias and kind == KINDS[0]
                for direction in ("forward", "backward"):
                    yield f"activation {direction}", dtype, given, quick
        for s, b, g, m, d, width in (
            (7, 2, 3, 3, 64, 48),
            (300, 1, 8, 4, 128, 128),
            (5, 3, 1, 1, 80, 80),
            (5, 3, 1, 1, 80, 0),
        ):
            given, quick = {"s": s, "b": b, "g": g, "m": m, "d": d}, is_bf16 and s == 7
            for direction in (1, -1) if width else ():
                turned = {"rotary": width, "direction": direction}
                yield "rotary", dtype, given | turned, quick
            for centre in (False, True):
                normed = {"rotary": width, "centre": centre}
                yield "qk_norm backward", dtype, given | normed, quick
        for s, b, width in ((5, 2, 1100), (1000, 3, 4096)):
            yield "dropout", dtype, {"s": s, "b": b, "width": width}, is_bf16 and s == 5
        loss = {"tokens": 6, "width": 1504, "columns": 1500}
        yield "cross_entropy", dtype, loss, is_bf16
        yield "cross_entropy", dtype, loss | {"softcap": 30.0}, is_bf16
        yield "cross_entropy", dtype, {"tokens": 70, "width": 32000}, False


def optimizer_calls(arch: int) -> Calls:
    """AdamW, the gradient's norm, initial weights, and 8-bit floats (of Hopper)."""
    for size in (5000, 1 << 20):
        for grad, moments, out in (
            (BF16, F32, True),
            (F32, F32, True),
            (F32, BF16, True),
            (F32, F32, False),
        ):
            given = {"size": size, "grad": grad, "exp_avg": moments, "exp_avg_sq": moments}
            yield "adamw", BF16, given | {"out": out}, size == 5000 and grad == BF16
    for dtype in (BF16, F16, F32):
        for size in (5000, 4083, 1):
            yield "grad_norm", dtype, {"size": size, "grad": dtype}, dtype == BF16 and size > 1
    for rows, columns in ((5, 1030), (70000, 64), (1, 3)):
        yield "initialise", F32, {"rows": rows, "width": columns, "skip": 7}, rows == 5
    for dtype in (BF16, F16, F32) if arch >= 90 else ():
        for scaling in ("tensor", "row", "block"):
            for transposed in (False, True):
                given = {"rows": 70, "width": 150, "scaling": scaling, "transposed": transposed}
                yield "fp8 tiles", dtype, given, dtype == BF16 and scaling == "row"


def expert_calls(arch: int) -> Calls:
    """Grouped products: few experts, many, and one; sizes that tiles do not divide."""
    for dtype in (BF16, F16, F32):
        for counts in ((5, 0, 170), (64,), (3,) * 128):
            for o, i in ((136, 72), (1536, 2048)):
                given = {"counts": counts, "o": o, "i": i}
                quick = dtype == BF16 and len(counts) == 3 and o == 136
                yield "grouped_gemm rows", dtype, given, quick
                for overwrite in (True, False):
                    weights = given | {"overwrite": overwrite}
                    yield "grouped_gemm weight", dtype, weights, quick


GROUPS: dict[str, Callable[[int], Calls]] = {
    "attention": attention_calls,
    "gluon": gluon_calls,
    "norm": norm_calls,
    "rows": row_calls,
    "experts": expert_calls,
    "optimizer": optimizer_calls,
}


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


def run(arch: int, groups: list[str], quick: bool) -> dict[str, Any]:
    """Make the calls: their number, the kernels that were launched, and what failed."""
    import torch
    from megatron.kernels.cases import case_of
    from megatron.kernels.self_check import Variant
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    failed: dict[str, str] = {}
    real = JITFunction.run
    calls = 0

    def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(_name(kernel))
        return real(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", watched):
        for group in groups:
            for kernel, dtype, settings, often in GROUPS[group](arch):
                if quick and not often:
                    continue
                calls += 1
                variant = Variant(kernel, dtype, settings)
                try:
                    case_of(variant, torch.device("cpu")).call()
                except Exception as error:  # all that a first launch may meet
                    failed[str(variant)] = f"{type(error).__name__}: {error}"[:500]
    return {"calls": calls, "launched": sorted(launched), "failed": failed}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="launch every operator into a pretended driver")
    parser.add_argument("groups", nargs="*", help=", ".join(GROUPS))
    parser.add_argument("--arch", type=int, choices=list(SHARED_MEMORY), default=90)
    parser.add_argument("--quick", action="store_true", help="what every run of the tests makes")
    parser.add_argument("--fault", choices=["misaligned"], help="put a fault in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", required=True)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    arguments = parse_arguments(words)
    load_driver(arguments.log, arguments.arch)
    use_driver(arguments.arch)
    with misaligned() if arguments.fault else contextlib.nullcontext():
        found = run(arguments.arch, arguments.groups or list(GROUPS), arguments.quick)
    found["compiled"] = compiled_kernels(arguments.arch)
    arguments.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    sys.exit(main(sys.argv[1:]))
