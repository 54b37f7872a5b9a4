"""What a checkpoint holds and where: one rank finds out and informs the others; that every tensor
is covered once is a sweep.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import (
    all_ranks,
    cut,
    dealt,
    example,
    pairs,
    part_of,
    same_bits,
    save_in_shards,
)
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_ranks import BOTH, save

from megatron.checkpoint import manifest
from megatron.checkpoint.boxes import tiles
from megatron.checkpoint.index import Index
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.errors import UserError


def open_and_read(root, seed: int, cut_seed: int) -> tuple[list[str], list[str]]:
    """The files that this rank opens to open a checkpoint of all ranks, and then to read its
    boxes.
    """
    opened: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).startswith(str(root)) and watching:
            opened.append(Path(arguments[0]).name)

    watching = True
    sys.addaudithook(watch)
    with open_checkpoint(root, ranks=all_ranks()) as checkpoint:
        opening = sorted(opened)
        opened.clear()
        own = dealt(seed, cut_seed)
        filled = [(box, torch.zeros_like(want)) for box, want in own]
        checkpoint.read_all(filled)
        assert all(same_bits(into, want) for (_, into), (_, want) in zip(filled, own, strict=True))
    watching = False
    return opening, sorted(opened)


def test_the_first_rank_opens_everything_and_the_others_what_they_read(gloo_world, tmp_path):
    """In the cut that was saved each rank reads its own shard alone; no shard is opened twice."""
    gloo_world(4).run(save, tmp_path, 1, 7, BOTH)
    shown = gloo_world(4).run(open_and_read, tmp_path, 7, BOTH)
    shards, tables = (
        [f"shard-{i:05d}.{kind}" for i in range(4)] for kind in ("safetensors", "digests")
    )
    # the manifest once more for what the other ranks see of it
    opened = [*2 * [manifest.MANIFEST], *shards, *tables]
    assert shown[0][0] == sorted(opened)
    assert [opening for opening, _ in shown[1:]] == [["MANIFEST.json"]] * 3
    assert [reading for _, reading in shown] == [[tables[i], shards[i]] for i in range(4)]
    across = [reading for _, reading in gloo_world(4).run(open_and_read, tmp_path, 7, 3)]
    assert all(len(set(reading)) == len(reading) for reading in across)
    assert sum(map(len, across)) > 8


def open_unencoded(root) -> str:
    """The error where the first rank cannot give the others its index."""
    fault = CheckpointError("MANIFEST.json: cannot be read")
    with mock.patch.object(Index, "encode", side_effect=fault), pytest.raises(UserError) as error:
        open_checkpoint(root, ranks=all_ranks())
    return str(error.value)


def test_no_rank_waits_for_an_index_that_cannot_be_sent(gloo_world, tmp_path):
    gloo_world(2).run(save, tmp_path, 1, 1, BOTH)
    first, second = gloo_world(2).run(open_unencoded, tmp_path)
    assert first == second and "MANIFEST.json: cannot be read" in first


def open_own_view(root) -> str:
    """The error where each rank has another file system at the same place."""
    with pytest.raises(UserError) as error:
        open_checkpoint(root / str(dist.get_rank()), ranks=all_ranks(), older=True)
    return str(error.value)


def test_a_checkpoint_that_one_rank_does_not_see_is_not_damaged(gloo_world, tmp_path):
    """No older one is taken, although both ranks see that."""
    for iteration in (1, 2):
        save_checkpoint(tmp_path / "0", iteration, pairs(example()), {"iteration": iteration})
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / "iter_0000002")
    first, second = gloo_world(2).run(open_own_view, tmp_path)
    assert first == second and "iter_0000002: the checkpoint that rank 0 found there" in first
    assert "is not seen from here" in first and "cannot be loaded" not in first


def test_an_index_that_was_sent_is_the_one_that_was_opened(tmp_path):
    items = pairs(example())
    path = save_in_shards(tmp_path, 1, [items[::2], items[1::2]], {"iteration": 1, "text": "é"})
    opened = Index(path)
    sent = Checkpoint(path, opened.encode())
    assert (sent.manifest, sent.shards, sent.tensors) == (
        opened.manifest,
        opened.shards,
        opened.tensors,
    )
    assert [hash(shard) for shard in sent.shards] == [hash(shard) for shard in opened.shards]
    assert all(same_bits(sent.read_tensor(name), tensor) for name, tensor in example().items())
    save_in_shards(tmp_path / "other", 1, [items[::2], items[1::2]], {"iteration": 1, "text": "e"})
    with pytest.raises(CheckpointError, match="not seen from here"):
        Index(tmp_path / "other" / "iter_0000001", opened.encode())
    (path / "shard-00001.digests").write_bytes(b"")  # what comes later is verified later
    with pytest.raises(CheckpointError, match="shard-00001.digests: damaged"):
        Checkpoint(path, opened.encode()).read_all(
            (box, torch.zeros_like(tensor)) for box, tensor in items
        )


def test_a_process_that_commits_needs_no_torch():
    script = (
        "import sys; import megatron.checkpoint.commit; assert 'torch' not in sys.modules "
        "and 'numpy' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=Path(__file__).resolve().parents[3]
    )


@given(seed=st.integers(0, 2**32))
def test_tiles_counts_every_element(seed):
    """Tilings, and tilings of which one box was moved or another put in its place, against a count
    of each element.
    """
    rng = random.Random(seed)
    shape = rng.choice([(40,), (9, 11), (4, 5, 6)])
    boxes = cut(rng, shape, rng.randint(1, 12))
    if rng.random() < 0.7:
        at = rng.randrange(len(boxes))
        offset, extent = boxes[at]
        boxes[at] = rng.choice(
            [(tuple(max(0, o + rng.randint(-1, 1)) for o in offset), extent), rng.choice(boxes)]
        )
    rng.shuffle(boxes)
    count = torch.zeros([2 * n for n in shape], dtype=torch.int)
    for offset, extent in boxes:
        part_of(count, offset, extent).add_(1)
    inside = tuple(slice(0, n) for n in shape)
    assert tiles(shape, boxes) == bool(
        (count[inside] == 1).all() and count.sum() == count[inside].sum()
    )
