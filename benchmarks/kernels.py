"""The kernels of kernels/ on a GPU, next to PyTorch's, torch.compile's and Liger's, against what
the device can do: one call of at most 9 minutes.

    python benchmarks/kernels.py --out FOLDER                      # kernels.json and kernels.md
    python benchmarks/kernels.py --out FOLDER --parts attention
    python benchmarks/kernels.py --out FOLDER --tiny               # to try the program
    python kernels/tools/adopt.py FOLDER/kernels.json

--tiny takes small shapes of the same cases, on a CPU in Triton's interpreter. After adopt.py `auto`
takes what has won.

Parts (--parts), in this order until --minutes are used up; the rest is listed as not run:

limits     a product of 8192 x 8192 matrices in bf16, and a copy of 1 GiB: what fractions below are
           of
attention  a layer of Llama 3 8B (32 query heads on 8 key heads in the fused projection), then heads
           of 64 and 128, causal and full, 16384 tokens in sequences of 2048 to 8192, 2048 channels:
           ours (and with atomic sums of dq), torch's flash kernel held to equal bits (what
           --deterministic-mode takes) and not, its cuDNN kernel; flex_attention for Llama 3 8B.
           FLOPs as usual: 4 b n s^2 d forward, half of it when causal, 2.5 times that backward
experts    products of experts, forward and of both gradients: ours, torch's in a loop, its grouped
           product
memory     norms, rotary embedding, activations, 8-bit floats, dropout, cross-entropy, AdamW
           and the gradient's norm: bytes that must be moved, by time

Where a result is cheap to know, ours is compared with fp32 before it is timed; an error above the
bound is a separate row, a fault. `predicted` was written before anything was measured. Times are
medians over events around single calls, after three calls to warm up, with a buffer of twice the L2
cache overwritten in between; the device sleeps while the host enqueues a call, so host time is not
counted. The implementations of a case take turns. Results are written after every case, so that an
interrupted run keeps what it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import torch
import torch._functorch.config
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import interpreter

    interpreter.patch()

from megatron.benchmarks.peers.kernel_cases import PARTS
from megatron.benchmarks.peers.one_call import OneCall
from megatron.kernels import lang

torch._functorch.config.donated_buffer = False  # compiled graphs are differentiated repeatedly
WARM_UP, REPETITIONS = 3, 20
HEADER = (
    "| part | case | implementation | ms | rate | of the limit | |\n|---|---|---|---|---|---|---|"
)


@dataclass
class Row:
    """One implementation in one case. `work` is in FLOP or bytes, `unit`. `role` in a choice of
    dispatch's `operator`: kernel, rival, or none.
    """

    part: str
    case: str
    implementation: str
    work: float
    unit: str
    operator: str = ""
    role: str = ""
    predicted_ms: float | None = None
    milliseconds: float | None = None
    fault: str | None = None
    all: list[float] = field(default_factory=list)


class Bench:
    """Times calls on one device, and keeps the rows."""

    # relative error in the Frobenius norm, against fp32
    BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}

    def __init__(
        self,
        device: torch.device,
        tiny: bool,
        deadline: float,
        after_case: Callable[[Bench], None] = lambda bench: None,
    ):
        self.after_case = after_case
        self.device, self.tiny, self.deadline, self.rows = device, tiny, deadline, []
        # the interpreter's bf16 is wrong
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.limits: dict[str, float] = {}  # unit -> measured best, per second
        self.once = OneCall(device, tiny)

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def measure(
        self,
        part: str,
        case: str,
        implementations: dict[str, Callable[[], object]],
        work: float,
        unit: str,
        predicted_ms: float | None = None,
        operator: str = "",
        rival: str = "torch",
    ) -> None:
        """Time the implementations in turns; one that fails leaves its error in its row. `rival` is
        what the model takes instead of "ours".
        """
        rows = [
            Row(
                part,
                case,
                name,
                work,
                unit,
                operator,
                {"ours": "kernel", rival: "rival"}.get(name, "") if operator else "",
                predicted_ms if name.startswith("ours") else None,
            )
            for name in implementations
        ]
        self.rows += rows
        late = self.is_late()
        for turn in range(0 if late else 2 if self.tiny else WARM_UP + REPETITIONS):
            for row, call in zip(rows, implementations.values(), strict=True):
                if row.fault is None:
                    try:
                        row.all.append(self.once.milliseconds(call))
                    except Exception as error:  # a peer that cannot do a case is a result, too
                        row.fault = _first_line(error)
        for row in rows:
            row.all = row.all[1 if self.tiny else WARM_UP :]
            if late:
                row.fault = "not run: out of time"
            elif row.fault is None:
                row.milliseconds = statistics.median(row.all)
            print(self.line(row), flush=True)
        self.after_case(self)

    @contextlib.contextmanager
    def checking(self, case: str, implementation: str, operator: str = "") -> Iterator[None]:
        """Around a first call: what goes wrong becomes the fault of its rows."""
        try:
            yield
        except Exception as error:
            role = "kernel" if implementation == "ours" else ""
            self.rows.append(
                Row(
                    "checks",
                    case,
                    implementation,
                    0.0,
                    "byte",
                    operator,
                    role,
                    fault=_first_line(error),
                )
            )
            print(self.line(self.rows[-1]), flush=True)

    def check(self, actual: Tensor, expected: Tensor) -> None:
        """Raises AssertionError when a result is not near the expected one (fp32)."""
        actual, expected = actual.detach().float(), expected.float()
        error = float((actual - expected).norm() / expected.norm())
        assert error < self.BOUND[self.dtype], f"its result is off by {error:.2g} of the norm"

    def rate(self, row: Row) -> float | None:
        """Work per second."""
        return None if row.milliseconds is None else row.work / row.milliseconds * 1e3

    def line(self, row: Row) -> str:
        rate, limit = self.rate(row), self.limits.get(row.unit)
        if rate is None:
            return f"| {row.part} | {row.case} | {row.implementation} | - | - | - | {row.fault} |"
        share = f"{rate / limit:.2f}" if limit else "-"
        shown = f"{rate / 1e12:.4g} TFLOP/s" if row.unit == "FLOP" else f"{rate / 1e9:.4g} GB/s"
        predicted = "" if row.predicted_ms is None else f"predicted {row.predicted_ms:.4g} ms"
        return (
            f"| {row.part} | {row.case} | {row.implementation} | {row.milliseconds:.4g} | "
            f"{shown} | {share} | {predicted} |"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


def describe(device: torch.device) -> dict[str, object]:
    with contextlib.suppress(ImportError):
        import triton

        return {
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.processor() or "CPU",
            "architecture": lang.capability(device) if device.type == "cuda" else None,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "date": date.today().isoformat(),
        }
    sys.exit("Triton is not installed: pip install triton==3.6.0")


def write_results(out: Path, about: dict[str, object], finished: bool, bench: Bench) -> None:
    """Write kernels.json and kernels.md, each replaced by one rename. `finished`: no case is left
    to measure.
    """
    found = {
        **about,
        "tiny": bench.tiny,
        "finished": finished,
        "limits": bench.limits,
        "rows": [asdict(row) for row in bench.rows],
    }
    described = ", ".join(f"{name} {value}" for name, value in about.items())
    table = "\n".join([described, "", HEADER, *map(bench.line, bench.rows)])
    for name, text in (("kernels.json", json.dumps(found, indent=1)), ("kernels.md", table)):
        partial_file = out / f"{name}.partial"
        partial_file.write_text(text + "\n")
        partial_file.replace(out / name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, one repetition")
    parser.add_argument("--minutes", type=float, default=8.5, help="begin no case after this time")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("no GPU is here: --tiny tries the tool on a CPU")
    about, out = describe(device), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    bench = Bench(device, arguments.tiny, deadline, partial(write_results, out, about, False))
    print(HEADER)
    for name in arguments.parts:
        PARTS[name](bench)
    write_results(out, about, True, bench)
    faults = [row for row in bench.rows if row.fault and row.implementation.startswith("ours")]
    print(f"{len(bench.rows)} rows, {len(faults)} of ours without a time; results in {out}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
