"""Studies that really run: killed half-way and continued; and how each kind of end is reported."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.tools._study import launch, raw, runner
from megatron.tools._study.description import read_study
from megatron.tools._study.launch import (
    Ending,
    LocalLauncher,
    SlurmLauncher,
    StudyRun,
    _processes,
    status_of,
)
from megatron.tools._study.runner import run_of
from megatron.tools.study import main

from megatron.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
STUDY = """
name: tiny
repeats: 1
iterations: 3
warmup: 1
environment: {OMP_NUM_THREADS: 1}
base: {num-layers: 2, hidden-size: 32, num-attention-heads: 4, seq-length: 16, vocab-size: 63,
  micro-batch-size: 1, global-batch-size: 4, mock-data: true, lr: 1e-3}
rows:
  - {world-size: 1}
  - {world-size: 2}
  - {name: wild, lr: 1e30, clip-grad: 0}
"""
MINUTES = 8  # that a busy machine may take


def wait_for(what: Callable[[], object]) -> object:
    end = time.monotonic() + 60 * MINUTES
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.mark.full
def test_a_killed_study_goes_on_and_repeats_nothing(tmp_path):
    file, folder = tmp_path / "study.yaml", tmp_path / "study"
    file.write_text(STUDY)
    plan = read_study(file)
    second = run_of(folder, plan.rows[1], 0)
    command = [sys.executable, str(ROOT / "tools/study.py"), str(file), "--folder", str(folder)]
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(raw.read(folder).runs) == 1 and list(_processes(second.metrics)))
        assert main(command[2:]) == 2, "two runners must not share a folder"
    finally:
        runner.kill()
        runner.wait()
    assert list(_processes(second.metrics)), "what it has started runs on without it"
    lines = (folder / "raw.jsonl").read_text().splitlines()

    assert main(command[2:]) == 0
    after = (folder / "raw.jsonl").read_text().splitlines()
    assert after[: len(lines)] == lines and len(after) == 1 + 3
    assert not list(_processes(second.metrics))
    runs = [raw.read(folder).runs[row.key, 0] for row in plan.rows]
    assert [run["status"] for run in runs] == ["ok", "ok", "crashed"]
    assert [len(run["losses"]) for run in runs] == [3, 3, 1]
    assert "iteration 2: NaN or Inf" in runs[2]["reason"] and runs[2]["exit_code"] == 1
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-6)
    assert runs[1]["command"][0] == "env" and runs[1]["tokens"] == 4 * 16
    table = (folder / "table.md").read_text()
    assert "| w1 |" in table and "| wild | crashed | 0 |" in table and "Equal work A" in table
    assert main(command[2:]) == 0 and (folder / "raw.jsonl").read_text().splitlines() == after


def test_a_run_that_needs_more_memory_than_it_may_have(tmp_path):
    """The command of a row with a limit, on a program that takes more."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY + "  - {memory-limit: 0.25, seed: 2}\n")
    plan = read_study(file)
    command = LocalLauncher(plan).command(run_of(tmp_path, plan.rows[3], 0))
    at = command.index(sys.executable)
    assert command[at - 2 : at] == ["prlimit", "--data=268435456"]
    takes = "import torch; torch.empty(2**28)"
    done = subprocess.run([*command[: at + 1], "-c", takes], capture_output=True, text=True)
    status, reason = status_of(Ending(done.returncode, "", "here"), done.stderr, 0, 3)
    assert status == "out of memory" and "before the first iteration" in reason


