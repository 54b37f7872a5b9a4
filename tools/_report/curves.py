"""The curves and charts of a report, made of logged rows: thinned, so that pages stay small, and
without losing a spike.

Called from page.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron.tools._report.metric_names import METRICS
from megatron.tools._report.runs import VALIDATION, LoggedRun, typical_step

from megatron.observe.metrics import Metrics

MOST_POINTS = 1200  # of a curve; longer ones keep the lowest and highest point of each stretch
MOST_POINTS_OF_A_CHART = 6000
FEWEST_POINTS_TO_SMOOTH = 120
GIB = 2**30
# Okabe and Ito's colours that can be distinguished with any colour vision, without the yellow,
# which is too pale for lines on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1e293b")
DASHES = ("", "7 3", "2 3")  # as many runs again as there are colours, each time
PREDICTED = "predicted-iteration-time"

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One metric of one run: `points` are (iteration, value) and finite. Of a thinned curve,
    `means` are the stretches that it was thinned in, as (last iteration, mean, points); else empty.
    `broken` are the iterations at which the value was NaN or infinite.
    """

    run: int
    label: str
    colour: str
    dash: str
    noisy: bool
    points: list[Point]
    means: list[tuple[float, float, int]]
    broken: list[float]


@dataclass(frozen=True)
class Chart:
    """One picture of `metrics`; `drawn` are their curves, none where nothing was logged."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]  # (name, label)
    scale: float = 1.0  # values are divided by it
    wide: bool = False
    lanes: bool = False  # shows the events of each run under its curves
    from_zero: bool = True
    drawn: tuple[Curve, ...] = ()


NOISY = {"lm loss", "grad-norm", "tokens-per-second-per-gpu", "iteration-time"}
_STANDARD = (
    Chart(
        "Learning rate",
        "",
        (
            ("learning-rate", "learning rate"),
            ("decoupled-learning-rate", "of embedding and output layer"),
        ),
    ),
    Chart("Gradient norm before clipping", "L2 norm", (("grad-norm", "gradient norm"),)),
    Chart(
        "Throughput", "tokens/s per GPU or process", (("tokens-per-second-per-gpu", "throughput"),)
    ),
    Chart("Time of an iteration", "s", (("iteration-time", "measured"), (PREDICTED, "predicted"))),
    Chart(
        "Memory of rank 0",
        "GiB",
        (
            ("mem-max-allocated-bytes", "peak"),
            ("mem-allocated-bytes", "at the log step"),
            ("mem-reserved-bytes", "reserved"),
        ),
        scale=GIB,
    ),
)
# shown as axes, events or figures
_NO_CURVE = {"iteration", "timestamp", "consumed_samples", "consumed-tokens", "samples vs steps"}
_NO_CURVE |= {"resumed-from-iteration", "lm loss test", "lm loss test ppl"}


def charts(runs: list[LoggedRun]) -> tuple[list[Chart], list[Chart]]:
    """The charts that everybody looks at, and one for each further metric. Those of which nothing
    was logged have no `drawn` curve in the first list and are left out of the second.

    One run's curves of a chart have a colour each. Of several runs each has a colour, and a chart
    shows one metric of them, but a prediction next to its measurement.
    """
    names = sorted({name for run in runs for row in run.rows for name in row})
    validation = [
        name for name in names if name.startswith(VALIDATION) and not name.startswith(_PERPLEXITY)
    ]
    loss = Chart(
        "Loss",
        "nats per token",
        (("lm loss", "training"), *((name, name.removeprefix("lm loss ")) for name in validation)),
        wide=True,
        lanes=True,
        from_zero=False,
    )
    first = [loss, *_STANDARD] if len(runs) == 1 else _beside_each_other(loss)
    shown = {name for chart in (loss, *_STANDARD) for name, _ in chart.metrics} | _NO_CURVE
    rest = [
        Chart(name, METRICS.get(name, ("", ""))[0], ((name, name),), from_zero=False)
        for name in names
        if name not in shown and not name.startswith(("save-checkpoint-", *_PERPLEXITY))
    ]
    drawn = [_with_curves(chart, runs) for chart in rest]
    return [_with_curves(chart, runs) for chart in first], [one for one in drawn if one.drawn]


def _beside_each_other(loss: Chart) -> list[Chart]:
    """The charts of several runs: each loss by itself, and the first metric of the others."""
    evaluated = [
        replace(
            loss,
            title=f"{label.capitalize()} loss",
            metrics=((name, label),),
            wide=len(loss.metrics) == 2,
            lanes=False,
        )
        for name, label in loss.metrics[1:]
    ]
    standard = [
        chart
        if chart.metrics[1:] == ((PREDICTED, "predicted"),)
        else replace(chart, metrics=chart.metrics[:1])
        for chart in _STANDARD
    ]
    return [replace(loss, title="Training loss", metrics=loss.metrics[:1]), *evaluated, *standard]


_PERPLEXITY = (f"{VALIDATION} ppl", "lm loss test")


def _with_curves(chart: Chart, runs: list[LoggedRun]) -> Chart:
    curves = []
    most = max(100, min(MOST_POINTS, MOST_POINTS_OF_A_CHART // len(runs)))
    for run in range(len(runs)):
        for number, (name, label) in enumerate(chart.metrics):
            logged = [
                (row["iteration"], row[name] / chart.scale) for row in runs[run].rows if name in row
            ]
            finite = [point for point in logged if math.isfinite(point[1])]
            if not logged:
                continue
            colour = run if len(runs) > 1 else number
            curves.append(
                Curve(
                    run=run,
                    label=label,
                    colour=COLOURS[colour % len(COLOURS)],
                    dash="2 3" if name == PREDICTED else DASHES[colour // len(COLOURS) % 3],
                    noisy=name in NOISY,
                    points=thinned(finite, most),
                    means=stretch_means(finite, most) if len(finite) > most else [],
                    broken=[x for x, y in logged if not math.isfinite(y)][:most],
                )
            )
    return replace(chart, drawn=tuple(curves))


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` of the points: the lowest and the highest of equal stretches, so that no spike
    disappears.
    """
    if len(points) <= most:
        return points
    return [
        point
        for part in _stretches(points, most)
        for point in sorted({min(part, key=_value), max(part, key=_value)})
    ]


