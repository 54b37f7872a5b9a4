"""Two runs never write to one --save folder, and a run that died never keeps the next one from
starting.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from itertools import chain, repeat
from pathlib import Path
from unittest import mock

import pytest
from logged import logged, silently
from programs import Program, without_plan
from reshard_cases import start

from megatron.checkpoint import lease as module
from megatron.checkpoint.lease import NAME, describe_run, read_owner, take_lease
from megatron.checkpoint.manifest import CheckpointError

FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8
--micro-batch-size 1 --global-batch-size 1 --mock-data
--tokenizer-type NullTokenizer --vocab-size 15 --lr 1e-3 --log-interval 1 --eval-iters 0
--save-interval 50
--train-iters 1000000""".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "STALE_S", 1.0)
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    monkeypatch.setattr(module, "POLL_S", 0.05)


def elsewhere(job: str = "", **fields: object) -> dict:
    """A run on another machine."""
    there = {"token": "0" * 16, "run": f"process 7 on far{job}", "machine": "another"}
    return describe_run(job) | there | fields


def write(root: Path, content: dict | bytes, age: float = 0.0) -> Path:
    path = root / NAME
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    os.utime(path, (time.time() - age,) * 2)
    return path


def take(root: Path, job: str = "") -> list[str]:
    """What is logged when a lease is taken; it is given up again."""
    with logged() as lines:
        take_lease(root, job).release()
    assert not list(root.glob("*")) and not list(root.glob(".*"))
    return lines


def test_a_folder_is_taken_renewed_and_given_up(tmp_path):
    lease = silently(take_lease, tmp_path / "a/b", "7")
    path = tmp_path / "a/b" / NAME
    owner = read_owner(path)
    assert owner["token"] == lease.token and owner["job"] == "7"
    assert f"process {os.getpid()} on " in owner["run"] and "(Slurm job 7)" in owner["run"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = path.stat().st_mtime_ns
    time.sleep(0.5)
    assert path.stat().st_mtime_ns > before, "it is renewed"
    lease.check()
    lease.release()
    assert not path.exists()


def test_the_same_slurm_job_on_another_node_is_followed_at_once(tmp_path):
    write(tmp_path, elsewhere("7"))
    (line,) = take(tmp_path, "7")
    assert "earlier start of the same Slurm job" in line


@pytest.mark.parametrize("content", [elsewhere("7"), b"", b'{"pid": 1, "run": 2}'])
def test_a_silent_owner_is_watched_and_then_followed(tmp_path, content):
    """One elsewhere, and one that cannot be read."""
    write(tmp_path, content)
    begun = time.monotonic()
    waits, taken = take(tmp_path, "8")
    assert "waiting up to 1 s" in waits and "has not renewed its lease for 1 s" in taken
    assert time.monotonic() - begun >= 1
    write(tmp_path, content, age=3600)
    (taken,) = take(tmp_path, "8")
    assert "has not renewed its lease for 3600 s" in taken


def test_a_process_of_this_machine_is_never_followed_while_it_exists(tmp_path):
    """Even if it has not renewed its lease, which it is known by the lock of; and at once when it
    has ended.
    """
    lease = take_lease(tmp_path, "7")
    os.utime(tmp_path / NAME, (time.time() - 3600,) * 2)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* is dead for certain"):
        take_lease(tmp_path, "7")
    lease.release()
    write(tmp_path, describe_run("7"))
    (line,) = take(tmp_path)
    assert "it has ended" in line


@pytest.mark.parametrize("locked", [False, True])
def test_without_locks_a_process_of_this_machine_is_known_by_its_renewals(
    tmp_path, monkeypatch, locked
):
    """Without a lock, or with one that the next run cannot try."""
    answers = chain([None] if locked else [], repeat(OSError(38, "no locks")))
    monkeypatch.setattr(module.fcntl, "flock", mock.Mock(side_effect=answers))
    lease = take_lease(tmp_path, "")
    assert (read_owner(tmp_path / NAME)["machine"] != "") == locked
    with pytest.raises(CheckpointError, match="another run is writing there"):
        take_lease(tmp_path, "")
    lease._end.set()
    lease._thread.join()
    assert "has not renewed its lease" in take(tmp_path)[-1]
    lease.release()


def test_an_owner_that_renews_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STALE_S", 60.0)
    owner = elsewhere("7")
    path = write(tmp_path, owner)
    renewing = threading.Timer(0.3, os.utime, [path])
    renewing.start()
    with pytest.raises(CheckpointError) as refused:
        take_lease(tmp_path, "8")
    renewing.join()
    assert f"writing there: {owner['run']}. " in str(refused.value)
    assert "give this one another --save folder" in str(refused.value)
    assert path.exists() and len(list(tmp_path.iterdir())) == 1


def test_of_two_that_follow_one_dead_owner_one_runs(tmp_path, monkeypatch):
    path = write(tmp_path, elsewhere(), age=3600)
    first = []

    def slow(*given: object) -> str:
        """The second run has judged the dead owner when the first takes the folder over."""
        monkeypatch.undo()
        first.append(take_lease(tmp_path, ""))
        return "it was dead"

    monkeypatch.setattr(module, "_death", slow)
    with pytest.raises(CheckpointError, match="another run is writing there: process"):
        take_lease(tmp_path, "")
    assert read_owner(path)["token"] == first[0].token
    first[0].release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_slept", [False, True])
def test_a_run_whose_folder_was_taken_over_ends(tmp_path, monkeypatch, has_slept):
    """The thread that renews the lease finds it, or the run itself after a sleep."""
    if has_slept:
        monkeypatch.setattr(module, "RENEW_S", 60.0)
    lease = take_lease(tmp_path, "")
    write(tmp_path, elsewhere())
    if has_slept:
        lease.check()  # it has renewed just now
        lease.confirmed -= 0.6
    until = time.monotonic() + 20
    while not has_slept and lease.confirmed > 0 and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(CheckpointError, match="another run has taken this folder over .*on far"):
        lease.check()
    lease.release()
    assert "on far" in read_owner(tmp_path / NAME)["run"]


def test_a_second_run_is_refused_and_one_after_a_kill_starts_by_itself(tmp_path):
    root = tmp_path / "run"
    given = (*FLAGS, "--save", str(root), "--load", str(root))
    first = Program(given, tmp_path / "first")
    while "saved checkpoint" not in first.output:
        assert first.is_alive(), first.output
        time.sleep(0.02)
    refusal = f"--save {root}: another run is writing there: process {first.process.pid} on "
    with without_plan():
        assert refusal in start(given)
    assert "resumed-from-iteration" not in (root / "metrics.jsonl").read_text()
    first.kill(signal.SIGKILL)
    first.end()
    for name in ("metrics.jsonl", NAME):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o640, name
    left = root / ".tmp-iter-7-0123456789abcdef"
    left.mkdir()
    with without_plan():
        shown = start((*given, "--exit-interval", "10"))
    assert shown.endswith("exit code 0"), shown
    assert f"taken over from process {first.process.pid} on " in shown
    assert "loaded checkpoint" in shown
    assert not left.exists() and not (root / NAME).exists()
