"""A save appears whole or not at all, never replaces a whole checkpoint, and a failed one leaves
the older ones loadable.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import WHOLE, example, flip, listing, loads, pairs
from logged import silently
from reshard_cases import BASE, FEATURES, start

from megatron.checkpoint import commit, files
from megatron.checkpoint.files import read_back
from megatron.checkpoint.index import Index
from megatron.checkpoint.manifest import CheckpointError, list_iterations
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint

STATE = {"iteration": 2, "consumed_samples": 16}
DEAD = ".tmp-iter-2-00000000deadbeef"


@pytest.fixture
def root(tmp_path):
    save_checkpoint(tmp_path, 1, pairs(example(1)), STATE)
    return tmp_path


# ---- an iteration that exists already ------------------------------------------------------------


@pytest.mark.parametrize("archived", [False, True])
def test_saving_the_same_again_keeps_the_old_files(root, tmp_path_factory, archived):
    if archived:
        archive = tmp_path_factory.mktemp("archive") / "iter_0000001"
        shutil.move(root / "iter_0000001", archive)
        (root / "iter_0000001").symlink_to(archive)
    before = (root / "iter_0000001" / "MANIFEST.json").stat()
    assert save_checkpoint(root, 1, pairs(example(1)), STATE) == root / "iter_0000001"
    after = (root / "iter_0000001" / "MANIFEST.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert listing(root) == WHOLE


def config(**fields) -> dict:
    return STATE | {"config": {group: {name: 1} for group, name in fields.items()}}


def test_where_a_run_saves_and_what_it_logs_is_no_part_of_what_is_equal(root):
    save_checkpoint(root, 2, pairs(example(2)), config(checkpoint="save_keep_last"))
    silently(save_checkpoint, root, 2, pairs(example(2)), config(logging="log_interval"))
    with pytest.raises(CheckpointError, match="from this run in: config.training.seed. It was"):
        save_checkpoint(root, 2, pairs(example(2)), config(training="seed"))


@pytest.mark.parametrize(
    ("tensors", "state", "text"),
    [
        (2, STATE, "in: tensors, or how they are cut into shards"),
        (1, STATE | {"consumed_samples": 17}, "in: consumed_samples"),
    ],
)
def test_a_whole_checkpoint_is_never_replaced_by_a_different_one(root, tensors, state, text):
    with pytest.raises(
        CheckpointError, match=f"exists already, is whole, and differs from this run {text}"
    ):
        save_checkpoint(root, 1, pairs(example(tensors)), state)
    loads(open_checkpoint(root).path, example(1))
    assert listing(root) == WHOLE


def test_a_state_with_nan_equals_itself(root):
    state = STATE | {"best": float("nan"), "list": [1, (2, 3)]}
    for _ in range(2):
        silently(save_checkpoint, root, 2, pairs(example(2)), state)


@pytest.mark.parametrize(
    "name", ["MANIFEST.json", "shard-00000.digests", "shard-00000.safetensors"]
)
def test_a_damaged_checkpoint_is_moved_aside_with_a_warning(root, name, log_lines):
    file = root / "iter_0000001" / name
    flip(file, -2)
    raw = file.read_bytes()
    save_checkpoint(root, 1, pairs(example(5)), STATE)
    (line,) = log_lines
    loads(open_checkpoint(root).path, example(5))
    (aside,) = set(listing(root)) - set(WHOLE)
    assert f"{name}: " in line and f"moved to {aside}" in line
    assert (root / aside / name).read_bytes() == raw
    save_checkpoint(root, 2, pairs(example(2)), STATE)  # and no save removes it
    assert aside in listing(root)


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_foreign_is_moved_aside_not_deleted(root, is_folder, log_lines):
    foreign = root / "iter_0000002"
    if is_folder:  # Megatron-LM's layout has the same names
        (foreign / "mp_rank_00").mkdir(parents=True)
    else:
        foreign.write_text("notes")
    with pytest.raises(CheckpointError, match=r"MANIFEST.json: No.*--ckpt-step 1\."):
        open_checkpoint(root)
    save_checkpoint(root, 2, pairs(example(2)), STATE)
    loads(open_checkpoint(root).path, example(2))
    (aside,) = root.glob("iter_0000002.damaged-*")
    assert (aside / "mp_rank_00").is_dir() if is_folder else aside.read_text() == "notes"
    assert aside.name in log_lines[0]


# ---- leftovers of attempts -----------------------------------------------------------------------


def test_leftovers_of_earlier_attempts_go_and_everything_else_stays(root):
    for name in (
        DEAD,
        ".trash-iter-2-00000000deadbeef-0123456789abcdef",
        ".tmp-other",
        "iter_notes",
        ".tmp-iter-2-short",
    ):
        (root / name).mkdir()
        (root / name / "shard-00000.safetensors").write_bytes(b"part")
    (root / f"{DEAD}.txt").write_text("2\n")
    save_checkpoint(root, 2, pairs(example(2)), STATE)
    assert listing(root) == sorted(
        [".tmp-other", "iter_notes", ".tmp-iter-2-short", "iter_0000002", *WHOLE]
    )


def test_a_zombie_of_an_earlier_attempt_cannot_replace_what_was_saved_since(root, monkeypatch):
    """The zombie stops just before its rename; the new attempt commits the same iteration; the
    zombie wakes up.
    """
    rename = os.rename

    def late(source, target):
        monkeypatch.setattr(os, "rename", rename)
        save_checkpoint(root, 2, pairs(example(7)), STATE)
        return rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(CheckpointError, match="iteration 2 was not saved: No such file.*vanished"):
        save_checkpoint(root, 2, pairs(example(2)), STATE)
    loads(open_checkpoint(root).path, example(7))
    assert listing(root) == sorted(["iter_0000002", *WHOLE])


# ---- failing writes ------------------------------------------------------------------------------


def test_short_writes_are_completed(root, monkeypatch):
    rng = random.Random(4)

    real = os.pwrite

    def short(file, data, at):
        return real(file, data[: rng.randint(1, len(data))], at)

    monkeypatch.setattr(os, "pwrite", short)
    loads(save_checkpoint(root, 2, pairs(example(2)), STATE), example(2))


# ---- what comes back from the disk (--verify-integrity) ------------------------------------------


@pytest.fixture
def shard(tmp_path):
    """(folder, entry in the manifest) of a shard of several chunks."""
    tensors = {**example(1), "big": torch.arange(3 << 18, dtype=torch.float32)}
    folder = save_checkpoint(tmp_path, 1, pairs(tensors), {"iteration": 1})
    return folder, Index(folder).manifest["shards"][0]


def test_every_byte_is_covered(shard):
    folder, record = shard
    path, size = folder / record["file"], record["bytes"]
    read_back(folder, 0, record)
    for file, at in ((path, 0), (path, -1), (path.with_suffix(".digests"), -1)):
        flip(file, at)
        damaged = f"read back from the disk: .*{file.name}: damaged"
        with pytest.raises(CheckpointError, match=damaged):
            read_back(folder, 0, record)
        flip(file, at)
    os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match=f"has {size - 1} bytes, the manifest has {size}"):
        read_back(folder, 0, record)


def test_the_disk_is_asked_and_not_the_page_cache(shard, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append(args[3]))
    read_back(shard[0], 0, shard[1])
    assert calls == [os.POSIX_FADV_DONTNEED] * 2  # the shard and its table


def save_on_a_bad_disk(arguments: tuple[str, ...]) -> str:
    """A run in which the disk changes a bit of rank 1's shard of iteration 4 before it is read
    back.
    """

    def after_the_disk(folder, index, record) -> None:
        if dist.get_rank() == 1 and "-iter-4-" in folder.name:
            flip(folder / record["file"], -9)
        read_back(folder, index, record)

    with mock.patch.object(files, "read_back", after_the_disk):
        return start(arguments)


def test_what_the_disk_has_changed_is_not_committed(gloo_world, tmp_path):
    arguments = (*BASE, *FEATURES["tied-bf16"].split(), "--save-interval", "2", "--save")
    words = (*arguments, str(tmp_path), "--verify-integrity")
    text, _ = gloo_world(2).run(save_on_a_bad_disk, words)
    assert re.search(
        r"warning: iteration 4 was NOT saved\. rank 1: .*read back from the disk: .*"
        r"shard-00001\.safetensors: damaged: bytes \d+ to \d+ do not match their digest",
        text,
    )
    assert text.endswith("exit code 0") and list_iterations(tmp_path) == [6, 2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_error_of_the_file_system_has_a_fix(tmp_path):
    space, rights = "; free space", "; make it writable"
    fixes = {errno.ENOSPC: space, errno.EDQUOT: space, errno.EACCES: rights, errno.EROFS: rights}
    for number, fix in fixes.items():
        error = OSError(number, os.strerror(number))
        text = commit.not_saved(tmp_path, 2, error)
        assert os.strerror(number) in text and fix in text
        wrapped = CheckpointError("shard: cannot be read")
        wrapped.__cause__ = error
        assert fix in commit.not_saved(tmp_path, 2, wrapped)
