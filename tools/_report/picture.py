"""The picture of a chart as SVG, over iterations, as it is before anybody switches anything.

`page.js` draws the same again in a browser, and anew for another axis, scale or smoothing; a
test holds the two to each other. Called from page.py.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from megatron.tools._report.curves import COLOURS, Chart, Curve, Point, smoothed
from megatron.tools._report.runs import LoggedRun

# pixels; page.js reads these
LAYOUT = {
    "left": 54,
    "right": 14,
    "top": 12,
    "bottom": 40,
    "lane": 13,
    "wide": 1122,
    "narrow": 545,
    "tall": 380,
    "low": 260,
    "most_lanes": 7,
    "apart": 11,  # events of one kind; closer ones would be a blot
}
SPARSE = 40  # curves of fewer points show each
SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
# of events, around (0, 0), but for restarts, which are dashed lines; page.js reads these
GLYPHS = {
    "checkpoint": "m-3.5,-3.5h7v7h-7z",
    "evaluation": "m-3.5,0a3.5,3.5 0 1 0 7,0a3.5,3.5 0 1 0 -7,0z",
    "skipped": "m-4,-4l8,8m-8,0l8,-8",
    "other": "m-4,0h8m-4,-4v8",
}
GREY = "#475569"
BROKEN = "#b91c1c"


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round values from `low` to `high`, about `most` or fewer; `whole` asks for whole numbers."""
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if raw <= digit * power * (1 + 1e-9))
    if whole:
        step = max(1.0, step)
    return [
        k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def short(value: float) -> str:
    """A number as ticks show it: 0.002, 4e-5, 500, 12.5k, 3M."""
    size = abs(value)
    if size < 1e-14:
        return "0"
    if size >= 1e4:
        unit, suffix = next((unit, suffix) for unit, suffix in SUFFIXES if size >= unit)
        return f"{value / unit:.4g}{suffix}"
    if size < 1e-3:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def spread(values: list[float], from_zero: bool) -> tuple[float, float]:
    """The lowest and the highest value that a chart of these has room for."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room


def span(runs: list[LoggedRun]) -> tuple[float, float]:
    """First and last iteration of all runs, never equal."""
    first = min(run.rows[0]["iteration"] for run in runs)
    final = max(run.rows[-1]["iteration"] for run in runs)
    return first, final if final > first else first + 1


def line(points: list[Point], x: Scale, y: Scale) -> str:
    """The `d` of a path through points."""
    return "M" + "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points) if points else ""


def lanes_of(chart: Chart, runs: list[LoggedRun]) -> int:
    """Rows of event glyphs under the curves: one a run, none when there are too many."""
    return len(runs) if chart.lanes and len(runs) <= LAYOUT["most_lanes"] else 0


def svg(chart: Chart, runs: list[LoggedRun], life: float) -> str:
    """The picture of a chart that has curves."""
    width = LAYOUT["wide" if chart.wide else "narrow"]
    lanes = lanes_of(chart, runs) * LAYOUT["lane"]
    height = LAYOUT["tall" if chart.wide else "low"] + lanes
    left, right = LAYOUT["left"], width - LAYOUT["right"]
    top, bottom = LAYOUT["top"], height - LAYOUT["bottom"] - lanes
    x = Scale(*span(runs), left, right)
    values = [value for curve in chart.drawn for _, value in curve.points]
    y = Scale(*spread(values, chart.from_zero), bottom, top)
    parts = [*_frame(x, y, lanes, height), *_events(chart, runs, x, top, bottom)]
    for curve in chart.drawn:
        parts += _lines(curve, x, y, life)
    return (
        f'<svg class=picture viewBox="0 0 {width} {height}" role=img '
        f'aria-label="{html.escape(chart.title)}">{"".join(parts)}</svg>'
    )


def _frame(x: Scale, y: Scale, lanes: int, height: int) -> list[str]:
    """Grid, ticks and axes."""
    left, right, top, bottom = x.start, x.end, y.end, y.start
    parts = [
        f'<path class=grid d="M{left},{y(v):.1f}H{right}"/>'
        f'<text x="{left - 7}" y="{y(v) + 4:.1f}" text-anchor=end>{short(v)}</text>'
        for v in ticks(y.low, y.high, int(bottom - top) // 36)
    ]
    parts += [
        f'<path class=tick d="M{x(v):.1f},{bottom + lanes}v5"/>'
        f'<text x="{x(v):.1f}" y="{bottom + lanes + 18}" text-anchor=middle>{short(v)}</text>'
        for v in ticks(x.low, x.high, int(right - left) // 90, whole=True)
    ]
    return [
        *parts,
        f'<text class=axis x="{right}" y="{height - 5}" text-anchor=end>iteration</text>'
        f'<path class=frame d="M{left},{top}V{bottom + lanes}H{right}"/>',
    ]


def _lines(curve: Curve, x: Scale, y: Scale, life: float) -> list[str]:
    """A curve, its exponential mean or else the dots of a sparse one, and crosses for NaN."""
    smooth = life > 0 and curve.noisy
    style = f'stroke="{curve.colour}" stroke-dasharray="{curve.dash}"'
    faint = " faint" if smooth else ""
    parts = [f'<path class="curve{faint}" {style} d="{line(curve.points, x, y)}"/>']
    if smooth:
        mean = line(smoothed(curve, life), x, y)
        parts.append(f'<path class="curve smooth" {style} d="{mean}"/>')
    elif len(curve.points) <= SPARSE:
        dots = "".join(f"M{x(a):.1f},{y(b):.1f}h0" for a, b in curve.points)
        parts.append(f'<path class=dots stroke="{curve.colour}" d="{dots}"/>')
    if curve.broken:
        height = y.start - 8
        crosses = "".join(f"M{x(a):.1f},{height}{GLYPHS['skipped']}" for a in curve.broken)
        parts.append(f'<path class=broken stroke="{BROKEN}" d="{crosses}"/>')
    return parts


def _events(chart: Chart, runs: list[LoggedRun], x: Scale, top: float, bottom: float) -> list[str]:
    """Dashed lines at restarts, and a glyph for each event where a chart has lanes for them."""
    parts = []
    lanes = lanes_of(chart, runs)
    for number, run in enumerate(runs):
        colour = mark_colour(number, runs)
        at = [
            (mark.kind, x(mark.iteration))
            for mark in run.marks
            if mark.iteration is not None and x.low <= mark.iteration <= x.high
        ]
        restarts = "".join(f"M{a:.1f},{top}V{bottom}" for kind, a in at if kind == "restart")
        if restarts:
            parts.append(f'<path class=restart stroke="{colour}" d="{restarts}"/>')
        if not lanes:
            continue
        middle = bottom + (number + 0.5) * LAYOUT["lane"]
        for wanted, glyph in GLYPHS.items():
            d, before = "", -math.inf
            for kind, a in at:
                if kind == wanted and a - before >= LAYOUT["apart"]:
                    d, before = f"{d}M{a:.1f},{middle:g}{glyph}", a
            if d:
                parts.append(f'<path class="mark {wanted}" stroke="{colour}" d="{d}"/>')
    return parts


def mark_colour(number: int, runs: list[LoggedRun]) -> str:
    """The colour of a run's events: its own next to other runs, grey when it is alone."""
    return COLOURS[number % len(COLOURS)] if len(runs) > 1 else GREY
