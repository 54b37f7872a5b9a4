"""Kill -9 at random times and before every system call of a save, power loss after every one; and
bad writers that must be caught.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from disk_model import CALLS, Disk, put
from dying import die_before
from kill_writer import campaign, check, main, verdict
from saving_jobs import JOBS, SAVES, contents

from megatron.checkpoint import writer
from megatron.checkpoint.manifest import iteration_folder, list_iterations
from megatron.checkpoint.reader import find_checkpoint
from megatron.checkpoint.retention import Policy, retire
from megatron.checkpoint.writer import save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_random_kills_of_one_of_two_ranks(tmp_path):
    assert campaign(8, 1, JOBS["sync"]["real"], tmp_path / "run", lambda line: None, ranks=2) == []


def test_the_campaign_catches_a_bad_writer(tmp_path):
    """Up to twenty kills, until one finds something."""
    job = JOBS["sync"]["in-place"]
    assert any(
        campaign(5, seed, job, tmp_path / str(seed), lambda line: None, ranks=2)
        for seed in range(1, 5)
    )


def test_the_documented_command(tmp_path, monkeypatch, capsys):
    words = ["--kills", "2", "--ranks", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kill_writer.py", *words])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    assert end.value.code == 0 and "2 kills" in printed and "0 bad recoveries" in printed


def two_threads(monkeypatch) -> None:
    """To write two shards; the rest has one: a process that is forked must not wait for threads
    that stay behind.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(writer, "PART", 1 << 16)


def save_and_retire(root, iteration: int, pairs: list, state: dict) -> None:
    save_checkpoint(root, iteration, pairs, state)
    retire(root, Policy(last=1), iteration)


def save_and_delete(root, iteration: int, pairs: list, state: dict) -> None:
    """A mutant: older checkpoints are deleted under their names."""
    save_checkpoint(root, iteration, pairs, state)
    for old in list_iterations(root)[1:]:
        shutil.rmtree(root / iteration_folder(old))


@pytest.mark.parametrize(
    "save, good",
    [(save_and_retire, True), (SAVES["in-place"], False), (save_and_delete, False)],
)
def test_kill_before_every_system_call(tmp_path, monkeypatch, save, good):
    two_threads(monkeypatch)
    recovered, faults = [], []
    for number in range(200):
        root = tmp_path / str(number)
        save_checkpoint(root, 1, *contents(1))
        calls = (*CALLS, "unlink", "rmdir")
        status = die_before(number, calls, lambda: save(root, 2, *contents(2)))
        iteration, fault = verdict(root, 2 if status == 0 else 1)
        recovered.append(iteration)
        faults += [fault] if fault else []
        if status == 0:
            break
        assert os.WIFSIGNALED(status), "the victim failed by itself"
        save_and_retire(root, 3, *contents(3))  # the next attempt is not hindered, and tidies up
        assert not [p for p in root.iterdir() if p.name.startswith(".")]
    assert status == 0 and recovered[0] == 1 and recovered[-1] == 2 and len(recovered) > 10
    assert (faults == []) == good
    if good:
        assert recovered == sorted(recovered) and list_iterations(root) == [2]


def test_kill_while_a_damaged_checkpoint_is_replaced(tmp_path):
    """Before every system call: the older checkpoint stays, and the next attempt completes the
    replacement.
    """
    for number in range(200):
        root = tmp_path / str(number)
        for iteration in (1, 2):
            save_checkpoint(root, iteration, *contents(iteration))
        (root / "iter_0000002" / "shard-00000.digests").write_bytes(b"damaged")
        status = die_before(number, CALLS, lambda: save_checkpoint(root, 2, *contents(2)))
        assert check(find_checkpoint(root, step=1), 1) is None
        if status != 0:
            save_checkpoint(root, 2, *contents(2))
        assert verdict(root, 2) == (2, None)
        assert not [p for p in root.iterdir() if p.name.startswith(".")]
        if status == 0:
            break
    assert status == 0 and number > 20


# ---- power loss (disk_model.py) ------------------------------------------------------------------


def power_losses(tmp_path, monkeypatch) -> list[str]:
    """Save iterations 1, 2 and lose power before each call and at the end; what recovery finds
    wrong.
    """
    root = tmp_path / "run"
    root.mkdir()
    disk = Disk(root)
    with monkeypatch.context() as patch:
        two_threads(patch)
        disk.follow(patch)
        for iteration in (1, 2):
            save_checkpoint(root, iteration, *contents(iteration))
            disk.acknowledged = iteration
        disk.crash()
    assert len(disk.crashes) > 60
    return recoveries(disk, tmp_path)


def recoveries(disk: Disk, tmp_path) -> list[str]:
    """What is wrong with what is found after every crash of two saves."""
    found, faults = [], []
    for number, (acknowledged, tree) in enumerate(disk.crashes):
        iteration, fault = verdict(put(tree, tmp_path / str(number)), acknowledged)
        found.append(iteration)
        faults += [fault] if fault else []
    assert faults or (set(found) == {0, 1, 2} and found[-1] == found[-2] == 2)
    return faults


def test_power_loss_after_any_call(tmp_path, monkeypatch):
    assert power_losses(tmp_path, monkeypatch) == []


def only(kind: type):
    """A mutant's fsync: has no effect on the disk except for nodes of `kind`."""

    def on_fsync(self, _, file):
        if isinstance(self.files[file].now, kind):
            self.files[file].durable = self.files[file].now

    return on_fsync


@pytest.mark.parametrize("kind", [bytes, dict])
def test_power_loss_catches_a_missing_fsync(tmp_path, monkeypatch, kind):
    """Without the fsync of files, or of folders, the same oracle finds torn or vanished
    checkpoints.
    """
    monkeypatch.setattr(Disk, "on_fsync", only(kind))
    assert power_losses(tmp_path, monkeypatch)
