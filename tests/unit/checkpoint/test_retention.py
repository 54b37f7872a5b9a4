"""Old checkpoints go by the rule, never the only whole one; tests/faults/test_kill_writer.py kills
deletions.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import pairs
from logged import silently
from reshard_cases import BASE, FEATURES, start

from megatron.checkpoint import commit
from megatron.checkpoint.commit import Policy, retire
from megatron.checkpoint.manifest import iteration_folder, list_iterations
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.observe.tracking import read_metrics

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


def test_later_iterations_of_another_pass_stay_and_what_was_just_saved_too(root):
    """After --ckpt-step 4 a run has saved iteration 5 anew."""
    assert silently(retire, root, Policy(last=2), 5) == [3, 2, 1]
    assert list_iterations(root) == [10, 9, 8, 7, 6, 5, 4]


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


def test_names_are_durable_before_anything_is_deleted(root, monkeypatch):
    calls: list[str] = []

    def noted(name: str, real):
        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("rename", "fsync", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    silently(retire, root, Policy(last=8), 10)
    assert calls[:3] == ["rename", "rename", "fsync"] and set(calls[3:]) == {"unlink", "rmdir"}


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


def test_a_policy_that_counts_the_damaged_is_caught(root, monkeypatch):
    """The control of what counts: without opening, a damaged one takes the place of the only whole
    one.
    """
    monkeypatch.setattr(commit, "_is_whole", lambda folder: True)
    damage(root, 9)
    silently(retire, root, Policy(last=2), 10)
    assert list_iterations(root) == [10, 9]
