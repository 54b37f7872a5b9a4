"""The raw rows of a study: one JSON object a line, appended and never changed.

Called from study/runner.py, which appends, and from study/table.py, which makes everything else of
them. Kinds of lines: `study` (the header: what was asked for), `run` (one run of one row, also one
that failed or was refused), `prediction` (of tools/plan.py for a row). Of several lines for one
thing the last counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.errors import UserError

RAW = "raw.jsonl"
FINISHED = "ok"  # status of a run that did all its iterations
REFUSED = "refused"
Line = dict[str, Any]


class RawRows(NamedTuple):
    """The lines: the header, the runs by (row key, repeat), predictions by row key."""

    header: Line | None
    runs: dict[tuple[str, int], Line]
    predictions: dict[str, Line]

    def of(self, key: str) -> list[Line]:
        """The runs of one row, in the order of their repeats."""
        return [line for (row, _), line in sorted(self.runs.items()) if row == key]


def append(folder: Path, line: Line) -> None:
    """Add one line with one write. A line that a kill has torn before it is ended first."""
    text = (json.dumps(line, allow_nan=False) + "\n").encode()
    descriptor = os.open(folder / RAW, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text
        os.write(descriptor, text)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> RawRows:
    """All lines of a study's folder; none at all where it has no raw file. Torn lines are skipped.
    Raises UserError for a file in which no line is one of a study.
    """
    found = RawRows(None, {}, {})
    path = folder / RAW
    if not path.exists():
        return found
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    good = 0
    for text in lines:
        try:
            line = json.loads(text)
            kind = line["kind"]
            if kind == "study":
                found = found._replace(header=line)
            elif kind == "run":
                found.runs[line["key"], line["repeat"]] = line
            elif kind == "prediction":
                found.predictions[line["key"]] = line
        except (ValueError, KeyError, TypeError):
            continue
        good += 1
    if lines and not good:
        raise UserError(f"{path}: not the raw rows of a study: no line has a kind")
    return found
