"""The report page: what its sections hold of the runs; page.html shows them.

Called from tools/report.py. A new section is one more value in `page` and its lines in page.html.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megatron.tools._report import picture
from megatron.tools._report.curves import (
    COLOURS,
    DASHES,
    GIB,
    PREDICTED,
    Chart,
    charts,
    lives,
    table_of_axes,
)
from megatron.tools._report.markup import HERE, MACROS, Markup, render
from megatron.tools._report.metric_names import METRICS
from megatron.tools._report.runs import (
    KINDS,
    RESUMED,
    LoggedRun,
    axes,
    differences,
    flattened,
    last,
    median,
    training_seconds,
)
from megatron.tools._report.time_spent import goodput_section, step_section

from megatron.observe.metrics import Metrics

FLAGS_IN_LEGEND = 3
MOST_EVENTS = 300  # of a run's list of events
MOST_MARKS = 5000  # of a run in its charts
POINTS_OF_AXES = 600
Rows = list[list[Any]]


class Judgement(NamedTuple):
    """Whether a loss is as expected, in a sentence; `kind`: ok, bad, or nothing to mark."""

    is_good: bool
    text: str
    kind: str


def page(
    runs: list[LoggedRun], judged: Judgement | None = None, sections: Sequence[Markup] = ()
) -> str:
    """The HTML text of one run or many, followed by further sections, or of these alone."""
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    common = {"runs": runs, "several": len(runs) > 1, "sections": sections, "style": style}
    if not runs:
        return render("page.html", judged=None, **common)
    return render(
        "page.html",
        **common,
        judged=judged,
        final=final_values(runs),
        figures=figures(runs[0].rows),
        **curves_section(runs),
        predictions=predictions(runs),
        goodput=goodput_section(runs),
        steps=step_section(runs),
        **differences_section(runs),
        **events_section(runs),
        groups=[configuration(run.config or {}) for run in runs],
        units=units(runs),
    )


def run_names(runs: list[LoggedRun]) -> list[Markup]:
    """The name of each run next to its colour."""
    return [MACROS.swatch(number, run) for number, run in enumerate(runs)]


# ---- figures


def figures(rows: list[Metrics]) -> list[tuple[str, str | None]]:
    """(what it is, value) of the final figures of a run; None for what was not logged."""
    peak = [row["mem-max-allocated-bytes"] for row in rows if "mem-max-allocated-bytes" in row]
    seconds = training_seconds(rows)
    found: list[tuple[str, float | None, str]] = [
        ("iterations", rows[-1]["iteration"], "{:,}"),
        ("training loss, last row", last(rows, "lm loss"), "{:.4f}"),
        ("validation loss, last", last(rows, "lm loss validation"), "{:.4f}"),
        ("validation perplexity, last", last(rows, "lm loss validation ppl"), "{:.2f}"),
        ("bits per byte, last", last(rows, "bits-per-byte"), "{:.4f}"),
        ("test loss", last(rows, "lm loss test"), "{:.4f}"),
        ("tokens/s per GPU, median", median(rows, "tokens-per-second-per-gpu"), "{:,.0f}"),
        ("MFU, median", median(rows, "mfu"), "{:.1%}"),
        ("peak memory (GiB)", max(peak) / GIB if peak else None, "{:.2f}"),
        ("restarts", sum(RESUMED in row for row in rows) or None, "{}"),
    ]
    shown = [(label, None if value is None else form.format(value)) for label, value, form in found]
    tokens = last(rows, "consumed-tokens")
    shown.insert(1, ("tokens consumed", None if tokens is None else count(tokens)))
    return [*shown, ("training time", None if seconds is None else duration(seconds[-1]))]


def count(value: float) -> str:
    """12,345,678; from a hundred million on 209.7B."""
    return f"{value:,.0f}" if value < 1e8 else picture.short(value)


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def final_values(runs: list[LoggedRun]) -> dict[str, Any]:
    """A row for each run, and where they end at different iterations the losses at the last one
    that all have reached.
    """
    columns = [dict(figures(run.rows)) for run in runs]
    ends = [run.rows[-1]["iteration"] for run in runs]
    if max(ends) > (common := min(ends)):
        for column, run in zip(columns, runs, strict=True):
            reached = [row for row in run.rows if row["iteration"] <= common]
            for name, label in (("lm loss", "training"), ("lm loss validation", "validation")):
                value = last(reached, name)
                text = None if value is None else f"{value:.4f}"
                column[f"{label} loss at iteration {common:,}"] = text
    labels = [label for label in columns[0] if any(column[label] is not None for column in columns)]
    rows = [
        [name, *(column[label] or "-" for label in labels)]
        for name, column in zip(run_names(runs), columns, strict=True)
    ]
    return {"labels": labels, "rows": rows}


def predictions(runs: list[LoggedRun]) -> Rows:
    """Predicted next to measured step time, of the runs that logged a prediction."""
    rows = []
    names = run_names(runs) if len(runs) > 1 else ["time of an iteration"]
    for name, run in zip(names, runs, strict=True):
        predicted, measured = last(run.rows, PREDICTED), median(run.rows, "iteration-time")
        if predicted is not None and measured is not None:
            error = predicted / measured - 1
            rows.append([name, f"{predicted:.4g} s", f"{measured:.4g} s", f"{error:+.1%}"])
    return rows


def judge(rows: list[Metrics], expected: float, tolerance: float | None) -> Judgement:
    """The last validation loss against an expected one. Without a tolerance any loss that is a
    number is as expected.
    """
    got = last(rows, "lm loss validation")
    if got is None:
        fix = "the run has not been evaluated (see --eval-interval and --eval-iters)"
        return Judgement(False, f"validation loss: expected {expected:.4f}, got none: {fix}", "bad")
    is_good = math.isfinite(got) and (tolerance is None or abs(got - expected) <= tolerance)
    found = f"got {got:.4f} (difference {got - expected:+.4f})"
    if tolerance is None:
        text = f"validation loss: expected {expected:.4f}, {found}"
        return Judgement(is_good, text, "" if is_good else "bad")
    verdict, kind = ("as expected", "ok") if is_good else ("NOT as expected", "bad")
    text = f"validation loss: expected {expected:.4f} ± {tolerance:g}, {found}: {verdict}"
    return Judgement(is_good, text, kind)


# ---- charts


def curves_section(runs: list[LoggedRun]) -> dict[str, Any]:
    """Switches, legend and charts, and what the script draws them from."""
    shown, further = charts(runs)
    strengths, strength = lives(runs)
    differ, life = differences(runs), strengths[strength]
    drawn_from = data(runs, [*shown, *further], strengths, strength)
    text = json.dumps(drawn_from, separators=(",", ":"), allow_nan=False)
    return {
        "axes": drawn_from["axes"],
        "strengths": drawn_from["strengths"],
        "strength": strength,
        "looks": [look(number) for number in range(len(runs))],
        "flags": [legend_flags(differ, number) for number in range(len(runs))],
        "shown": chart_contents(shown, 0, runs, life),
        "absent": [
            f"{chart.title} ({chart.metrics[0][0]} was not logged)"
            for chart in shown
            if not chart.drawn
        ],
        "further": chart_contents(further, len(shown), runs, life),
        "script": Markup((HERE / "page.js").read_text(encoding="utf-8")),
        "data": Markup(text.replace("<", "\\u003c")),  # no end of the script
    }


def strength_text(life: float) -> str:
    """The switch's label of a strength of smoothing."""
    return f"exponential mean, {picture.short(life)} iterations" if life else "none"


