"""Kernels against their definitions.

    python scripts/gpu/checks.py [OPERATOR[:DTYPE] ...] [--processes N]
    python scripts/gpu/checks.py --failed RECORD    # those of first.json, under compute-sanitizer

Every row of kernels/configurations.json that this GPU takes, in small shapes. Each operator, and of
attention each kernel and head width, is a separate process: an illegal address or a hang ends the
CUDA context, and must not hide other results. Prints a JSON object for each row: its error as a
share of the bound of kernels/cases.py. OPERATOR may have the key of a row, as "attention dq 128".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from device import DEVICE, HALF, IS_CUDA, message
from megatron.kernels import cases, configurations, lang
from record import failed_operators, title

OPERATORS = (
    *(
        f"attention {kernel} {d}:{dtype}"
        for dtype in ("bf16", "fp16")
        for kernel in ("dq", "forward", "dkv_dq")
        for d in (256, 128, 64)
        if (kernel, d) != ("dkv_dq", 256)
    ),
    "norm",
    "qk_norm",
    "rotary",
    "activation",
    "dropout",
    "cross_entropy",
    "grad_norm",
    "adamw:bf16",
    "adamw:fp32",
    "fp8:bf16",
    "grouped_gemm",
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SANITIZER = ("compute-sanitizer", "--tool", "memcheck")
SECONDS = 62.0  # of all operators; a stage that is killed hides what they printed
WRONG = 3  # the exit code of an operator with a wrong row; an exception has 1
LOST_CONTEXT = ("CUDA error", "illegal", "misaligned")


def worst_error(case: cases.Case) -> float:
    """The largest error of a result as a share of its bound."""
    found = 0.0
    for actual, expected in zip(case.call(), case.expected(torch.float32), strict=True):
        wide = expected.double()
        error = float((actual.double() - wide).norm() / wide.norm())
        bound = cases.BOUND.get(actual.dtype, cases.BOUND[torch.float32])
        found = max(found, error / bound if error == error else float("inf"))
    return found


def rows_of(operator: str, dtype: torch.dtype) -> Iterator[configurations.Row]:
    """The rows whose operator and key begin with `operator` and that compute something by
    themselves: the case of dq covers dkv and prepare.
    """
    arch = lang.capability(DEVICE) if IS_CUDA else 90
    for name, key in configurations.TABLE:
        if min(configurations.TABLE[name, key]) > arch:
            continue
        row = configurations.find(name, arch, **dict(key))
        if not f"{title(row.operator, row.key)} ".startswith(f"{operator} "):
            continue
        covered = name in ("attention dkv", "attention prepare") or "gluon" in name
        width = row.key.get("bytes", dtype.itemsize)
        if not covered and not row.refused and width == dtype.itemsize:
            yield row


def check(operator: str, dtype_name: str) -> bool:
    """Check an operator in this process; whether all its rows are right."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dtype = DTYPES[dtype_name] if IS_CUDA else HALF
    all_ok = True
    for row in rows_of(operator, dtype):
        begun = time.monotonic()
        found = {"operator": row.operator, "key": dict(row.key), "dtype": dtype_name}
        try:
            share = worst_error(cases.case(row, DEVICE, True, dtype))
            found |= {"of_bound": round(share, 3), "ok": share < 1}
        except Exception as error:  # anything that a kernel may raise is a result
            found |= {"ok": False, "error": message(error)}
        print(json.dumps(found | {"seconds": round(time.monotonic() - begun, 2)}), flush=True)
        all_ok &= found["ok"]
        if any(word in found.get("error", "") for word in LOST_CONTEXT):
            return False
    return all_ok


def check_in_process(name: str, until: float, under: tuple[str, ...] = ()) -> bool:
    """Check an operator in a separate process, `under` another program, until this time by
    time.monotonic(), and print its rows.
    """
    command = [*under, sys.executable, __file__, "--here", name]
    left = max(until - time.monotonic(), 0.0)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=left)
        fault = "" if run.returncode in (0, WRONG) else f"exit code {run.returncode}"
        out = run.stdout
        last = run.stderr.strip().splitlines()[-1:] if fault else []
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
        fault, last = f"killed: not done after {left:.0f} s", []
    lines = [line for line in out.splitlines() if line.startswith("{")]
    notes = [f"# {line}" for line in out.splitlines() if under and line.startswith("====")]
    if fault:
        lines.append(json.dumps({"operator": name, "ok": False, "error": " ".join([fault, *last])}))
    print("\n".join([*notes, *lines]), flush=True)
    return not fault and all(json.loads(line)["ok"] for line in lines)


def first_word(name: str) -> str:
    return name.replace(":", " ").split()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR[:DTYPE]")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=SECONDS, help="until all are killed")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--failed", type=Path, metavar="RECORD")
    given = parser.parse_args()
    until, under = time.monotonic() + given.seconds, ()
    names = given.operators or list(OPERATORS)
    if given.failed:
        names, under = failed_operators(given.failed), SANITIZER
        print(f"# wrong in {given.failed}: {', '.join(names) or 'no operator'}")
    unknown = {*map(first_word, names)} - {*map(first_word, OPERATORS)}
    if unknown:
        parser.error(f"no operator {', '.join(sorted(unknown))}; they are {', '.join(OPERATORS)}")
    if given.here:
        operator, _, dtype = names[0].partition(":")
        results = [check(operator, each) for each in [dtype] * bool(dtype) or DTYPES]
        return 0 if all(results) else WRONG
    with ThreadPoolExecutor(given.processes) as pool:
        results = list(pool.map(partial(check_in_process, until=until, under=under), names))
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
