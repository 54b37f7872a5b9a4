"""The environment is installed from files whose digests are listed in requirements/pinned.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PINS = (ROOT / "requirements/pinned.txt").read_text()


def source_environment(script: str) -> subprocess.CompletedProcess[str]:
    """A bash script after scripts/environment.sh, which finds this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f"source scripts/environment.sh && {script}"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )


def test_every_package_but_torch_has_digests():
    listed = re.findall(
        r"^([^ #\n]+)==([^ \n]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", PINS, re.M
    )
    assert len(listed) == PINS.count("==") > 80
    assert [name for name, _, digests in listed if not digests] == ["torch"]


def test_the_lowest_versions_are_the_bounds_of_every_dependency():
    """Those that `scripts/test.sh floor` installs, with Triton and what runs the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = source_environment("lowest_pins")
    others = [word for extra in project["optional-dependencies"].values() for word in extra]
    tools = [word for word in others if re.match("(triton|pytest|hypothesis)>=", word)]
    expected = [word.replace(">=", "==") for word in (*project["dependencies"], *tools)]
    assert done.stdout.split() == expected and len(expected) == len({*expected})


@pytest.mark.parametrize("conflicts", [False, True])
def test_pytorchs_index_is_asked_where_the_others_torch_wants_another_triton(tmp_path, conflicts):
    """PyPI's CUDA build requires one version of Triton."""
    pip = tmp_path / "python"
    pip.write_text(
        f"""#!/usr/bin/env bash
echo "$*" >>{tmp_path}/calls
case "$*" in *--require-hashes*|*--extra-index-url*) ;; *) exit {int(conflicts)} ;; esac
"""
    )
    pip.chmod(0o755)
    done = source_environment(f"venv={tmp_path}; install_pins {pip}")
    assert done.returncode == 0, done.stderr
    assert ("CPU build, which sees no GPU" in done.stdout) == conflicts
    hashed, *others = (tmp_path / "calls").read_text().splitlines()
    assert "--require-hashes" in hashed and len(others) == 1 + conflicts
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert [index in call for call in others] == [False, True][: len(others)]
