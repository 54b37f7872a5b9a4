"""Pieces of HTML that the sections of a report are made of.

Called from page.py and from the modules of its sections.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from megatron.tools._report.curves import COLOURS
from megatron.tools._report.runs import LoggedRun

# of the parts of a bar: those of the curves in an order whose neighbours differ, and three more
PARTS = (
    *("#009e73", "#d55e00", "#0072b2", "#e69f00", "#cc79a7"),
    *("#56b4e9", "#f0e442", "#1e293b", "#94a3b8", "#8c564b"),
)


def escaped(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text))


def square(colour: str) -> str:
    """A filled square, next to the name of what has this colour."""
    return f'<span class=swatch style="background:{colour}"></span>'


def swatch(number: int, run: LoggedRun) -> str:
    """A run's name next to its colour."""
    return square(COLOURS[number % len(COLOURS)]) + escaped(run.name)


def sheet(heads: list[str], rows: list[list[str]], numbers: bool = False) -> str:
    """A table that scrolls sideways where the page is narrow; the cells are HTML."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = " class=numbers" if numbers else ""
    return f"<div class=sheet tabindex=0><table{kind}><tr>{head}</tr>{body}</table></div>"


def pairs(rows: list[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    return (
        "<table class=pairs>"
        + "".join(
            f"<tr><td>{escaped(name)}</td><td>{escaped(value)}</td></tr>" for name, value in rows
        )
        + "</table>"
    )


def part_colour(number: int) -> str:
    """Of one part of a bar."""
    return PARTS[number % len(PARTS)]


def stack(parts: Iterable[tuple[str, float]]) -> str:
    """A bar of (name, seconds), each as wide as its share; what is not above zero is left out. A
    reader who points at a part sees its name and share.
    """
    found = list(parts)
    whole = sum(seconds for _, seconds in found if seconds > 0)
    pieces = [
        f'<i style="flex-grow:{seconds / whole:.6f};background:{part_colour(number)}" '
        f'title="{escaped(name)} {seconds / whole:.1%}"></i>'
        for number, (name, seconds) in enumerate(found)
        if seconds > 0
    ]
    return f"<div class=stack>{''.join(pieces)}</div>"
