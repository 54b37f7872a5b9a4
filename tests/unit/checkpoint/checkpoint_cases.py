"""Small checkpoints for the tests of this folder: tensors by logical name, cut into boxes and
shards.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint import writer
from megatron.checkpoint.commit import commit
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint
from megatron.distributed.groups import Axis
from megatron.model.spec import Box

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
WHOLE = ["iter_0000001", "latest_checkpointed_iteration.txt"]  # a folder with one checkpoint


def listing(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def whole(name: str, tensor: Tensor) -> Box:
    return Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))


def pairs(tensors: dict[str, Tensor]) -> list[tuple[Box, Tensor]]:
    return [(whole(name, tensor), tensor) for name, tensor in tensors.items()]


def example(seed: int = 0) -> dict[str, Tensor]:
    """Vectors and matrices of every dtype, sizes around the digest chunk that the tests use (256
    bytes).
    """
    g = torch.Generator().manual_seed(seed)
    shapes = [(3,), (64,), (7, 5), (64, 33), (1, 200), (130, 2)]
    return {
        f"layers.{i}.{str(d)[6:]}.weight": torch.randn(s, generator=g).to(d)
        for d in DTYPES
        for i, s in enumerate(shapes)
    }


def cut(
    rng: random.Random, shape: tuple[int, ...], pieces: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random tiling of `shape` by about `pieces` boxes (offset, extent)."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(pieces - 1):
        offset, extent = boxes.pop(rng.randrange(len(boxes)))
        d = rng.randrange(len(shape))
        if extent[d] < 2:
            boxes.append((offset, extent))
            continue
        at = rng.randrange(1, extent[d])
        for low, size in ((0, at), (at, extent[d] - at)):
            begin = tuple(o + low * (i == d) for i, o in enumerate(offset))
            boxes.append((begin, tuple(size if i == d else e for i, e in enumerate(extent))))
    return boxes


def part_of(full: Tensor, offset: tuple, extent: tuple) -> Tensor:
    return full[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def deal(
    rng: random.Random, tensors: dict[str, Tensor], takers: Sequence[int], pieces: int = 5
) -> dict[int, list[tuple[Box, Tensor]]]:
    """The tensors, each cut at random into at most about `pieces` boxes, dealt to the takers."""
    hands: dict[int, list] = {taker: [] for taker in takers}
    for name, full in tensors.items():
        for offset, extent in cut(rng, tuple(full.shape), rng.randint(1, pieces)):
            box = Box(name, tuple(full.shape), offset, extent)
            hands[rng.choice(takers)].append((box, part_of(full, offset, extent).clone()))
    return hands


def dealt(seed: int, cut_seed: int, least: int = 1) -> list[tuple[Box, Tensor]]:
    """What this rank owns of `example(seed)`, cut at random and dealt to `least` ranks or more."""
    rng, world = random.Random(cut_seed), dist.get_world_size()
    takers = rng.sample(range(world), rng.randint(least, world))
    return deal(rng, example(seed), takers).get(dist.get_rank(), [])


def all_ranks() -> Ranks:
    """The ranks of a Gloo world."""
    return Ranks(Axis("world", dist.get_rank(), tuple(range(dist.get_world_size()))))


def save_in_shards(
    root: Path, iteration: int, shards: list[list[tuple[Box, Tensor]]], state: dict
) -> Path:
    """What many writers do, one after the other: each its own shard, then one commit."""
    attempt = secrets.token_hex(8)
    root.mkdir(exist_ok=True)
    folder = root / f".tmp-iter-{iteration}-{attempt}"
    folder.mkdir()
    records = [
        writer.write_shard(folder, i, len(shards), iteration, part) for i, part in enumerate(shards)
    ]
    return commit(root, folder, iteration, attempt, records, state)


def flip(path: Path, at: int = -3) -> None:
    """Change a bit of a byte of a file; the same again undoes it."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def loads(path: Path, tensors: dict[str, Tensor]) -> None:
    """Assert that the checkpoint holds exactly these tensors, bit for bit."""
    with Checkpoint(path) as checkpoint:
        assert sorted(checkpoint.names) == sorted(tensors)
        for name, tensor in tensors.items():
            assert same_bits(checkpoint.read_tensor(name), tensor), name


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs in the place of `folder`; skips the test without the right to mount one."""
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