def stretch_means(points: list[Point], most: int = MOST_POINTS) -> list[tuple[float, float, int]]:
    """(last iteration, mean, number of points) of the stretches of `thinned`."""
    return [
        (part[-1][0], math.fsum(y for _, y in part) / len(part), len(part))
        for part in _stretches(points, most)
    ]


def _stretches(points: list[Point], most: int) -> list[list[Point]]:
    count = most // 2
    cuts = [k * len(points) // count for k in range(count + 1)]
    return [points[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def _value(point: Point) -> float:
    return point[1]


def smoothed(curve: Curve, life: float) -> list[Point]:
    """The exponential mean of a curve: a value d iterations back weighs exp(-d / life), whatever
    the log interval is. The weights of the values so far add up to one, so it has no bias at the
    start.
    """
    values = curve.means or [(x, y, 1) for x, y in curve.points]
    total, weight, before, found = 0.0, 0.0, 0.0, []
    for x, y, count in values:
        kept = math.exp((before - x) / life)
        total, weight, before = total * kept + y * count, weight * kept + count, x
        found.append((x, total / weight))
    return found


def lives(runs: list[LoggedRun]) -> tuple[list[float], int]:
    """The strengths of smoothing to choose from, in iterations, 0 for none, and which of them a
    page opens with: about a fiftieth of the longest run, none for a short one.
    """
    span = max(run.rows[-1]["iteration"] - run.rows[0]["iteration"] for run in runs)
    shortest = 2 * typical_step(runs)
    found = {rounded(span / part) for part in (1000, 500, 200, 100, 50, 20, 10, 5)}
    choices = [0.0, *sorted(life for life in found if life >= shortest)]
    if len(choices) == 1 or max(len(run.rows) for run in runs) < FEWEST_POINTS_TO_SMOOTH:
        return choices, 0
    return choices, min(
        range(1, len(choices)), key=lambda k: abs(math.log(choices[k] / (span / 50)))
    )


def rounded(value: float) -> float:
    """The nearest of 1, 2, 5 x 10^k below or at `value`; 0 for 0."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (5, 2, 1) if digit * power <= value * (1 + 1e-9))


def table_of_axes(
    columns: list[list[float]], rows: list[Metrics], most: int = MOST_POINTS
) -> list[list[float]]:
    """x values on all axes of a run at enough of its rows to interpolate between them: all of a
    short run, else about `most` and both sides of every restart. `columns[0]` are iterations.
    """
    count = len(rows)
    kept = (
        {k * (count - 1) // (most - 1) for k in range(most)} if count > most else set(range(count))
    )
    for k, row in enumerate(rows):
        if "resumed-from-iteration" in row:
            kept |= {k, max(0, k - 1)}
    return [[column[k] for k in sorted(kept)] for column in columns]
