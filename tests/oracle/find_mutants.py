"""Finds a mutant of meaning by the case or the test that is named for it; tests/mutants.py prints
the table of all.

A mutant must run: one that raises an exception is no silent change. What finds it must be far
above the tolerance: a difference of FAR in a float64 case, ten times the bound in a narrow one, or
another count, rate or skipped step.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from mutation import Mutant
from oracle.cases import CASES, Case
from oracle.compare import COUNTS, EXACT, RATES, differences, expected, narrow_bound
from oracle.settings import read

ROOT = Path(__file__).resolve().parents[2]
FAR = 1e3 * EXACT
NUMBER = r"(-?[\d.]+(?:e[-+]?\d+)?|nan|inf)"
VALUES = re.compile(rf"iteration \d+: (?:the console's )?(.+?) {NUMBER}, expected {NUMBER}$")
WEIGHTS = re.compile(rf"weights of .*: off by {NUMBER}, their norm is {NUMBER}$")
# differences without a size
COUNTED = re.compile(
    r"rows of iterations |console lines of |is on the console alone|is not expected$|"
    r" None, expected |weights differ in name|has shape "
)


class Found(NamedTuple):
    """What noticed a mutant: a case or a test, the largest difference as text, and its relative
    size (None: it has none, as a row too many or a failed test).
    """

    by: str
    difference: str
    size: float | None


def size_of(text: str) -> tuple[bool, float | None]:
    """Of a difference as compare.py prints it: whether it is one of a count, a rate, an overflow or
    a row; and its relative size, where it has one. Raises AssertionError for any other text, which
    would else pass as a difference without a size.
    """
    if values := VALUES.search(text):
        name, got, value = values[1], float(values[2]), float(values[3])
        if not (math.isfinite(got) and math.isfinite(value)):
            return True, None
        size = abs(got - value) / max(abs(got), abs(value))
        return name in COUNTS | RATES, size
    if weights := WEIGHTS.search(text):
        off, norm = float(weights[1]), float(weights[2])
        return False, off / norm if norm > 0 else math.inf
    assert COUNTED.search(text), f"a difference that compare.py prints and this cannot read: {text}"
    return True, None


def found_by(mutant: Mutant, case: Case) -> Found | None:
    """The largest difference of a case under a mutant; None when it is not far above the tolerance.

    Raises AssertionError where the mutant does not run.
    """
    expected(case)  # the oracle's, before anything is replaced
    with mutant.put_in():
        texts = differences(case)
    broken = [text for text in texts if re.match(r"run \d+: \w*(Error|Exception): ", text)]
    assert not broken, f"{mutant.name}: does not run: {broken[0]}"
    far = FAR
    if case.narrow:
        far = 10 * narrow_bound(case.narrow, read(case.runs("unused")[0]).num_layers)
    sizes = [(*size_of(text), text) for text in texts]
    found = [(size, text) for count, size, text in sizes if count or size > far]
    if not found:
        return None
    size, text = max(found, key=lambda each: each[0] or 0.0)
    return Found(case.name, text, size)


def failed_test(mutant: Mutant, test: str) -> Found | None:
    """What fails of a test file under a mutant, the first: by default, else in `full`."""
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report):
            if report.failed:
                error = [
                    line[2:].strip()
                    for line in report.longreprtext.splitlines()
                    if line.startswith("E ")
                ]
                failed.append(f"{report.nodeid}: {error[0] if error else 'failed'}")

    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--no-summary", ROOT / test]
    with (
        mutant.put_in(),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.dict(sys.modules),  # the file imports the mutant, also where it was collected
    ):
        sys.modules.pop(Path(test).stem, None)
        for marks in ((), ("-m", "full and not campaign")):
            if not failed:
                pytest.main([*map(str, arguments), *marks], plugins=[Listener()])
    return Found(failed[0].split(": ")[0], failed[0].split(": ", 1)[1], None) if failed else None


def find(mutant: Mutant) -> Found | None:
    """By what is named for it."""
    if mutant.where.startswith("tests/"):
        return failed_test(mutant, mutant.where)
    (case,) = (case for case in CASES if case.name == mutant.where)
    return found_by(mutant, case)
