"""Starts the runs of a study, here or as Slurm jobs, and reports how each has ended.

Called from study/runner.py. A run that a killed runner has left behind is found again by the folder
that its command line or its job's name holds: here it is ended, as what disturbed it is unknown;
a job continues and is waited for.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron.tools._study.description import StudyPlan, StudyRow

from megatron.config.errors import UserError

PROGRAM = Path(find_spec("pretrain_gpt").origin)  # in a checkout and where it is installed
CHECKOUT = PROGRAM.parent
TIMED_OUT = "TIMEOUT"  # Slurm's word for it, used for local runs too
COMMAND_SECONDS = 60  # timeout of a Slurm command
# in which Slurm may be asked again how a job has ended; by default it forgets after as many
PATIENCE_SECONDS = 300


class StudyRun(NamedTuple):
    """One run of one row, in its own folder."""

    row: StudyRow
    repeat: int
    folder: Path

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder / "log.txt"

    @property
    def metrics(self) -> Path:
        """Its --metrics-file."""
        return self.folder / "metrics.jsonl"


class Ending(NamedTuple):
    """Exit code (128 + signal for a killed process), the word of Slurm if it has one, the hosts."""

    code: int
    state: str
    host: str


class Running(Protocol):
    """A run that has been started."""

    def poll(self) -> Ending | None:
        """How it has ended; None while it runs."""

    def end(self) -> None:
        """End it at once."""


class Launcher(Protocol):
    """A way to start runs; `pause` is the seconds between two looks at them."""

    pause: float

    def command(self, run: StudyRun) -> list[str]:
        """The full command line of a run."""

    def start(self, run: StudyRun) -> Running:
        """Start it."""

    def find(self, run: StudyRun) -> Running | None:
        """The processes of a run that an earlier runner started; None: run it again."""


def make_launcher(plan: StudyPlan) -> Launcher:
    """The launcher of a study. Raises UserError where it cannot work."""
    return SlurmLauncher(plan) if plan.launcher == "sbatch" else LocalLauncher(plan)


def flags_of(plan: StudyPlan, run: StudyRun) -> list[str]:
    """The flags of a run: its row's, and those by which the study finds what it has logged."""
    flags = [*run.row.flags, "--metrics-file", str(run.metrics)]
    if "wandb-project" in run.row.settings:
        name = f"{run.row.name} r{run.repeat}"
        flags += ["--wandb-group", plan.name, "--wandb-exp-name", name]
        flags += ["--wandb-save-dir", str(run.folder)]
    return flags


# ---- processes of this machine -----------------------------------------------------------------


