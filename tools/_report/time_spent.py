"""Sections of a report about time: the goodput of runs over all their starts, and where the steps
went that a profile recorded.

Called from page.py.
"""

from __future__ import annotations

from megatron.tools._report import goodput_text
from megatron.tools._report.goodput_account import Goodput
from megatron.tools._report.goodput_text import MEANINGS
from megatron.tools._report.markup import escaped, part_colour, sheet, square, stack, swatch
from megatron.tools._report.runs import LoggedRun
from megatron.tools._report.step_parts import in_milliseconds, mean_steps, part_names


def goodput_section(runs: list[LoggedRun]) -> str:
    """Productive time and its losses of the runs whose events are there: of one run a row a cause,
    of several a row a run.
    """
    known = [(number, run) for number, run in enumerate(runs) if run.goodput is not None]
    if not known:
        return ""
    body = _causes(runs[0].goodput) if len(runs) == 1 else _goodputs(known)
    faults = (
        f"<p class=note>{escaped(run.name + ': ') if len(runs) > 1 else ''}{escaped(fault)}.</p>"
        for _, run in known
        if (fault := goodput_text.fault(run.goodput))
    )
    return f"<h2>Goodput</h2>{body}{''.join(faults)}"


def _causes(found: Goodput) -> str:
    rows = [
        [
            f"{square(part_colour(number))}{cause}: {MEANINGS[cause]}",
            f"{seconds:,.1f}",
            f"{seconds / (found.wall or 1.0):.1%}",
        ]
        for number, (cause, seconds) in enumerate(found.rows())
    ]
    rows.append(["wall time", f"{found.wall:,.1f}", "100.0%"])
    headline = escaped(goodput_text.headline(found))
    return (
        f"<p class=note>{headline[0].upper()}{headline[1:]}.</p>"
        f"<div class=bar-of-parts>{stack(found.rows())}</div>"
        + sheet(["cause", "seconds", "share"], rows, numbers=True)
    )


def _goodputs(known: list[tuple[int, LoggedRun]]) -> str:
    rows = []
    for number, run in known:
        found = run.goodput
        wall = found.wall or 1.0
        cells = [f"{seconds:,.1f} ({seconds / wall:.1%})" for _, seconds in found.rows()]
        counts = [f"{found.starts}", f"{found.wall:,.1f}"]
        rows.append([swatch(number, run), stack(found.rows()), *counts, *cells])
    causes = [
        f"{square(part_colour(number))}{cause}, s (share)" for number, cause in enumerate(MEANINGS)
    ]
    return sheet(["run", "", "starts", "wall time, s", *causes], rows, numbers=True)


def step_section(runs: list[LoggedRun]) -> str:
    """The parts of the steps that a profile recorded, a row a rank; for one run without a profile
    how it gets one.
    """
    faults = "".join(
        f"<p class=note>{escaped(run.trace_fault)}</p>" for run in runs if run.trace_fault
    )
    recorded = [(number, run) for number, run in enumerate(runs) if run.steps]
    if not recorded:
        hint = (
            "<p class=note>Where the time of a step went is not recorded: --profile with "
            "--profile-step-start and --profile-step-end records some steps.</p>"
        )
        return faults or (hint if len(runs) == 1 else "")
    names = part_names([step for _, run in recorded for step in run.steps])
    rows = [
        [
            *([swatch(number, run)] if len(runs) > 1 else []),
            f"rank {step.rank}",
            stack([(name, step.parts.get(name, 0.0)) for name in names]),
            f"{step.steps}",
            f"{1000 * step.seconds:.1f}",
            *(in_milliseconds(step, name) for name in names),
        ]
        for number, run in recorded
        for step in mean_steps(run.steps)
    ]
    heads = [f"{square(part_colour(number))}{escaped(name)}" for number, name in enumerate(names)]
    first = ["run"] if len(runs) > 1 else []
    return (
        "<h2>Where the steps went</h2><p class=note>Means over the steps that --profile recorded, "
        "in milliseconds and percent of the step. Recording takes time itself, most of it in "
        f"the part host.</p>{faults}"
        + sheet([*first, "rank", "", "steps", "ms", *heads], rows, numbers=True)
    )
