"""The report page: sections one below the other, each a function of the runs that returns HTML.

Called from tools/report.py. A new section is one more function in `page`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
from megatron.tools._report.markup import escaped, pairs, sheet, swatch
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

HERE = Path(__file__).parent
FLAGS_IN_LEGEND = 3
MOST_EVENTS = 300  # of a run's list of events
POINTS_OF_AXES = 600
RESTART = 'class=restart d="M6,-1V13"'

Judged = tuple[bool, str]


def page(
    runs: list[LoggedRun],
    judged: Judged | None = None,
    judged_strictly: bool = False,
    further_sections: Sequence[str] = (),
) -> str:
    """The HTML text of one run or many, or of `further_sections` alone. `judged` is whether the
    loss is as expected and that sentence, of the first run; it is marked as good only
    if `judged_strictly`.
    """
    if not runs:
        return document(["<h1>Study report</h1>", *further_sections])
    shown, further = charts(runs)
    strengths, strength = lives(runs)
    several = len(runs) > 1
    parts = [heading(runs)]
    if judged is not None:
        kind = ("ok" if judged[0] else "bad") if judged_strictly or not judged[0] else ""
        parts.append(
            f'<p class="verdict {kind}">{escaped(judged[1][0].upper() + judged[1][1:])}</p>'
        )
    parts.append(final_values(runs) if several else cards(runs[0].rows))
    parts.append(switches(runs, len(strengths), strengths[strength], strength))
    parts.append(picture_section(shown, further, runs, strengths[strength]))
    parts += [prediction(runs), goodput_section(runs), step_section(runs), *further_sections]
    parts += [differences_section(runs), events(runs)]
    parts += ["<h2>Configuration</h2>", *(configuration(run, several) for run in runs)]
    parts.append(units(runs))
    return document(parts, data(runs, [*shown, *further], strengths, strength))


def document(parts: Iterable[str], content: dict[str, Any] | None = None) -> str:
    """A page with nothing outside of it: style, and `content` with the script that draws it."""
    drawn = ""
    if content is not None:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        drawn = (
            "<script type=application/json id=data>" + text.replace("<", "\\u003c") + "</script>"
            f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>"
        )
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8><meta name=viewport "
        'content="width=device-width, initial-scale=1"><title>Training report</title>'
        f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head><body><main>"
        + "\n".join(part for part in parts if part)
        + f"</main>{drawn}</body></html>\n"
    )


def heading(runs: list[LoggedRun]) -> str:
    if len(runs) == 1:
        return f"<h1>Training report</h1><p class=path>{escaped(runs[0].metrics)}</p>"
    return f"<h1>Training report: {len(runs)} runs</h1>"


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


def cards(rows: list[Metrics]) -> str:
    return (
        "<div class=cards>"
        + "".join(
            f"<div class=card><b>{value}</b><span>{label}</span></div>"
            for label, value in figures(rows)
            if value is not None
        )
        + "</div>"
    )


def final_values(runs: list[LoggedRun]) -> str:
    """A row for each run, and where they end at different iterations the losses at the last one
    that all have reached.
    """
    columns = [dict(figures(run.rows)) for run in runs]
    common = min(run.rows[-1]["iteration"] for run in runs)
    if any(run.rows[-1]["iteration"] > common for run in runs):
        for column, run in zip(columns, runs, strict=True):
            reached = [row for row in run.rows if row["iteration"] <= common]
            for name, label in (("lm loss", "training"), ("lm loss validation", "validation")):
                value = last(reached, name)
                column[f"{label} loss at iteration {common:,}"] = (
                    None if value is None else f"{value:.4f}"
                )
    labels = [label for label in columns[0] if any(column[label] is not None for column in columns)]
    rows = [
        [swatch(number, run), *(escaped(column[label] or "-") for label in labels)]
        for number, (run, column) in enumerate(zip(runs, columns, strict=True))
    ]
    return "<h2>Final values</h2>" + sheet(["run", *labels], rows, numbers=True)


def prediction(runs: list[LoggedRun]) -> str:
    """Predicted next to measured step time, of the runs that logged a prediction."""
    rows = []
    for number, run in enumerate(runs):
        predicted, measured = last(run.rows, PREDICTED), median(run.rows, "iteration-time")
        if predicted is None or measured is None:
            continue
        rows.append(
            [
                swatch(number, run) if len(runs) > 1 else "time of an iteration",
                f"{predicted:.4g} s",
                f"{measured:.4g} s",
                f"{predicted / measured - 1:+.1%}",
            ]
        )
    if not rows:
        return ""
    names = ["", "predicted", "measured, median", "error of the prediction"]
    return "<h2>Prediction and measurement</h2>" + sheet(names, rows, numbers=True)


def differences_section(runs: list[LoggedRun]) -> str:
    """What the configurations of several runs differ in."""
    if len(runs) < 2:
        return ""
    unknown = [run.name for run in runs if run.config is None]
    note = (
        f"<p class=note>The configuration of {escaped(', '.join(unknown))} is not known: there is "
        "no metrics.config.json next to its metrics.</p>"
        if unknown
        else ""
    )
    found = differences(runs)
    if not found:
        text = "" if unknown else "<p class=note>The configurations do not differ.</p>"
        return f"<h2>Configuration differences</h2>{note}{text}"
    rows = [[escaped(name), *map(escaped, values)] for name, values in found]
    heads = ["flag", *(swatch(number, run) for number, run in enumerate(runs))]
    return f"<h2>Configuration differences</h2>{note}" + sheet(heads, rows)


# ---- charts


def switches(runs: list[LoggedRun], choices: int, life: float, strength: int) -> str:
    """Axis, scale and smoothing, which need the script, and of several runs the legend."""
    options = "".join(
        f"<option value={number}>{escaped(label)}</option>"
        for number, (_, label, _) in enumerate(axes(runs))
    )
    text = strength_text(life)
    smoothing = (
        f"<label{' hidden' if choices == 1 else ''}>smoothing <input type=range id=smoothing min=0 "
        f"max={choices - 1} value={strength}><output id=strength>{text}</output></label>"
    )
    bar = (
        f"<div class=switches hidden><label>x axis <select id=axis>{options}</select></label>"
        "<label><input type=checkbox id=log> logarithmic y</label>"
        f"{smoothing}<button id=whole hidden>show all again</button></div>"
    )
    legend = ""
    if len(runs) > 1:
        found = differences(runs)
        flags = [
            " ".join(
                f"{name.removeprefix('--')} {values[number]}"
                for name, values in found[:FLAGS_IN_LEGEND]
                if name.startswith("--") and len(values[number]) <= 40
            )
            for number in range(len(runs))
        ]
        legend = (
            "<div class=runs>"
            + "".join(
                f"<label><input type=checkbox class=switches hidden checked data-run={number}>"
                f"{sample(*look(number))}<span>{escaped(run.name)} "
                f"<small>{escaped(flags[number])}</small></span></label>"
                for number, run in enumerate(runs)
            )
            + "</div>"
        )
    return f"<h2>Curves</h2><div class=bar>{bar}{legend}</div>"


def strength_text(life: float) -> str:
    """The switch's label of a strength of smoothing."""
    return f"exponential mean, {picture.short(life)} iterations" if life else "none"


