"""Kill -9 at random times, kill and power loss at every system call of a save; and bad writers that
must be caught.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import saving_jobs
import torch
from disk_model import Disk, put
from kill_writer import campaign, check, main, verdict
from saving_jobs import JOBS, SAVES, contents

from megatron.checkpoint import writer
from megatron.checkpoint.commit import Policy, retire
from megatron.checkpoint.manifest import iteration_folder, list_iterations
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_campaign_catches_a_bad_writer(tmp_path):
    """Up to twenty kills, until one finds something."""
    job = JOBS["sync"]["in-place"]
    assert any(
        campaign(5, seed, job, tmp_path / str(seed), lambda line: None, ranks=2)
        for seed in range(1, 5)
    )


def test_random_kills_of_one_of_two_ranks(tmp_path, monkeypatch, capsys):
    """By the documented command."""
    words = f"kill_writer.py --kills 8 --ranks 2 --folder {tmp_path}".split()
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    assert end.value.code == 0 and "8 kills" in printed and "0 bad recoveries" in printed


# ---- a crash at any system call (disk_model.py) --------------------------------------------------


def save_and_retire(root, iteration: int) -> None:
    save_checkpoint(root, iteration, *contents(iteration))
    retire(root, Policy(last=1), iteration)


def save_in_place(root, iteration: int) -> None:
    """A mutant: writes where readers look."""
    SAVES["in-place"](root, iteration, *contents(iteration))


def save_and_delete(root, iteration: int) -> None:
    """A mutant: older checkpoints are deleted under their names."""
    save_checkpoint(root, iteration, *contents(iteration))
    for old in list_iterations(root)[1:]:
        shutil.rmtree(root / iteration_folder(old))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """disk(*acts): what follows the calls of `acts`, each of which saves the next iteration in one
    folder.
    """
    monkeypatch.setattr(saving_jobs, "SHAPES", {"w": (300, 300), "v": (300,)})

    def follow(*acts, threads: int = 2) -> Disk:
        root = tmp_path / "run"
        root.mkdir()
        followed = Disk(root)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: threads)
            patch.setattr(writer, "MIN_SHARD_BYTES", 1 << 16)
            followed.follow(patch)
            for iteration, act in enumerate(acts, 1):
                act(root, iteration)
                followed.acknowledged = iteration
            followed.crash()
        assert len(followed.crashes) > 20
        return followed

    return follow


def recoveries(disk: Disk, tmp_path) -> list[str]:
    """What is wrong with what is found after every crash of two saves."""
    found, faults = [], []
    for number, (acknowledged, tree) in enumerate(disk.crashes):
        root = put(tree, tmp_path / str(number))
        iteration, fault = verdict(root, acknowledged)
        found.append(iteration)
        faults += [fault] if fault else []
        if number % 10 == 0:  # the next attempt is not hindered, and tidies up
            save_and_retire(root, 3)
            assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert faults or (set(found) == {0, 1, 2} and found[-1] == 2)
    return faults


@pytest.mark.parametrize(
    ("save", "good"), [(save_and_retire, True), (save_in_place, False), (save_and_delete, False)]
)
def test_a_crash_at_any_call(disk, tmp_path, save, good):
    assert (recoveries(disk(save, save), tmp_path) == []) == good


def only(kind: type):
    """A mutant's fsync: has no effect on the disk except for nodes of `kind`."""

    def on_fsync(self, _, file):
        if isinstance(self.files[file].now, kind):
            self.files[file].durable = self.files[file].now

    return on_fsync


@pytest.mark.parametrize("kind", [bytes, dict])
def test_power_loss_catches_a_missing_fsync(disk, tmp_path, monkeypatch, kind):
    """Without the fsync of files, or of folders, the same oracle finds torn or vanished
    checkpoints.
    """
    monkeypatch.setattr(Disk, "on_fsync", only(kind))
    assert recoveries(disk(save_and_retire, save_and_retire), tmp_path)


def test_a_crash_while_a_damaged_checkpoint_is_replaced(disk, tmp_path):
    """The older checkpoint stays, and the next attempt completes the replacement."""

    def save(root, iteration: int) -> None:
        save_checkpoint(root, iteration, *contents(iteration))

    def damage_and_save(root, _: int) -> None:
        file = os.open(root / iteration_folder(2) / "shard-00000.digests", os.O_WRONLY)
        os.pwrite(file, b"damaged", 0)
        os.fsync(file)
        os.close(file)
        save(root, 2)

    followed = disk(save, save, damage_and_save, threads=1)
    states = [tree for acknowledged, tree in followed.crashes if acknowledged >= 2]
    assert len(states) > 20
    for number, tree in enumerate(states):
        root = put(tree, tmp_path / str(number))
        assert check(open_checkpoint(root, step=1).path, 1) is None
        if number % 5 == 0 or tree is states[-1]:
            save(root, 2)
            assert verdict(root, 2) == (2, None)
            assert not [path for path in root.iterdir() if path.name.startswith(".")]
