"""Programs that are compared run on equal terms: kept memory, buckets, threads."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.benchmarks import checkpoint, training, zero
from megatron.benchmarks.turn_group import Group

ROOT = Path(__file__).resolve().parents[3]

FAULTS = """
import resource
if {ours}:
    from megatron.distributed.setup import keep_freed_memory
    assert keep_freed_memory()
def step():
    b"1" * (32 << 20)  # malloc, and a write to each page
for _ in range(24):  # small objects split freed blocks at first
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ANSWER = (
    "import os; input(); print('TURN ' + os.environ['MALLOC_TRIM_THRESHOLD_'].join('[]'), "
    "flush=True)"
)


def peer_module(name: str, monkeypatch: pytest.MonkeyPatch):
    """A script of benchmarks/peers/; what it imports from there is forgotten with it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    with mock.patch.dict(sys.modules):
        return importlib.import_module(name)


def page_faults(ours: bool, environment: dict[str, str]) -> int:
    """Of eight allocations of 32 MiB, once the heap has settled."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", FAULTS.format(ours=ours)]
    return int(
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.full
def test_the_settings_of_peers_keep_memory_as_our_mallopt_does():
    pages = 8 * (32 << 20) // 4096
    assert page_faults(False, {}) >= 0.5 * pages / 512  # huge pages make few faults, never none
    assert page_faults(False, training.KEPT_MEMORY) <= 8
    assert page_faults(True, {}) <= 8


def test_every_program_is_started_with_them(monkeypatch):
    given = []

    def popen(*arguments, env, **settings):
        given.append(env)
        raise InterruptedError

    monkeypatch.setattr(training.subprocess, "Popen", popen)
    work = training.SETTINGS["fp32"]
    for who in ("ours", "plain loop"):
        try:
            training.run(who, work, Path("peers"), Path("start"))
        except InterruptedError:
            pass
    assert len(given) == 2 and all(env.items() >= training.KEPT_MEMORY.items() for env in given)


def test_turns_are_taken_with_them():
    group = Group("any", [sys.executable, "-c", ANSWER], 1)
    try:
        assert group.turn("") == [[int(training.KEPT_MEMORY["MALLOC_TRIM_THRESHOLD_"])]]
    finally:
        group.end()


def test_deepspeed_is_timed_with_its_own_defaults_too(monkeypatch):
    assert {f"deepspeed-{stage}-default" for stage in range(4)} <= zero.SYSTEMS.keys()
    source = ast.parse((ROOT / "benchmarks/peers/zero_peer.py").read_text())
    knobs = {
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.Constant) and str(node.value).endswith("bucket_size")
    }
    peer = peer_module("zero_peer", monkeypatch)
    small, default = peer.zero_settings(2, 99), peer.zero_settings(2, None)
    assert knobs <= small.keys() and default == {"stage": 2}


def test_checkpoints_are_compared_with_equal_threads():
    assert {"ours, 1 thread", "raw pwrite, 2 threads"} <= set(checkpoint.SYSTEMS)
    rows = {what: (above, below) for what, above, below, *_ in checkpoint.goals("tmpfs")}
    assert rows["torch.save's time by ours with 1 thread"] == ("torch.save", "ours, 1 thread")
    assert rows["DCP's time by ours with 1 thread"] == ("DCP", "ours, 1 thread")
    assert rows["time by raw pwrite's with 2 threads"] == ("ours", "raw pwrite, 2 threads")


def test_raw_writes_of_two_threads_hold_every_byte(tmp_path, monkeypatch):
    peer = peer_module("checkpoint_rank", monkeypatch)
    tensors = {name: torch.arange(5.0) + index for index, name in enumerate("abc")}
    peer.SYSTEMS["raw pwrite, 2 threads"](tensors, 3, 4)(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["rank-3-0", "rank-3-1"], files
    assert peer.own_bytes(tmp_path, 3) == 60 and peer.own_bytes(tmp_path, 0) == 0
    assert files[1].read_bytes() == bytes(peer.raw_bytes(tensors["b"]))
