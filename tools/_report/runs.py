"""What runs left behind, for a report: rows, configuration, events, and the x axes of their curves.

Called from tools/report.py and page.py.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.tools._report.goodput_account import Goodput, goodput
from megatron.tools._report.metrics_file import metrics_path, read_json_lines, read_metrics
from megatron.tools._report.step_parts import StepParts, step_table

from megatron.config.errors import UserError
from megatron.config.input_files import read_json
from megatron.config.metadata import flag_name
from megatron.observe.metrics import Metrics
from megatron.observe.tracking import RESUMED, config_file

VALIDATION = "lm loss validation"
# kind of an event: what the page calls it
KINDS = {
    "restart": "restart",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "skipped": "skipped steps",
    "other": "other event",
}
# of the events of a run; other events are of the kind "other"
_KIND_OF = {"start": "restart", "checkpoint": "checkpoint", "evaluation": "evaluation"}
# parts of others, and what happens all the time
_QUIET = {"steps", "ready", "restore", "checkpoint-wait"}
# where a run writes, and how far one start of it goes: no difference that explains a curve
BOOKKEEPING = {
    "save",
    "load",
    "exit_interval",
    "exit_duration_in_mins",
    "metrics_file",
    "tensorboard_dir",
    "wandb_project",
    "wandb_exp_name",
    "wandb_save_dir",
    "wandb_entity",
    "pipeline_timeline",
    "local_checkpoint_dir",
}
_BANNER = ("versions", "device", "layout", "kernels")  # what is not in the flags


@dataclass(frozen=True)
class Mark:
    """Something that happened: `kind` is a key of KINDS."""

    kind: str
    text: str
    iteration: int | None  # None where it is not known


@dataclass(frozen=True)
class LoggedRun:
    """One run: rows by iteration, `config` as in metrics.config.json (None without that file), and
    its marks in the order of their iterations. `goodput` is None without events, `steps` are those
    of a profile; `trace_fault` is why it could not be read.
    """

    name: str
    metrics: Path
    rows: list[Metrics]
    config: dict[str, Any] | None
    marks: list[Mark]
    goodput: Goodput | None = None
    steps: tuple[StepParts, ...] = ()
    trace_fault: str = ""


def load_runs(paths: list[str]) -> list[LoggedRun]:
    """The runs of some folders or metrics files, each under the shortest name that distinguishes it
    from the others.

    UserError for a missing file, one that is no metrics file, one without a row, and one given
    twice.
    """
    files = [metrics_path(path).resolve() for path in paths]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file}: given twice; give each run once")
    runs = []
    for file, name in zip(files, short_names(files), strict=True):
        rows = read_metrics(file)
        if not rows:
            raise UserError(
                f"{file}: no rows; the run has not logged anything yet (see --log-interval)"
            )
        described = config_file(file)
        config = read_json(described) if os.path.lexists(described) else None
        marks = merged(marks_of_rows(rows), read_events(file.with_name("events.jsonl")))
        steps, fault = _profile(file, config)
        found = _goodput(file.parent)
        runs.append(LoggedRun(name, file, rows, config, marks, found, steps, fault))
    return runs


def _goodput(folder: Path) -> Goodput | None:
    """That of a run's folder; None where it has no events."""
    try:
        return goodput(folder)
    except UserError:
        return None


def _profile(metrics: Path, config: dict[str, Any] | None) -> tuple[tuple[StepParts, ...], str]:
    """The steps of the traces of a run, and why there are none where a trace is damaged."""
    chosen = _inner(config, "config", "logging", "profile_dir")
    folder = Path(chosen) if isinstance(chosen, str) else metrics.parent / "profile"
    try:
        return tuple(step_table(folder)), ""
    except (UserError, OSError) as error:
        return (), str(error)


