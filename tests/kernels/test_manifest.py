"""The compile-only gate: every shipped kernel compiles for sm_90 as the manifest says, and what
breaks a rule is found.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "kernels/tools/manifest.py"


@pytest.fixture
def gate(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        # nothing is taken from an earlier compilation
        environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, TOOL, *arguments], capture_output=True, text=True, env=environ
        )

    return run


@pytest.mark.slow
def test_every_kernel_compiles_as_the_manifest_says(gate):
    done = gate("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^[1-9]\d+ kernels compiled with Triton [\d.]+, 0 faults$", done.stdout, re.MULTILINE
    )


def test_bad_configurations_are_found(gate):
    done = gate("--rows", str(Path(__file__).with_name("bad_kernels.py")))
    assert done.returncode == 1, done.stderr
    faults = dict(
        line.split(": ", 1)
        for line in done.stdout.splitlines()
        if ": " in line and not line.startswith("{") and '{"' not in line
    )
    assert faults.keys() == {
        "spills",
        "too much shared memory",
        "no wgmma",
        "does not compile",
        "kills the compiler",
    }
    assert re.match(
        r"\d+ bytes are spilled, 0 are accepted: take smaller tiles or more warps", faults["spills"]
    )
    assert re.match(
        r"\d+ bytes of shared memory, a block may have 232448: take",
        faults["too much shared memory"],
    )
    assert re.match(r"0 wgmma and \d+ older matrix instructions", faults["no wgmma"])
    assert (
        faults["does not compile"].startswith("does not compile: ")
        and "no_such_function" in faults["does not compile"]
    )
    assert faults["kills the compiler"].startswith("the compiler died with code -6")
    assert done.stdout.splitlines()[-1].startswith("7 kernels compiled")
    good = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("good ")).removeprefix(
            "good "
        )
    )
    assert good["wgmma"] > 0 and good["old_mma"] == 0 and good["spilled"] == 0


def test_a_difference_from_the_manifest_is_named():
    from megatron.kernels.tools import manifest

    same, other = {"registers": 32, "spilled": 0}, {"registers": 40, "spilled": 0}
    assert manifest.differences({"a": same}, {"a": same}, whole=True) == []
    assert manifest.differences({"a": other, "b": same}, {"a": same, "c": same}, whole=True) == [
        "b: not in the manifest",
        "a: registers 40, the manifest has 32",
        "c: in the manifest, but no kernel has it",
    ]
    assert (
        manifest.differences(
            {"a": {"instructions": 1020}}, {"a": {"instructions": 1000}}, whole=True
        )
        == []
    )
    for other in (1021, 979, None):
        assert (
            len(
                manifest.differences(
                    {"a": {"instructions": other}}, {"a": {"instructions": 1000}}, whole=True
                )
            )
            == 1
        )