class LocalLauncher:
    """Runs one after the other, each with all cores of this machine."""

    pause = 0.1

    def __init__(self, plan: StudyPlan) -> None:
        self.plan = plan

    def command(self, run: StudyRun) -> list[str]:
        """`env` and `prlimit` show on the command line what else a run depends on."""
        row, cores = run.row, len(os.sched_getaffinity(0))
        settings = {"OMP_NUM_THREADS": str(max(1, cores // row.world_size))}
        settings |= self.plan.environment
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        if row.memory_limit is not None:
            command += ["prlimit", f"--data={int(row.memory_limit * 2**30)}"]
        command.append(sys.executable)
        if row.world_size > 1:
            ours = CHECKOUT / "scripts" / "torchrun.py"  # ends with the code of the failed rank
            command += [str(ours)] if ours.is_file() else ["-m", "torch.distributed.run"]
            command += ["--standalone", "--nproc-per-node", str(row.world_size)]
        return [*command, str(PROGRAM), *flags_of(self.plan, run)]

    def start(self, run: StudyRun) -> Running:
        """Start it in its own session, so that Ctrl-C reaches the runner alone."""
        with open(run.log, "wb") as log:
            process = subprocess.Popen(
                self.command(run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _LocalRun(run, process, self.plan.timeout * 60)

    def find(self, run: StudyRun) -> Running | None:
        """End its remaining processes on this machine: it must be run again."""
        end_processes(run.metrics)
        return None


class _LocalRun:
    def __init__(self, run: StudyRun, process: subprocess.Popen, seconds: float) -> None:
        self._study_run, self._process = run, process
        self._deadline = time.monotonic() + seconds
        self._kills = _kernel_kills()

    def poll(self) -> Ending | None:
        code, state = self._process.poll(), ""
        if code is None and time.monotonic() < self._deadline:
            return None
        if code is None:
            self.end()
            code, state = 128 + signal.SIGKILL, TIMED_OUT
        end_processes(self._study_run.metrics)  # ranks that a killed launcher has left
        code = code if code >= 0 else 128 - code
        if not state and code == 128 + signal.SIGKILL and _kernel_kills() > self._kills:
            state = "OUT_OF_MEMORY"
        return Ending(code, state, os.uname().nodename)

    def end(self) -> None:
        end_processes(self._study_run.metrics)
        self._process.wait()


def _kernel_kills() -> int:
    """Processes that the kernel has ended since it started because memory was short."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", text, re.M)
    return int(found[1]) if found else 0


def end_processes(metrics: Path) -> None:
    """Kill every process on this machine whose command line has this file as --metrics-file, until
    none is left.
    """
    while found := list(_processes(metrics)):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _processes(metrics: Path) -> Iterator[int]:
    wanted = b"\0--metrics-file\0" + os.fsencode(metrics) + b"\0"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rsplit(") ", 1)[1][0]
            if state != "Z" and wanted in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except (OSError, IndexError):
            continue


# ---- jobs --------------------------------------------------------------------------------------


class SlurmLauncher:
    """Each run is a job of scripts/train.sbatch, submitted from the checkout."""

    pause = 1.0

    def __init__(self, plan: StudyPlan) -> None:
        self.plan = plan
        if not (CHECKOUT / "scripts" / "train.sbatch").is_file():
            raise UserError(
                f"launcher: sbatch: there is no scripts/train.sbatch in {CHECKOUT}: run "
                "tools/study.py of a checkout"
            )

    def command(self, run: StudyRun) -> list[str]:
        """`env` holds the settings of the script: PRESET empty, so that it adds no flags."""
        per_node = min(run.row.world_size, self.plan.ranks_per_node)
        settings = {
            **{"PRESET": "", "TOKENS": "", "LOGS": "", "MAX_ATTEMPTS": "1"},
            **{"SAVE": str(run.folder), "PYTHON": sys.executable},
            **self.plan.environment,
        }
        return [
            *("env", *(f"{name}={value}" for name, value in settings.items())),
            *("sbatch", "--parsable", "--no-requeue", f"--job-name={self._name(run)}"),
            f"--nodes={run.row.world_size // per_node}",
            *(f"--ntasks-per-node={per_node}", f"--gpus-per-node={per_node}"),
            *(f"--time={math.ceil(self.plan.timeout)}", "--signal=B:USR1@10"),
            *(f"--output={run.log}", *self.plan.sbatch),
            *("scripts/train.sbatch", *flags_of(self.plan, run)),
        ]

    def start(self, run: StudyRun) -> Running:
        """Submit it. Raises UserError with sbatch's message when it takes no such job."""
        try:
            done = _slurm(*self.command(run))
        except FileNotFoundError as error:
            raise UserError(f"launcher: sbatch: {error}") from None
        number = done.stdout.strip().partition(";")[0]
        if done.returncode or not number.isdigit():
            raise UserError(f"sbatch refuses row {run.row.name}: {done.stderr.strip()[:2000]}")
        (run.folder / "job").write_text(number + "\n")
        return _SlurmRun(run, number)

    def find(self, run: StudyRun) -> Running | None:
        """The job, by the number in its folder, or by its name when the runner was killed before it
        wrote the number.
        """
        file = run.folder / "job"
        if file.exists() and (number := file.read_text().strip()):
            return _SlurmRun(run, number)
        done = _slurm("squeue", "--noheader", f"--name={self._name(run)}", "--format=%A")
        if done.returncode:
            fault = done.stderr.strip()[:2000]
            raise UserError(f"squeue does not show whether row {run.row.name} is queued: {fault}")
        return _SlurmRun(run, done.stdout.split()[0]) if done.stdout.split() else None

    def _name(self, run: StudyRun) -> str:
        return f"{self.plan.name}-{run.row.key}-r{run.repeat}"


class _SlurmRun:
    def __init__(self, run: StudyRun, job: str) -> None:
        self._study_run, self._job = run, job
        self._gone_at: float | None = None  # when squeue first no longer listed the job

    def poll(self) -> Ending | None:
        queued = _slurm("squeue", "--noheader", f"--jobs={self._job}", "--format=%T")
        away = queued.returncode and "Invalid job id" not in queued.stderr
        if away or queued.stdout.strip():
            return None
        state, code, host = self._ended()
        # the script's word is the ranks' own; Slurm knows the highest code of all tasks
        text = (
            self._study_run.log.read_text(errors="replace") if self._study_run.log.exists() else ""
        )
        message = re.search(r"\] the ranks ended with exit code (\d+)", text)
        if self._gone_at is None:
            self._gone_at = time.monotonic()
        if not state and not message and time.monotonic() < self._gone_at + PATIENCE_SECONDS:
            return None
        if state != TIMED_OUT and "] time is nearly over" in text:
            state = TIMED_OUT
        return Ending(int(message[1]) if message else code, state, host)

    def end(self) -> None:
        """Jobs go on without their runner: the next one waits for them."""

    def _ended(self) -> tuple[str, int, str]:
        """State, exit code and nodes, of the controller or, when it has forgotten, the accounts."""
        shown = _slurm("scontrol", "show", "job", "--oneliner", self._job).stdout
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        state, code, host = (fields.get(key, "") for key in ("JobState", "ExitCode", "NodeList"))
        if not state:
            asked = [
                "--allocations",
                "--noheader",
                "--parsable2",
                "--format=State,ExitCode,NodeList",
            ]
            try:
                line = _slurm("sacct", f"--jobs={self._job}", *asked).stdout.split("\n")[0]
            except FileNotFoundError:
                line = ""
            state, code, host = line.split("|") if line.count("|") == 2 else ("", "", "")
        number, _, killed = code.partition(":")
        value = int(number or 0) or (128 + int(killed) if killed not in ("", "0") else 0)
        return state.split(" ")[0], value if state else 1, host


def _slurm(*command: str) -> subprocess.CompletedProcess:
    """Run a Slurm command; a timeout gives exit code 1."""
    try:
        return subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {COMMAND_SECONDS} s")


# ---- how a run has ended -----------------------------------------------------------------------

NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|Cannot allocate memory|"
    r"\bMemoryError\b|std::bad_alloc|could not create a primitive|oom[-_]kill"
)
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*")
RUN_LINE = re.compile(r"={20,}$| \[\d{4}-\d\d-\d\d [\d:.]+\]")  # banner, iterations
LAUNCHER_LINE = re.compile(r"rank \d+ \(process|srun: |\[\d{4}-\d\d-\d\d [\d:]{8}\] ")
USER_ERROR = 2  # exit code of pretrain_gpt.py for a mistake of the user's
BY_STATE = {
    TIMED_OUT: "timeout",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED": "killed",
    "NODE_FAIL": "killed",
    "PREEMPTED": "killed",
}


def status_of(ending: Ending, log: str, done: int, iterations: int) -> tuple[str, str]:
    """(status, reason) of a run that has logged `done` of its iterations; no reason for `ok`."""
    if ending.code == 0 and done == iterations and ending.state not in BY_STATE:
        return "ok", ""
    where = f"after iteration {done} of {iterations}" if done else "before the first iteration"
    if ending.state in BY_STATE:
        reason = f"{ending.state} {where}" if ending.state != TIMED_OUT else f"no end {where}"
        return BY_STATE[ending.state], reason
    message = error_line(log)
    if found := NO_MEMORY.search(log):
        line = next(line for line in log.split("\n") if found[0] in line)
        return "out of memory", f"{_cut(line)}, {where}"
    if ending.code == USER_ERROR and not done:
        return "refused", message
    if ending.code > 128:
        return "killed", f"{_signal(ending.code - 128)} {where}: {message}"
    return "crashed", f"{message}, {where}, exit code {ending.code}"


def error_line(log: str) -> str:
    """What a failed run printed of its failure: the last exception, or the first words after the
    lines of its banner and its iterations.
    """
    lines = [re.sub(r"^\[rank ?\d+\]:? ", "", line).rstrip() for line in log.split("\n")]
    lines = [line for line in lines if line.strip() and not LAUNCHER_LINE.match(line)]
    for line in reversed(lines):
        if EXCEPTION.match(line):
            return _cut(line)
    last = max((index for index, line in enumerate(lines) if RUN_LINE.match(line)), default=-1)
    message = lines[last + 1 : last + 3]
    if message and not message[0].endswith(":"):  # else what is wrong follows
        message = message[:1]
    return _cut(" ".join(message)) or "it printed nothing"


def _cut(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= 240 else line[:237] + "..."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