def _inner(value: Any, *names: str) -> Any:
    """A value of nested dictionaries; None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def short_names(files: list[Path]) -> list[str]:
    """The name of each run's folder, with as many folders above it as distinguish all; a file that
    is not called metrics.jsonl counts as a folder.
    """
    whole = [
        file.parent.parts if file.name == "metrics.jsonl" else file.with_suffix("").parts
        for file in files
    ]
    for count in range(1, max(map(len, whole), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def last(rows: list[Metrics], name: str) -> float | None:
    """The latest logged value of a metric."""
    return next((row[name] for row in reversed(rows) if name in row), None)


def median(rows: list[Metrics], name: str) -> float | None:
    """The median of the logged values of a metric."""
    values = [row[name] for row in rows if name in row]
    return statistics.median(values) if values else None


def marks_of_rows(rows: list[Metrics]) -> list[Mark]:
    """Restarts, checkpoints, evaluations and skipped steps, as far as the rows show."""
    marks = []
    skipped = 0.0
    for row in rows:
        iteration = int(row["iteration"])
        if RESUMED in row:
            marks.append(Mark("restart", "restart", int(row[RESUMED])))
        if "save-checkpoint-seconds" in row:
            marks.append(Mark("checkpoint", _checkpoint(row), iteration))
        if VALIDATION in row:
            marks.append(Mark("evaluation", f"evaluation, loss {row[VALIDATION]:.4f}", iteration))
        samples = row.get("skipped-train-samples", skipped)
        if samples > skipped:
            text = f"{samples - skipped:,.0f} samples of skipped steps"
            marks.append(Mark("skipped", text, iteration))
        skipped = samples
    return marks


def _checkpoint(row: Metrics) -> str:
    text = f"checkpoint in {row['save-checkpoint-seconds']:.3g} s"
    if "save-checkpoint-stall-seconds" in row:
        text += f", training stood still for {row['save-checkpoint-stall-seconds']:.3g} s"
    return text


def read_events(path: Path) -> list[Mark]:
    """The marks of events.jsonl; the first start is none. No file has no marks; lines that are no
    events, as a kill leaves them, are skipped.
    """
    if not path.is_file():
        return []
    marks: list[Mark] = []
    starts = 0
    for event in read_json_lines(path):
        name, iteration = event.get("event"), event.get("iteration")
        if not isinstance(name, str) or type(iteration) not in (int, type(None)):
            continue
        starts += name == "start"
        is_first = name == "start" and starts == 1
        if name not in _QUIET and not name.endswith("-begin") and not is_first:
            marks.append(Mark(_KIND_OF.get(name, "other"), _text(name, event), iteration))
    return marks


def _text(name: str, event: dict[str, Any]) -> str:
    rest = [
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in event.items()
        if key not in ("event", "iteration", "timestamp", "time")
        and not isinstance(value, (dict, list))
    ]
    return ", ".join(["restart" if name == "start" else name, *rest])


def merged(rows: list[Mark], events: list[Mark]) -> list[Mark]:
    """Marks of both sources by iteration; those without one come last. What rows hold of something
    that is an event too is added to the event. Of a checkpoint written in the background that is
    the last one begun before.
    """
    found = list(events)
    for mark in rows:
        same = [
            k
            for k, event in enumerate(events)
            if event.kind == mark.kind
            and event.iteration is not None
            and (
                event.iteration <= mark.iteration
                if mark.kind == "checkpoint"
                else event.iteration == mark.iteration
            )
        ]
        if same:
            event = found[same[-1]]
            if mark.text != event.text:
                found[same[-1]] = replace(event, text=f"{event.text}; {mark.text}")
        else:
            found.append(mark)
    return sorted(found, key=lambda mark: math.inf if mark.iteration is None else mark.iteration)


# ---- x axes


def _logged(name: str) -> Callable[[list[Metrics]], list[float] | None]:
    """The axis that a metric is; a row without it lies where the one before it does."""

    def values(rows: list[Metrics]) -> list[float] | None:
        if name not in rows[0]:
            return None
        found: list[float] = []
        for row in rows:
            found.append(row.get(name, found[-1] if found else 0))
        return found

    return values


def training_seconds(rows: list[Metrics]) -> list[float] | None:
    """Seconds of training up to each row: iterations x iteration-time, without evaluations,
    checkpoints, restarts and what was trained in vain before them. None where times are lacking.
    """
    if "iteration-time" not in rows[0]:
        return None
    total, before, found = 0.0, 0, []
    for row in rows:
        if "iteration-time" in row:  # else of a save between two log intervals
            total += (row["iteration"] - before) * row["iteration-time"]
            before = int(row["iteration"])
        found.append(total)
    return found


def elapsed_seconds(rows: list[Metrics]) -> list[float] | None:
    """Seconds of the clock since the first row, whatever happened in between."""
    if any("timestamp" not in row for row in rows):
        return None
    elapsed = [row["timestamp"] - rows[0]["timestamp"] for row in rows]
    # a save in the background is written into the row that was logged last
    for i in range(1, len(elapsed)):
        elapsed[i] = max(elapsed[i], elapsed[i - 1])
    return elapsed


_AXES: tuple[tuple[str, str, Callable[[list[Metrics]], list[float] | None]], ...] = (
    ("iteration", "iteration", _logged("iteration")),
    ("samples", "samples", _logged("consumed_samples")),
    ("tokens", "tokens", _logged("consumed-tokens")),
    ("training", "training time, without restarts", training_seconds),
    ("elapsed", "time since the first row", elapsed_seconds),
)


def axes(runs: list[LoggedRun]) -> list[tuple[str, str, list[list[float]]]]:
    """(key, label, x of every row of every run) of each axis that all of the runs can be drawn
    over. Times are in the unit that the label names.
    """
    found = []
    for key, label, of in _AXES:
        columns = [of(run.rows) for run in runs]
        if any(column is None for column in columns):
            continue
        if key in ("training", "elapsed"):
            longest = max(column[-1] for column in columns)
            unit, seconds = next(
                (unit, seconds)
                for unit, seconds in (("hours", 3600), ("minutes", 60), ("seconds", 1))
                if longest >= 2 * seconds or seconds == 1
            )
            label = f"{label} ({unit})"
            columns = [[value / seconds for value in column] for column in columns]
        found.append((key, label, columns))
    return found


def typical_step(runs: list[LoggedRun]) -> float:
    """Iterations between two rows: the median over all of the runs; 1 when none has two rows."""
    steps = [b["iteration"] - a["iteration"] for run in runs for a, b in pairwise(run.rows)]
    return statistics.median(steps) if steps else 1


# ---- configurations


def flattened(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as (dotted name, value) rows."""
    if isinstance(value, dict):
        return [
            row
            for name, item in value.items()
            for row in flattened(item, f"{prefix}.{name}" if prefix else str(name))
        ]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]


def differences(runs: list[LoggedRun]) -> list[tuple[str, list[str]]]:
    """(flag, value in each run) where the runs differ, flags first, then what the banner has of
    the machine. A run without the flag or without a configuration has `-`; BOOKKEEPING is left out.
    """
    tables = [_settings(run.config) for run in runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    found = [(name, [table.get(name, "-") for table in tables]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _settings(config: dict[str, Any] | None) -> dict[str, str]:
    found, groups = {}, _inner(config, "config")
    for group in groups.values() if isinstance(groups, dict) else ():
        for name, value in group.items() if isinstance(group, dict) else ():
            if name not in BOOKKEEPING:
                found[flag_name(name)] = value
    for name in _BANNER:
        if (value := _inner(config, "banner", name)) is not None:
            found[name] = value
    return {name: ", ".join(text for _, text in flattened(value)) for name, value in found.items()}
