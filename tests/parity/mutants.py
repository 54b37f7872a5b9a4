"""Breaks the code on purpose, one place at a time, and shows that the parity table notices: python tests/parity/mutants.py [--out FILE] [NAME ...]

Each mutant replaces a piece of text, which must be there exactly once, in a temporary copy of the tree; a world of processes that imports the
copy runs the rows of CI that are named here for it, and the comparison with the healthy one-process run must find fault with one of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new` in a file; `rows` (ids of ci_rows) of which at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    rows: tuple[str, ...]


def skipped_row(name: str, start: str, row: str) -> Mutant:
    """One row of PARTIAL_GRADIENTS left out: the parameters stay replicated but nobody sums their gradients."""
    return Mutant(name, "megatron/layers/tensor_parallel.py", f"    Partial(({start}", f"    *() and (Partial(({start}", (row,))


MUTANTS: tuple[Mutant, ...] = ()


def broken_copy(mutant: Mutant, folder: Path) -> Path:
    """A copy of what a run imports, with the mutation. AssertionError when its text is not there exactly once: the list is stale."""
    for part in ("megatron", "kernels"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has this text {text.count(mutant.old)} times, expected once:\n{mutant.old}"
    path.write_text(text.replace(mutant.old, mutant.new))
    return folder


def run_mutated(tree: str, flags: tuple[str, ...], patches: tuple[str, ...]):
    """run_case of the copy."""
    import megatron
    from parity.worker import run_case

    assert Path(megatron.__file__).is_relative_to(tree), f"{megatron.__file__} is not the mutant"
    return run_case(flags, patches)


def caught_by(mutant: Mutant) -> tuple[str, str] | None:
    """(row, first fault) of the first named row that notices; None when the mutant survives."""
    from dist.pool import Hang, RankError, World
    from parity.compare import faults_of
    from parity.layouts import ci_rows

    rows = {str(row): row for row in ci_rows()}
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = str(broken_copy(mutant, Path(folder)))
        path = [tree, *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        worlds: dict[int, World] = {}
        try:
            for name in mutant.rows:
                row = rows[name]
                world = worlds.setdefault(row.world, World(row.world))
                try:
                    with mock.patch.object(sys, "path", path):
                        outcomes = world.run(run_mutated, tree, row.flags(layout=True), row.patches, timeout=60)
                except (Hang, RankError) as error:
                    return name, str(error).strip().splitlines()[-1]
                if faults := faults_of(row, outcomes):
                    return name, faults[0]
        finally:
            for world in worlds.values():
                world.close()
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args(argv)
    results, survivors = {}, []
    for mutant in MUTANTS:
        if arguments.names and mutant.name not in arguments.names:
            continue
        begun, caught = time.monotonic(), caught_by(mutant)
        row, fault = caught or (None, "")
        results[mutant.name] = {"file": mutant.file, "old": mutant.old, "new": mutant.new, "caught by": row, "fault": fault}
        survivors += [] if caught else [mutant.name]
        print(f"{mutant.name}: {f'caught by {row}: {fault[:150]}' if caught else 'SURVIVED'} ({time.monotonic() - begun:.1f} s)", flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results) - len(survivors)} of {len(results)} mutants caught" + (f"; survived: {', '.join(survivors)}" if survivors else ""))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import parity.mutants  # under the name by which the ranks find its functions

    sys.exit(parity.mutants.main())
