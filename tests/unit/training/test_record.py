"""What a run stores of itself."""

from __future__ import annotations

import os
import subprocess

from megatron.config.groups import Config
from megatron.distributed.groups import Layout
from megatron.training.advisor import Forecast, Verdict
from megatron.training.banner import git_state, run_record


def git(folder, *arguments: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_git_state(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    file = tmp_path / "a file.txt"
    file.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-m", "a name", "v1")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "untracked").write_text("")
    index = (tmp_path / ".git" / "index").read_bytes()
    os.utime(file, (0, 0))
    assert git_state(tmp_path) == clean
    assert (tmp_path / ".git" / "index").read_bytes() == index, "a lock was taken"
    file.write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}
    (tmp_path / "below").mkdir()
    assert git_state(tmp_path / "below") is None  # another project's
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_record():
    verdict = Verdict("tight", "tight: the plan needs 79 GiB")
    forecast = Forecast(verdict=verdict, prediction={"step_s": 1.5})
    found = run_record(Config(), Layout(tp=2, dp=3, pp=4), {"model": ["x"]}, forecast)
    assert found["config"] == Config().to_dict() and found["banner"] == {"model": ["x"]}
    assert found["layout"] == {"tp": 2, "cp": 1, "pp": 4, "dp": 3, "ranks": 24}
    assert found["memory"] == {"verdict": "tight", "reason": "tight: the plan needs 79 GiB"}
    assert found["prediction"] == {"step_s": 1.5}
    assert {"megatron", "torch", "python"} <= set(found["versions"])
    without = run_record(Config(), Layout(), {}, Forecast())
    assert "memory" not in without and "prediction" not in without