BANNER = (
    f"{120 * '='}\n [2026-11-25 04:19:12.719058] iteration        1/      10 | lm loss: 6.2 |\n"
)
OF_A_RANK = f"{BANNER}[rank 1] ValueError: wrong\nrank 1 (process 9) ended first here\n"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
REFUSED = "1 fault in the settings:\n  --lr: gone\n"
# exit code, Slurm's state, log, iterations that are done
ENDINGS = {
    (0, "", BANNER, 10): ("ok", ""),
    (0, "", BANNER, 9): ("crashed", "it printed nothing, after iteration 9 of 10, exit code 0"),
    (2, "", REFUSED, 0): ("refused", "--lr: gone"),
    (1, "", f"{BANNER}iteration 2: NaN\n  more\n", 1): ("crashed", "iteration 2: NaN, after"),
    (1, "", OF_A_RANK, 1): ("crashed", "ValueError: wrong, after iteration 1 of 10, exit code 1"),
    (1, "", OUT_OF_MEMORY, 0): ("out of memory", "Tried 2 GiB, before the first iteration"),
    (137, "OUT_OF_MEMORY", BANNER, 3): ("out of memory", "after iteration 3 of 10"),
    (137, "", BANNER, 3): ("killed", "SIGKILL after iteration 3 of 10"),
    (137, "TIMEOUT", BANNER, 3): ("timeout", "no end after iteration 3 of 10"),
    (143, "CANCELLED", BANNER, 3): ("killed", "CANCELLED after iteration 3"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_run_has_ended(ending):
    (code, state, log, done), (status, reason) = ending, ENDINGS[ending]
    found, shown = status_of(Ending(code, state, "here"), log, done, 10)
    assert found == status and reason in shown


def test_a_run_that_does_not_end_is_ended(tmp_path):
    """With what it has started in separate sessions, as torchrun does."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY + "timeout: 0.05\n")
    plan = read_study(file)
    run = run_of(tmp_path, plan.rows[0], 0)
    run.folder.mkdir(parents=True)
    sleeper = "import subprocess as s, sys; s.run(sys.argv[1:], start_new_session=True)"
    rest = [sys.executable, "-c", "import time; time.sleep(600)", "--metrics-file"]
    launcher = LocalLauncher(plan)
    launcher.command = lambda _: [sys.executable, "-c", sleeper, *rest, str(run.metrics), "x"]
    started = launcher.start(run)
    wait_for(lambda: len(list(_processes(run.metrics))) == 2)
    ending = wait_for(started.poll)
    assert ending[:2] == (128 + signal.SIGKILL, "TIMEOUT") and not list(_processes(run.metrics))


PLAN = """import json, sys
if sys.argv[1] == "measure":
    open(sys.argv[-1], "x").write("measured")
else:
    hardware = sys.argv[sys.argv.index("--hardware") + 1]
    print(json.dumps({"step_s": 0.5, "read": open(hardware).read()}))
"""


def test_predictions_are_of_the_hardware_that_the_study_names(tmp_path, monkeypatch):
    """It is measured once. Commands of raw rows name no folder of this machine."""
    tool = tmp_path / "plan.py"
    tool.write_text(PLAN)
    monkeypatch.setattr(runner, "_plan_tool", lambda: [sys.executable, str(tool)])
    file, folder = tmp_path / "study.yaml", tmp_path / "study"
    folder.mkdir()
    (tmp_path / "named").write_text("named")
    for hardware, read in (("measure", "measured"), (tmp_path / "named", "named")):
        file.write_text(f"{STUDY}hardware: {hardware}\n")
        plan = read_study(file)
        for _ in range(2):  # the second time everything is there
            runner._predictions(plan, folder, raw.read(folder), lambda line: None)
        found = raw.read(folder).predictions_for(plan.hardware)
        assert len(found) == 3
        for line in found.values():
            assert line["prediction"] == {"step_s": 0.5, "read": read}
            assert line["command"][0] == "python" and line["command"][2] == "step"
    assert len((folder / "raw.jsonl").read_text().splitlines()) == 6
    assert not raw.read(folder).predictions_for(None)
    shown = runner._told([sys.executable, f"{runner.CHECKOUT}/tools/plan.py", "step"])
    assert shown == ["python", "tools/plan.py", "step"]


class FakeSlurm:
    """Answers of Slurm's programs, by the first word of their command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | None):
        self.answers = answers  # None: there is none
        monkeypatch.setattr(launch, "_slurm", self)

    def __call__(self, *command: str) -> subprocess.CompletedProcess:
        if command[0] not in self.answers:
            raise FileNotFoundError(command[0])
        answer = self.answers[command[0]]
        return subprocess.CompletedProcess(command, int(answer is None), answer or "", "away")


def slurm_run(tmp_path: Path, *, is_known: bool) -> tuple[SlurmLauncher, StudyRun]:
    """A launcher and a run that it has submitted as job 7, which its folder knows or not."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY + "launcher: sbatch\n")
    plan = read_study(file)
    run = run_of(tmp_path, plan.rows[0], 0)
    run.folder.mkdir(parents=True)
    if is_known:
        (run.folder / "job").write_text("7\n")
    return SlurmLauncher(plan), run


def test_a_job_has_not_crashed_while_slurm_does_not_show_how_it_ended(tmp_path, monkeypatch):
    launcher, run = slurm_run(tmp_path, is_known=True)
    slurm = FakeSlurm(monkeypatch, squeue=None, scontrol=None)
    running = launcher.find(run)
    assert running.poll() is None
    slurm.answers["squeue"] = ""
    assert running.poll() is None
    slurm.answers["scontrol"] = "JobId=7 JobState=COMPLETED ExitCode=0:0 NodeList=n1\n"
    assert running.poll() == Ending(0, "COMPLETED", "n1")
    slurm.answers["scontrol"] = None
    monkeypatch.setattr(launch, "PATIENCE_SECONDS", 0)
    assert running.poll() == Ending(1, "", "")


def test_a_run_is_not_submitted_twice_because_slurm_is_away(tmp_path, monkeypatch):
    launcher, run = slurm_run(tmp_path, is_known=False)
    slurm = FakeSlurm(monkeypatch, squeue=None)
    with pytest.raises(UserError, match="squeue does not show whether row w1 is queued: away"):
        launcher.find(run)
    slurm.answers["squeue"] = ""
    assert launcher.find(run) is None


def test_a_program_of_slurm_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(launch, "COMMAND_SECONDS", 0.1)
    assert launch._slurm("sleep", "60").returncode == 1
