"""Draw the time line of a pipeline schedule, simulated and measured on one scale, or compare all
schedules.

python tools/plot_schedule.py --schedule 1f1b --ranks 4 --micro-batches 8 --out FILE.svg   simulated
python tools/plot_schedule.py --measured TIMELINE.json --out FILE.svg      a step that
--pipeline-timeline kept, below its simulation
python tools/plot_schedule.py --table --ranks 8 --micro-batches 16         figures of all schedules,
as a markdown table

Prints bubble, idle time and peak activations. --costs are those of forward pass, input gradient and
weight gradient of one micro-batch on one rank, in any unit; without them they are 1, or with
--measured in seconds each stage's medians. Exit code: 0, or 2 when there is nothing to draw.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.config.errors import UserError  # noqa: E402
from megatron.parallel.schedule import BUILDERS, Action, Kind, Schedule, build_schedule
from megatron.parallel.simulate import Costs, peak_activations, simulate  # noqa: E402
from megatron.parallel.timeline import Timeline  # noqa: E402

WIDTH, LEFT, RIGHT, ROW, GAP = 1000, 58, 12, 20, 4  # pixels
MOST_NUMBERS = 700  # spans of a picture in which micro-batches are numbered
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
COLOURS = {  # of a rank's even and odd stages
    Kind.FORWARD: ("#4f86c6", "#9fc1e6"),
    Kind.BACKWARD: ("#3f9c6d", "#98d0b2"),
    Kind.BACKWARD_INPUT: ("#3f9c6d", "#98d0b2"),
    Kind.BACKWARD_WEIGHT: ("#dd8a3d", "#f2c396"),
}
Panel = tuple[str, Timeline]  # title


def measured_costs(line: Timeline, message: float, latency: float) -> Costs:
    """The median of each stage's computations; a whole backward pass counts as input gradient."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for row in line.rows:
        for kind, stage, _, begin, end in row:
            found.setdefault(
                (Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind, stage), []
            ).append(end - begin)
    stages = range(len(line.placement))
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return Costs(
        *(
            tuple(statistics.median(found.get((kind, stage), [0.0])) for stage in stages)
            for kind in kinds
        ),
        message,
        latency,
    )


def schedule_of(line: Timeline) -> Schedule:
    """The computations of a time line as a schedule without messages."""
    return Schedule(
        line.schedule,
        line.placement,
        line.micro_batches,
        tuple(tuple(Action(*span[:3]) for span in row) for row in line.rows),
    )


def figures(line: Timeline) -> dict[str, float]:
    """What a time line comes to; activations in micro-batches on a whole rank, of the rank that
    holds most.
    """
    ranks = range(len(line.rows))
    return {
        "time": line.end - line.begin,
        "bubble": line.bubble,
        "idle": statistics.fmean(map(line.idle, ranks)),
        "idle inside": statistics.fmean(map(line.idle_inside, ranks)),
        "peak activations": max(peak_activations(schedule_of(line))),
    }


def table(rows: list[Panel], unit: str) -> str:
    """Figures as a markdown table; idle times are the mean of the ranks."""
    text = [
        f"| | {unit} | bubble | idle a rank | of it inside | peak activations |",
        "|---|---|---|---|---|---|",
    ]
    for title, line in rows:
        found = figures(line)
        times = [f"{found[name]:.4g}" for name in ("idle", "idle inside", "peak activations")]
        text.append(
            f"| {title} | {found['time']:.4g} | {100 * found['bubble']:.1f}% | "
            f"{' | '.join(times)} |"
        )
    return "\n".join(text)


def all_schedules(
    ranks: int,
    virtual: int,
    micro_batches: int,
    costs: tuple[float, ...],
    message: float,
    latency: float,
) -> list[Panel]:
    """Every schedule, simulated; interleaved with `virtual` stages a rank."""
    lines = []
    for name in BUILDERS:
        stages = {"interleaved": virtual, "zero-bubble-v": 2}.get(name, 1)
        schedule = build_schedule(name, ranks, stages, micro_batches)
        title = f"{name}, {stages} stages a rank" if name == "interleaved" else name
        lines.append(
            (
                title,
                simulate(schedule, Costs.even(schedule, *costs, message=message, latency=latency)),
            )
        )
    return lines


