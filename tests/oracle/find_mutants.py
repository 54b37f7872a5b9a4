"""Finds a mutant of meaning by the case or the test that is named for it; tests/mutants.py prints
the table of all.

A mutant must run: one that raises an exception is no silent change. What finds it must be far
above the tolerance: a difference of FAR in a float64 case, ten times the bound in a narrow one, or
another count, rate or skipped step.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from mutation import Mutant
from oracle.cases import CASES, Case
from oracle.compare import EXACT, differences, expected, narrow_bound
from oracle.settings import read

ROOT = Path(__file__).resolve().parents[2]
FAR = 1e3 * EXACT


class Found(NamedTuple):
    """What noticed a mutant: a case or a test, and what differs, as text."""

    by: str
    difference: str


def found_by(mutant: Mutant, case: Case) -> Found | None:
    """The largest difference of a case under a mutant; None when it is not far above the tolerance.

    Raises AssertionError where the mutant does not run.
    """
    expected(case)  # the oracle's, before anything is replaced
    with mutant.put_in():
        found = differences(case)
    broken = [each for each in found if re.match(r"run \d+: \w*(Error|Exception): ", each.text)]
    assert not broken, f"{mutant.name}: does not run: {broken[0].text}"
    far = FAR
    if case.narrow:
        far = 10 * narrow_bound(case.narrow, read(case.runs("unused")[0]).num_layers)
    found = [each for each in found if each.is_exact or each.size > far]
    return Found(case.name, max(found, key=lambda each: each.size).text) if found else None


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
    return Found(failed[0].split(": ")[0], failed[0].split(": ", 1)[1]) if failed else None


def find(mutant: Mutant) -> Found | None:
    """By what is named for it."""
    if mutant.where.startswith("tests/"):
        return failed_test(mutant, mutant.where)
    (case,) = (case for case in CASES if case.name == mutant.where)
    return found_by(mutant, case)
