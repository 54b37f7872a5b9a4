"""scripts/train.sbatch itself, as Slurm runs it, with commands of Slurm that only write down how
they were called: cheap, and with odd input.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import ROOT, launch_environment, program
from selection import each_value

SCRIPT = "scripts/train.sbatch"
COMMANDS = {  # on a node n0; srun carries out what it is given, once, unless that would train
    "scontrol": """case "$1 $2" in
        "show hostnames") echo n0 ;;
        "show node") echo "NodeName=n0 NodeAddr=127.0.0.1 Port=1" ;;
        "show job") echo "JobId=7 ExcNodeList=${EXCLUDED:-(null)} Features=" ;;
        requeue*) echo "$2" >>"$CALLS/requeue" ;;
        update*) echo "$*" >>"$CALLS/update" ;;
    esac""",
    "srun": """
        number=$(ls "$CALLS" | grep -c srun)
        printf '%s\\n' "$@" >"$CALLS/srun-$number"
        while [[ $1 = --* ]]; do shift; done
        case "$*" in
            *launch.sh*) exit "${TRAINING_ENDS:-0}" ;;
            *preflight.sh*) printf '%s\\n' "${PREFLIGHT_SAYS:-}"; exit 137 ;;
            *) "$@" ;;
        esac""",
}


@dataclass
class Started:
    """How scripts/train.sbatch ended."""

    code: int
    log: str
    calls: Path

    @property
    def training(self) -> list[str]:
        """The arguments of the srun that trains."""
        calls = [call.read_text().splitlines() for call in sorted(self.calls.glob("srun-*"))]
        return next((call for call in calls if "scripts/launch.sh" in call), [])

    @property
    def requeued(self) -> bool:
        return (self.calls / "requeue").exists()


@pytest.fixture
def start(tmp_path: Path):
    """`start(*flags, **settings)`: a start of the job 7 in the checkout, or in `cwd`; SAVE is
    `tmp_path`/run.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "run").mkdir()
    for name, script in COMMANDS.items():
        program(programs / name, script)
    (tmp_path / "torch.py").touch()  # the real one takes seconds to import
    python = program(tmp_path / "python", f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"')
    program(tmp_path / "without-torch", f'exec {sys.executable} -S "$@"')

    def run(*flags: str, cwd: Path = ROOT, script: str = SCRIPT, **settings: str) -> Started:
        calls = tmp_path / f"calls{len(list(tmp_path.glob('calls*')))}"
        calls.mkdir()
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "CALLS": str(calls),
            "SAVE": str(tmp_path / "run"),
            "PYTHON": str(python),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "n0",
            "SLURM_JOB_NAME": "gpt",
            **settings,
        }
        done = subprocess.run(
            ["bash", script, *flags],
            cwd=cwd,
            env={name: value for name, value in environment.items() if value != "-"},
            capture_output=True,
            text=True,
        )
        return Started(done.returncode, done.stdout + done.stderr, calls)

    return run


def test_the_tasks_of_the_sweep_are_different_runs(start, tmp_path):
    """examples/sweep: each has its own folder and its own pair of learning rate and seed."""
    chosen, sweep = set(), tmp_path / "sweep"
    for task in range(6):
        settings = {"SLURM_ARRAY_TASK_ID": str(task), "SWEEP": str(sweep)}
        started = start("--weight-decay", "0.2", script="examples/sweep/sweep.sbatch", **settings)
        words = started.training
        assert started.code == 0 and words[-4:-2] == ["--weight-decay", "0.2"], started.log
        lr, seed = (words[len(words) - words[::-1].index(flag)] for flag in ("--lr", "--seed"))
        assert words[words.index("--save") + 1] == f"{sweep}/lr-{lr}-seed-{seed}"
        chosen.add((lr, seed))
    assert len(chosen) == 6


