"""Next to another package named `megatron`: one line that names both folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """In a process that imports from these folders, in their order."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=paths[0].anchor
    )


@pytest.mark.parametrize("program", ["pretrain_gpt", "mgpt_commands"])
@pytest.mark.parametrize("regular", [True, False])
def test_a_program_behind_another_megatron(tmp_path, regular, program):
    """Older Megatron-LM has megatron/__init__.py, and comes first on the path. A namespace package
    gives way to ours.
    """
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    if regular:
        (tmp_path / "megatron" / "__init__.py").write_text("")
    done = run(f"import {program}", tmp_path, ROOT)
    if not regular:
        assert done.returncode == 0, done.stderr
        return
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and str(tmp_path / "megatron") in line
    assert str(ROOT / "megatron") in line and "cannot share an environment" in line


@pytest.mark.parametrize("name", ["megatron.core", "megatron.core.models", "megatron.legacy"])
def test_a_module_of_the_other_megatron(tmp_path, name):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "legacy.py").write_text("")
    done = run(f"import {name}", ROOT, tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: megatron.")
    assert str(tmp_path / "megatron") in last and str(ROOT / "megatron") in last


def test_a_module_that_nobody_has(tmp_path):
    done = run("import megatron.nothing", ROOT, tmp_path)
    assert done.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: No module named 'megatron.nothing'"
    )


def test_every_command_is_behind_the_check():
    """The modules that commands import are outside of `megatron`, and check which one is found."""
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {name: target.split(":") for name, target in commands.items()}
    assert modules.pop("mgpt-pretrain") == ["pretrain_gpt", "main"]
    for module, tool in modules.values():
        assert module == "mgpt_commands" and (ROOT / "tools" / f"{tool}.py").exists()
