"""Tries other configurations than those of kernels/configurations.json and writes those that win.
Nothing else tunes, and nothing while a model runs.

    python kernels/tools/tune.py --compile-only --only "attention dq"
    python kernels/tools/tune.py --out tuned.jsonl [--minutes 8]
    python kernels/tools/tune.py --out tuned.jsonl --write
    python kernels/tools/tune.py --out tuned.jsonl --tiny

The first needs no GPU: it prints what each candidate for sm_90 compiles to (--arch 80, 100). The
second, on a GPU, writes a line for each row of the table and continues where the file ends. --write
puts what won into the table; then run manifest.py --write. --tiny takes small shapes and few
candidates, also on a CPU: to try the program.

For each row: candidates are compiled ahead of time, in processes of their own; those that break a
rule of the gate (shared memory, spilled bytes beyond the frozen row's, no wgmma or serialised ones)
are dropped. The others are timed next to the frozen row, a call of each in turn, the four best and
the frozen one for longer. The winner must be faster than the frozen row by more than both the noise
of the two medians and 1%, its result must be the definition's, and all variants of it must pass the
gate: then it is written. A row is measured where it is looked up: on a GPU newer than the row's
architecture the winner becomes a row of the GPU's own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path[0] = str(ROOT)

import torch

if __name__ == "__main__" and not torch.cuda.is_available() and "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import interpreter

    interpreter.patch()

from megatron.benchmarks.peers.one_call import OneCall
from megatron.kernels import cases, configurations, lang
from megatron.kernels.configurations import FILE, Row, find, read
from megatron.kernels.tools import manifest
from megatron.kernels.tools.shipped import Compiled, compilations

# of kernels with matrix products
GRID = {
    "M": (32, 64, 128),
    "N": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4),
    "maxnreg": (0, 128),
}
OF_SHARED = ("attention", "grouped_gemm")  # operators that ask whether a GPU has as much memory
UNTUNED = "attention gluon"  # few layouts, which benchmarks/kernels.py measures
LEAST_GAIN = 0.01
ROUNDS = {"first": 5, "last": 25}


def rows_of(arch: int, only: str = "") -> list[Row]:
    """What the table has for an architecture, each row once that it can run."""
    found = []
    for (operator, key), by_arch in configurations.TABLE.items():
        if min(by_arch) > arch or operator.startswith(UNTUNED):
            continue
        row = find(operator, arch, **dict(key))
        if only in title(row) and row.unsupported_reason(arch) is None:
            found.append(row)
    return found


def write(rows: Iterable[Row]) -> str:
    """JSON, a row a line."""

    lines = []
    for row in rows:
        fields = vars(row).items()
        given = {name: value for name, value in fields if value or name in ("key", "numbers")}
        lines.append(json.dumps(given))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def title(row: Row) -> str:
    return " ".join([row.operator, *(str(value) for value in row.key.values())])


def candidates(row: Row, arch: int) -> list[Row]:
    """Other numbers for a row: the grid for matrix products; for what only moves bytes one number
    halved or doubled at a time.
    """
    chosen = []
    if "M" in row.numbers and "N" in row.numbers:
        for values in itertools.product(*GRID.values()):
            each = {**row.numbers, **dict(zip(GRID, values, strict=True))}
            if not (each["maxnreg"] and each["num_warps"] == 4):
                chosen.append({name: value for name, value in each.items() if value})
    else:
        for name, old in row.numbers.items():
            chosen += [{**row.numbers, name: value} for value in (old // 2, 2 * old) if value]
    return [
        replace(row, arch=arch, numbers=each, shared=0, serialised="", measured={})
        for each in chosen
        if each != row.numbers
    ]


@contextlib.contextmanager
def using(row: Row) -> Iterator[None]:
    """While open, the table has this row in its place."""
    place = configurations.TABLE[row.operator, frozenset(row.key.items())]
    before = dict(place)
    place[row.arch] = row
    try:
        yield
    finally:
        place.clear()
        place.update(before)


def compiled(row: Row, arch: int, *, whole: bool = True) -> list[Compiled]:
    """What is compiled from a row, or not `whole` the first."""
    with using(row):
        family = compilations(arch, row.operator.split()[0])
        of_row = (replace(each, arch=arch) for each in family if each.row == row)
        return list(itertools.islice(of_row, None if whole else 1))


def gate(
    rows: list[Row], arch: int, jobs: int, *, whole: bool
) -> list[tuple[manifest.Facts, list[str]]]:
    """For each row what it compiles to and the rules that it breaks, in processes that may die;
    `whole`: all variants, the worst of each number.
    """
    shapes = list(shapes_of(rows, arch, whole))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        # a process that compiles makes the same rows under the same names
        file.write(
            "from megatron.kernels.tools.tune import read, shapes_of\n\n\n"
            f"def aot():\n    return shapes_of(read({write(rows)!r}), {arch}, {whole})\n"
        )
        file.flush()
        facts = manifest.compile_all([shape.name for shape in shapes], jobs, file.name)
    result: list[tuple[dict, list[str]]] = [({}, []) for _ in rows]
    for shape in shapes:
        needs = facts[shape.name]
        found, faults = result[int(shape.name.partition("/")[0])]
        faults += manifest.faults(shape, needs)
        for key, value in needs.items():
            if key != "error":
                found[key] = max(value, found.get(key, 0))
        found["num_warps"] = shape.num_warps
    return result


def shapes_of(rows: list[Row], arch: int, whole: bool) -> Iterator[Compiled]:
    """What is compiled from rows, of each all or the first, named by the row's place."""
    for at, row in enumerate(rows):
        for shape in compiled(row, arch, whole=whole):
            yield replace(shape, name=f"{at}/{shape.name}")


