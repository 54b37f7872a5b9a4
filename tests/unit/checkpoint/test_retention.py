"""Old checkpoints go by the rule, never the only whole one (tests/faults/test_kill_writer.py kills
deletions); and a run that went back to an older one: the later ones of the pass that it left are
there, and are not taken for the newest.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import pairs
from logged import logged, silently
from megatron.tools._report.metrics_file import read_metrics
from reshard_cases import BASE, FEATURES, start

from megatron.checkpoint.commit import Policy, retire
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.manifest import (
    CheckpointError,
    iteration_folder,
    list_iterations,
)
from megatron.checkpoint.ranks import SINGLE_RANK
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def save(root: Path, iteration: int) -> None:
    save_checkpoint(
        root, iteration, pairs({"w": torch.full((8,), float(iteration))}), {"iteration": iteration}
    )


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    root = tmp_path_factory.mktemp("ten")
    for iteration in range(1, 11):
        save(root, iteration)
    return root


@pytest.fixture
def root(ten, tmp_path):
    return shutil.copytree(ten, tmp_path / "run")


def damage(root: Path, iteration: int) -> None:
    (root / iteration_folder(iteration) / "shard-00000.digests").write_bytes(b"")


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Policy(), range(1, 11)),
        (Policy(last=3), (8, 9, 10)),
        (Policy(interval=4), (4, 8, 10)),
        (Policy(interval=4, last=2), (4, 8, 9, 10)),
        (Policy(interval=5, last=2), (5, 9, 10)),
    ],
)
def test_what_stays(root, policy, kept):
    gone = silently(retire, root, policy, 10)
    assert list_iterations(root) == sorted(kept, reverse=True)
    assert sorted([*gone, *kept]) == list(range(1, 11))
    assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert silently(retire, root, policy, 10) == []


def test_the_damaged_and_the_foreign_stay_and_do_not_count(root, tmp_path):
    damage(root, 9)
    damage(root, 7)
    shutil.rmtree(root / iteration_folder(6))
    # Megatron-LM's layout has the same names
    (root / iteration_folder(6) / "mp_rank_00").mkdir(parents=True)
    os.rename(root / iteration_folder(5), tmp_path / iteration_folder(5))
    (root / iteration_folder(5)).symlink_to(tmp_path / iteration_folder(5))
    (root / "iter_0000004.damaged-0123456789abcdef").mkdir()
    assert silently(retire, root, Policy(last=2), 10) == [4, 3, 2, 1]
    assert list_iterations(root) == [10, 9, 8, 7, 6, 5]
    assert (tmp_path / iteration_folder(5) / "MANIFEST.json").exists()
    assert (root / "iter_0000004.damaged-0123456789abcdef").exists()


def test_nothing_goes_before_the_newest_is_known_to_be_whole(root, log_lines):
    damage(root, 10)
    assert retire(root, Policy(last=1), 10) == []
    assert retire(root, Policy(last=1), 11) == []
    first, _ = log_lines
    assert "iter_0000010/shard-00000.digests" in first and "were not deleted" in first
    assert len(list_iterations(root)) == 10


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_failing_deletion_fails_no_save(root, monkeypatch, call, log_lines):
    def failing(*args, **kwargs):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        retire(root, Policy(last=1), 10)
    assert open_checkpoint(root).path.name == iteration_folder(10)
    assert (call == "rename") == (
        len(log_lines) == 1
        and "Input/output error" in log_lines[0]
        and len(list_iterations(root)) == 10
    )
    save(root, 11)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_a_run_keeps_what_its_flags_say_and_logs_its_saves(gloo_world, tmp_path):
    flags = f"""--save {tmp_path} --save-interval 1 --save-retain-interval 2 --save-keep-last 1
    --verify-integrity --async-save --train-iters 4""".split()
    text, _ = gloo_world(2).run(start, (*BASE, *FEATURES["tied-bf16"].split(), *flags))
    assert text.endswith("exit code 0") and list_iterations(tmp_path) == [4, 2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    shards = (tmp_path / iteration_folder(4)).glob("*.safetensors")
    size = sum(path.stat().st_size for path in shards)
    lines = re.findall(
        r"saved checkpoint .*/iter_000000(\d): (\S+) GB in \S+ s, \S+ GB/s; training waited \S+ s",
        text,
    )
    assert [int(iteration) for iteration, _ in lines] == [1, 2, 3, 4]
    assert {float(gb) for _, gb in lines} == {round(size / 1e9, 2)}
    last = read_metrics(tmp_path)[-1]
    seconds = last["save-checkpoint-seconds"]
    assert last["save-checkpoint-bytes"] == size and "lm loss" in last
    assert 0 < last["save-checkpoint-stall-seconds"] <= seconds
    assert last["save-checkpoint-gb-per-second"] == pytest.approx(size / 1e9 / seconds)


# ---- going back to an older checkpoint -----------------------------------------------------------


def contents(iteration: int, run: int) -> tuple[list, dict]:
    return pairs({"w": torch.tensor([float(iteration), float(run)])}), {
        "iteration": iteration,
        "run": run,
    }


class Run(CheckpointManager):
    """A run under `root` that saves in the background or at once; what it logs is `lines`."""

    def __init__(self, root: Path, number: int, background: bool = False, **options) -> None:
        self.number, self.lines = number, []
        memory = staging_bytes(contents(0, 0)[0], None) if background else None
        super().__init__(root, SINGLE_RANK, memory, **options)

    def save(self, *iterations: int) -> None:
        for iteration in iterations:
            with logged() as lines:
                super().save(iteration, *contents(iteration, self.number))
                assert self.finalize(), lines
            self.lines += lines


def newest(root: Path) -> tuple[int, list[str]]:
    """(iteration that a plain --load takes, what is logged)."""
    with logged() as lines:
        return int(open_checkpoint(root).path.name.removeprefix("iter_")), lines


@pytest.mark.parametrize("background", [False, True])
def test_what_was_saved_last_is_taken(tmp_path, background):
    Run(tmp_path, 1).save(10, 20, 30)
    assert newest(tmp_path) == (30, [])
    run = Run(tmp_path, 2, background)  # --ckpt-step 10
    assert newest(tmp_path) == (30, []), "it has saved nothing yet"
    run.save(15)
    run.close()
    (warning,) = [line for line in run.lines if "warning" in line]
    later = (
        "holds later iterations from before this run, which resumed from an earlier one: 30, 20."
    )
    assert later in warning and "takes iteration 15" in warning
    iteration, (message,) = newest(tmp_path)
    assert iteration == 15 and "NOT taken are iterations 30, 20:" in message
    assert "--ckpt-step 30" in message
    assert open_checkpoint(tmp_path, step=30).state["run"] == 1
    run.save(25)
    assert newest(tmp_path)[0] == 25
    run.save(35)
    run.close()
    assert newest(tmp_path)[0] == 35 and "30, 20" in newest(tmp_path)[1][0]
    assert "warning" not in run.lines[-1]
    Run(tmp_path, 3).save(12)  # and back again
    assert newest(tmp_path)[0] == 12 and "35, 30, 25, 20, 15" in newest(tmp_path)[1][0]


def test_only_those_that_were_there_before(tmp_path):
    """A run that was there first, and is slow or was thought dead, hides nothing of another; nor is
    what has come in the place of one hidden.
    """
    Run(tmp_path, 1).save(10)
    slow = Run(tmp_path, 1)
    Run(tmp_path, 2).save(20, 30)
    slow.save(15)
    assert newest(tmp_path)[0] == 30
    Run(tmp_path, 3).save(12)
    assert newest(tmp_path)[0] == 12
    shutil.rmtree(tmp_path / iteration_folder(30))
    slow.save(30)
    assert newest(tmp_path)[0] == 30


def test_what_was_left_is_the_oldest_once_it_has_been_passed(tmp_path):
    Run(tmp_path, 1).save(10, 20, 30)
    run = Run(tmp_path, 2)
    run.save(15)
    for iteration, gone in ((15, []), (25, [10, 20]), (35, [15, 30])):
        if iteration > 15:
            run.save(iteration)
        assert silently(retire, tmp_path, Policy(last=2), iteration) == gone
    assert list_iterations(tmp_path) == [35, 25] and newest(tmp_path) == (35, [])


@pytest.mark.parametrize("background", [False, True])
def test_what_was_superseded_counts_when_it_is_saved_again(tmp_path, background):
    """Else the run would go back to what it had passed, and retention delete what it has saved."""
    Run(tmp_path, 1).save(10, 20, 30)
    Run(tmp_path, 1).save(15)  # --ckpt-step 10, ended by a signal
    run = Run(tmp_path, 1, background, retention=Policy(last=2))
    shards = [tmp_path / iteration_folder(each) / "shard-00000.safetensors" for each in (20, 30)]
    before = [shard.stat().st_ino for shard in shards]
    run.save(20)
    assert newest(tmp_path)[0] == 20
    run.save(30)
    run.close()
    assert newest(tmp_path) == (30, []) and list_iterations(tmp_path) == [30, 20]
    assert [shard.stat().st_ino for shard in shards] == before
    assert not list(tmp_path.rglob(".*"))


def test_retention_never_deletes_what_was_just_saved(tmp_path):
    """Of a run that is slow or was thought dead, and has been superseded."""
    Run(tmp_path, 1).save(10)
    slow = Run(tmp_path, 1)
    Run(tmp_path, 1).save(20, 30)
    Run(tmp_path, 2).save(12, 15)
    slow.save(30)
    assert silently(retire, tmp_path, Policy(last=1), 30) == [12, 10, 20]
    assert list_iterations(tmp_path) == [30, 15]


def test_a_run_moves_what_it_went_back_before_aside(tmp_path):
    Run(tmp_path, 1).save(10, 20, 30)
    with pytest.raises(AssertionError, match="iteration 20 was NOT saved"):
        Run(tmp_path, 2).save(20)  # another run's folder
    run = Run(tmp_path, 2, continues=True)  # --ckpt-step 10
    run.save(20)
    assert newest(tmp_path)[0] == 20 and open_checkpoint(tmp_path).state["run"] == 2
    run = Run(tmp_path, 2, continues=True)
    run.save(30)
    (aside,) = tmp_path.glob("iter_0000030.superseded-*")
    assert f"It was moved to {aside.name}, and a new checkpoint of iteration 30" in run.lines[0]
    assert newest(tmp_path) == (30, []) and open_checkpoint(tmp_path).state["run"] == 2
    slow = Run(tmp_path, 3, continues=True)
    Run(tmp_path, 2).save(40)
    with pytest.raises(AssertionError, match="iteration 40 was NOT saved"):
        slow.save(40)  # by another since it began


def test_a_later_one_that_cannot_be_read_is_superseded_too(tmp_path):
    Run(tmp_path, 1).save(10, 20)
    (tmp_path / iteration_folder(20) / "MANIFEST.json").write_bytes(b"")
    Run(tmp_path, 2).save(15)
    iteration, (message,) = newest(tmp_path)
    assert iteration == 15 and "NOT taken are iterations 20:" in message
    run = Run(tmp_path, 2)
    run.save(20)
    assert "moved to iter_0000020.damaged-" in run.lines[0]
    assert newest(tmp_path)[0] == 20


def test_what_was_moved_away_is_named_no_more(tmp_path):
    Run(tmp_path, 1).save(10, 20)
    run = Run(tmp_path, 2)
    shutil.rmtree(tmp_path / iteration_folder(20))
    run.save(15)
    assert "later iterations" not in "".join(run.lines) and newest(tmp_path) == (15, [])


def test_an_older_one_is_of_a_pass_that_counts(tmp_path):
    Run(tmp_path, 1).save(100, 110, 150)
    Run(tmp_path, 2).save(105, 120)
    damage(tmp_path, 120)
    with pytest.raises(CheckpointError, match="the older whole one with --ckpt-step 105"):
        open_checkpoint(tmp_path, 120)
    with logged():
        assert open_checkpoint(tmp_path, 120, older=True).iteration == 105


def test_a_run_that_goes_back_saves_where_it_was(gloo_world, tmp_path):
    """With the same flags it keeps what it finds; what is logged or saved is no part of that."""
    words = (*BASE, *FEATURES["tied-bf16"].split(), "--save-interval", "2", "--save", str(tmp_path))
    back = (*words, "--load", str(tmp_path), "--ckpt-step", "2")
    assert gloo_world(2).run(start, words)[0].endswith("exit code 0")
    attempts = [path.read_bytes() for path in sorted(tmp_path.glob("iter_*/MANIFEST.json"))]
    text = gloo_world(2).run(start, (*back, "--timing-log-level", "1", "--save-keep-last", "9"))[0]
    assert text.endswith("exit code 0") and "warning" not in text, text
    assert attempts == [path.read_bytes() for path in sorted(tmp_path.glob("iter_*/MANIFEST.json"))]

    text = gloo_world(2).run(start, (*back, "--lr", "5e-3", "--override-opt-param-scheduler"))[0]
    assert text.endswith("exit code 0") and "config.optimizer.lr" in text, text
    assert (
        list_iterations(tmp_path) == [6, 4, 2] and len([*tmp_path.glob("iter_*.superseded-*")]) == 2
    )
    assert newest(tmp_path) == (6, [])
