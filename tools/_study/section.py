"""A study as a section of a report page: its chart with error bars, its table and what makes that
credible.

Called from tools/report.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron.tools._report.markup import escaped, sheet
from megatron.tools._study import raw
from megatron.tools._study.chart import draw
from megatron.tools._study.table import cells_of, failures_of, summary

NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # which a picture in a page does without


def is_study(folder: Path) -> bool:
    """Whether a folder holds the raw rows of a study."""
    return (folder / raw.RAW).is_file()


def study_section(folder: Path) -> str:
    """HTML of a study's folder. Raises UserError where its raw rows are none."""
    found = summary(raw.read(folder))
    columns = cells_of(found)
    tables = []
    if columns["row"]:
        rows = [list(map(escaped, cells)) for cells in zip(*columns.values(), strict=True)]
        tables.append(sheet(list(map(escaped, columns)), rows, numbers=True))
    if failed := failures_of(found):
        heads, *rows = failed
        tables.append(sheet(heads, [list(map(escaped, cells)) for cells in rows]))
    picture = draw(found).replace(NAMESPACE, " class=study", 1)
    notes = "".join(f"<li>{emphasised(note)}</li>" for note in found.notes)
    return (
        f"<h2>Study {escaped(found.header['name'])}</h2><p class=path>{escaped(folder)}</p>"
        f"<div class=sheet tabindex=0>{picture}</div>"
        f"{''.join(f'<br>{table}' for table in tables)}<ul class=notes>{notes}</ul>"
    )


def emphasised(note: str) -> str:
    """A note's Markdown, in which only **this** and *this* mean something, as HTML."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped(note))
    return re.sub(r"\*(.+?)\*", r"<i>\1</i>", bold)
