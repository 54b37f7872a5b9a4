"""A rank with several cores writes several shards at a time: of equal bytes, read back from any,
with one error that ends all of them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_cases import all_ranks, example, loads, pairs

from megatron.checkpoint import files, manifest, writer
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import save_checkpoint, shard_bytes, shard_parts
from megatron.model.spec import Box

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import inspect_checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 256


@pytest.fixture
def cores(monkeypatch):
    """Sets how many a rank has; a shard holds at least 1000 bytes."""
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    monkeypatch.setattr(writer, "MIN_SHARD_BYTES", 1000)
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def files_of(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.name != manifest.MANIFEST
    }


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (3, 3), (64, 4)])
def test_any_number_of_cores_saves_the_same_tensors(tmp_path, monkeypatch, cores, count, parts):
    shown: list[int] = []
    monkeypatch.setattr(writer, "WriteProgress", lambda *_: shown.append)
    cores(count)
    path = save_checkpoint(tmp_path, 1, pairs(example()), {}, verify=True)
    loads(path, example())
    with Checkpoint(path) as checkpoint:
        checkpoint.verify()
        sizes = [shard.data_bytes for shard in checkpoint.shards]
        assert {record["rank"] for record in checkpoint.manifest["shards"]} == {0}
    assert len(sizes) == parts and sum(sizes) == sum(shown) == shard_bytes(pairs(example()))
    assert max(sizes) - min(sizes) < 2000, "more than a row or two of each tensor"
    again = save_checkpoint(tmp_path / "again", 1, pairs(example()), {})
    assert files_of(again) == files_of(path)


def test_little_is_not_cut(cores):
    cores(4)
    small = pairs({"w": torch.ones(100)})
    assert shard_parts(small) == [small] and shard_parts([]) == []
    assert [shard_bytes(part) for part in shard_parts(pairs({"w": torch.ones(600)}))] == [
        1200,
        1200,
    ]


def test_fused_groups_are_cut_at_rows(tmp_path, cores):
    """Local tensors that hold a box in groups of rows, or next to others' rows."""
    cores(3)
    fused = torch.arange(24 * 40.0).view(24, 40)
    boxes = [
        (Box("q", (12, 40), (0, 0), (12, 40), groups=4, start=0), fused),
        (Box("k", (4, 40), (0, 0), (4, 40), groups=4, start=3), fused),
    ]
    with Checkpoint(save_checkpoint(tmp_path, 1, boxes, {})) as checkpoint:
        assert len(checkpoint.shards) == 2
        rows = fused.view(4, 6, 40)
        assert torch.equal(checkpoint["q"], rows[:, :3].reshape(12, 40))
        assert torch.equal(checkpoint["k"], rows[:, 3])


def test_an_error_of_one_ends_all(tmp_path, monkeypatch, cores):
    save_checkpoint(tmp_path, 1, pairs(example(1)), {})
    cores(3)
    calls, real = [], os.pwritev

    def full(file, buffers, at):
        calls.append(at)
        if len(calls) == 8:
            raise OSError(28, os.strerror(28))
        time.sleep(1e-3)
        return real(file, buffers, at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(
        CheckpointError,
        match=r"iteration 2 was not saved: No space left on device.*newest: iteration 1",
    ):
        save_checkpoint(tmp_path, 2, pairs(example(2)), {})
    assert len(calls) <= 8 + 2 * 2, "the others wrote on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", manifest.TRACKER]
    loads(open_checkpoint(tmp_path).path, example(1))


def save_by_two(root: Path) -> list[tuple[int, int]]:
    """Rank 0 has one core, rank 1 three; (shard, rank) in the manifest."""
    ranks = all_ranks()
    rank = ranks.world.rank
    values = torch.arange(8000.0).view(2000, 4)
    own = [(Box("w", (2000, 4), (1000 * rank, 0), (1000, 4)), values[1000 * rank :][:1000])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MIN_SHARD_BYTES", 1000)
        patch.setattr(torch, "get_num_threads", lambda: 1 + 2 * rank)
        path = save_checkpoint(root, 1, own, {}, ranks=ranks)
    with Checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["w"], values)
        records = checkpoint.manifest["shards"]
        return [(shard.number, records[shard.number]["rank"]) for shard in checkpoint.shards]


def test_ranks_with_different_cores(gloo_world, tmp_path, capsys):
    assert gloo_world(2).run(save_by_two, tmp_path) == [[(0, 0), (1, 1), (2, 1), (3, 1)]] * 2
    assert inspect_checkpoint.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    files_of_1 = ", ".join(f"shard-0000{i}.safetensors" for i in (1, 2, 3))
    assert "2 ranks wrote" in out and re.search(rf"rank 1: \S+ MiB in {files_of_1}\n", out)


def test_what_has_been_taken_is_written_before_more_is_asked_for(tmp_path, monkeypatch):
    """A buffer may be filled anew: of the writer process, of the copies between nodes."""
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    buffer = bytearray(CHUNK)

    def data():
        for number in range(40):
            buffer[:] = bytes([number]) * CHUNK
            yield memoryview(buffer)[:100]
            yield memoryview(buffer)[100:]

    files.write_shard_file(tmp_path, 0, b"h" * 8, data(), verify=True)
    assert (tmp_path / manifest.shard_file(0)).read_bytes() == b"h" * 8 + b"".join(
        bytes([number]) * CHUNK for number in range(40)
    )
