"""The workspace and report for wandb against the names that real runs logged, offline."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from parity.layouts import BASE
from parity.worker import run_case

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import wandb_workspace as tool

FLAGS = (
    *BASE,
    *"--micro-batch-size 1 --train-iters 4 --log-layer-norms --log-num-zeros-in-grad".split(),
    *"--timing-log-level 1 --peak-tflops 1 --eval-interval 2 --decoupled-lr 1e-3".split(),
    *"--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2".split(),
    *"--wandb-project p --save-interval 2".split(),
)
NOT_THERE = {
    "memory/mem-reserved-bytes",  # of GPUs
    "validation/bits-per-byte",  # of text
    "speed/predicted-iteration-time",  # of a known device
}


def in_two_starts(save: str) -> None:
    """One rank of a run that ends half-way and resumes."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    flags = (*FLAGS, "--save", save, "--load", save)
    run_case((*flags, "--exit-interval", "2"))
    run_case(flags)


@pytest.fixture(scope="module")
def run(gloo_world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "save"
    gloo_world(2).run(in_two_starts, str(folder))
    return folder


@pytest.fixture(scope="module")
def made() -> tool.Described:
    return tool.build("p", "team", "tokens")


def test_a_run_has_logged_every_name(run, made):
    used = tool.names_in(made.json)
    assert {"tokens", "train/lm loss", "^grad-norm/"} < used
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    logged = tool.logged_names(run)
    found = tool.compare(used, logged)
    assert found.missing == [] and set(found.absent) <= NOT_THERE
    assert {*tool.X_AXES, "grad-norm/layers.1", "health/resumed-from-iteration"} <= logged
    assert tool.compare(used, tool.logged_names(run / "metrics.jsonl")) == found


def test_a_renamed_metric_is_found(run, tmp_path, capsys):
    assert tool.main(["--check", str(run)]) == 0
    assert "missing" not in capsys.readouterr().out
    rows = (run / "metrics.jsonl").read_text()
    renamed = tmp_path / "metrics.jsonl"
    renamed.write_text(rows.replace('"grad-norm":', '"gradient-norm":'))
    assert tool.main(["--check", str(renamed)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "missing: health/grad-norm" in shown and "in no chart: train/gradient-norm" in shown
    assert sum(line.startswith("missing") for line in shown) == 1


def test_written_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "made.json"
    assert tool.main(["--project", "p", "--entity", "team", "--out", str(out)]) == 0
    stored = json.loads(out.read_text())
    bank = stored["workspace"]["spec"]["section"]["panelBankConfig"]
    names = [section["name"] for section in bank["sections"]]
    assert names == ["train", "validation", "speed", "memory", "health"]
    assert stored["report"]["spec"]["blocks"] and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], "give --project"),
        (["--check", "no-such-run"], "no such file"),
        (["--check", "FILE"], "not a .wandb file"),
        (["--project", "p"], "wandb has no key"),
    ],
)
def test_what_cannot_be_done_is_one_error(tmp_path, monkeypatch, capsys, flags, shown):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    file = tmp_path / "run-x.wandb"
    file.write_bytes(b"something else")
    assert tool.main([str(file) if flag == "FILE" else flag for flag in flags]) == 2
    captured = capsys.readouterr()
    assert shown in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""
