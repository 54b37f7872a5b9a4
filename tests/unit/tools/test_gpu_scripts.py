"""scripts/gpu/: every script keeps to its 8 minutes, every command line is one that its program
takes, a stage that fails stops no other, and results are recorded. `-m campaign` rehearses every
script as a whole on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.benchmarks import training
from megatron.tools.plan import without_files

from megatron.config.arguments import parse_arguments
from megatron.config.derive import derive
from megatron.config.validate import resolve

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "scripts" / "gpu"
sys.path.append(str(GPU))

import record  # noqa: E402
import stages  # noqa: E402

WINDOW = 480  # seconds; a command on a lent GPU may run for 600
MOST_FILES = 5
# what a CPU cannot do: a trace of it has no kernels, adopt.py refuses its times
FAILS_ON_A_CPU = {"ours-kernels", "before-kernels", "adopt"}
START = 10  # seconds until a tool has imported torch, and for its table


def run_script(script: Path, out: Path, *words: str) -> list[dict]:
    """Rehearse a script; the lines of its rows.jsonl."""
    environ = {"REHEARSE": "1", "PYTHON": sys.executable, "OUT": str(out), "WORK": f"{out}-work"}
    environ["OMP_NUM_THREADS"] = "1"
    subprocess.run(["bash", str(script), *words], env={**os.environ, **environ}, check=True)
    assert len(list(out.iterdir())) <= MOST_FILES
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def outcomes(lines: list[dict]) -> dict[str, int]:
    return {line["stage"]: line["exit_code"] for line in lines if "exit_code" in line}


@pytest.mark.parametrize("rehearse", ["", "1"])
@pytest.mark.parametrize("script", stages.SCRIPTS)
def test_a_script_fits_its_window_and_every_command_line_is_valid(script, rehearse):
    found = stages.stages_of(script, REHEARSE=rehearse)
    assert sum(stage.limit for stage in found) <= WINDOW
    names = [stage.name for stage in found]
    assert names[0] == "facts" and len(set(names)) == len(names)
    for stage in found:
        programs = [word for word in stage.words if word.endswith(".py")]
        assert not [word for word in programs if not (ROOT / word).exists()], stage.name
        flags = stage.flags()
        if flags is not None:
            vocabulary = int(flags[flags.index("--vocab-size") + 1]) + 1
            config = without_files(parse_arguments(flags).config)  # text.sh writes its own
            resolve(config, stage.ranks(), vocabulary)


@pytest.mark.parametrize("name", ["125M", "1.3B", "8B-layers"])
def test_peers_train_the_models_of_the_scripts(name):
    """The model and the step that peers are given are those of the shell's command lines."""
    work = training.SETTINGS[f"{name} on a GPU"]
    by_name = {
        each.name: each for script in ("first", "settle") for each in stages.stages_of(script)
    }
    flags = by_name["ours" if name == "8B-layers" else name].flags()
    configs = [
        derive(parse_arguments(each).config, 1, work.vocab).config
        for each in (training.our_flags(work), flags)
    ]
    assert configs[0].model == configs[1].model
    assert configs[0].data.seq_length == configs[1].data.seq_length
    assert configs[0].training.global_batch_size == configs[1].training.global_batch_size
    assert configs[0].training.micro_batch_size == configs[1].training.micro_batch_size


