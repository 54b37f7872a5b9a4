"""What figures of the documents are made of: the results they are read from, tables, ratios.

Called from document_results.py, whose figures enter FIGURES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from megatron.study.raw import read
from megatron.study.table import markdown, summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FIGURES: dict[str, Callable[[], str]] = {}


def figure(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Enter a function into FIGURES."""
    return lambda compute: FIGURES.setdefault(name, compute)


@cache
def result(name: str) -> Any:
    """The content of docs/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


@figure("study.two_cores")
def study_two_cores() -> str:
    """The table of studies/two_cores.yaml, from its raw rows."""
    return f"\n{markdown(summary(read(RESULTS / 'two_cores')))}"


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table on lines of its own; `header` holds the columns' names between bars."""
    lines = [f"| {header} |", "|---" * (header.count("|") + 1) + "|"]
    return "\n".join(["", *lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def ratio(row: Any, digits: int = 2) -> str:
    """Median and interval."""
    return f"{row['median']:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def verdict(row: Any) -> str:
    """Of the ratio rule."""
    return "reached" if row["passed"] else "**lost**"