def test_a_task_of_an_array_requeues_itself_alone(start):
    """One task has the array's number, with which scontrol requeues all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5", "TRAINING_ENDS": "1"}
    assert (start(**array).calls / "requeue").read_text() == "7_5\n"
    named = {"PREFLIGHT": "1", "PREFLIGHT_EXCLUDE": "1"}
    started = start(PREFLIGHT_SAYS="preflight: leave out n0", **named, **array)
    assert (started.calls / "update").read_text() == "update JobId=7_5 ExcNodeList=n0\n"


# ---- what is read from files and settings is never carried out -----------------------------------

COMMAND = "$(touch {mark})"
ATTEMPTS = [f"a[{COMMAND}]", "SLURM_JOB_ID", "010", "9" * 20]
TRACKER = "latest_checkpointed_iteration.txt"
EVENTS = "events.jsonl"


def event(name: str, iteration: object) -> str:
    return f'{{"event": "{name}", "time": 1.5, "iteration": {iteration}}}\n'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(("attempts", f"7 0 {count}\n", "attempt 1 of 3") for count in ATTEMPTS),
        *((TRACKER, newest, "from iteration 0:") for newest in (f"a[{COMMAND}]", COMMAND)),
        (TRACKER, "3\n4", "from iteration 3:"),
        # of the events, the last start's, which may have loaded a checkpoint of the nodes
        (EVENTS, event("start", 0) + event("start", 3) + event("steps", 9), "from iteration 3:"),
        (EVENTS, event("start", 7) + event("start", COMMAND), "from iteration 7:"),
    ],
)
def test_files_of_a_run_are_data(start, tmp_path, file, content, message):
    mark = tmp_path / "carried-out"
    (tmp_path / "run" / file).write_text(content.replace("{mark}", str(mark)))
    started = start()
    assert started.code == 0 and not mark.exists() and message in started.log, started.log


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("TOKENS", value) for value in (f"a[{COMMAND}]", "300e9", "-5")),
        ("MAX_ATTEMPTS", f"a[{COMMAND}]"),
        ("--seq-length", f"a[{COMMAND}]"),
        ("--seq-length=", f"x[{COMMAND}]"),
        *((switch, "yes") for switch in ("PREFLIGHT", "PREFLIGHT_EXCLUDE")),
    ],
)
def test_settings_that_are_no_numbers_are_refused(start, tmp_path, name, value):
    mark = tmp_path / "carried-out"
    value = value.format(mark=mark)
    flags = [name + value] if name.endswith("=") else [name, value]
    started = start(*flags) if name.startswith("--") else start(**{name: value})
    assert started.code == 2 and not mark.exists(), started.log
    assert f"{name.rstrip('=')}={value}: " in started.log
    assert not started.training and not started.requeued


def values_of(flag: str, words: list[str]) -> list[str]:
    """What follows each occurrence of a flag."""
    return [value for name, value in zip(words, words[1:], strict=False) if name == flag]


@pytest.mark.parametrize(
    "flags", [("--train-iters", "7"), ("--train_samples=7",), ("--train-tokens", "100000")]
)
def test_a_flag_of_the_length_replaces_the_default_in_every_spelling(start, flags):
    given = start(*flags).training
    assert given[-len(flags) :] == list(flags) and "--train-samples" not in given
    refused = start(*flags, TOKENS="10240")
    assert refused.code == 2 and f"TOKENS=10240 and {flags[0]} both give" in refused.log


def test_the_folder_of_the_flags_is_the_jobs(start, tmp_path):
    """Else the attempts are counted against a folder in which nothing is ever saved."""
    saved = tmp_path / "saved"
    (saved / "iter_0000003").mkdir(parents=True)
    (saved / TRACKER).write_text("3")
    for flags in (("--save", str(saved)), (f"--save={saved}",)):
        started = start(*flags, MAX_ATTEMPTS="9")
        assert "from iteration 3:" in started.log and (saved / "attempts").exists(), started.log
        assert values_of("--load", started.training) == [str(saved)]
        alone = start("--seq-length", "32", *flags, PRESET="", MAX_ATTEMPTS="9")
        assert "from iteration 3:" in alone.log and "--load" not in alone.training
    assert not (tmp_path / "run/attempts").exists()


NO_PRESET = {"PRESET": "", "TOKENS": ""}
NO_LENGTH = " needs --seq-length behind the script: add it, or set TOKENS= "
# a file may name a model, a length and a folder, which the script does not read
FILE = "--config 7b.yaml"


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        (FILE, {}, "--config 7b.yaml: flags of the preset gpt3-125m would override"),
        ("--yaml_cfg=7b.yaml", {}, "set PRESET= "),
        (FILE, NO_PRESET | {"SAVE": "-"}, "--config 7b.yaml: set SAVE to the folder"),
        ("", {"PRESET": ""}, NO_LENGTH),
        (FILE, {"PRESET": "", "TOKENS": "10240"}, NO_LENGTH),
    ],
)
def test_a_preset_length_or_folder_that_would_be_wrong_is_refused(start, flags, settings, message):
    refused = start(*flags.split(), **settings)
    assert refused.code == 2 and message in refused.log and not refused.training


@pytest.mark.parametrize(
    ("flags", "settings", "last"),
    [
        ("--seq-length=1024", {"TOKENS": "10240"}, "--train-samples 10"),
        ("--seq-length 512", {"TOKENS": "10240"}, "--train-samples 20"),
        (FILE, {"PRESET": "gpt3-125m", "TOKENS": "20480"}, "--train-samples 10"),
        (FILE, NO_PRESET, FILE),
        (f"{FILE} --save SAVED", NO_PRESET | {"SAVE": "-"}, f"{FILE} --save SAVED"),
    ],
)
def test_what_the_training_gets_last(start, tmp_path, flags, settings, last):
    flags, last = (words.replace("SAVED", str(tmp_path / "saved")) for words in (flags, last))
    given = " ".join(start(*flags.split(), **settings).training)
    assert given.endswith(last) and given.count("--train-samples") == ("samples" in last)


def test_a_preset_that_is_edited_away_is_not_in_the_way_of_a_file(start, tmp_path):
    edited = tmp_path / "train.sbatch"
    edited.write_text((ROOT / SCRIPT).read_text().replace("${PRESET-gpt3-125m}", "${PRESET-}"))
    assert start(*FILE.split(), script=str(edited), TOKENS="").training


@pytest.mark.parametrize("flag", ["--data-path", "--train_data_path", "--data-args-path"])
def test_data_behind_the_script_replace_computed_tokens(start, flag):
    given = start(flag, "mine").training
    assert "--mock-data" not in given and "--vocab-size" not in given
    assert "--mock-data" in start("--data-cache-path", "mine").training
    settings = {"PRESET": "gpt3-125m", "MAX_ATTEMPTS": "9"}
    assert "--mock-data" in start("--config-logger-dir", "mine", **settings).training
    of_file = start("--config", "mine.yaml", **settings)  # which may name data
    assert of_file.training and "--mock-data" not in of_file.training


def test_the_attempts_are_counted_and_for_the_group_alone(start, tmp_path):
    assert "attempt 1 of 3" in start().log and "attempt 2 of 3" in start().log
    assert (tmp_path / "run/attempts").read_text() == "7 0 2\n"
    assert stat.S_IMODE((tmp_path / "run/attempts").stat().st_mode) == 0o640


# ---- the environment of the ranks ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "message"),
    [("without-torch", "No module named 'torch'"), ("no-such-python", "No such file")],
)
def test_a_python_without_torch_is_not_requeued(start, tmp_path, python, message):
    python = tmp_path / python
    started = start(PYTHON=str(python))
    assert started.code == 2 and not started.requeued and not started.training
    assert message in started.log and f"PYTHON={python} cannot be used on n0" in started.log
    assert "bash scripts/test.sh" in started.log and "] not requeued" in started.log, started.log
    # it had torch before the requeue: a fault of the machine
    again = start(PYTHON=str(python), SLURM_RESTART_COUNT="1")
    assert again.code == 2 and again.requeued


@pytest.mark.parametrize("name", ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"])
@pytest.mark.parametrize(("gpus", "sees", "trains"), [("a100:8", 0, 0), ("8", 1, 1), ("0", 0, 1)])
def test_a_job_with_gpus_that_torch_does_not_see_is_no_run_on_cpus(
    start, tmp_path, gpus, sees, trains, name
):
    (tmp_path / "torch.py").write_text(
        f"__version__ = '2.13.0+cpu'\nclass cuda:\n    is_available = lambda: {bool(sees)}\n"
    )
    started = start(**{name: gpus})
    assert bool(started.training) == bool(trains), started.log
    if not trains:
        assert started.code == 2 and not started.requeued
        assert "torch 2.13.0+cpu sees no GPU: " in started.log


def test_the_environment_of_the_checkout_is_the_default(start, tmp_path):
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "python", python)
    started = start(cwd=checkout, PYTHON="-")
    assert started.code == 0 and f"Python {python}" in started.log, started.log
    started = start(cwd=checkout, PYTHON="-", SRUN_FLAGS="--container=/bundle")
    assert "PYTHON=python " in started.log, started.log
    shutil.rmtree(checkout / ".venv")
    started = start(cwd=checkout, PYTHON="-")  # the one of the PATH, if any
    assert started.code == 2 and "PYTHON=python cannot be used" in started.log


def test_a_setup_file_comes_before_all_settings(start, tmp_path):
    setup = tmp_path / "my setup.sh"
    setup.write_text(
        'export NCCL_SOCKET_IFNAME=ib0\nPRESET=llama-1b\necho "modules: $UNSET_BY_A_MODULE"\n'
        "false\n"
    )
    started = start(SETUP=str(setup))
    assert started.code == 0 and "modules: \n" in started.log, started.log
    assert started.training[started.training.index("--num-layers") + 1] == "16"
    started = start(SETUP=str(tmp_path / "nowhere.sh"))
    assert started.code == 2 and "nowhere.sh" in started.log and not started.training


def test_container_and_srun_flags_are_words_that_may_hold_spaces(start, tmp_path):
    script = 'echo "in $1" >>"$CALLS/container"; shift; exec "$@"'
    container = program(tmp_path / "run in image", script)
    started = start(
        "--data-path",
        "a b",
        CONTAINER=f"'{container}' \"my image.sif\"",
        SRUN_FLAGS="--container-image='x y.sqsh' --mpi=none",
        DATA="--data-path 'c d'",
    )
    assert started.code == 0, started.log
    command = started.training
    at = command.index("bash")
    assert command[at - 2 : at + 2] == [str(container), "my image.sif", "bash", "scripts/launch.sh"]
    assert "--container-image=x y.sqsh" in command[:at] and "--mpi=none" in command[:at]
    assert "c d" in command and "a b" in command
    # where torch was looked for
    assert (started.calls / "container").read_text() == "in my image.sif\n"
    for setting in ("CONTAINER", "SRUN_FLAGS", "LAYOUT", "DATA"):
        refused = start(**{setting: "it's"})
        assert refused.code == 2 and f"{setting}=it's: " in refused.log and not refused.training


def test_a_warning_before_the_ranks_are_started_is_no_end(start, tmp_path):
    """bash would die of SIGUSR1, and Slurm would not requeue the job."""
    setup = tmp_path / "setup.sh"
    setup.write_text("export BATCH=$$\n")
    script = f'kill -USR1 "$BATCH"; exec {tmp_path}/python "$@"'
    python = program(tmp_path / "warned", script)
    started = start(SETUP=str(setup), PYTHON=str(python))
    assert (started.code, started.requeued) == (85, True) and not started.training, started.log
    assert "SIGUSR1 before the ranks were started" in started.log


def launch(
    tmp_path: Path, way: str, pretrain: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """scripts/launch.sh on a node of one rank, which runs the text `pretrain`."""
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    (checkout / "pretrain_gpt.py").write_text(pretrain)
    environment = launch_environment(tmp_path, 1)
    for name in SET_FOR_RANKS:
        environment.pop(name, None)
    command = ["bash", "scripts/launch.sh", way]
    environment |= settings
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


SET_FOR_RANKS = ("NCCL_LAUNCH_ORDER_IMPLICIT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
DEFAULTS = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": None,
}


@pytest.mark.table(traits=each_value)
@pytest.mark.parametrize("way", ["srun", "torchrun"])
@pytest.mark.parametrize(
    ("driver", "given", "changed"),
    [
        ("12030", {}, {}),
        # older: messages that cross would hang
        ("12020", {}, {"NCCL_LAUNCH_ORDER_IMPLICIT": None}),
        # no driver
        ("", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {}),
        (
            "13000",
            {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            {},
        ),
        # the setting's older name
        ("13000", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": None}),
    ],
)
def test_settings_of_nccl_and_torch_reach_the_ranks_and_those_given_win(
    tmp_path, way, driver, given, changed
):
    script = (
        "import json, os\n"
        f"print('SEEN', json.dumps({{name: os.environ.get(name) for name in {SET_FOR_RANKS}}}))\n"
    )
    cases = f'*cuDriverGetVersion*) echo {driver} ;; *) exec {sys.executable} "$@" ;;'
    python = program(tmp_path / "python", f'case "$*" in {cases} esac')
    done = launch(tmp_path, way, script, PYTHON=str(python), **given)
    assert done.returncode == 0, done.stderr
    seen = re.findall(r"SEEN (.*)", done.stdout)
    assert [json.loads(line) for line in seen] == [{**DEFAULTS, **changed, **given}]


@pytest.mark.parametrize("given", [{}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}])
def test_torchrun_gives_its_ranks_time_to_save(tmp_path, given):
    """At SIGTERM; 30 seconds are its default, whatever the site allows."""
    script = "import os; print('SEEN', os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"
    done = launch(tmp_path, "torchrun", script, **given)
    seconds = given.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    assert done.returncode == 0 and f"SEEN {seconds}\n" in done.stdout, done.stderr


def test_a_signal_before_the_rank_is_started_does_not_kill_it(tmp_path):
    """SIGUSR1 while the driver is asked for its version."""
    (tmp_path / "begin").write_text("export LAUNCHER=${LAUNCHER:-$$}\n")
    cases = f'*cuDriverGetVersion*) kill -USR1 "$LAUNCHER" ;; *) exec {sys.executable} "$@" ;;'
    python = program(tmp_path / "python", f'case "$*" in {cases} esac')
    settings = {"PYTHON": str(python), "BASH_ENV": str(tmp_path / "begin")}
    done = launch(tmp_path, "srun", "print('started')", **settings)
    assert done.returncode == 0 and "started" in done.stdout, done.stderr


# ---- the check of the nodes ----------------------------------------------------------------------


def test_the_nodes_are_checked_before_the_training_where_it_is_wanted(start):
    assert "preflight" not in start().log
    flags = {"PREFLIGHT_FLAGS": "--tolerance 0.2"}
    started = start("--lr", "1", PREFLIGHT="1", PREFLIGHT_SAYS=IN_ORDER, **flags)
    assert started.code == 0 and started.training and IN_ORDER in started.log, started.log
    calls = [call.read_text().splitlines() for call in sorted(started.calls.glob("srun-*"))]
    (check,) = (call for call in calls if "scripts/preflight.sh" in call)
    assert calls.index(check) < calls.index(started.training)
    flags = check[check.index("scripts/preflight.sh") + 1 :]
    assert "--tolerance" in flags and "--ntasks-per-node=2" in check
    of_run = started.training[started.training.index("torchrun") + 1 :]
    assert flags[-len(of_run) :] == of_run  # the layout and the folders of the run


IN_ORDER = "preflight: in order"


@pytest.mark.parametrize(
    ("message", "settings", "code", "requeued", "words"),
    [
        ("preflight: leave out n0", {}, 3, False, "submit again with --exclude=n0"),
        ("preflight: leave out n0", {"SLURM_RESTART_COUNT": "1"}, 3, False, "--exclude=n0"),
        ("preflight: leave out n0,n1", {"PREFLIGHT_EXCLUDE": "1"}, 3, True, "without n0,n1"),
        ("preflight: not in order", {"PREFLIGHT_EXCLUDE": "1"}, 2, False, "not requeued"),
        ("preflight: not in order", {"SLURM_RESTART_COUNT": "1"}, 2, True, "] requeued"),
        # it crashed, or prints what is no verdict
        ("", {}, 1, True, "without a verdict"),
        ("preflight: leave out n0;touch $CALLS/mark", {"PREFLIGHT_EXCLUDE": "1"}, 1, True, ""),
    ],
)
def test_what_follows_on_a_fault_of_the_nodes(start, message, settings, code, requeued, words):
    started = start(PREFLIGHT="1", PREFLIGHT_SAYS=f"fault: n0: slow\n{message}", **settings)
    assert (started.code, started.requeued) == (code, requeued), started.log
    assert words in started.log and not started.training and not (started.calls / "mark").exists()


def test_nodes_are_added_to_those_that_the_job_excludes(start):
    named = {"PREFLIGHT": "1", "PREFLIGHT_EXCLUDE": "1"}
    named["PREFLIGHT_SAYS"] = "preflight: leave out n0"
    update = (start(**named).calls / "update").read_text()
    assert update == "update JobId=7 ExcNodeList=n0\n"
    update = (start(**named, EXCLUDED="n[2-3]").calls / "update").read_text()
    assert update == "update JobId=7 ExcNodeList=n[2-3],n0\n"


# ---- logs of the ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_each_rank_has_its_log(tmp_path, way):
    """What a rank writes is in the job's log and in a separate file, to the last line before
    a failure.
    """
    logs = tmp_path / "my logs"
    script = (
        "import os, sys\nprint('out of', os.environ.get('RANK', "
        "os.environ['SLURM_PROCID']))\nprint('last words', file=sys.stderr)\nsys.exit(3)\n"
    )
    done = launch(tmp_path, way, script, LOGS=str(logs))
    shown = done.stdout + done.stderr
    assert done.returncode == 3 and "out of 0" in shown and "last words" in shown, shown
    kept = "".join(path.read_text() for path in logs.rglob("*.log"))
    assert kept.count("out of 0") == 1 and kept.count("last words") == 1, list(logs.rglob("*"))
    assert (tmp_path / "failures").read_text() == "3 task 0 on n0\n"
