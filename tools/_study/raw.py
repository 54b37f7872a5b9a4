"""The raw rows of a study: one JSON object a line, appended and never changed.

Called from study/runner.py, which appends, and from study/table.py, which makes everything else of
them. Kinds of lines: `study` (the header: what was asked for), `run` (one run of one row, also one
that failed or was refused), `prediction` (of tools/plan.py for a row). Of several lines for one
thing the last counts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from megatron.tools._report.metrics_file import read_json_lines

from megatron.config.errors import UserError
from megatron.observe.json_lines import JsonLines

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

    def predictions_for(self, hardware: str | None) -> dict[str, Line]:
        """Those of a study's `hardware`; lines that do not name theirs count."""
        return {
            key: line
            for key, line in self.predictions.items()
            if line.get("hardware", hardware) == hardware
        }


def append(folder: Path, line: Line) -> None:
    """Add one line, which is on the disk then."""
    file = JsonLines(folder / RAW)
    try:
        file.append(line)
        os.fsync(file.fd)
    finally:
        file.close()


def read(folder: Path) -> RawRows:
    """All lines of a study's folder; none at all where it has no raw file. Torn lines are skipped.
    Raises UserError for a file in which no line is one of a study.
    """
    found = RawRows(None, {}, {})
    path = folder / RAW
    if not path.exists():
        return found
    for line in read_json_lines(path):
        kind, key, repeat = line.get("kind"), line.get("key"), line.get("repeat")
        if kind == "study":
            found = found._replace(header=line)
        elif kind == "run" and isinstance(key, str) and type(repeat) is int:
            found.runs[key, repeat] = line
        elif kind == "prediction" and isinstance(key, str):
            found.predictions[key] = line
    if not any(found) and path.read_bytes().strip():
        raise UserError(f"{path}: not the raw rows of a study: no line has a kind")
    return found
