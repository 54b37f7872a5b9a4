"""Sections of a report about time: the goodput of runs over all their starts, and where the steps
went that a profile recorded.

Called from page.py.
"""

from __future__ import annotations

from typing import Any

from megatron.tools._report.goodput_account import MEANINGS
from megatron.tools._report.markup import MACROS, part_heads
from megatron.tools._report.runs import LoggedRun
from megatron.tools._report.step_parts import in_milliseconds, mean_steps, part_names


def goodput_section(runs: list[LoggedRun]) -> dict[str, Any] | None:
    """Productive time and its losses of the runs whose events are there: of one run a row a cause,
    of several a row a run.
    """
    several = len(runs) > 1
    known = [(number, run) for number, run in enumerate(runs) if run.goodput is not None]
    if not known:
        return None
    faults = [
        f"{run.name}: {fault}" if several else fault
        for _, run in known
        if (fault := run.goodput.fault())
    ]
    if several:
        heads = part_heads([f"{cause}, s (share)" for cause in MEANINGS])
        return {
            "headline": None,
            "heads": ["run", "", "starts", "wall time, s", *heads],
            "rows": [_of_run(number, run) for number, run in known],
            "faults": faults,
        }
    found = runs[0].goodput
    headline, wall = found.headline(), found.wall or 1.0
    names = part_heads([f"{cause}: {meaning}" for cause, meaning in MEANINGS.items()])
    rows = [
        [name, f"{seconds:,.1f}", f"{seconds / wall:.1%}"]
        for name, (_, seconds) in zip(names, found.rows(), strict=True)
    ]
    return {
        "headline": headline[0].upper() + headline[1:],
        "parts": found.rows(),
        "heads": ["cause", "seconds", "share"],
        "rows": [*rows, ["wall time", f"{found.wall:,.1f}", "100.0%"]],
        "faults": faults,
    }


def _of_run(number: int, run: LoggedRun) -> list[Any]:
    found = run.goodput
    wall = found.wall or 1.0
    cells = [f"{seconds:,.1f} ({seconds / wall:.1%})" for _, seconds in found.rows()]
    bar = MACROS.stack(found.rows())
    return [MACROS.swatch(number, run), bar, found.starts, f"{found.wall:,.1f}", *cells]


def step_section(runs: list[LoggedRun]) -> dict[str, Any] | None:
    """The parts of the steps that a profile recorded, a row a rank."""
    names = part_names([step for run in runs for step in run.steps])
    rows = []
    for number, run in enumerate(runs):
        for step in mean_steps(run.steps):
            bar = MACROS.stack([(name, step.parts.get(name, 0.0)) for name in names])
            cells = [in_milliseconds(step, name) for name in names]
            row = [f"rank {step.rank}", bar, step.steps, f"{1000 * step.seconds:.1f}", *cells]
            rows.append([MACROS.swatch(number, run), *row] if len(runs) > 1 else row)
    if not rows:
        return None
    heads = ["rank", "", "steps", "ms", *part_heads(names)]
    return {"heads": ["run", *heads] if len(runs) > 1 else heads, "rows": rows}
