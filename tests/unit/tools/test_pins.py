"""The environment is installed from files whose digests are listed in requirements/pinned.txt."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PINS = (ROOT / "requirements/pinned.txt").read_text()


def test_every_package_but_torch_has_digests():
    listed = re.findall(
        r"^([^ #\n]+)==([^ \n]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", PINS, re.M
    )
    assert len(listed) == PINS.count("==") > 80
    assert [name for name, _, digests in listed if not digests] == ["torch"]


@pytest.mark.full
def test_a_file_that_is_not_the_listed_one_is_refused(tmp_path: Path):
    wheel = tmp_path / "wheels/pinned_thing-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    write_wheel(wheel, "original = True\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "pinned.txt").write_text(f"pinned-thing==1.0 \\\n    --hash=sha256:{digest}\n")
    good = install(tmp_path, "good")
    assert good.returncode == 0 and (tmp_path / "good/pinned_thing.py").exists(), good.stderr
    write_wheel(wheel, "original = False\n")
    bad = install(tmp_path, "bad")
    assert bad.returncode == 1 and "DO NOT MATCH THE HASHES" in bad.stderr, bad.stderr
    assert "serves other files" in bad.stderr and not (tmp_path / "bad/pinned_thing.py").exists()


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


def install(folder: Path, target: str) -> subprocess.CompletedProcess:
    """What scripts/environment.sh installs of `folder`/pinned.txt, from `folder`/wheels, into
    `folder`/`target`.
    """
    script = 'source scripts/environment.sh && pins=$0/pinned.txt venv=$0 && install_pins "$python"'
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder / "wheels"),
        "PIP_TARGET": str(folder / target),
    }
    return subprocess.run(
        ["bash", "-c", script, folder], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def write_wheel(path: Path, code: str) -> None:
    """A wheel of one module."""
    about = "pinned_thing-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pinned_thing.py", code)
        file.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: pinned-thing\nVersion: 1.0\n"
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