def look(run: int) -> tuple[str, str]:
    """Colour and dashes of a run among several."""
    return COLOURS[run % len(COLOURS)], DASHES[run // len(COLOURS) % len(DASHES)]


def legend_flags(differ: list[tuple[str, list[str]]], run: int) -> str:
    """The first flags that the runs differ in, with the values of one."""
    return " ".join(
        f"{name.removeprefix('--')} {values[run]}"
        for name, values in differ[:FLAGS_IN_LEGEND]
        if name.startswith("--") and len(values[run]) <= 40
    )


def chart_contents(
    some: list[Chart], first: int, runs: list[LoggedRun], life: float
) -> list[dict[str, Any]]:
    """The charts that have curves, with their pictures; `first`: the number of the first in the
    data of the script.
    """
    return [
        {
            "number": number,
            "title": chart.title,
            "unit": chart.unit,
            "wide": chart.wide,
            "legend": legend(chart, runs),
            "picture": Markup(picture.svg(chart, runs, life)),
        }
        for number, chart in enumerate(some, first)
        if chart.drawn
    ]


def legend(chart: Chart, runs: list[LoggedRun]) -> list[tuple[Markup, str]]:
    """Samples of what is drawn, and their names."""
    found: list[tuple[Markup, str]] = []
    if len(runs) == 1 and len(chart.drawn) > 1:
        found = [(MACROS.sample(curve.colour, curve.dash), curve.label) for curve in chart.drawn]
    elif any(curve.label == "predicted" for curve in chart.drawn):
        found = [(MACROS.sample(picture.GREY, "2 3"), "predicted")]
    if broken := sum(len(curve.broken) for curve in chart.drawn):
        found.append((MACROS.sign("skipped"), f"NaN or Inf ({broken})"))
    if picture.lanes_of(chart, runs):
        kinds = {mark.kind for run in runs for mark in run.marks if mark.iteration is not None}
        found += [(MACROS.sign(kind), name) for kind, name in KINDS.items() if kind in kinds]
    return found


def data(
    runs: list[LoggedRun], drawn: list[Chart], strengths: list[float], strength: int
) -> dict[str, Any]:
    """What page.js draws from."""
    found = axes(runs)
    return {
        "axes": [label for _, label, _ in found],
        "lives": strengths,
        "strength": strength,
        "strengths": list(map(strength_text, strengths)),
        "layout": picture.LAYOUT,
        "glyphs": picture.GLYPHS,
        "suffixes": picture.SUFFIXES,
        "sparse": picture.SPARSE,
        "broken_colour": picture.BROKEN,
        "runs": [
            {
                "name": run.name,
                "mark_colour": picture.mark_colour(number, runs),
                "x": x_of(run, [columns[number] for _, _, columns in found]),
                "marks": [
                    [mark.kind, mark.iteration, mark.text]
                    for mark in run.marks[:MOST_MARKS]
                    if mark.iteration is not None
                ],
            }
            for number, run in enumerate(runs)
        ],
        "charts": [
            {
                "title": chart.title,
                "wide": chart.wide,
                "lanes": picture.lanes_of(chart, runs),
                "from_zero": chart.from_zero,
                "curves": [
                    vars(curve)
                    | {
                        "points": columns_of(curve.points, 2),
                        "means": columns_of(curve.means, 3) if curve.means else None,
                    }
                    for curve in chart.drawn
                ],
            }
            for chart in drawn
        ],
    }


def x_of(run: LoggedRun, columns: list[list[float]]) -> list[list[float]]:
    return list(map(rounded_all, table_of_axes(columns, run.rows, POINTS_OF_AXES)))


def columns_of(rows: Iterable[tuple[float, ...]], count: int) -> list[list[float]]:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]
    return [columns[0], rounded_all(columns[1]), *columns[2:]]


