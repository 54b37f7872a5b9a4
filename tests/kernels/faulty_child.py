"""The child of the check at start in Triton's interpreter, with kernels that fail on request:

    python faulty_child.py rotary=abort norm=hang ...

A kernel may be wrong, raise, abort, crash (SIGSEGV), hang, or print to stdout; `start=exit` ends
the child before it is ready.
"""

import ctypes
import dataclasses
import os
import sys
import time
from pathlib import Path

if "start=exit" in sys.argv:  # before torch is imported, which takes seconds
    sys.exit("CUDA error: out of memory")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

import interpreter

interpreter.patch()

from megatron.kernels import cases


def fail(how: str, results: tuple) -> tuple:
    if how == "raise":
        raise RuntimeError("PTXAS failed\nmany lines")
    if how == "abort":
        os.abort()
    if how == "crash":
        ctypes.string_at(0)
    if how == "hang":
        time.sleep(600)
    if how == "print":
        print("a line of a compiler", flush=True)
    return tuple(1.1 * each for each in results) if how == "wrong" else results


def broken(operator: str, how: str) -> None:
    right = cases.CASES[operator]

    def wrapped(draw, key, rest):
        case = right(draw, key, rest)
        return dataclasses.replace(case, call=lambda: fail(how, case.call()))

    cases.CASES[operator] = wrapped


for word in sys.argv[1:]:
    operator, _, how = word.partition("=")
    broken(operator, how)
cases.main()
