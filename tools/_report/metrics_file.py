"""Reads metrics.jsonl, which megatron/observe/tracking.py writes, and other files of one JSON
object a line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError
from megatron.observe.metrics import Metrics
from megatron.observe.tracking import RESUMED


def metrics_path(path: str | Path) -> Path:
    """The metrics file of a run folder, or `path` when it is a file. Raises UserError."""
    path = Path(path)
    found = path / "metrics.jsonl" if os.path.isdir(path) else path
    if not os.path.isfile(found):
        raise UserError(
            f"{str(found)[:4000]}: no such file; give a folder that was --save of a run, or "
            "the file of its --metrics-file"
        )
    return found


def read_metrics(path: str | Path) -> list[Metrics]:
    """One row an iteration, in order, of a metrics.jsonl file or the run folder that holds it.

    A row marked `resumed-from-iteration` R starts a new attempt, which discards rows beyond R. Of
    several rows of an iteration each value is the last one logged. Torn lines are skipped. Raises
    UserError for a missing file and for one without rows.
    """
    path = metrics_path(path)
    rows: dict[int, Metrics] = {}
    for written in read_json_lines(path):
        try:
            row = {
                name: float(value) if isinstance(value, str) else value
                for name, value in written.items()
            }
        except ValueError:
            continue
        iteration = row.get("iteration")
        if type(iteration) is not int or type(row.get(RESUMED, 0)) is not int:
            continue
        if RESUMED in row:
            rows = {i: old for i, old in rows.items() if i <= row[RESUMED]}
        rows.setdefault(iteration, {}).update(row)
    if not rows and path.read_bytes().strip():
        raise UserError(
            f"{path}: not a metrics file: none of its lines is a JSON object with the key iteration"
        )
    return [rows[i] for i in sorted(rows)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; lines that are no JSON object are skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
