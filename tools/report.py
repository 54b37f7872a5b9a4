"""One page about a run: `python tools/report.py RUN [--output PAGE.html]
[--expected-validation-loss X [--tolerance T]]`.

RUN is a run folder (--save) or a metrics.jsonl file. The page holds plots (loss, learning rate,
gradient norm, throughput, memory), the final figures and the run's configuration; it is one file
without links to others. With an expected loss the command also prints expected and got, and with
--tolerance its exit code is 1 when they are further apart. Exit code 2: nothing to report.
"""

from __future__ import annotations

import argparse
import html
import io
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.input_files import read_json  # noqa: E402
from megatron.observe.metrics import METRICS  # noqa: E402
from megatron.observe.tracking import RESUMED, config_file, metrics_path, read_metrics  # noqa: E402

Row = dict[str, float]
MOST_POINTS = 2000  # of a curve; longer ones keep the lowest and highest point of each stretch
COLOURS = ("#2563eb", "#dc6803", "#0f8a5f", "#9333ea", "#64748b", "#be185d")
GIB = 2**30

STYLE = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
color:#1e293b;background:#f1f5f9;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 12px}
.where{color:#64748b;margin:2px 0 18px;word-break:break-all}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px}
.card,.plot,details,.verdict{background:#fff;border:1px solid #e2e8f0;border-radius:10px}
.card{padding:10px 14px}.card b{display:block;font-size:21px;font-weight:600}
.card span{color:#64748b;font-size:13px}
.verdict{padding:12px 16px;margin:0 0 14px;border-left:6px solid #64748b}
.verdict.ok{border-left-color:#0f8a5f}.verdict.bad{border-left-color:#dc2626}
.plots{display:grid;grid-template-columns:1fr 1fr;gap:14px;margin-top:16px}
.plot{padding:8px}.plot.wide{grid-column:1/-1}
.plot svg{width:100%;height:auto;display:block}.missing{color:#64748b;padding:26px 16px}
details{padding:8px 14px;margin:8px 0}summary{cursor:pointer;font-weight:600}
table{border-collapse:collapse;width:100%;font-size:14px}
td{border-top:1px solid #e2e8f0;padding:3px 8px;vertical-align:top;word-break:break-word}
td:first-child{color:#64748b;width:34%}
@media(max-width:820px){.plots{grid-template-columns:1fr}}
"""


@dataclass(frozen=True)
class Plot:
    """One picture: curves are (metric name, label); values are divided by `scale` for the axis
    label `unit`.
    """

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    hint: str
    scale: float = 1.0
    wide: bool = False
    from_zero: bool = True


def plots(rows: list[Row]) -> list[Plot]:
    """What a page shows; every validation source has its own curve."""
    validation = sorted(
        {
            name
            for row in rows
            for name in row
            if name.startswith("lm loss validation") and " ppl" not in name
        }
    )
    losses = (
        ("lm loss", "training"),
        *((name, name.removeprefix("lm loss ")) for name in validation),
    )
    return [
        Plot(
            "Loss",
            "nats per token",
            losses,
            "the run has not reached its first --log-interval",
            wide=True,
            from_zero=False,
        ),
        Plot(
            "Learning rate",
            "learning rate",
            (
                ("learning-rate", "learning rate"),
                ("decoupled-learning-rate", "of embedding and output layer"),
            ),
            "learning-rate was not logged",
        ),
        Plot(
            "Gradient norm, before clipping",
            "L2 norm",
            (("grad-norm", "gradient norm"),),
            "grad-norm was not logged",
        ),
        Plot(
            "Throughput",
            "tokens/s per GPU (or process)",
            (("tokens-per-second-per-gpu", "throughput"),),
            "tokens-per-second-per-gpu was not logged",
        ),
        Plot(
            "Memory of rank 0",
            "GiB",
            (
                ("mem-max-allocated-bytes", "peak"),
                ("mem-allocated-bytes", "at the log step"),
                ("mem-reserved-bytes", "reserved"),
            ),
            "memory is logged on CUDA devices and on Linux",
            scale=GIB,
        ),
    ]


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of the points: the lowest and the highest of equal stretches, so that no
    spike disappears.
    """
    if len(points) <= MOST_POINTS:
        return points
    stretches = MOST_POINTS // 2
    kept: list[tuple[float, float]] = []
    for k in range(stretches):
        part = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        kept += sorted(
            {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        )
    return kept


def running_mean(points: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Mean of the last `window` values at each point from the window-th on."""
    result, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        if i >= window - 1:
            result.append((x, total / window))
    return result


def draw(plot: Plot, rows: list[Row]) -> Any | None:
    """The matplotlib figure of a plot, None when none of its metrics was logged."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    series = {
        label: [(row["iteration"], row[name] / plot.scale) for row in rows if name in row]
        for name, label in plot.curves
    }
    series = {label: points for label, points in series.items() if points}
    if not series:
        return None
    with matplotlib.rc_context(
        {
            "font.size": 10.5,
            "axes.edgecolor": "#94a3b8",
            "text.color": "#1e293b",
            "axes.labelcolor": "#475569",
        }
    ):
        figure = Figure(figsize=(11.4, 4.3) if plot.wide else (5.6, 3.3), layout="constrained")
        axes = figure.add_subplot()
        for (label, points), colour in zip(series.items(), COLOURS, strict=False):
            finite = [(x, y) for x, y in points if math.isfinite(y)]
            broken = [x for x, y in points if not math.isfinite(y)]
            sparse = len(finite) <= 30
            window = len(finite) // 40
            smooth = plot.title == "Loss" and window >= 3
            axes.plot(
                *zip(*thinned(finite), strict=True) if finite else ((), ()),
                color=colour,
                alpha=0.35 if smooth else 1,
                linewidth=1.1 if smooth else 1.7,
                marker="o" if sparse else None,
                markersize=4,
                label=None if smooth else label,
            )
            if smooth:
                axes.plot(
                    *zip(*thinned(running_mean(finite, window)), strict=True),
                    color=colour,
                    linewidth=1.9,
                    label=f"{label} (line: mean of {window} rows)",
                )
            if broken:
                axes.plot(
                    broken,
                    [0.03] * len(broken),
                    "x",
                    color="#dc2626",
                    transform=axes.get_xaxis_transform(),
                    label=f"{label}: NaN or Inf ({len(broken)})",
                )
        for k, x in enumerate(row[RESUMED] for row in rows if RESUMED in row):
            axes.axvline(
                x,
                color="#475569",
                linestyle=(0, (4, 3)),
                linewidth=1.1,
                label="resumed from a checkpoint" if k == 0 else None,
                zorder=1,
            )
        if plot.from_zero:
            axes.set_ylim(bottom=0)
        axes.set_title(plot.title, loc="left", fontweight="bold", fontsize=12)
        axes.set_xlabel("iteration")
        axes.set_ylabel(plot.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if plot.wide else 6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if plot.title == "Throughput":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False, fontsize=9.5)
    return figure


def svg(figure: Any) -> str:
    """A figure as an <svg> element; the same figure gives the same text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def last(rows: list[Row], name: str) -> float | None:
    """The latest logged value of a metric."""
    return next((row[name] for row in reversed(rows) if name in row), None)


def median(rows: list[Row], name: str) -> float | None:
    """The median of the logged values of a metric."""
    values = [row[name] for row in rows if name in row]
    return statistics.median(values) if values else None


def figures(rows: list[Row]) -> list[tuple[str, str]]:
    """(value, what it is) of the cards at the top; what was not logged is left out."""
    peak = [row["mem-max-allocated-bytes"] for row in rows if "mem-max-allocated-bytes" in row]
    found = [
        (rows[-1]["iteration"], "iterations", "{:,}"),
        (last(rows, "consumed-tokens"), "tokens consumed", "{:,.0f}"),
        (last(rows, "lm loss"), "training loss, last row", "{:.4f}"),
        (last(rows, "lm loss validation"), "validation loss, last", "{:.4f}"),
        (last(rows, "lm loss validation ppl"), "validation perplexity, last", "{:.2f}"),
        (last(rows, "bits-per-byte"), "bits per byte, last", "{:.4f}"),
        (last(rows, "lm loss test"), "test loss", "{:.4f}"),
        (median(rows, "tokens-per-second-per-gpu"), "tokens/s per GPU, median", "{:,.0f}"),
        (median(rows, "mfu"), "MFU, median", "{:.1%}"),
        (max(peak) / GIB if peak else None, "peak memory (GiB)", "{:.2f}"),
        (len([row for row in rows if RESUMED in row]) or None, "resumes", "{}"),
    ]
    return [(form.format(value), label) for value, label, form in found if value is not None]


def verdict(rows: list[Row], expected: float, tolerance: float | None) -> tuple[bool, str]:
    """(as expected?, the sentence that says so). Without a tolerance any loss that is a number is
    as expected.
    """
    got = last(rows, "lm loss validation")
    if got is None:
        return (
            False,
            (
                f"validation loss: expected {expected:.4f}, got none: the run has not been "
                "evaluated (see --eval-interval and --eval-iters)"
            ),
        )
    margin = "" if tolerance is None else f" ± {tolerance:g}"
    ok = math.isfinite(got) and (tolerance is None or abs(got - expected) <= tolerance)
    judgement = "" if tolerance is None else (": as expected" if ok else ": NOT as expected")
    return (
        ok,
        (
            f"validation loss: expected {expected:.4f}{margin}, got {got:.4f} (difference "
            f"{got - expected:+.4f}){judgement}"
        ),
    )


def flattened(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as (dotted name, value) rows."""
    if isinstance(value, dict):
        return [
            row
            for name, item in value.items()
            for row in flattened(item, f"{prefix}.{name}" if prefix else str(name))
        ]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]


def table(rows: list[tuple[str, str]]) -> str:
    return (
        "<table>"
        + "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in rows
        )
        + "</table>"
    )


def page(
    metrics: Path,
    rows: list[Row],
    run_config: dict[str, Any] | None,
    judged: tuple[bool, str] | None,
    judged_strictly: bool,
) -> str:
    """The HTML text."""
    parts = [f"<h1>Training report</h1><p class=where>{html.escape(str(metrics.resolve()))}</p>"]
    if judged is not None:
        kind = ("ok" if judged[0] else "bad") if judged_strictly or not judged[0] else ""
        parts.append(
            f'<p class="verdict {kind}">{html.escape(judged[1][0].upper() + judged[1][1:])}</p>'
        )
    parts.append(
        "<div class=cards>"
        + "".join(
            f"<div class=card><b>{html.escape(value)}</b><span>{label}</span></div>"
            for value, label in figures(rows)
        )
        + "</div>"
    )
    parts.append("<div class=plots>")
    for plot in plots(rows):
        figure = draw(plot, rows)
        content = (
            svg(figure)
            if figure is not None
            else (
                f"<p class=missing><b>{plot.title}</b>: nothing to draw; "
                f"{html.escape(plot.hint)}.</p>"
            )
        )
        parts.append(
            f'<div class="plot{" wide" if plot.wide else ""}" role=img '
            f'aria-label="{plot.title}">{content}</div>'
        )
    parts.append("</div><h2>Run</h2>")
    if run_config is None:
        parts.append(
            f"<p>No {html.escape(config_file(metrics).name)} beside the metrics: the run's "
            "configuration is not known.</p>"
        )
    else:
        plain = {name: value for name, value in run_config.items() if not isinstance(value, dict)}
        groups = {name: value for name, value in run_config.items() if isinstance(value, dict)}
        for title, value in (({"run": plain} if plain else {}) | groups).items():
            parts.append(
                "<details "
                f"open><summary>{html.escape(title)}</summary>{table(flattened(value))}</details>"
            )
    units = [
        (name, f"{unit + ': ' if unit else ''}{meaning}")
        for name, (unit, meaning) in METRICS.items()
        if any(name in row for row in rows)
    ]
    parts.append(
        f"<details><summary>Metrics of this run and their units</summary>{table(units)}</details>"
    )
    body = "\n".join(parts)
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8><meta name=viewport "
        'content="width=device-width, initial-scale=1">'
        "<title>Training "
        f"report</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="run folder or metrics.jsonl")
    parser.add_argument(
        "--output", help="where the page goes (default: report.html beside the metrics)"
    )
    parser.add_argument(
        "--expected-validation-loss", type=float, metavar="X", help="print expected and got"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="exit with 1 when got is further than this from expected (nats per token)",
    )
    arguments = parser.parse_args(argv)
    if arguments.tolerance is not None and arguments.expected_validation_loss is None:
        parser.error("--tolerance needs --expected-validation-loss")
    try:
        metrics = metrics_path(arguments.run)
        rows = read_metrics(metrics)
        if not rows:
            raise UserError(
                f"{metrics}: no rows; the run has not logged anything yet (see --log-interval)"
            )
        described = config_file(metrics)
        run_config = read_json(described) if os.path.lexists(described) else None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    expected = arguments.expected_validation_loss
    judged = None if expected is None else verdict(rows, expected, arguments.tolerance)
    output = Path(arguments.output) if arguments.output else metrics.with_name("report.html")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        page(metrics, rows, run_config, judged, arguments.tolerance is not None), encoding="utf-8"
    )
    print(f"report: {output}")
    if judged is not None:
        print(judged[1])
    return 0 if judged is None or judged[0] else 1


if __name__ == "__main__":
    sys.exit(main())
