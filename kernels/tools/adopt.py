"""From a measurement to a choice: `python kernels/tools/adopt.py kernels.json` writes what
benchmarks/kernels.py has found into kernels/measured.json.

That file is what `auto` goes by (kernels/dispatch.py), and the banner prints it. Of each operator
on the measured architecture, all cases together:

- The ratio is the time of PyTorch's implementation by the kernel's, both summed over the operator's
  cases, of each turn; the median of all turns, and
  its 95% interval by bootstrap (benchmarks/ratio_rule.py).
- The kernel wins where the whole interval lies above 1 and no case is lost by more than 5% beyond
  its own noise.
- A case without a time, or a wrong result, leaves the operator as it was: why is printed. So does a
  measurement that was interrupted among the operator's cases; those before it are judged.

What was adopted before stays for operators and architectures that the new file has not measured.
Results of --tiny or of a CPU are refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path[0] = str(ROOT)

from megatron.benchmarks.ratio_rule import PAIRS, SLACK, bootstrap

MEASURED = ROOT / "kernels" / "measured.json"
Times = list[list[float]]  # of each case, in turns


def judge(kernel: Times, rival: Times) -> dict[str, Any]:
    """ratio, low, high, wins."""
    totals = [
        sum(theirs) / sum(ours)
        for ours, theirs in zip(zip(*kernel, strict=True), zip(*rival, strict=True), strict=True)
    ]
    (low, high), cases = bootstrap(totals), []
    for ours, theirs in zip(kernel, rival, strict=True):
        cases.append(bootstrap([b / a for a, b in zip(ours, theirs, strict=True)]))
    wins = low > 1 and all(upper > 1 - SLACK for _, upper in cases)
    return {
        "ratio": round(statistics.median(totals), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "wins": wins,
    }


def adopted(results: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row for each operator that was measured whole, why others were not). Raises ValueError for
    a file without measurements of a GPU.
    """
    if results.get("tiny", True) or results.get("architecture") is None:
        raise ValueError(
            "measured with --tiny or on a CPU, which shows nothing about a GPU's speed"
        )
    # operator -> case -> role -> row
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for row in results["rows"]:
        if row["operator"] and row["role"]:
            found[row["operator"]][row["case"]][row["role"]] = row
    # cases of an operator follow each other, so that an interruption affects the last one alone
    interrupted = None if results["finished"] or not found else next(reversed(found))
    rows, left = [], []
    for operator, cases in found.items():
        if operator == interrupted:
            left.append(f"{operator}: the measurement was interrupted, cases may be missing")
        elif lacking := lacks(cases):
            left.append(f"{operator}: {lacking}")
        else:
            rows.append(_judged(operator, list(cases.values()), results))
    return rows, left


def _judged(
    operator: str, cases: list[dict[str, dict[str, Any]]], results: dict[str, Any]
) -> dict[str, Any]:
    """The row of measured.json for an operator whose cases all have times."""
    times = [[roles[role]["all"] for roles in cases] for role in ("kernel", "rival")]
    return {
        "operator": operator,
        "implementation": "triton",
        "architecture": results["architecture"],
        "rival": cases[0]["rival"]["implementation"],
        **judge(*times),
        "cases": len(cases),
        "gpu": results["device"],
        **{name: results[name] for name in ("torch", "triton", "date")},
    }


def lacks(cases: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Why an operator's cases, each with a row by role, cannot be judged; "" when they can."""
    for case, roles in cases.items():
        for row in roles.values():
            if row["fault"]:
                return f"{case}, {row['implementation']}: {row['fault']}"
    turns = {len(row["all"]) for roles in cases.values() for row in roles.values()}
    both = all(roles.keys() == {"kernel", "rival"} for roles in cases.values())
    if not both or len(turns) != 1 or min(turns) < PAIRS:
        return f"not every case has {PAIRS} times of both"
    return ""


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows instead of the old ones of the same operator, implementation and
    architecture.
    """
    rows = {
        (row["operator"], row["implementation"], row["architecture"]): row for row in (*old, *new)
    }
    return [rows[key] for key in sorted(rows)]


def main(argv: Sequence[str], measured: Path = MEASURED) -> int:
    """The exit code: 2 for a file that cannot be adopted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="kernels.json of benchmarks/kernels.py"
    )
    file = parser.parse_args(argv).file
    try:
        rows, left = adopted(json.loads(file.read_text()))
    except KeyError as error:
        print(f"{file}: no {error} in it: not a result of benchmarks/kernels.py", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    for row in rows:
        print(
            f"{row['operator']}: {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}) "
            f"times {row['rival']}: {'taken' if row['wins'] else 'not taken'}"
        )
    for line in left:
        print(f"{line}: left as it was")
    measured.write_text(
        json.dumps({"rows": merged(json.loads(measured.read_text())["rows"], rows)}, indent=1)
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
