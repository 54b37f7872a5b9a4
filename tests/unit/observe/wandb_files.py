"""What the offline runs of wandb below a folder have stored, the runs in order of their start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.tools.wandb_workspace import wandb_records


def run_files(folder: Path) -> list[Path]:
    files = folder.glob("wandb/offline-run-*/run-*.wandb")
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def records(folder: Path, kind: str) -> Iterator[Any]:
    """The records of a kind: history, summary, run, metric."""
    for path in run_files(folder):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def values(items: Iterable[Any]) -> dict[str, Any]:
    names = [item.key or "/".join(getattr(item, "nested_key", ())) for item in items]
    return dict(zip(names, (json.loads(item.value_json) for item in items), strict=True))


def history(folder: Path) -> list[dict[str, Any]]:
    """All rows."""
    return [values(record.item) for record in records(folder, "history")]
