"""Prints for each mutant the test of the default command that finds it, and the test of `full`:

    python tests/mutants.py [--kind layout|meaning] [--out FILE.json] [NAME ...]

Each mutant is put in and the tests that are named for it run: of layout tests/parity/mutants.py,
of meaning tests/oracle/mutants.py. Exit code 1 unless `full` finds all, and the default command
nine of ten of each kind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does

import pytest  # noqa: E402
from distributed.pool import Worlds  # noqa: E402, I001
from oracle.find_mutants import find  # noqa: E402
from oracle.mutants import MUTANTS as MEANING  # noqa: E402
from parity.mutants import MUTANTS as LAYOUT  # noqa: E402
from parity.mutants import caught_by  # noqa: E402

LAYOUTS = "tests/parity/test_layouts.py::test_the_layout_is_the_same_run[{}]"
CASES = "tests/oracle/test_oracle.py::test_the_program_is_the_oracle[{}]"
DEFAULT_SHARE = 0.9


def default_tests(names: Iterable[str]) -> set[str]:
    """The tests of these files that the default command runs."""
    found: set[str] = set()

    class Collected:
        def pytest_collection_finish(self, session):
            found.update(item.nodeid for item in session.items)

    files = sorted({name.split("::")[0] for name in names})
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = ["--collect-only", "-p", "no:cacheprovider", *(str(ROOT / f) for f in files)]
        code = pytest.main(arguments, plugins=[Collected()])
    assert code == 0, f"pytest collects nothing of {files}: exit code {code}"
    return found


def chosen(mutants: Iterable[Any], names: list[str]) -> list[Any]:
    return [mutant for mutant in mutants if not names or mutant.name in names]


def layouts(names: list[str]) -> Iterator[tuple[str, str | None, str]]:
    """(mutant, the test that finds it, what differs)."""
    worlds = Worlds()
    for mutant in chosen(LAYOUT, names):
        row, fault = caught_by(mutant, worlds) or (None, "survived")
        yield mutant.name, row and LAYOUTS.format(row), fault
    worlds.close()


def meanings(names: list[str]) -> Iterator[tuple[str, str | None, str]]:
    """(mutant, the test that finds it, what differs)."""
    for mutant in chosen(MEANING, names):
        try:
            found = find(mutant)
        except AssertionError as error:  # it does not run
            yield mutant.name, None, str(error)
            continue
        by = found and (found.by if "::" in found.by else CASES.format(found.by))
        yield mutant.name, by, found.difference if found else "survived"


KINDS = {"layout": layouts, "meaning": meanings}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="mutants of this kind")
    parser.add_argument("--out", help="write the table to this JSON file")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    files = [each.where for each in MEANING if each.where.startswith("tests/")]
    default, begun = default_tests([LAYOUTS, CASES, *files]), time.monotonic()
    for kind in arguments.kind or KINDS:
        for name, test, difference in KINDS[kind](arguments.names):
            found = {"default": test if test in default else None, "full": test}
            rows.append({"kind": kind, "mutant": name, **found})
            seconds, begun = time.monotonic() - begun, time.monotonic()
            by = " | ".join((each or "-").split("::")[-1] for each in found.values())
            print(f"{kind} | {name} | {by} | {difference[:100]} | {seconds:.1f} s", flush=True)
    missed = False
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        by_default, by_full = (
            sum(bool(row[column]) for row in own) for column in ("default", "full")
        )
        print(f"{kind}: {by_default} of {len(own)} found by default, {by_full} by full")
        missed |= by_full < len(own) or by_default < DEFAULT_SHARE * len(own)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