@pytest.mark.full
def test_a_stage_that_is_killed_or_crashes_stops_no_other(tmp_path):
    script = tmp_path / "demo.sh"
    script.write_text(
        f"""source {GPU}/common.sh
        begin demo "$@"
        stage hangs 1 bash -c 'echo "{{\\"before\\": 1}}"; sleep 60 & sleep 60'
        stage crashes 5 bash -c 'echo last words; kill -SEGV $$'
        stage "not chosen" 5 touch {tmp_path}/ran
        stage works 5 echo '{{"it": "runs"}}'
        """
    )
    lines = run_script(script, tmp_path / "out", "hangs", "crashes", "works")
    assert outcomes(lines) == {"facts": 0, "hangs": 124, "crashes": 139, "works": 0}
    rows = {line["stage"]: line["row"] for line in lines if "row" in line}
    # what a killed stage had found is kept
    assert rows["hangs"] == {"before": 1} and rows["works"] == {"it": "runs"}
    assert rows["facts"]["device"] and rows["facts"]["packages"]["torch"]
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "over its limit of 8 s" in report and "last words" in report
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_a_part_of_a_script_is_rehearsed_and_recorded(tmp_path):
    lines = run_script(GPU / "first.sh", tmp_path / "out", "ours", "ours-kernels")
    assert outcomes(lines) == {"facts": 0, "ours": 0, "ours-kernels": 1}
    found = json.loads((tmp_path / "out" / "first.json").read_text())
    assert found["kind"] == "rehearsal" and found["runs"]["ours"]["exit_code"] == 0
    assert "pretrain_gpt.py" in found["runs"]["ours"]["command"]
    assert record.measured(found["runs"]["ours"]["rows"])["step_s"] > 0


