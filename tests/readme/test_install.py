"""`pip install .` and `pip install -e .` give a working `megatron`, also beside PyPI's `kernels` and megatron-core's namespace package."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CHECK = """
import importlib.util, kernels, megatron.config.groups, pretrain_gpt
print(kernels.theirs, importlib.util.find_spec("megatron.kernels.philox").origin, megatron.__file__, pretrain_gpt.__file__)
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment that sees this one's packages behind its own and holds other projects' `kernels` and `megatron.core`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = tmp_path / f"venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "kernels").mkdir()
    (site / "kernels/__init__.py").write_text("theirs = True\n")
    (site / "megatron/core").mkdir(parents=True)
    (site / "megatron/core/__init__.py").write_text("")
    return tmp_path / "venv"


@pytest.mark.parametrize("arguments", [["."], ["-e", "."]], ids=["plain", "editable"])
def test_install(arguments: list[str], venv: Path, clone: Path, tmp_path: Path):
    python = venv / "bin/python"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    install = [sys.executable, "-m", "pip", "--python", python, "install", *offline, *arguments]
    done = subprocess.run(install, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([python, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    home = clone if "-e" in arguments else venv
    assert shown.stdout.split()[0] == "True" and all(path.startswith(str(home)) for path in shown.stdout.split()[1:]), shown.stdout
    program = [python, "-m", "pretrain_gpt", "--print-config", "--seq-length", "8"]
    page = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert page.returncode == 0 and '"seq_length": 8' in page.stdout, page.stderr
