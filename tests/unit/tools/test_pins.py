"""The environment is installed from files whose digests are listed in requirements/pinned.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PINS = (ROOT / "requirements/pinned.txt").read_text()


def test_every_package_but_torch_has_digests():
    listed = re.findall(
        r"^([^ #\n]+)==([^ \n]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", PINS, re.M
    )
    assert len(listed) == PINS.count("==") > 80
    assert [name for name, _, digests in listed if not digests] == ["torch"]


def test_the_lowest_versions_are_the_bounds_of_every_dependency():
    """Those that `scripts/test.sh floor` installs, with Triton and what runs the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = "source scripts/environment.sh && lowest_pins"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    others = [word for extra in project["optional-dependencies"].values() for word in extra]
    tools = [word for word in others if re.match("(triton|pytest|hypothesis)>=", word)]
    expected = [word.replace(">=", "==") for word in (*project["dependencies"], *tools)]
    assert done.stdout.split() == expected and len(expected) == len({*expected})