def blocks_of_an_sm(facts: manifest.Facts, arch: int) -> int:
    """How many blocks of threads a multiprocessor holds at once, by threads, registers (256 at a
    time a warp) and shared memory (1 KiB more each).
    """
    warps = facts["num_warps"]
    registers = -(-facts["registers"] * 32 // 256) * 256 * warps
    shared = configurations.shared_memory(arch) + 1024
    return min(
        (1536 if arch in (86, 89, 120) else 2048) // (32 * warps),
        65536 // registers,
        shared // (facts["shared"] + 1024),
        32,
    )


def show(row: Row, facts: manifest.Facts, faults: list[str], arch: int) -> str:
    numbers = ", ".join(f"{name} {value}" for name, value in row.numbers.items())
    if "registers" not in facts:
        return f"| {title(row)} | {numbers} | - | - | - | - | - | {'; '.join(faults)} |"
    blocks = blocks_of_an_sm(facts, arch)
    return (
        f"| {title(row)} | {numbers} | {facts['registers']} | {facts['spilled']} | "
        f"{facts['shared']} | {blocks} | {facts['hot_instructions']}, {facts['hot_spill_loads']} | "
        f"{'; '.join(faults)} |"
    )


class Clock:
    """Times calls in turn on one device."""

    def __init__(self, device: torch.device, tiny: bool):
        self.device, self.tiny, self.once = device, tiny, OneCall(device, tiny)

    def rounds(self, rows: list[Row], call: Callable[[], Any], count: int) -> list[list[float]]:
        """`count` times of each row, one call of each in turn."""
        times: list[list[float]] = [[] for _ in rows]
        for turn in range(-1, count):  # the first compiles and warms up
            for row, found in zip(rows, times, strict=True):
                with using(row):
                    taken = self.once.milliseconds(call)
                if turn >= 0:
                    found.append(taken)
        return times


def noise(times: list[float]) -> float:
    """Twice the standard error of the median, by the median distance from it."""
    middle = statistics.median(times)
    distance = statistics.median(abs(each - middle) for each in times)
    return 2 * 1.2533 * 1.4826 * distance / len(times) ** 0.5


def winner(frozen: Row, rows: list[Row], times: list[list[float]]) -> tuple[Row, float, float]:
    """(row, its median, the frozen row's): the fastest if it beats the frozen one, rows[0], by more
    than the noise, else that.
    """
    medians = [statistics.median(each) for each in times]
    before, ms = medians[0], min(medians)
    best = medians.index(ms)
    if before - ms > max(LEAST_GAIN * before, noise(times[0]) + noise(times[best])):
        return rows[best], ms, before
    return frozen, before, before


def fitting(tried: list[Row], arch: int, jobs: int) -> list[Row]:
    """Those that compile and need no more than the gate allows."""
    judged = zip(tried, gate(tried, arch, jobs, whole=False), strict=True)
    return [row for row, (_, faults) in judged if not faults]


def fastest(row: Row, fit: list[Row], clock: Clock) -> tuple[Row, float, float]:
    """The winner of a short round of all and a long one of the four best, the frozen row in both:
    (it, its milliseconds, those of the frozen row).
    """
    case = cases.case(row, clock.device, clock.tiny)
    quick = clock.rounds([row, *fit], case.call, 1 if clock.tiny else ROUNDS["first"])
    order = sorted(range(len(fit)), key=lambda at: statistics.median(quick[1 + at]))
    finals = [row, *(fit[at] for at in order[:4])]
    times = clock.rounds(finals, case.call, 2 if clock.tiny else ROUNDS["last"])
    return winner(row, finals, times)


def tune(row: Row, arch: int, clock: Clock, jobs: int) -> dict[str, Any]:
    """A line of the results for one row."""
    tried = candidates(row, arch)[: 2 if clock.tiny else None]
    fit = tried if clock.tiny else fitting(tried, arch, jobs)
    best, ms, frozen_ms = fastest(row, fit, clock)
    with using(best):
        fault = cases.wrong(cases.case(row, clock.device, True))
    facts: dict[str, Any] = {}
    if best is not row and not fault and not clock.tiny:
        ((facts, faults),) = gate([best], arch, jobs, whole=True)
        fault = "; ".join(faults)
    return {
        "operator": row.operator,
        "arch": arch,
        "key": dict(row.key),
        "frozen": dict(row.numbers),
        "tried": len(tried),
        "fit": len(fit),
        "numbers": dict(best.numbers),
        "ms": ms,
        "frozen_ms": frozen_ms,
        "spills": facts.get("spilled", row.spills),
        "shared": facts.get("shared", row.shared),
        "fault": fault,
    }


def taken(table: list[Row], lines: list[dict[str, Any]]) -> list[Row]:
    """The table with what won in place of, or in addition to, what was frozen."""
    rows = {(row.operator, frozenset(row.key.items()), row.arch): row for row in table}
    for line in lines:
        place = line["operator"], frozenset(line["key"].items()), line["arch"]
        is_frozen = line["numbers"] == line["frozen"]
        if line["fault"] or line["tiny"] or (is_frozen and place not in rows):
            continue
        shared = line["shared"] if line["operator"].split()[0] in OF_SHARED else 0
        measured = {name: line[name] for name in ("ms", "gpu", "torch", "triton", "date")}
        given = [line[name] for name in ("operator", "arch", "key", "numbers", "spills")]
        rows[place] = Row(*given, shared, measured=measured)
    return sorted(rows.values(), key=lambda row: (row.operator, row.arch))


def finished(file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of this device and these versions; a last line that was cut off does not count."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if all(line[name] == about[name] for name in ("gpu", "torch", "triton", "tiny")):
                lines.append(line)
    return lines


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help='rows whose operator and key contain it, as in "attention dq 128"',
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="lines of results, which a later call continues"
    )
    parser.add_argument(
        "--write", action="store_true", help="put what won into kernels/configurations.json"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="begin no row after this time")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the candidates and show what they need"
    )
    parser.add_argument(
        "--arch",
        type=int,
        choices=configurations.ARCHITECTURES,
        help="of --compile-only; default 90",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes that compile at once"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, two candidates, one round"
    )
    return parser


