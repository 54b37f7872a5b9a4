"""A run that has gone on from an older checkpoint: the later ones of the pass that it left are
there, and are not taken for the newest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import pairs
from logged import logged, silently
from reshard_cases import flags, saving, start

from megatron.checkpoint import manifest
from megatron.checkpoint.commit import Policy, retire
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.manifest import (
    CheckpointError,
    decode_manifest,
    iteration_folder,
    list_iterations,
)
from megatron.checkpoint.ranks import SINGLE_RANK
from megatron.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def contents(iteration: int, run: int) -> tuple[list, dict]:
    return pairs({"w": torch.tensor([float(iteration), float(run)])}), {
        "iteration": iteration,
        "run": run,
    }


class Run(CheckpointManager):
    """A run under `root` that saves in the background or at once; what it logs is `lines`."""

    def __init__(self, root: Path, number: int, background: bool = False) -> None:
        self.number, self.lines = number, []
        memory = staging_bytes(contents(0, 0)[0], None) if background else None
        super().__init__(root, SINGLE_RANK, memory)

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
    iteration, (said,) = newest(tmp_path)
    assert iteration == 15 and "NOT taken are iterations 30, 20:" in said
    assert "--ckpt-step 30" in said
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


def test_a_damaged_one_is_not_replaced_by_what_was_left(tmp_path):
    Run(tmp_path, 1).save(10, 30)
    Run(tmp_path, 2).save(20)
    (tmp_path / iteration_folder(20) / manifest.shard_file(0)).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000020 cannot be loaded; load the older whole one with --ckpt-step 10\.",
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("left", [{"10": "0" * 16}, {"11": 7}, {"x": "0"}, ["11"]])
def test_a_malformed_note_is_refused(tmp_path, left):
    Run(tmp_path, 1).save(10)
    path = tmp_path / iteration_folder(10) / manifest.MANIFEST
    path.write_bytes(
        manifest.encode_manifest(decode_manifest(path.read_bytes(), path) | {"left": left})
    )
    with pytest.raises(CheckpointError, match="not a manifest of this format"):
        open_checkpoint(tmp_path)


def test_a_run_goes_on_from_what_it_saved_last(tmp_path):
    """By the flags of a user who goes back to try another learning rate."""

    def run(*more: object) -> str:
        return start(flags("gqa-untied", "one", *saving(tmp_path), *more))

    back = (
        *("--load", tmp_path, "--ckpt-step", 3, "--lr", "2e-2", "--override-opt-param-scheduler"),
        *("--save-interval", 1, "--exit-interval", 4),
    )
    assert run().endswith("exit code 0") and list_iterations(tmp_path) == [6, 3]
    shown = run(*back)
    assert "warning: " in shown
    assert "from an earlier one: 6. From now on --load takes iteration 4" in shown
    shown = run("--load", tmp_path, "--lr", "2e-2", "--exit-interval", 5)
    assert "NOT taken are iterations 6" in shown and "iter_0000004" in shown