def rounded_all(values: list[float]) -> list[float]:
    """Seven digits, which no screen resolves."""
    return [value if isinstance(value, int) else float(f"{value:.7g}") for value in values]


# ---- events and configuration


def events_section(runs: list[LoggedRun]) -> dict[str, Any]:
    """How often each thing happened; the template lists them all."""
    counts = [Counter(mark.kind for mark in run.marks) for run in runs]
    kinds = {kind: name for kind, name in KINDS.items() if any(own[kind] for own in counts)}
    rows = [
        [name, *(f"{own[kind]:,}" for kind in kinds)]
        for name, own in zip(run_names(runs), counts, strict=True)
    ]
    summary = ", ".join(f"{name} {counts[0][kind]:,}" for kind, name in kinds.items())
    return {"kinds": kinds, "counts": rows, "summary": summary, "most_events": MOST_EVENTS}


def differences_section(runs: list[LoggedRun]) -> dict[str, Any]:
    """What the configurations of several runs differ in."""
    return {
        "names": run_names(runs),
        "unknown": [run.name for run in runs if run.config is None],
        "differences": [[name, *values] for name, values in differences(runs)],
    }


def configuration(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Everything that metrics.config.json holds of a run, by group."""
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    groups = {name: value for name, value in config.items() if isinstance(value, dict)}
    named_groups = ({"run": plain} if plain else {}) | groups
    return [(title, flattened(values)) for title, values in named_groups.items()]


def units(runs: list[LoggedRun]) -> list[tuple[str, str]]:
    """The logged metrics and their meaning."""
    logged = {name for run in runs for row in run.rows for name in row}
    return [
        (name, f"{unit}: {meaning}" if unit else meaning)
        for name, (unit, meaning) in METRICS.items()
        if name in logged
    ]
