"""Runs what a study still lacks, and adds a raw row for every run that has ended.

Called from tools/study.py. Nothing is kept but the raw rows and the folders of runs that have no
row yet, so that a runner can be killed at any moment and started again.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.tools._report.metrics_file import read_metrics
from megatron.tools._study import raw
from megatron.tools._study.description import MEASURE, StudyPlan, StudyRow
from megatron.tools._study.launch import (
    CHECKOUT,
    Ending,
    Launcher,
    Running,
    StudyRun,
    make_launcher,
    status_of,
)

from megatron import __version__
from megatron.config.errors import UserError
from megatron.observe.tracking import config_file

Log = Callable[[str], None]


def run_study(plan: StudyPlan, folder: Path, log: Log, *, retry_failed: bool = False) -> None:
    """Carry out every run of the study that has no raw row in `folder` yet; a row that has failed
    is not run again, unless `retry_failed`. Raises UserError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launcher = make_launcher(plan)
    with _alone(folder), _ended_by_signals():
        found = raw.read(folder)
        if found.header != plan.header():
            raw.append(folder, plan.header())
        _refused_rows(plan, folder, found, log)
        if plan.hardware is not None:
            _predictions(plan, folder, found, log)
        if retry_failed:
            good = {key: line for key, line in found.runs.items() if line["status"] == raw.FINISHED}
            found = found._replace(runs=good)
        _Rounds(plan, folder, launcher, found, log).carry_out()


def turns(plan: StudyPlan) -> list[tuple[StudyRow, int]]:
    """All (row, repeat) in the order in which they run: every round takes each row once, forwards
    and backwards in turn, so that what drifts meets all rows alike.
    """
    rows = [row for row in plan.rows if row.refusal is None]
    return [
        (row, repeat)
        for repeat in range(plan.repeats)
        for row in (rows if repeat % 2 == 0 else rows[::-1])
    ]


def run_of(folder: Path, row: StudyRow, repeat: int) -> StudyRun:
    """The run and its folder."""
    slug = re.sub(r"[^\w.=-]+", "-", row.name)[:60]
    return StudyRun(row, repeat, folder.resolve() / "runs" / f"{slug}-{row.key[:6]}-r{repeat}")


class _Rounds:
    """The runs that are left; at most `at_once` of them at a time."""

    def __init__(
        self, plan: StudyPlan, folder: Path, launcher: Launcher, found: raw.RawRows, log: Log
    ) -> None:
        self.plan, self.folder, self.launcher, self.log = plan, folder, launcher, log
        self.ended = set(found.runs)
        self.failed = {
            key for (key, _), line in found.runs.items() if line["status"] != raw.FINISHED
        }
        self.todo = [turn for turn in turns(plan) if (turn[0].key, turn[1]) not in self.ended]
        self.order = {(row.key, repeat): at for at, (row, repeat) in enumerate(turns(plan))}
        self.active: list[tuple[StudyRun, Running, dict[str, Any]]] = []

    def carry_out(self) -> None:
        """Until nothing is left to run."""
        try:
            self._find()
            while self.todo or self.active:
                while self.todo and len(self.active) < self.plan.at_once:
                    self._start(*self.todo.pop(0))
                for one in list(self.active):
                    run, running, facts = one
                    if (ending := running.poll()) is not None:
                        self._finish(run, ending, facts)
                        self.active.remove(one)
                        break
                else:
                    time.sleep(self.launcher.pause)
        finally:
            for _, running, _ in self.active:
                running.end()

    def _find(self) -> None:
        """Take over what an earlier runner has started and not entered."""
        for row, repeat in list(self.todo):
            run = run_of(self.folder, row, repeat)
            facts = run.folder / "started.json"
            if facts.exists() and (running := self.launcher.find(run)) is not None:
                self.active.append((run, running, json.loads(facts.read_text())))
                self.todo.remove((row, repeat))

    def _start(self, row: StudyRow, repeat: int) -> None:
        if row.key in self.failed:
            return
        run = run_of(self.folder, row, repeat)
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True)
        facts = {
            "command": _told(self.launcher.command(run)),
            "order": self.order[row.key, repeat],
            "started": _now(),
            **_machine(),
        }
        (run.folder / "started.json").write_text(json.dumps(facts))
        self.active.append((run, self.launcher.start(run), facts))

    def _finish(self, run: StudyRun, ending: Ending, facts: dict[str, Any]) -> None:
        line = run_line(self.plan, run, ending, facts)
        raw.append(self.folder, line)
        if line["status"] != raw.FINISHED:
            self.failed.add(run.row.key)
            shown = f"{line['status']}: {line['reason']}"
        else:
            seconds = statistics.median(line["iteration_s"][self.plan.warmup :])
            shown = f"{line['tokens'] / seconds:,.0f} tokens/s, {seconds:.4g} s an iteration"
        runs = len(self.order)
        self.log(f"[{line['order'] + 1}/{runs}] {run.row.name}, r{run.repeat}: {shown}")


