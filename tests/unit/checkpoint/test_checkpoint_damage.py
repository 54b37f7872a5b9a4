"""Damage of any kind gives one CheckpointError that names the file (and the tensor), and an older
checkpoint stays loadable.
"""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from checkpoint_cases import example, flip, loads, pairs, save_in_shards
from logged import silently

from megatron.checkpoint import manifest
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import save_checkpoint

STATE = {"iteration": 2, "consumed_samples": 16}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 256)


@pytest.fixture
def two(tmp_path):
    """Iteration 1, and iteration 2 in two shards."""
    items = pairs(example())
    save_checkpoint(tmp_path, 1, pairs(example(1)), STATE)
    return save_in_shards(tmp_path, 2, [items[::2], items[1::2]], STATE)


def load_all(root) -> None:
    with open_checkpoint(root) as checkpoint:
        for name in checkpoint.names:
            checkpoint.read_tensor(name)


def harm(two, root, how: str) -> str:
    """Damage the newer checkpoint; the name of the file that a message must hold."""
    shard, table, manifest_file = (
        two / name for name in ("shard-00001.safetensors", "shard-00000.digests", "MANIFEST.json")
    )
    if how == "missing":
        shard.unlink()
    elif how == "torn manifest":
        manifest_file.write_bytes(manifest_file.read_bytes()[:-40])
    elif how == "foreign":
        other = save_checkpoint(root / "other", 2, pairs(example(5)), STATE)
        shutil.copy(other / table.name, table)
    else:
        flip(shard, -300)
    return {"torn manifest": manifest_file, "foreign": table}.get(how, shard).name


@pytest.mark.parametrize("how", ["missing", "torn manifest", "foreign", "data"])
def test_an_older_whole_checkpoint_is_taken_when_allowed_and_that_is_logged(
    tmp_path, two, how, log_lines
):
    """Damaged data too, which opening does not see; and when the older one is damaged as well, one
    error.
    """
    name = harm(two, tmp_path, how)
    instead = "iter_0000002 cannot be loaded; load the older whole one with --ckpt-step 1"
    with pytest.raises(CheckpointError, match=f"{name}.*{instead}"):
        load_all(tmp_path)
    with open_checkpoint(tmp_path, older=True) as checkpoint:
        assert checkpoint.iteration == 1
        loads(checkpoint.path, example(1))
    (line,) = log_lines
    assert line.startswith("warning: ") and name in line
    end = "iter_0000002 CANNOT BE LOADED; an older checkpoint is taken instead"
    assert line.endswith(f"{end} (--allow-older-checkpoint)")
    with silently(open_checkpoint, tmp_path, step=1, older=True) as checkpoint:
        assert checkpoint.iteration == 1
    (tmp_path / "iter_0000001" / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="iter_0000001.*no older whole checkpoint is there"):
        open_checkpoint(tmp_path, older=True)


def test_a_disk_that_cannot_read_is_damage_too(tmp_path, two, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error.*--ckpt-step 1"):
        load_all(tmp_path)


def test_foreign_and_swapped_shards(tmp_path, two):
    """Of the same names and sizes: of another run, another iteration, another rank."""
    items = pairs({name: tensor + 1 for name, tensor in example().items()})
    other_run, other_iteration = (
        save_in_shards(tmp_path / name, iteration, [items[::2], items[1::2]], STATE)
        for name, iteration in (("other", 2), ("third", 3))
    )
    shard, table, first = (f"shard-0000{name}" for name in ("1.safetensors", "1.digests", "0"))
    for sources, text in (
        ({shard: other_run}, f"{shard}: damaged: bytes .*in tensor layers"),
        ({shard: other_run, table: other_run}, f"{table}: .*of another checkpoint"),
        ({shard: other_iteration}, f"{shard}: damaged: the header"),
        ({shard: two / f"{first}.safetensors"}, shard),
        ({table: two / f"{first}.digests"}, table),
    ):
        kept = {name: (two / name).read_bytes() for name in sources}
        for name, source in sources.items():
            shutil.copy(source / name if source.is_dir() else source, two / name)
        with pytest.raises(CheckpointError, match=text):
            load_all(tmp_path)
        for name, raw in kept.items():
            (two / name).write_bytes(raw)
    load_all(tmp_path)


def test_another_version_is_refused(two):
    file = two / manifest.MANIFEST
    content = manifest.decode_manifest(file.read_bytes(), file) | {"version": 2}
    file.write_bytes(manifest.encode_manifest(content))
    with pytest.raises(CheckpointError, match="has format .* version 2; this program reads"):
        Checkpoint(two)
    header = manifest.encode_header([("a@0", "F32", (1,))], {"shapes": '{"a": [1]}'})
    with pytest.raises(CheckpointError, match="a@0: dtype 'F8!' is not one of F64, F32, BF16, F16"):
        manifest.decode_header(header.replace(b"F32", b"F8!"), two)


def test_a_file_that_is_truncated_while_it_is_open(two):
    with Checkpoint(two) as checkpoint:
        file = two / "shard-00001.safetensors"
        os.truncate(file, file.stat().st_size - 300)
        with pytest.raises(CheckpointError, match="shard-00001.safetensors.*truncated"):
            checkpoint.verify()


def test_a_wrong_tracker_is_ignored(tmp_path, two):
    (tmp_path / manifest.TRACKER).write_bytes(b"1\n")
    assert silently(open_checkpoint, tmp_path).path == two


def test_choosing_an_iteration(tmp_path, two):
    loads(open_checkpoint(tmp_path, step=1).path, example(1))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of iteration 7 \(--ckpt-step\); there: 2, 1"
    ):
        open_checkpoint(tmp_path, step=7)
    with pytest.raises(CheckpointError, match="itself a checkpoint: give its parent folder"):
        open_checkpoint(two)
    assert open_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        open_checkpoint(tmp_path / "latest_checkpointed_iteration.txt")
    for name in ("iter_0000009.bak", ".tmp-iter-9-0123456789abcdef", "iter_9", "iter_00000009"):
        (tmp_path / name).mkdir()
    assert silently(open_checkpoint, tmp_path).path == two
    two.rename(tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match=r"manifest is of iteration 2.*--ckpt-step 1\."):
        open_checkpoint(tmp_path)