def round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for at most about 12 marks."""
    power = 10.0 ** math.floor(math.log10(span / 12))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 12)


def draw(panels: list[Panel], unit: str) -> str:
    """An SVG with one panel below the other, all on the time scale of the longest; grey is idle."""
    longest = max(line.end - line.begin for _, line in panels) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    numbered = sum(len(row) for _, line in panels for row in line.rows) <= MOST_NUMBERS
    parts, y = [], 8
    for title, line in panels:
        y += 18
        found = figures(line)
        summary = (
            f"bubble {100 * found['bubble']:.1f}%, peak activations {found['peak activations']:.4g}"
        )
        parts.append(
            f'<text x="{LEFT}" y="{y - 5}" font-size="13" '
            f'font-weight="bold">{_escape(title)}</text>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{y - 5}" text-anchor="end">{summary}</text>')
        parts += _rows(line, y, scale, numbered)
        y += len(line.rows) * (ROW + GAP) + 6
    parts += _axis(y, longest, scale, unit)
    y += 40
    parts += _legend([line for _, line in panels], y)
    y += 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>', *parts, "</svg>", ""]
    )


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _turn(line: Timeline, stage: int) -> int:
    """0 for a rank's even stages, 1 for its odd ones."""
    return line.placement[:stage].count(line.placement[stage]) % 2


def _rows(line: Timeline, top: float, scale: float, numbered: bool) -> list[str]:
    """One row a rank: boxes of one colour are one path; a number is the micro-batch."""
    width = _number((line.end - line.begin) * scale)
    boxes: dict[str, list[str]] = {}
    texts, rows = [], []
    colours = {
        (kind, stage): COLOURS[kind][_turn(line, stage)]
        for kind in COLOURS
        for stage in range(len(line.placement))
    }
    for rank, row in enumerate(line.rows):
        y = top + rank * (ROW + GAP)
        rows.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">rank {rank}</text>')
        rows.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW}" fill="#e8eaed"/>')
        for kind, stage, micro, begin, end in row:
            x, length = LEFT + (begin - line.begin) * scale, (end - begin) * scale
            boxes.setdefault(colours[kind, stage], []).append(
                f"M{_number(x)} {y}h{_number(length)}v{ROW}h-{_number(length)}z"
            )
            if numbered and length >= 5.6 * len(str(micro)) + 1:
                texts.append(f'<text x="{_number(x + length / 2)}" y="{y + 14}">{micro}</text>')
    rows += [
        f'<path fill="{colour}" stroke="#fff" stroke-width=".6" d="{"".join(paths)}"/>'
        for colour, paths in boxes.items()
    ]
    return [*rows, '<g text-anchor="middle" font-size="10">', *texts, "</g>"]


def _axis(y: float, longest: float, scale: float, unit: str) -> list[str]:
    step = round_step(longest)
    marks = [step * i for i in range(int(longest / step * (1 + 1e-9)) + 1)]
    factor, unit = (1000.0, "ms") if unit == "s" and longest < 10 else (1.0, unit)
    texts = [
        f'<text x="{_number(LEFT + mark * scale)}" y="{y + 16}">{mark * factor:.6g}</text>'
        for mark in marks
    ]
    ticks = "".join(f"M{_number(LEFT + mark * scale)} {y}v4" for mark in marks)
    return [
        f'<path stroke="#555" fill="none" d="M{LEFT} {y}h{_number(longest * scale)}{ticks}"/>',
        '<g text-anchor="middle">',
        *texts,
        "</g>",
        f'<text x="{LEFT - 6}" y="{y + 16}" text-anchor="end">{_escape(unit)}</text>',
    ]


def _legend(lines: list[Timeline], y: float) -> list[str]:
    stages = {(span.kind, span.stage) for line in lines for row in line.rows for span in row}
    used = {(kind, _turn(lines[0], stage)) for kind, stage in stages}
    second = (
        " (every second stage)"
        if len(lines[0].placement) > 2 * len(lines[0].rows)
        else " (second stage)"
    )
    entries = [
        (COLOURS[kind][turn], NAMES[kind] + second * turn)
        for kind in NAMES
        for turn in (0, 1)
        if (kind, turn) in used
    ]
    parts, x = [], float(LEFT)
    for colour, text in [*entries, ("#e8eaed", "idle")]:
        parts.append(f'<rect x="{_number(x)}" y="{y - 9}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{_number(x + 15)}" y="{y}" font-size="10">{text}</text>')
        x += 26 + 5.4 * len(text)
    return parts


def write(svg: str, path: Path) -> None:
    """As SVG, or with cairosvg as PNG, by the file's name. Raises UserError for another name, and
    for PNG without cairosvg.
    """
    if path.suffix == ".svg":
        path.write_text(svg)
    elif path.suffix == ".png":
        try:
            import cairosvg
        except ImportError:
            raise UserError(
                f"{path}: PNG needs cairosvg (pip install cairosvg); or write "
                f"{path.with_suffix('.svg')}"
            ) from None
        cairosvg.svg2png(bytestring=svg.encode(), write_to=str(path), scale=2)
    else:
        raise UserError(f"--out {path}: must end in .svg or .png")