def run_line(
    plan: StudyPlan, run: StudyRun, ending: Ending, facts: dict[str, Any]
) -> dict[str, Any]:
    """The raw row of a run that has ended."""
    row = run.row
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    log = run.log.read_text(errors="replace") if run.log.exists() else ""
    status, reason = status_of(ending, log, len(rows), plan.iterations)
    described = config_file(run.metrics)
    banner = json.loads(described.read_text())["banner"] if described.exists() else {}
    last: dict[str, Any] = rows[-1] if rows else {}
    line = {
        **_line_of(row, run.repeat, status, reason),
        **facts,
        "host": ending.host,
        "ended": _now(),
        "exit_code": ending.code,
        "versions": [*banner.get("versions", [f"megatron {__version__}"]), *_commit()],
        "device": banner.get("device", []),
        "tokens": last["consumed-tokens"] / len(rows) if rows else None,
        "samples": last["consumed_samples"] / len(rows) if rows else None,
        "iteration_s": [entry["iteration-time"] for entry in rows],
        "losses": [_finite(entry["lm loss"]) for entry in rows],
        "mfu": [entry["mfu"] for entry in rows if "mfu" in entry],
        "peak_bytes": max((entry.get("mem-max-allocated-bytes", 0) for entry in rows), default=0),
    }
    return line


def _line_of(row: StudyRow, repeat: int, status: str, reason: str) -> dict[str, Any]:
    """What every raw row of a run holds, also of one that never started."""
    return {
        "kind": "run",
        "key": row.key,
        "name": row.name,
        "repeat": repeat,
        "status": status,
        "reason": reason,
        "flags": list(row.flags),
        "world_size": row.world_size,
        "memory_limit_gib": row.memory_limit,
        "config": row.config,
        "config_digest": row.config_digest,
        "work": row.work,
        "layers": row.layers,
        "precision": row.precision,
    }


def _refused_rows(plan: StudyPlan, folder: Path, found: raw.RawRows, log: Log) -> None:
    for row in plan.rows:
        if row.refusal is not None:
            log(f"row {row.name} is refused: {row.refusal}")
            if (row.key, 0) not in found.runs:
                line = _line_of(row, 0, raw.REFUSED, row.refusal)
                raw.append(folder, {**line, "started": _now()})


def _predictions(plan: StudyPlan, folder: Path, found: raw.RawRows, log: Log) -> None:
    """Keep what tools/plan.py predicts of every row; where it predicts nothing, nothing."""
    known = found.predictions_for(plan.hardware)
    rows = [row for row in plan.rows if row.refusal is None and row.key not in known]
    if not rows:
        return
    hardware = str(plan.hardware)
    if plan.hardware == MEASURE:
        hardware = str(_measured(plan, folder, log))
    for row in rows:
        words = ["--world-size", str(row.world_size), "--hardware", hardware, "--json"]
        command = [*_plan_tool(), "step", *row.flags, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            predicted = json.loads(done.stdout) if done.returncode == 0 else None
        except ValueError:
            predicted = None
        if isinstance(predicted, dict) and "step_s" in predicted:
            line = {"kind": "prediction", "key": row.key, "name": row.name}
            line |= {"hardware": plan.hardware, "command": _told(command), "prediction": predicted}
            raw.append(folder, line)
        else:
            log(f"row {row.name}: tools/plan.py step predicts nothing")


def _plan_tool() -> list[str]:
    tool = find_spec("megatron.tools.plan")
    assert tool is not None and tool.origin is not None
    return [sys.executable, tool.origin]


def _measured(plan: StudyPlan, folder: Path, log: Log) -> Path:
    """The file of what this machine can do, measured once for a study. Raises UserError."""
    path = folder / "hardware.json"
    if not path.exists():
        log("measuring this machine for the predictions: a few minutes")
        command = [*_plan_tool(), "measure", "--out", str(path)]
        environment = {**os.environ, **plan.environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode or not path.exists():
            lines = done.stderr.strip().splitlines()
            raise UserError(f"hardware: {MEASURE}: {lines[-1] if lines else 'measuring failed'}")
    return path


def _told(command: list[str]) -> list[str]:
    """A command as the raw rows keep it: from the checkout, by any Python."""
    words = ["python" if word == sys.executable else word for word in command]
    return [word.replace(f"{CHECKOUT}{os.sep}", "") for word in words]


# ---- the machine -------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    """What may disturb a run or make it slow: other work, and clocks."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    clocks = [float(value) for value in re.findall(r"^cpu MHz\s*: ([\d.]+)", text, re.M)]
    return {
        "load": [round(value, 2) for value in os.getloadavg()],
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "cpu_mhz": round(statistics.fmean(clocks)) if clocks else None,
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Name, clocks, temperature and use of each GPU, as nvidia-smi prints them."""
    fields = "name,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _commit() -> list[str]:
    """The commit of the checkout, and whether files differ from it; nothing in an installation."""
    if not (CHECKOUT / ".git").exists():
        return []
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    return [f"commit {done.stdout.strip()}"] if done.returncode == 0 else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if abs(value) < float("inf") else str(value)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runners away from the folder. Raises UserError when there is one."""
    with open(folder / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{folder}: another runner works there; wait for it or choose another --folder"
            ) from None
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the runner as Ctrl-C does: what it has started here ends first."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
