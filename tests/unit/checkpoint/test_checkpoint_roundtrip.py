"""What is saved is what is read, for any cut into boxes and shards, reading only the chunks that
are needed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import stat
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_cases import (
    cut,
    deal,
    example,
    loads,
    pairs,
    part_of,
    same_bits,
    save_in_shards,
    whole,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged import silently

from megatron.checkpoint import commit, fetch, manifest, reader, writer
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import save_checkpoint, shard_bytes
from megatron.model.spec import Box

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 256
STATE = {
    "iteration": 3,
    "ledger": {"segments": [[0, 1.5]]},
    "text": 'é "quoted" \\',
    "tiny": 5e-324,
    "third": 1 / 3,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    monkeypatch.setattr(reader, "BATCH", 1000)


def test_every_dtype_and_size_comes_back_bit_for_bit(tmp_path):
    """In files that any reader of safetensors opens, with the same bytes every time."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = example()
    tensors["nan.weight"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    root = tmp_path / "new" / "run"
    path = save_checkpoint(root, 3, pairs(tensors), STATE)
    assert path == root / "iter_0000003" and silently(open_checkpoint, root).path == path
    loads(path, tensors)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.state == STATE and checkpoint.iteration == 3
        checkpoint.verify()
    names = ["MANIFEST.json", "shard-00000.digests", "shard-00000.safetensors"]
    assert sorted(p.name for p in path.iterdir()) == names
    loaded = safetensors.load_file(path / names[2])
    for name, tensor in tensors.items():
        assert same_bits(loaded[f"{name}@{','.join('0' * tensor.ndim)}"], tensor)
    (length,) = struct.unpack("<Q", (path / names[2]).read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    again = save_checkpoint(tmp_path / "again", 3, pairs(tensors), STATE)
    assert all((again / name).read_bytes() == (path / name).read_bytes() for name in names[1:])


def test_strided_and_fused_views_are_written_without_their_neighbours(tmp_path):
    qkv = torch.randn(2 * (3 + 1 + 1) * 4, 6)  # 2 groups of 3 query heads, k and v, head width 4
    q = Box("q", (24, 6), (0, 0), (24, 6), groups=2, start=0)
    v = Box("v", (8, 6), (0, 0), (8, 6), groups=2, start=16)
    transposed = torch.randn(50, 30).t()
    saved = [(q, qkv), (v, qkv), (whole("t", transposed), transposed)]
    path = save_checkpoint(tmp_path, 1, saved, {})
    rows = qkv.view(2, 5, 4, 6)
    parts = {"q": rows[:, :3].reshape(24, 6), "v": rows[:, 4].reshape(8, 6)}
    loads(path, parts | {"t": transposed.contiguous()})
    into = torch.full_like(qkv, 7.0)
    with Checkpoint(path) as checkpoint:
        checkpoint.read(q, into)
        checkpoint.read(v, into)
    want = qkv.clone().view(2, 5, 4, 6)
    want[:, 3] = 7.0  # k was not read
    assert same_bits(into, want.view_as(qkv))


def test_large_strided_tensors_are_copied_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PIECE", 512)
    tensors = {
        "a": torch.randn(40, 60).t(),
        "b": torch.randn(3, 400).t(),
        "c": torch.randn(700)[::2],
        "d": torch.randn(4, 300)[:, ::2],
    }
    path = save_checkpoint(tmp_path, 1, pairs(tensors), {})
    loads(path, {name: tensor.contiguous() for name, tensor in tensors.items()})


def needed_chunks(checkpoint: Checkpoint, box: Box) -> int:
    """Bytes of the distinct chunks that hold a row with an element of `box`, by enumerating all
    elements.
    """
    stored, total = checkpoint.tensors[box.name], 0
    for shard in checkpoint.shards:
        chunks = set()
        for piece in (p for p in stored.pieces if p.shard is shard):
            index = torch.arange(math.prod(piece.extent)).reshape(piece.extent)
            inside = tuple(
                slice(max(0, o - po), max(0, o + e - po))
                for o, e, po in zip(box.offset, box.extent, piece.offset, strict=True)
            )
            rows = index[inside[0]] if index[inside].numel() else index[:0]
            for element in rows.flatten().tolist():
                byte = piece.start + element * stored.item_bytes
                chunks.add(byte // manifest.CHUNK)
        total += sum(min(manifest.CHUNK, shard.data_bytes - c * manifest.CHUNK) for c in chunks)
    return total


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_any_boxes_resharded_to_any_boxes(tmp_path, seed):
    """Save boxes of a random tiling in random shards; read boxes of another one; each reads exactly
    the chunks of the rows that it needs, once.
    """
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, longest) for longest in rng.choice([(500,), (40, 90), (6, 9, 9)]))
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tensors = {"w": tensor, "other": torch.randn(rng.randint(1, 99))}
    shards = deal(rng, tensors, range(rng.randint(1, 4)), 6)
    path = save_in_shards(tmp_path / str(seed), 1, list(shards.values()), {})
    loads(path, tensors)
    for offset, extent in cut(rng, shape, 4):
        box = Box("w", shape, offset, extent)
        want = part_of(tensor, offset, extent)
        with Checkpoint(path) as checkpoint:
            into = torch.zeros(extent, dtype=tensor.dtype)
            checkpoint.read(box, into)
            assert same_bits(into, want)
            if len(shape) < 3:
                assert checkpoint.fetcher.bytes_read == needed_chunks(checkpoint, box)


def test_reading_everything_in_order_reads_each_chunk_once(tmp_path):
    """Whatever the order in which it is asked for."""
    path = save_checkpoint(tmp_path, 1, pairs(example()), {})
    with Checkpoint(path) as checkpoint:
        wanted = reversed(pairs(example()))
        checkpoint.read_all((box, torch.zeros_like(each)) for box, each in wanted)
        assert checkpoint.fetcher.bytes_read == checkpoint.shards[0].data_bytes


def test_values_are_converted_to_the_destination(tmp_path):
    w = torch.randn(9, 4, dtype=torch.float64)
    path = save_checkpoint(tmp_path, 1, pairs({"w": w}), {})
    into = torch.empty(9, 4, dtype=torch.bfloat16, requires_grad=True)
    with Checkpoint(path) as checkpoint:
        checkpoint.read(whole("w", w), into)
    assert same_bits(into.detach(), w.to(torch.bfloat16))


def test_a_read_without_memory_leaves_no_file_open(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, pairs(example()), {})
    monkeypatch.setattr(fetch, "bytearray", mock.Mock(side_effect=MemoryError), raising=False)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError):
        Checkpoint(path).verify()
    assert os.listdir("/proc/self/fd") == before