def chrome_trace(panels: list[Panel]) -> str:
    """All panels as one Chrome trace, for ui.perfetto.dev: a process a rank, one panel's behind
    the other's.
    """
    events: list[dict[str, Any]] = []
    first = 0
    for title, line in panels:
        events += line.chrome_events(title.partition(":")[0] if len(panels) > 1 else "", first)
        first += len(line.rows)
    return json.dumps({"traceEvents": events})


def panels_of(arguments: argparse.Namespace) -> tuple[list[Panel], str]:
    """What to draw, and the unit of its times. Raises UserError."""
    given = {
        "schedule": arguments.schedule,
        "ranks": arguments.ranks,
        "micro-batches": arguments.micro_batches,
    }
    measured = None
    if arguments.measured:
        measured = Timeline.from_json(Path(arguments.measured).read_text())
        found = {
            "schedule": measured.schedule,
            "ranks": len(measured.rows),
            "micro-batches": measured.micro_batches,
        }
        if measured.schedule not in BUILDERS:
            raise UserError(
                f"{arguments.measured}: schedule {measured.schedule} is not one of "
                f"{', '.join(BUILDERS)}"
            )
        for flag, value in given.items():
            if value not in (None, found[flag]):
                raise UserError(
                    f"--{flag} {value}: {arguments.measured} has {found[flag]}; leave the flag out"
                )
        given = found
    if missing := [f"--{flag}" for flag, value in given.items() if value is None]:
        raise UserError(f"needs {', '.join(missing)}, or --measured FILE")
    name = given["schedule"]
    virtual = {"interleaved": arguments.virtual, "zero-bubble-v": 2}.get(name, 1)
    if measured:
        virtual = len(measured.placement) // len(measured.rows)
    schedule = build_schedule(name, given["ranks"], virtual, given["micro-batches"])
    costs = Costs.even(
        schedule, *arguments.costs or (), message=arguments.message, latency=arguments.latency
    )
    if measured and not arguments.costs:
        costs = measured_costs(measured, arguments.message, arguments.latency)
    if measured and schedule.placement != measured.placement:
        raise UserError(
            f"{arguments.measured}: stages lie on ranks {measured.placement}, in {name} on "
            f"{schedule.placement}"
        )
    size = (
        f"{name}, {schedule.ranks} ranks"
        + (f" x {virtual} stages" if virtual > 1 else "")
        + f", {schedule.micro_batches} micro-batches"
    )
    panels = [(f"{'simulated: ' if measured else ''}{size}", simulate(schedule, costs))]
    return panels + (
        [(f"measured: {size}", measured)] if measured else []
    ), "s" if measured else "time"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--schedule", choices=list(BUILDERS))
    flags.add_argument("--ranks", type=_count, help="pipeline ranks")
    flags.add_argument(
        "--virtual",
        type=_count,
        default=2,
        help="stages a rank of the interleaved schedule (default 2)",
    )
    flags.add_argument("--micro-batches", type=_count)
    flags.add_argument(
        "--costs",
        type=_costs,
        metavar="F,I,W",
        help="of forward pass, input gradient, weight gradient; a backward pass costs I + W",
    )
    flags.add_argument(
        "--message",
        type=float,
        default=0.0,
        help="time that a message fills its link: bytes / bandwidth (default 0)",
    )
    flags.add_argument(
        "--latency", type=float, default=0.0, help="time from then to its arrival (default 0)"
    )
    flags.add_argument(
        "--measured", metavar="FILE.json", help="time line of a run (--pipeline-timeline)"
    )
    flags.add_argument("--out", type=Path, metavar="FILE.svg", help="picture; .png with cairosvg")
    flags.add_argument(
        "--chrome",
        type=Path,
        metavar="FILE.json",
        help="Chrome trace, for ui.perfetto.dev; a unit of a simulated cost is a second",
    )
    flags.add_argument("--table", action="store_true", help="all schedules' figures instead")
    return flags


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _costs(text: str) -> tuple[float, ...]:
    try:
        costs = tuple(map(float, text.split(",")))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 <= cost < math.inf for cost in costs) or not any(costs):
        raise argparse.ArgumentTypeError(f"{text!r} is not three costs like 1,1,1")
    return costs


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.table:
            if not arguments.ranks or not arguments.micro_batches:
                raise UserError("--table needs --ranks and --micro-batches")
            costs = arguments.costs or (1.0, 1.0, 1.0)
            lines = all_schedules(
                arguments.ranks,
                arguments.virtual,
                arguments.micro_batches,
                costs,
                arguments.message,
                arguments.latency,
            )
            print(table(lines, "time"))
            return 0
        panels, unit = panels_of(arguments)
        print(table(panels, unit))
        if arguments.out:
            write(draw(panels, unit), arguments.out)
        if arguments.chrome:
            arguments.chrome.write_text(chrome_trace(panels) + "\n")
    except (OSError, UserError) as error:
        print(f"plot_schedule.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
