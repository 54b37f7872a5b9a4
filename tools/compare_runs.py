"""Compare the metrics of two runs.

    python tools/compare_runs.py A B [--rtol X] [--common]

A and B are run folders or metrics.jsonl files. Every value of every iteration must be exactly
equal, or within --rtol; what depends on the machine (times, rates, memory, world size, resume
marks) is left out. Prints the first iteration and name that differ and, for each name, the largest
relative difference. Exit code: 0 equal, 1 different, 2 unreadable.
"""

from __future__ import annotations

import argparse
import math
import sys

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._report.metrics_file import read_metrics  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.observe.metrics import is_measured  # noqa: E402

Rows = dict[int, dict[str, float]]


def computed_rows(path: str) -> Rows:
    """The rows of a run by iteration, without what depends on the machine. UserError for an
    unreadable file or one without rows.
    """
    rows = {
        row["iteration"]: {
            name: value
            for name, value in row.items()
            if name != "iteration" and not is_measured(name)
        }
        for row in read_metrics(path)
    }
    rows = {iteration: row for iteration, row in rows.items() if row}
    if not rows:
        raise UserError(
            f"{path}: no rows; the run has not logged anything yet (see --log-interval)"
        )
    return rows


def relative_difference(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); 0 for equal values, two NaN included; inf when only one of them is
    finite or a number.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def differences(a: Rows, b: Rows, rtol: float) -> tuple[list[str], dict[str, tuple[float, int]]]:
    """Everything that differs by more than `rtol`, in order of iteration, and by name the largest
    relative difference with its iteration.
    """
    faults: list[str] = []
    largest: dict[str, tuple[float, int]] = {}
    for iteration in sorted(a.keys() | b.keys()):
        if iteration not in a or iteration not in b:
            faults.append(f"iteration {iteration} is only in {'A' if iteration in a else 'B'}")
            continue
        for name in [*a[iteration], *(name for name in b[iteration] if name not in a[iteration])]:
            if name not in a[iteration] or name not in b[iteration]:
                faults.append(
                    f"iteration {iteration}: {name} is only in "
                    f"{'A' if name in a[iteration] else 'B'}"
                )
                continue
            x, y = a[iteration][name], b[iteration][name]
            difference = relative_difference(x, y)
            if difference > largest.get(name, (-1.0, 0))[0]:
                largest[name] = (difference, iteration)
            if difference > rtol:
                faults.append(
                    f"iteration {iteration}: {name} is {x!r} in A and {y!r} in B, relative "
                    f"difference {difference:.3g}"
                )
    return faults, largest


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="run folder or metrics.jsonl")
    parser.add_argument("b", metavar="B", help="run folder or metrics.jsonl")
    parser.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        help="allowed relative difference of a value (default 0: exactly equal)",
    )
    parser.add_argument(
        "--common", action="store_true", help="compare only the iterations that both runs logged"
    )
    arguments = parser.parse_args(argv)
    try:
        a, b = computed_rows(arguments.a), computed_rows(arguments.b)
        if arguments.common:
            shared = a.keys() & b.keys()
            if not shared:
                raise UserError(
                    f"no iteration is in both {arguments.a} and {arguments.b}: nothing to compare"
                )
            a, b = ({i: rows[i] for i in shared} for rows in (a, b))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    faults, largest = differences(a, b, arguments.rtol)
    print(f"A: {arguments.a}, iterations {min(a)}-{max(a)} ({len(a)} rows)")
    print(f"B: {arguments.b}, iterations {min(b)}-{max(b)} ({len(b)} rows)")
    for name, (difference, iteration) in largest.items():
        if difference > 0:
            print(
                f"  {name}: largest relative difference {difference:.3g}, at iteration {iteration}"
            )
    how = "exactly equal" if arguments.rtol == 0 else f"equal within a relative {arguments.rtol:g}"
    if faults:
        print(
            f"DIFFERENT, first difference: {faults[0]}"
            + (f" ({len(faults)} in all)" if len(faults) > 1 else "")
        )
        return 1
    print(f"SAME: {sum(map(len, a.values()))} values {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
