"""--verify-integrity: what comes back from the disk is compared byte by byte before it counts."""

from __future__ import annotations

import io
import os
import random
import re
import tracemalloc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import example, flip, pairs
from reshard_cases import BASE, FEATURES, start

from megatron.checkpoint import files
from megatron.checkpoint.files import read_back
from megatron.checkpoint.manifest import CHUNK, CheckpointError, DigestTable, list_iterations
from megatron.checkpoint.writer import save_checkpoint


@pytest.fixture
def shard(tmp_path):
    """(path, table) of a shard of several chunks."""
    tensors = {**example(1), "big": torch.arange(3 << 18, dtype=torch.float32)}
    folder = save_checkpoint(tmp_path, 1, pairs(tensors), {"iteration": 1})
    path = folder / "shard-00000.safetensors"
    return path, DigestTable.decode(path.with_suffix(".digests").read_bytes(), path)


def test_every_byte_is_covered(shard):
    path, table = shard
    read_back(path, table)
    rng, size = random.Random(1), path.stat().st_size
    edges = [0, table.data_start - 1, table.data_start, table.data_start + table.chunk, size - 1]
    for at in (*edges, *(rng.randrange(size) for _ in range(40))):
        flip(path, at)
        with pytest.raises(
            CheckpointError, match=re.escape(f"{path}: read back from the disk: bytes ")
        ) as error:
            read_back(path, table)
        first, last = map(
            int, re.search(r"bytes (\d+) to (\d+) are not those", str(error.value)).groups()
        )
        assert first <= at <= last and last - first < max(table.chunk, table.data_start)
        flip(path, at)
    read_back(path, table)
    extra = path.with_suffix(".digests")
    flip(extra, extra.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"shard-00000.digests: read back"):
        read_back(path, table)


class BadDisk(io.FileIO):
    def read(self, size: int = -1) -> bytes:
        raise OSError(5, "Input/output error")


def test_a_file_that_is_shorter_or_cannot_be_read(shard, monkeypatch):
    path, table = shard
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", BadDisk, raising=False)
        with pytest.raises(CheckpointError, match="bytes 0 to 4095 cannot be read: Input/output"):
            read_back(path, table)
    os.truncate(path, table.size - 1)
    with pytest.raises(
        CheckpointError, match=f"{table.size - 1} bytes instead of the {table.size}"
    ):
        read_back(path, table)


def test_the_disk_is_asked_and_not_the_page_cache_in_bounded_memory(shard, monkeypatch):
    path, table = shard
    calls: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append(args[3]))
    tracemalloc.start()
    read_back(path, table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert calls == [os.POSIX_FADV_DONTNEED] * 2  # the shard and its table
    assert peak < CHUNK + (1 << 16) < table.size


def save_on_a_bad_disk(arguments: tuple[str, ...]) -> str:
    """A run in which the disk changes a bit of rank 1's shard of iteration 4 before it is read
    back.
    """

    def after_the_disk(path, table) -> None:
        if dist.get_rank() == 1 and "-iter-4-" in path.parent.name:
            flip(path, table.size // 2)
        read_back(path, table)

    with mock.patch.object(files, "read_back", after_the_disk):
        return start(arguments)


def test_what_the_disk_has_changed_is_not_committed(gloo_world, tmp_path):
    arguments = (*BASE, *FEATURES["tied-bf16"].split(), "--save-interval", "2", "--save")
    words = (*arguments, str(tmp_path), "--verify-integrity")
    text, _ = gloo_world(2).run(save_on_a_bad_disk, words)
    name = (
        r"shard-00001\.safetensors: read back from the disk: bytes \d+ to \d+ are not those "
        r"that were written"
    )
    assert re.search(
        r"warning: iteration 4 was NOT saved; older checkpoints are untouched\. rank 1: .*" + name,
        text,
    )
    assert text.endswith("exit code 0") and list_iterations(tmp_path) == [6, 2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
