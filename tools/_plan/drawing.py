"""The time line of a pipeline's step as a picture (SVG).

Called from tools/_advisor.py, for the trackers of a run, and from tools/plot_schedule.py.
"""

from __future__ import annotations

import math
import statistics

from megatron.tools._plan.schedule_check import in_memory

from megatron.parallel.schedule import Action, Kind, Schedule
from megatron.parallel.timeline import Timeline, in_pairs

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


def peak_activations(
    schedule: Schedule, held: tuple[float, ...] | None = None, deferred: float = 1.0
) -> tuple[float, ...]:
    """The most that each rank holds at a time, by the order of its list alone.

    A forward pass of stage s adds held[s]: bytes, or by default that stage's share of a rank's
    layers, so that one micro-batch on a whole rank is 1. The backward pass gives it back; where it
    is split the input gradient keeps the part `deferred` of it until the weight gradient.
    """
    held = held or (schedule.ranks / schedule.stages,) * schedule.stages
    kept = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.BACKWARD_INPUT: deferred - 1,
        Kind.BACKWARD_WEIGHT: -deferred,
    }
    peaks = []
    for rank in range(schedule.ranks):
        now = peak = 0.0
        for kind, stage, _ in in_memory(schedule, rank):
            if kind in kept:
                now += kept[kind] * held[stage]
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def schedule_of(line: Timeline) -> Schedule:
    """The computations of a time line as a schedule."""
    return Schedule(
        line.schedule,
        line.placement,
        line.micro_batches,
        tuple(tuple(Action(*span[:3]) for span in row) for row in line.rows),
        line.pairs,
    )


def idle_inside(line: Timeline) -> list[float]:
    """Of each rank's idle time, what lies between its own first and last computation."""
    return [
        row[-1].end - row[0].begin - line.busy(rank) if row else 0.0
        for rank, row in enumerate(line.rows)
    ]


def figures(line: Timeline) -> dict[str, float]:
    """What a time line comes to; activations in micro-batches on a whole rank, of the rank that
    holds most.
    """
    ranks = range(len(line.rows))
    return {
        "time": line.end - line.begin,
        "bubble": line.bubble,
        "idle": statistics.fmean(map(line.idle, ranks)),
        "idle inside": statistics.fmean(idle_inside(line)),
        "peak activations": max(peak_activations(schedule_of(line))),
    }


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


def _colours(line: Timeline) -> dict[tuple[Kind, int], str]:
    """By kind and stage."""
    return {
        (kind, stage): COLOURS[kind][_turn(line, stage)]
        for kind in COLOURS
        for stage in range(len(line.placement))
    }


def _box(x: float, y: float, length: float, height: int) -> str:
    """A part of a path."""
    return f"M{_number(x)} {y}h{_number(length)}v{height}h-{_number(length)}z"


def _height(kind: Kind, is_paired: bool) -> tuple[int, int]:
    """(from the top of the row, height) of a box: those of a pair share the row."""
    if not is_paired:
        return 0, ROW
    return (ROW // 2 if kind is Kind.FORWARD else 0), ROW // 2


def _text(micro: int, x: float, base: float, length: float) -> list[str]:
    """The number of a micro-batch in its box, where there is room."""
    if length < 5.6 * len(str(micro)) + 1:
        return []
    return [f'<text x="{_number(x + length / 2)}" y="{base}">{micro}</text>']


def _rows(line: Timeline, top: float, scale: float, numbered: bool) -> list[str]:
    """One row a rank: boxes of one colour are one path; a number is the micro-batch. Of a pair the
    backward pass is drawn above the forward pass.
    """
    width = _number((line.end - line.begin) * scale)
    boxes: dict[str, list[str]] = {}
    texts, rows = [], []
    colours = _colours(line)
    for rank, row in enumerate(line.rows):
        y = top + rank * (ROW + GAP)
        rows.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">rank {rank}</text>')
        rows.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW}" fill="#e8eaed"/>')
        for span, is_paired in zip(row, in_pairs(row)):
            down, height = _height(span.kind, is_paired)
            x, length = LEFT + (span.begin - line.begin) * scale, (span.end - span.begin) * scale
            boxes.setdefault(colours[span[:2]], []).append(_box(x, y + down, length, height))
            if numbered:
                texts += _text(span.micro, x, y + down + height // 2 + 4, length)
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