def look(run: int) -> tuple[str, str]:
    """Colour and dashes of a run among several."""
    return COLOURS[run % len(COLOURS)], DASHES[run // len(COLOURS) % len(DASHES)]


def sample(colour: str, dash: str) -> str:
    """A piece of a line, for legends."""
    return (
        f'<svg width=22 height=8><path class=curve stroke="{colour}" stroke-dasharray="{dash}" '
        'd="M0,4H22"/></svg>'
    )


def picture_section(
    shown: list[Chart], further: list[Chart], runs: list[LoggedRun], life: float
) -> str:
    present = [chart for chart in shown if chart.drawn]
    absent = [chart for chart in shown if not chart.drawn]
    number = {id(chart): k for k, chart in enumerate([*shown, *further])}

    def grid(some: list[Chart]) -> str:
        return (
            "<div class=charts>"
            + "".join(chart_figure(chart, number[id(chart)], runs, life) for chart in some)
            + "</div>"
        )

    parts = [grid(present)]
    if absent:
        names = "; ".join(
            f"{chart.title} ({' and '.join(name for name, _ in chart.metrics[:1])} was not logged)"
            for chart in absent
        )
        parts.append(f"<p class=note>Nothing to draw of: {escaped(names)}.</p>")
    if further:
        parts.append(
            f"<details><summary>Further metrics ({len(further)})</summary>{grid(further)}</details>"
        )
    return "".join(parts)


def chart_figure(chart: Chart, number: int, runs: list[LoggedRun], life: float) -> str:
    unit = f" <span class=unit>{escaped(chart.unit)}</span>" if chart.unit else ""
    legend = []
    if len(runs) == 1 and len(chart.drawn) > 1:
        legend = [sample(curve.colour, curve.dash) + escaped(curve.label) for curve in chart.drawn]
    elif any(curve.dash == "2 3" and curve.label == "predicted" for curve in chart.drawn):
        legend = [sample(picture.GREY, "2 3") + "predicted"]
    if broken := sum(len(curve.broken) for curve in chart.drawn):
        legend.append(sign("skipped") + f"NaN or Inf ({broken})")
    if picture.lanes_of(chart, runs):
        kinds = Counter(
            mark.kind for run in runs for mark in run.marks if mark.iteration is not None
        )
        legend += [sign(kind) + name for kind, name in KINDS.items() if kinds[kind]]
    keys = "".join(f"<span>{entry}</span>" for entry in legend)
    return (
        f"<figure{' class=wide' if chart.wide else ''} data-chart={number}><figcaption>"
        f"<b>{escaped(chart.title)}</b>{unit}"
        + (f"<div class=legend>{keys}</div>" if keys else "")
        + f"</figcaption>{picture.svg(chart, runs, life)}<div class=tip hidden></div></figure>"
    )


def sign(kind: str) -> str:
    """The sign of a kind of event, for legends."""
    colour = picture.BROKEN if kind == "skipped" else picture.GREY
    drawn = f'class=mark d="M6,6{picture.GLYPHS[kind]}"' if kind in picture.GLYPHS else RESTART
    return f'<svg width=12 height=12><path stroke="{colour}" {drawn}/></svg>'


def data(
    runs: list[LoggedRun], drawn: list[Chart], strengths: list[float], strength: int
) -> dict[str, Any]:
    """What page.js draws from."""
    found = axes(runs)
    return {
        "axes": [label for _, label, _ in found],
        "lives": strengths,
        "strength": strength,
        "strengths": [strength_text(life) for life in strengths],
        "layout": picture.LAYOUT,
        "glyphs": picture.GLYPHS,
        "suffixes": picture.SUFFIXES,
        "sparse": picture.SPARSE,
        "broken_colour": picture.BROKEN,
        "runs": [
            {
                "name": run.name,
                "mark_colour": picture.mark_colour(number, runs),
                "x": [
                    rounded_all(column)
                    for column in table_of_axes(
                        [columns[number] for _, _, columns in found], run.rows, POINTS_OF_AXES
                    )
                ],
                "marks": [
                    [mark.kind, mark.iteration, mark.text]
                    for mark in run.marks[:5000]
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
                    {
                        "run": curve.run,
                        "label": curve.label,
                        "colour": curve.colour,
                        "dash": curve.dash,
                        "noisy": curve.noisy,
                        "points": columns_of(curve.points, 2),
                        "means": columns_of(curve.means, 3) if curve.means else None,
                        "broken": curve.broken,
                    }
                    for curve in chart.drawn
                ],
            }
            for chart in drawn
        ],
    }


def columns_of(rows: Iterable[tuple[float, ...]], count: int) -> list[list[float]]:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]
    return [columns[0], rounded_all(columns[1]), *columns[2:]]