def test_wrong_names_and_shapes_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, pairs({"w": torch.zeros(4, 2)}), {})
    with Checkpoint(path) as checkpoint:
        box = whole("w", torch.zeros(4, 2))
        with pytest.raises(
            CheckpointError, match=r"w has shape \[4, 2\], this model needs \[8, 2\]"
        ):
            checkpoint.read(dataclasses.replace(box, shape=(8, 2)), torch.zeros(4, 2))
        with pytest.raises(CheckpointError, match="no tensor optimizer.exp_avg.w.*--no-load-optim"):
            checkpoint.read(dataclasses.replace(box, name="optimizer.exp_avg.w"), torch.zeros(4, 2))


def test_shards_that_do_not_tile_a_tensor_are_refused(tmp_path, monkeypatch):
    """By the writer, before anything is committed; and by the reader, if one had been."""
    upper, lower, late = (Box("w", (4, 2), (row, 0), (2, 2)) for row in (0, 2, 1))
    part = torch.zeros(2, 2)
    for name, shards in {
        "hole": [[(upper, part)]],
        "overlap": [[(upper, part), (late, part)], [(lower, part)]],
    }.items():
        with pytest.raises(CheckpointError, match="exactly once"):
            save_in_shards(tmp_path / name, 1, shards, {})
        assert open_checkpoint(tmp_path / name) is None
        with monkeypatch.context() as patch:
            patch.setattr(commit, "Index", lambda path: None)  # a writer that does not look
            path = save_in_shards(tmp_path / name, 1, shards, {})
        with pytest.raises(CheckpointError, match="exactly once"):
            Checkpoint(path)


def test_state_that_is_not_json_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="must be JSON"):
        save_checkpoint(tmp_path, 1, pairs(example()), {"x": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_files_are_not_for_the_world(tmp_path):
    old = os.umask(0)
    try:
        path = save_checkpoint(tmp_path / "run", 1, pairs(example()), {})
    finally:
        os.umask(old)
    modes = {
        p.name: stat.S_IMODE(p.stat().st_mode)
        for p in (path.parent, path, *path.iterdir(), path.parent / manifest.TRACKER)
    }
    assert {modes.pop("run"), modes.pop("iter_0000001")} == {0o750}
    assert set(modes.values()) == {0o640}


def test_saving_and_reading_take_no_second_copy(tmp_path):
    """Peak memory of a process that saves and reads 192 MB, contiguous, strided and transposed, in
    place: a few chunks and pieces more.
    """
    script = """
import resource, sys, torch
sys.path.insert(0, sys.argv[2])
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.model.spec import Box
torch.set_num_threads(1)
fused = torch.ones(4096, 8192)
plain, across = torch.ones(2048, 8192), torch.ones(4096, 512).t()
pairs = [(Box("q", (2048, 8192), (0, 0), (2048, 8192), groups=16), fused)]
pairs += [(Box("p", plain.shape, (0, 0), plain.shape), plain)]
pairs += [(Box("t", across.shape, (0, 0), across.shape), across)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = save_checkpoint(sys.argv[1], 1, pairs, {})
with Checkpoint(path) as checkpoint:
    checkpoint.read_all(pairs)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, root], capture_output=True, text=True, check=True
    )
    # KiB: a piece (16 MiB), five runs of 2 MiB (3 with the chunks at both ends), and what the
    # allocator keeps
    assert int(done.stdout) < 56 * 1024


# ---- several shards of a rank that has several cores ---------------------------------------------


@pytest.fixture
def cores(monkeypatch):
    """Sets how many a rank has; a shard holds at least 1000 bytes."""
    monkeypatch.setattr(writer, "MIN_SHARD_BYTES", 1000)
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def files_of(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.name != manifest.MANIFEST
    }


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (3, 3), (64, 4)])
def test_any_number_of_cores_saves_the_same_tensors(tmp_path, cores, count, parts):
    cores(count)
    path = save_checkpoint(tmp_path, 1, pairs(example()), {}, verify=True)
    loads(path, example())
    with Checkpoint(path) as checkpoint:
        checkpoint.verify()
        sizes = [shard.data_bytes for shard in checkpoint.shards]
        assert {record["rank"] for record in checkpoint.manifest["shards"]} == {0}
    assert len(sizes) == parts and sum(sizes) == shard_bytes(pairs(example()))
    assert max(sizes) - min(sizes) < 2000, "more than a row or two of each tensor"
    again = save_checkpoint(tmp_path / "again", 1, pairs(example()), {})
    assert files_of(again) == files_of(path)
