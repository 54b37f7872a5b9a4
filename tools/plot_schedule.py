"""Draw the time line of a pipeline schedule, simulated and measured on one scale, or compare all
schedules.

    # simulated
    python tools/plot_schedule.py --schedule 1f1b --ranks 4 --micro-batches 8 --out FILE.svg
    # a step that --pipeline-timeline kept, below its simulation
    python tools/plot_schedule.py --measured TIMELINE.json --out FILE.svg
    # figures of all schedules, as a markdown table
    python tools/plot_schedule.py --table --ranks 8 --micro-batches 16

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
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._plan.drawing import Panel, draw, figures  # noqa: E402
from megatron.tools._plan.simulate import Costs, simulate  # noqa: E402
from megatron.tools._plan.timeline_files import chrome_events, read_timeline  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.schedules import IN_PAIRS  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.parallel.schedule import BUILDERS, Kind, Schedule, build_schedule
from megatron.parallel.timeline import Timeline, in_pairs  # noqa: E402


def measured_costs(line: Timeline, message: float, latency: float) -> Costs:
    """The median of each stage's computations that ran alone; a whole backward pass counts as input
    gradient.
    """
    found: dict[tuple[Kind, int], list[float]] = {}
    for row in line.rows:
        for (kind, stage, _, begin, end), is_paired in zip(row, in_pairs(row)):
            if not is_paired:
                part = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind
                found.setdefault((part, stage), []).append(end - begin)
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
        events += chrome_events(line, title.partition(":")[0] if len(panels) > 1 else "", first)
        first += len(line.rows)
    return json.dumps({"traceEvents": events})


def with_exchanges(costs: Costs, of_rank: tuple[float, ...], ranks: int) -> Costs:
    """The costs, of which so much is exchanged in a forward and in a backward pass of all stages of
    a rank. Raises UserError where that is more than the whole.
    """
    stages = len(costs.forward)
    forward, backward = (time * ranks / stages for time in of_rank)
    for stage in range(stages):
        if forward > costs.of(Kind.FORWARD, stage) or backward > costs.of(Kind.BACKWARD, stage):
            raise UserError("--exchanged: is a part of the passes' costs; give less than these")
    return replace(
        costs, exchanged_forward=(forward,) * stages, exchanged_backward=(backward,) * stages
    )


def measured_timeline(path: str) -> Timeline:
    """A time line that --pipeline-timeline kept. Raises UserError for an unknown schedule."""
    line = read_timeline(Path(path).read_text())
    if line.schedule not in BUILDERS:
        raise UserError(f"{path}: schedule {line.schedule} is not one of {', '.join(BUILDERS)}")
    return line


def schedule_of(arguments: argparse.Namespace) -> Schedule:
    """The schedule that the flags name. Raises UserError."""
    needed = {
        "--schedule": arguments.schedule,
        "--ranks": arguments.ranks,
        "--micro-batches": arguments.micro_batches,
    }
    if missing := [flag for flag, value in needed.items() if value is None]:
        raise UserError(f"needs {', '.join(missing)}, or --measured FILE")
    name = arguments.schedule
    if arguments.pairs and name not in IN_PAIRS:
        raise UserError(f"--pairs: {name} has none; give --schedule {' or '.join(IN_PAIRS)}")
    virtual = {"interleaved": arguments.virtual, "zero-bubble-v": 2}.get(name, 1)
    return build_schedule(name, arguments.ranks, virtual, arguments.micro_batches, arguments.pairs)


def measured_schedule(arguments: argparse.Namespace, line: Timeline) -> Schedule:
    """The schedule of a measured step. Raises UserError where a flag contradicts it."""
    found = {
        "--schedule": (arguments.schedule, line.schedule),
        "--ranks": (arguments.ranks, len(line.rows)),
        "--micro-batches": (arguments.micro_batches, line.micro_batches),
    }
    for flag, (given, kept) in found.items():
        if given not in (None, kept):
            raise UserError(f"{flag} {given}: {arguments.measured} has {kept}; leave the flag out")
    if arguments.pairs and not line.pairs:
        raise UserError(f"--pairs: {arguments.measured} has none; leave the flag out")
    virtual = len(line.placement) // len(line.rows)
    schedule = build_schedule(
        line.schedule, len(line.rows), virtual, line.micro_batches, line.pairs
    )
    if schedule.placement != line.placement:
        raise UserError(
            f"{arguments.measured}: stages lie on ranks {line.placement}, in {line.schedule} on "
            f"{schedule.placement}"
        )
    return schedule


def panels_of(arguments: argparse.Namespace) -> tuple[list[Panel], str]:
    """What to draw, and the unit of its times. Raises UserError."""
    measured = measured_timeline(arguments.measured) if arguments.measured else None
    schedule = measured_schedule(arguments, measured) if measured else schedule_of(arguments)
    costs = Costs.even(
        schedule, *arguments.costs or (), message=arguments.message, latency=arguments.latency
    )
    if measured and not arguments.costs:
        costs = measured_costs(measured, arguments.message, arguments.latency)
    if arguments.exchanged:
        if not schedule.pairs:
            raise UserError("--exchanged: only passes in pairs hide it; give --pairs, too")
        costs = with_exchanges(costs, arguments.exchanged, schedule.ranks)
    virtual = schedule.stages // schedule.ranks
    size = (
        f"{schedule.name}, {schedule.ranks} ranks"
        + (f" x {virtual} stages" if virtual > 1 else "")
        + f", {schedule.micro_batches} micro-batches"
        + ", in pairs" * schedule.pairs
    )
    simulated = simulate(schedule, costs)
    if measured is None:
        return [(size, simulated)], "time"
    return [(f"simulated: {size}", simulated), (f"measured: {size}", measured)], "s"


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
        "--pairs",
        action="store_true",
        help="each backward pass next to a forward pass (--overlap-moe-expert-parallel-comm)",
    )
    flags.add_argument(
        "--exchanged",
        type=_exchanged,
        metavar="F,B",
        help="of a forward and of a backward pass, what the other pass of a pair hides",
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
    costs = _numbers(text)
    if len(costs) != 3 or not any(costs):
        raise argparse.ArgumentTypeError(f"{text!r} is not three costs like 1,1,1")
    return costs


def _exchanged(text: str) -> tuple[float, ...]:
    times = _numbers(text)
    if len(times) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two times like 0.3,0.6")
    return times


def _numbers(text: str) -> tuple[float, ...]:
    """Finite ones from 0 up, with commas between; none where one is not."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        return ()
    return numbers if all(0 <= number < math.inf for number in numbers) else ()


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    arguments = parser().parse_args(argv)
    try:
        if arguments.table:
            if not arguments.ranks or not arguments.micro_batches:
                raise UserError("--table needs --ranks and --micro-batches")
            if arguments.pairs or arguments.exchanged or arguments.measured:
                raise UserError(
                    "--table: simulates every schedule without pairs; leave out --pairs, "
                    "--exchanged and --measured"
                )
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
