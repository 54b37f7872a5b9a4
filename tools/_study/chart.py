"""Bars with error bars of a study, as SVG: samples per second of every row, best first, and a line
for what failed.

Called from tools/study.py.
"""

from __future__ import annotations

from html import escape

from megatron.tools._study.raw import FINISHED
from megatron.tools._study.table import BEST, NOISE, OTHER_WORK, SLOWER, Outline, Summary

from megatron.config.errors import shortened

WIDTH, RIGHT, TOP, BAR, GAP = 960, 210, 74, 20, 10  # pixels
LETTER = 6.4  # pixels of a letter of the labels
COLOURS = {BEST: "#0f8a5f", NOISE: "#5fae91", OTHER_WORK: "#dc2626"}
SLOW_COLOUR, PREDICTED, FAILED = "#4f86c6", "#dc6803", "#b91c1c"
MARKS = 5  # of the axis, about


def draw(found: Summary) -> str:
    """The picture."""
    left = min(420.0, 24 + LETTER * max(len(row.name) for row in found.rows))
    most = max(
        [row.samples[2] for row in found.rows if row.samples] + list(_predictions(found)),
        default=1.0,
    )
    scale = (WIDTH - left - RIGHT) / most
    parts = [
        _text(12, 22, f"{found.header['name']}: samples per second", "start", "bold 15px"),
        _text(12, 42, _subtitle(found), "start", "12px"),
    ]
    y = TOP
    bottom = TOP + len(found.rows) * (BAR + GAP)
    parts += _axis(left, scale, most, bottom)
    for row in found.rows:
        parts.append(_text(left - 8, y + 14, row.name, "end", "12px"))
        parts += _bar(row, left, y, scale)
        y += BAR + GAP
    height = bottom + 62
    parts += _legend(found, left, bottom + 44)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _predictions(found: Summary) -> list[float]:
    return [value for row in found.rows if (value := _predicted(row)) is not None]


def _predicted(row: Outline) -> float | None:
    """Samples per second that were predicted for a row that ran."""
    if row.prediction is None or row.samples is None or row.seconds is None:
        return None
    return row.samples[0] * row.seconds / row.prediction["step_s"]


def _subtitle(found: Summary) -> str:
    header = found.header
    return (
        f"median of {header['repeats']} interleaved repeats with 95% bootstrap intervals (below 6 "
        f"repeats: range); {header['iterations']} iterations, {header['warmup']} of warm-up left "
        "out"
    )


def _text(x: float, y: float, words: str, anchor: str, font: str, colour: str = "#1e293b") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'style="font:{font} sans-serif">{escape(words, quote=False)}</text>'
    )


def _bar(row: Outline, left: float, y: float, scale: float) -> list[str]:
    """The bar of a row with its error bar, or why it has none."""
    if row.samples is None:
        return [_text(left + 6, y + 14, _why(row, WIDTH - left), "start", "italic 12px", FAILED)]
    middle, low, high = (left + value * scale for value in row.samples)
    box = f'x="{left:.1f}" y="{y}" width="{middle - left:.1f}" height="{BAR}"'
    parts = [
        f'<rect {box} fill="{COLOURS.get(row.verdict, SLOW_COLOUR)}"/>',
        _error_bar(low, high, y),
    ]
    end = high
    if (predicted := _predicted(row)) is not None:
        x = left + predicted * scale
        line = f'd="M{x:.1f} {y - 2}v{BAR + 4}"'
        parts.append(f'<path {line} stroke="{PREDICTED}" stroke-width="3"/>')
        end = max(end, x)
    later = f" ({row.status} later)" if row.status != FINISHED else ""
    label = f"{row.samples[0]:.4g}  {row.verdict}{later}"
    return [*parts, _text(end + 8, y + 14, label, "start", "12px")]


def _error_bar(low: float, high: float, y: float) -> str:
    cap = f"{y + 5}v{BAR - 10}"
    path = f"M{low:.1f} {y + BAR / 2}H{high:.1f}M{low:.1f} {cap}M{high:.1f} {cap}"
    return f'<path d="{path}" stroke="#1e293b" stroke-width="1.4" fill="none"/>'


def _why(row: Outline, width: float) -> str:
    """Status and reason of a row without a finished run, as far as there is room."""
    label = " ".join(f"{row.status}: {row.failure}".strip(": ").split())
    return shortened(label, int((width - 20) / LETTER))


def _axis(left: float, scale: float, most: float, bottom: float) -> list[str]:
    power = 10.0 ** len(str(int(most / MARKS))) / 10 if most >= MARKS else 0.01
    step = next(
        power * factor
        for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500)
        if most / (power * factor) <= MARKS + 1
    )
    parts = []
    for index in range(int(most / step) + 1):
        x = left + index * step * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="#e2e8f0"/>')
        parts.append(_text(x, bottom + 16, f"{index * step:g}", "middle", "11px", "#475569"))
    return parts


def _legend(found: Summary, left: float, y: float) -> list[str]:
    entries = [(COLOURS[BEST], "best"), (COLOURS[NOISE], NOISE), (SLOW_COLOUR, SLOWER)]
    if any(row.verdict == OTHER_WORK for row in found.rows):
        entries.append((COLOURS[OTHER_WORK], "other work: not comparable"))
    if _predictions(found):
        entries.append((PREDICTED, "predicted"))
    parts = []
    x = left
    for colour, words in entries:
        parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, y, words, "start", "12px"))
        x += 40 + LETTER * len(words)
    return parts