def show_candidates(rows: list[Row], arch: int, jobs: int) -> None:
    """Compile the candidates of each row for an architecture, and print what they need."""
    print(
        "| row | numbers | registers | spilled | shared | blocks an SM | hot loop | faults |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        all_of_them = [replace(row, arch=arch), *candidates(row, arch)]
        judged = gate(all_of_them, arch, jobs, whole=False)
        for each, (facts, faults) in zip(all_of_them, judged, strict=True):
            print(show(each, facts, faults, arch), flush=True)


def tune_rows(
    rows: list[Row],
    arch: int,
    arguments: argparse.Namespace,
    about: dict[str, Any],
    device: torch.device,
) -> int:
    """Measure rows until the time is over, and append a line for each to --out; how many are left.
    Rows with a line of this device and these versions are done.
    """
    deadline = time.monotonic() + 60 * arguments.minutes
    done = {
        (line["operator"], frozenset(line["key"].items()))
        for line in finished(arguments.out, about)
    }
    left = [row for row in rows if (row.operator, frozenset(row.key.items())) not in done]
    clock = Clock(device, arguments.tiny)
    with arguments.out.open("a") as out:
        while left and time.monotonic() < deadline:
            row = left.pop(0)
            line = tune(row, arch, clock, arguments.jobs) | about
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(
                f"{title(row)}: {line['numbers']}, {line['ms']:.4g} ms, frozen "
                f"{line['frozen_ms']:.4g} ms {line['fault']}",
                flush=True,
            )
    return len(left)


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if lang.triton is None:
        parser.error("Triton is not installed: pip install triton==3.6.0")
    arch = arguments.arch or lang.capability(device)
    rows = rows_of(arch, arguments.only)
    if not rows:
        parser.error(
            f"--only {arguments.only}: no row is called so; there are "
            f"{', '.join(title(row) for row in rows_of(arch))}"
        )
    if arguments.compile_only:
        show_candidates(rows, arch, arguments.jobs)
        return 0
    if arguments.arch:
        parser.error("--arch: what is timed is this GPU; add --compile-only")
    if not arguments.out:
        parser.error("--out FILE: where results go, or --compile-only")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("no GPU is here: --compile-only compiles, --tiny tries the tool on a CPU")
    about = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": lang.triton.__version__,
        "date": date.today().isoformat(),
        "tiny": arguments.tiny,
    }
    left = tune_rows(rows, arch, arguments, about, device)
    if arguments.write:
        FILE.write_text(write(taken(read(FILE.read_text()), finished(arguments.out, about))))
    print(
        f"{len(rows) - left} rows measured, {left} left"
        + (": the same call continues with them" if left else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