def test_a_measurement_is_held_against_the_prediction(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text(
        json.dumps({"rows": {"h200/first/ours": {"step_s": 0.8, "mfu": 0.5, "peak_gib": 48.0}}})
    )
    (tmp_path / "unfinished.json").write_text('{"rows": [')
    monkeypatch.setattr(record, "PREDICTIONS", tmp_path / "plan.json")
    rows = [
        {"iteration": step, "iteration-time": seconds, "mem-max-allocated-bytes": 50 << 30}
        for step, seconds in ((5, 9.0), (10, 1.0), (15, 3.0))  # warm-up, steady, profiled
    ]
    lines = [{"stage": "facts", "row": {"device": "NVIDIA H200"}}]
    lines += [{"stage": "ours", "row": row} for row in rows]
    lines.append({"stage": "ours", "exit_code": 0, "seconds": 30, "limit": 90})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rows.jsonl").write_text(text + '{"stage": "ours", "ro')  # killed while writing
    subprocess.run(
        ["tar", "-czf", "all.tgz", "plan.json", "unfinished.json"], cwd=tmp_path, check=True
    )
    found = record.record("first", tmp_path)
    assert found["kind"] == "measurement" and found["device"] == "NVIDIA H200"
    assert found["runs"]["ours"]["measured"] == {"step_s": 1.0, "peak_gib": 50.0}
    assert found["runs"]["ours"]["errors"] == {"step_s": -0.2, "peak_gib": -0.04}
    assert found["files"].keys() == {"plan.json"}
    # without its facts and its end it is a measurement all the same
    (tmp_path / "rows.jsonl").write_text(json.dumps(lines[-1] | {"exit_code": 1}) + "\n")
    found = record.record("first", tmp_path)
    assert found["kind"] == "measurement"
    (tmp_path / "first.json").write_text(json.dumps(found))
    monkeypatch.setattr(stages, "RESULTS", tmp_path)
    assert stages.described("first").endswith("unknown device, unknown date; failed: ours")


def test_predictions_are_those_of_the_plan():
    found = json.loads(stages.PREDICTIONS.read_text())["rows"]
    runs = {
        f"{hardware}/{script}/{stage.name}": stage
        for hardware in stages.HARDWARE
        for script in stages.SCRIPTS
        for stage in stages.stages_of(script)
        if stage.flags() is not None and stage.ranks() == 1
    }
    assert found.keys() == runs.keys(), "run python scripts/gpu/stages.py predict"
    for name in ("h200/first/ours", "h100/features/experts", "h200/memory/optimizer-offload"):
        assert stages.predict(name.split("/")[0], runs[name].flags()) == found[name]


def test_the_front_lists_the_scripts_and_refuses_what_it_cannot_run(tmp_path):
    def front(*words: str) -> subprocess.CompletedProcess:
        environ = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        command = ["bash", "scripts/gpu.sh", *words]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    listed = front("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(stages.SCRIPTS)
    assert front("common").returncode == 2 and "is not one of the scripts" in front("x").stderr
    without_gpu = front("first")
    assert without_gpu.returncode == 2 and "sees no GPU" in without_gpu.stderr


@pytest.fixture
def load(monkeypatch):
    """`load("timed")`: that script on a CPU, without device.py, which changes Triton for good."""
    device = {"DEVICE": "cpu", "HALF": torch.float32, "IS_CUDA": False, "message": str}
    monkeypatch.setitem(sys.modules, "device", SimpleNamespace(**device))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_attention_row_is_checked_by_one_process(load, dtype):
    checks = load("checks")

    def titles(operator: str) -> list[str]:
        rows = checks.rows_of(operator, checks.DTYPES[dtype])
        return [record.title(row.operator, row.key) for row in rows]

    names = [name.partition(":") for name in checks.OPERATORS if name.startswith("attention")]
    of_processes = [titles(name) for name, _, given in names if given == dtype]
    assert all(of_processes) and sorted(sum(of_processes, [])) == sorted(titles("attention"))
    assert titles("attention dq 128 causal") == ["attention dq 128 causal"]


ROW = {"operator": "norm forward", "key": {}, "ok": True}
HANGS = f"import time; print({json.dumps(ROW)!r}, flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    "script, seconds, rows, fault",
    [
        (HANGS, 3, [ROW], "killed: not done after 3 s"),
        ("import none_of_this_name", 30, [], "exit code 1 ModuleNotFoundError"),
    ],
)
def test_a_check_that_does_not_end_well_is_reported_with_the_rows_it_had(
    load, monkeypatch, tmp_path, capsys, script, seconds, rows, fault
):
    checks, file = load("checks"), tmp_path / "check.py"
    file.write_text(script)
    monkeypatch.setattr(checks, "__file__", str(file))
    assert not checks.check_in_process("norm", time.monotonic() + seconds, under=("env",))
    *found, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert found == rows and (last["operator"], last["ok"]) == ("norm", False)
    assert last["error"].startswith(fault)


def test_only_wrong_rows_are_checked_again(tmp_path):
    key = {"d": 128, "kind": "causal"}
    rows = [
        {"operator": "attention dq", "key": key, "dtype": "bf16", "ok": False},
        {"operator": "attention dq", "key": key, "dtype": "fp16", "ok": True},
        {"operator": "attention dq 256:bf16", "ok": False, "error": "exit code -11"},
    ]
    (tmp_path / "first.json").write_text(json.dumps({"runs": {"checks": {"rows": rows}}}))
    found = record.failed_operators(tmp_path / "first.json")
    assert found == ["attention dq 128 causal:bf16", "attention dq 256:bf16"]
    assert record.failed_operators(tmp_path / "none.json") == []


def test_tools_that_end_by_themselves_do_so_before_their_stage(load):
    found = {each.name: each for script in stages.SCRIPTS for each in stages.stages_of(script)}

    def value(name: str, flag: str) -> float:
        words = found[name].words
        return float(words[words.index(flag) + 1])

    seconds = {
        "checks": load("checks").SECONDS,
        "failed": value("failed", "--seconds"),
        "zero": 60 * value("zero", "--minutes") + value("zero", "--patience"),
    }
    assert not [name for name in seconds if seconds[name] + START > found[name].limit]


def test_timed_calls_the_kernels_as_they_are_declared(load, monkeypatch):
    timed = load("timed")
    forward = mock.create_autospec(timed.attention.forward, return_value=(None, None))
    backward = mock.create_autospec(timed.attention_backward.backward)
    monkeypatch.setattr(timed.attention, "forward", forward)
    monkeypatch.setattr(timed.attention_backward, "backward", backward)
    for _, call, *_ in timed.attentions():
        call()
    assert forward.call_count == backward.call_count == 2  # one forward call is for `backward`


@pytest.mark.campaign
@pytest.mark.parametrize("script", stages.SCRIPTS)
def test_a_whole_script_is_rehearsed(script, tmp_path):
    found = outcomes(run_script(GPU / f"{script}.sh", tmp_path / "out"))
    assert {name for name, code in found.items() if code} <= FAILS_ON_A_CPU
    assert found.keys() == {stage.name for stage in stages.stages_of(script)}