def rounded_all(values: list[float]) -> list[float]:
    """Seven digits, which no screen resolves."""
    return [value if isinstance(value, int) else float(f"{value:.7g}") for value in values]


# ---- events and configuration


def events(runs: list[LoggedRun]) -> str:
    """How often each thing happened, and a list of all."""
    kinds = [kind for kind in KINDS if any(mark.kind == kind for run in runs for mark in run.marks)]
    if not kinds:
        return ""
    rows = []
    for number, run in enumerate(runs):
        counts = Counter(mark.kind for mark in run.marks)
        rows.append([swatch(number, run), *(f"{counts[kind]:,}" for kind in kinds)])
    several = len(runs) > 1
    table = sheet(["run", *(KINDS[kind] for kind in kinds)], rows, numbers=True) if several else ""
    lists = (listed(run, several) for run in runs if run.marks)
    return f"<h2>Events</h2>{table}{''.join(lists)}"


def listed(run: LoggedRun, several: bool) -> str:
    """The events of a run in their order."""
    counts = Counter(mark.kind for mark in run.marks)
    summary = ", ".join(f"{KINDS[kind]} {counts[kind]:,}" for kind in KINDS if counts[kind])
    rows = [
        ("" if mark.iteration is None else f"iteration {mark.iteration:,}", mark.text)
        for mark in run.marks[:MOST_EVENTS]
    ]
    left = f"<p class=note>The first {MOST_EVENTS} of {len(run.marks):,}.</p>"
    return (
        f"<details><summary>{escaped(run.name) if several else summary}</summary>{pairs(rows)}"
        f"{left if len(run.marks) > MOST_EVENTS else ''}</details>"
    )


