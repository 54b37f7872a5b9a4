"""A study as a section of a report page: its chart with error bars, its table and what makes that
credible.

Called from tools/report.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron.tools._report.markup import Markup, render
from megatron.tools._study import raw
from megatron.tools._study.chart import draw
from megatron.tools._study.table import cells_of, failures_of, summary

NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # which a picture in a page does without


def is_study(folder: Path) -> bool:
    """Whether a folder holds the raw rows of a study."""
    return (folder / raw.RAW).is_file()


def study_section(folder: Path) -> Markup:
    """HTML of a study's folder. Raises UserError where its raw rows are none."""
    found = summary(raw.read(folder))
    columns = cells_of(found)
    tables = []
    if columns["row"]:
        tables.append((list(columns), zip(*columns.values(), strict=True), True))
    if failed := failures_of(found):
        tables.append((failed[0], failed[1:], False))
    return render(
        "study.html",
        name=found.header["name"],
        folder=folder,
        picture=Markup(draw(found).replace(NAMESPACE, " class=study", 1)),
        tables=tables,
        notes=map(emphasised, found.notes),
    )


def emphasised(note: str) -> Markup:
    """A note's Markdown, in which only **this** and *this* mean something, as HTML."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(Markup.escape(note)))
    return Markup(re.sub(r"\*(.+?)\*", r"<i>\1</i>", bold))
