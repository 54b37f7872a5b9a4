"""Every kernel once or twice in small shapes whose ends are no block's end, for compute-sanitizer.

    bash scripts/gpu.sh settle memcheck racecheck
    compute-sanitizer --tool memcheck python kernels/tools/sanitize.py
    compute-sanitizer --tool racecheck python kernels/tools/sanitize.py
    compute-sanitizer --tool memcheck python kernels/tools/sanitize.py gluon    # on Hopper

The last is of the kernels in Gluon, alone since they may hang.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor its own allocation, without which memcheck
sees the allocator's blocks and not their ends. Without a GPU the same calls run in Triton's
interpreter, to try the tool. Results are not looked at: tests/kernels does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path[0] = str(ROOT)

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import interpreter

    interpreter.patch()

from megatron.kernels import lang
from megatron.kernels.activation import KINDS
from megatron.kernels.candidates.gluon import unsupported_reason
from megatron.kernels.cases import case_of
from megatron.kernels.norm import WIDEST_BACKWARD
from megatron.kernels.self_check import Variant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bf16 is wrong.
DTYPE = "float32" if lang.interpreted() else "bfloat16"
ODD = {"s": 150, "b": 2, "g": 2, "m": 2}  # of attention
WIDE = WIDEST_BACKWARD + 40
Calls = Iterator[tuple[str, dict[str, Any]]]  # a row of the table, and its settings


def attention_calls() -> Calls:
    """Backward passes, which run forward first."""
    yield "attention dq", ODD | {"d": 64}
    yield "attention dq", ODD | {"d": 96, "causal": False, "softcap": 5.0, "fused": True}
    yield "attention dq", ODD | {"d": 64, "window": 40, "drop": 0.1}
    yield "attention dq", ODD | {"d": 64, "documents": True, "positions": True}
    if not lang.interpreted():
        yield "attention dq", ODD | {"d": 256, "g": 1, "m": 1}
    if lang.capability(DEVICE) >= lang.HOPPER:
        yield "attention dkv_dq", ODD | {"d": 128}


def gluon_calls() -> Calls:
    """Nothing where the kernels cannot run."""
    if lang.interpreted() or lang.capability(DEVICE) != lang.HOPPER:
        return
    if unsupported_reason(torch.device("cuda"), getattr(torch, DTYPE)) is None:
        for given in ({"d": 64}, {"d": 128, "causal": False}, {"d": 96, "window": 40}):
            yield "attention dq", ODD | given | {"backend": "gluon"}


def row_calls() -> Calls:
    """What works on rows: of norms' backward those that one program holds, and wider ones."""
    for width in (72, WIDE) if lang.interpreted() else (72, 1000, WIDE):
        for both in (False, True):
            row = {"rows": 10, "width": width, "stride": width + 8, "centre": both, "add": both}
            for direction in ("forward", "backward"):
                yield f"norm {direction}", row
    for centre in (False, True):
        heads = {"s": 7, "g": 3, "m": 3, "d": 64, "rotary": 48, "centre": centre}
        yield "qk_norm backward", heads
    yield "rotary", {"s": 7, "g": 3, "m": 3, "d": 64, "rotary": 48}
    for kind in KINDS:
        for bias in (False, True):
            for direction in ("forward", "backward"):
                settings = {"width": 1100, "activation": kind, "bias": bias}
                yield f"activation {direction}", settings
    yield "dropout", {"width": 1100}
    for softcap in (None, 30.0):
        yield "cross_entropy", {"tokens": 6, "width": 1504, "columns": 1500, "softcap": softcap}


def other_calls() -> Calls:
    """Experts, of which one has no row and the last tiles are partly empty; the optimizer and
    8-bit floats.
    """
    yield "grouped_gemm rows", {"o": 136}
    for overwrite in (True, False):
        yield "grouped_gemm weight", {"o": 136, "overwrite": overwrite}
    for grad in (DTYPE, "float32"):
        yield "adamw", {"size": 5000, "grad": grad}
        yield "grad_norm", {"size": 4083, "grad": grad, "pieces": 3}
    for scaling in ("tensor", "row", "block") if lang.capability(DEVICE) >= lang.HOPPER else ():
        for transposed in (False, True):
            settings = {"rows": 70, "width": 150, "scaling": scaling, "transposed": transposed}
            yield "fp8 tiles", settings


def main(words: list[str]) -> int:
    count = 0
    usual = (attention_calls, row_calls, other_calls)
    for calls in (gluon_calls,) if words == ["gluon"] else usual:
        for kernel, settings in calls():
            variant = Variant(kernel, DTYPE, settings)
            print(variant, flush=True)  # a fault that comes now is of this
            case_of(variant, DEVICE).call()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            count += 1
    print(f"{count} calls on {DEVICE.type}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