def configuration(run: LoggedRun, several: bool) -> str:
    """Everything that metrics.config.json holds of a run."""
    if run.config is None:
        return (
            f"<p class=note>No metrics.config.json next to {escaped(run.metrics)}: the run's "
            "configuration is not known.</p>"
        )
    plain = {name: value for name, value in run.config.items() if not isinstance(value, dict)}
    groups = {name: value for name, value in run.config.items() if isinstance(value, dict)}
    inner = "".join(
        f"<details><summary>{escaped(title)}</summary>{pairs(flattened(value))}</details>"
        for title, value in (({"run": plain} if plain else {}) | groups).items()
    )
    if not several:
        return inner
    return f"<details><summary>{escaped(run.name)}</summary>{inner}</details>"


def units(runs: list[LoggedRun]) -> str:
    logged = {name for run in runs for row in run.rows for name in row}
    rows = [
        (name, f"{unit + ': ' if unit else ''}{meaning}")
        for name, (unit, meaning) in METRICS.items()
        if name in logged
    ]
    return f"<details><summary>Metrics and their units</summary>{pairs(rows)}</details>"


def verdict(rows: list[Metrics], expected: float, tolerance: float | None) -> Judged:
    """(as expected?, that sentence). Without a tolerance any loss that is a number is
    as expected.
    """
    got = last(rows, "lm loss validation")
    if got is None:
        return (
            False,
            f"validation loss: expected {expected:.4f}, got none: the run has not been evaluated "
            "(see --eval-interval and --eval-iters)",
        )
    margin = "" if tolerance is None else f" ± {tolerance:g}"
    ok = math.isfinite(got) and (tolerance is None or abs(got - expected) <= tolerance)
    judgement = "" if tolerance is None else (": as expected" if ok else ": NOT as expected")
    return (
        ok,
        f"validation loss: expected {expected:.4f}{margin}, got {got:.4f} (difference "
        f"{got - expected:+.4f}){judgement}",
    )
