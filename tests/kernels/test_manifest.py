"""The compile-only gate: every shipped kernel has the manifest's key or compiles as it lists, and
what breaks a rule is found.
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


@pytest.mark.full
@pytest.mark.slow
def test_every_kernel_compiles_as_the_manifest_says(gate):
    done = gate("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    message = r"^\d+ kernels compiled with Triton [\d.]+, 0 faults(; \d+ have the manifest's key)?$"
    assert re.search(message, done.stdout, re.MULTILINE)


@pytest.mark.full
def test_bad_configurations_are_found(gate):
    done = gate("--rows", str(Path(__file__).with_name("bad_kernels.py")))
    assert done.returncode == 1, done.stderr
    faults = dict(
        line.split(": ", 1)
        for line in done.stdout.splitlines()
        if ": " in line and not line.startswith("{") and '{"' not in line
    )
    expected = {
        "spills": r"\d+ bytes are spilled, 0 are accepted: take smaller tiles or more warps",
        "too much shared memory": r"\d+ bytes of shared memory, a block may have 232448: take",
        "no wgmma": r"0 wgmma and \d+ older matrix instructions",
        "serialised": r"[1-9]\d* of \d+ wgmma wait for the one before: registers are short",
        "does not compile": "does not compile: .*no_such_function",
        "kills the compiler": "the compiler died with code -6",
    }
    assert faults.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(pattern, faults[name]), name
    *_, last = lines = done.stdout.splitlines()
    assert last.startswith("8 kernels compiled")
    good = json.loads(next(line[5:] for line in lines if line.startswith("good {")))
    assert good["wgmma"] > 0 and good["old_mma"] == 0 and good["spilled"] == 0
    assert good["serialised"] == 0 and good["hot_cp_async"] > 0 and good["hot_barriers"] > 0


def test_a_kernel_whose_key_has_changed_is_compiled_again(monkeypatch, capsys):
    from megatron.kernels.tools import manifest

    monkeypatch.setattr(manifest, "rows", lambda _: {"a": None})
    monkeypatch.setattr(manifest, "forget_lines", lambda: None)
    monkeypatch.setattr(manifest, "key_of", lambda _: "new")
    monkeypatch.setattr(manifest, "compile_row", lambda _: {"compiled": 1})
    for key, found in (
        ("new", {"key": "new", "held": True}),
        ("old", {"compiled": 1, "key": "new"}),
    ):
        manifest.work(None, ["a"], {"a": {"key": key}})
        assert json.loads(capsys.readouterr().out) == {"a": found}


def test_a_difference_from_the_manifest_is_named():
    from megatron.kernels.tools import manifest

    same, other = {"registers": 32, "spilled": 0}, {"registers": 40, "spilled": 0}
    assert manifest.differences({"a": same}, {"a": same}, whole=True) == []
    assert manifest.differences({"a": other, "b": same}, {"a": same, "c": same}, whole=True) == [
        "b: not in the manifest",
        "a: registers 40, the manifest has 32",
        "c: in the manifest, but no kernel has it",
    ]
    for name in ("instructions", "hot_instructions"):
        for other, lines in ((1020, 0), (1021, 1), (979, 1), (None, 1)):
            found = {"a": {name: other}}
            assert len(manifest.differences(found, {"a": {name: 1000}}, whole=True)) == lines
    for other, lines in ((168, 0), (169, 1), (151, 1), (None, 1)):
        found = {"a": {"spilled": other}}
        assert len(manifest.differences(found, {"a": {"spilled": 160}}, whole=True)) == lines
