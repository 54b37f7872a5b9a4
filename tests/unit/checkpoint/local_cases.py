"""What one rank does in the tests of local checkpoints: several nodes on one machine, each with a
separate folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import checkpoint_cases
import torch
import torch.distributed as dist
from checkpoint_cases import all_ranks, flip, listing, same_bits
from logged import logged
from reshard_cases import start

from megatron.checkpoint import manifest
from megatron.checkpoint.local import checkpoints, redundancy
from megatron.checkpoint.local.checkpoints import (
    LocalCheckpoint,
    LocalCheckpoints,
    newest_local,
    save_local,
)
from megatron.checkpoint.local.nodes import Nodes, adopt_run_id, find_nodes
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.errors import UserError
from megatron.model.spec import Box
from megatron.training.exit import Exit
from megatron.training.loop import COMPLETE

RUN, OTHER = "a" * 32, "b" * 32
STATE = {"iteration": 2, "scale": float("inf")}


def own_root(root: Path, each: int) -> Path:
    """What a node of `each` ranks sees; node 1 sees `root`/1."""
    return Path(root, str(dist.get_rank() // each))


def join(root: Path, each: int, run: str = RUN) -> Nodes:
    return replace(find_nodes(own_root(root, each), all_ranks()), run=run)


def found_nodes(root: Path, each: int) -> tuple:
    found = join(root, each)
    dist.barrier()  # all have taken their files away
    return (
        found.members,
        found.index,
        found.first,
        found.place,
        listing(found.root),
    )


def dealt(seed: int, cut_seed: int) -> list[tuple[Box, torch.Tensor]]:
    """What this rank owns of `example(seed)`: of four ranks, sometimes, one has nothing."""
    return checkpoint_cases.dealt(seed, cut_seed, max(1, dist.get_world_size() - 1))


@contextlib.contextmanager
def small(mutant: str | None = None) -> Iterator[None]:
    """Chunks and messages so small that every shard has several, and a mutant."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(manifest, "CHUNK", 1 << 14))
        stack.enter_context(mock.patch.object(redundancy, "WINDOW", 300))
        stack.enter_context(mock.patch.object(redundancy, "PIECE", 1000))
        if mutant is not None:
            stack.enter_context(MUTANTS[mutant]())
        yield


def save(
    root: Path,
    each: int,
    iteration: int,
    seed: int,
    kind: str = "partner",
    run: str = RUN,
    mutant: str | None = None,
) -> str:
    """Save `example(seed)` locally: the folder's name, or the error."""
    with small(mutant):
        try:
            name = save_local(join(root, each, run), iteration, dealt(seed, seed), STATE, kind).name
        except ValueError as error:
            name = str(error)
        dist.barrier()
    return name


def restart(
    root: Path,
    each: int,
    seed: int,
    cut_seed: int,
    run: str = RUN,
    oldest: int = 0,
    mutant: str | None = None,
) -> tuple:
    """Take the newest local checkpoint and read another cut of it: (iteration, what is not
    `example(seed)`, lines logged, bytes fetched).

    Seed 0: that of the iteration's number.
    """
    with small(mutant), logged() as lines:
        found = newest_local(join(root, each, run), oldest)
        if found is None:
            return None, [], lines, 0
        checkpoint, faults, fetched = LocalCheckpoint(found), [], 0
        wanted = dealt(seed or found.iteration, cut_seed)
        try:
            fetched = checkpoint.fetch([box for box, _ in wanted])
            for box, want in wanted:
                into = torch.zeros_like(want)
                checkpoint.read(box, into)
                faults += [] if same_bits(into, want) else [f"{box.name} at {box.offset}"]
        except ValueError as error:
            faults.append(str(error))
        dist.barrier()
        checkpoint.close()
        dist.barrier()
    return found.iteration, faults, lines, fetched


def num_verified(root: Path, each: int) -> int:
    """How many files this rank looks for, and verifies, at a restart."""
    counted = mock.Mock(wraps=checkpoints.verify_shard)
    with mock.patch.object(checkpoints, "verify_shard", counted):
        newest_local(join(root, each), 0)
    return counted.call_count


@contextlib.contextmanager
def no_room(number: int = errno.ENOSPC) -> Iterator[None]:
    """For a block, or for a shard that is rebuilt; or another error."""
    full = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    with mock.patch.object(checkpoints, "write_shard_file", full):
        yield


def save_without_room(root: Path, each: int, who: int, number: int) -> str:
    """Save iteration 2 while rank `who` finds no room, or has another error."""
    with no_room(number) if dist.get_rank() == who else contextlib.nullcontext():
        return save(root, each, 2, 5)


def prepared(root: Path, each: int, kind: str, own_bytes: int = 0) -> str:
    """What a run with this redundancy finds wrong before training."""
    try:
        local = LocalCheckpoints(own_root(root, each), all_ranks(), kind)
        local.adopt(RUN)
        local.require_space(own_bytes, False)
    except ValueError as error:
        return str(error)
    return ""


def newest_of_both(root: Path, seen: bool) -> str | int:
    """With --allow-older-checkpoint, over an older local checkpoint: the iteration that is taken
    where the only one of --load is damaged, or else whole and not seen by rank 1; or the error.
    """
    ranks, shared = all_ranks(), root / "shared"
    path = save_checkpoint(shared, 2, dealt(7, 7), STATE, ranks)
    local = LocalCheckpoints(own_root(root, 1), ranks, "none")
    local.adopt(adopt_run_id(str(shared), str(shared), ranks))
    assert local.save(1, dealt(7, 7), STATE)
    if seen and ranks.first:
        flip(next(path.glob("*.safetensors")))
    load = str(shared if seen or ranks.first else root / "elsewhere")
    dist.barrier()
    try:
        with local.newest(load, load, True) as checkpoint:
            return checkpoint.iteration
    except UserError as error:
        return str(error)


def join_on(folders: list[Path]) -> str:
    try:
        find_nodes(folders[dist.get_rank()], all_ranks())
    except ValueError as error:
        return str(error)
    return ""


def save_with_pictures(root: Path, each: int, iteration: int, seed: int, pictures: Path) -> int:
    """Save; before every change that this rank makes to its node's folder that is copied to
    `pictures`/node-rank-number. How many there are.
    """
    node, rank, taken = Path(root, str(dist.get_rank() // each)), dist.get_rank(), 0

    def pictured(real):
        def call(*args, **kwargs):
            nonlocal taken
            with mock.patch.multiple(os, **reals):
                shutil.copytree(node, pictures / f"{node.name}-{rank}-{taken}", dirs_exist_ok=True)
            taken += 1
            return real(*args, **kwargs)

        return call

    reals = {name: getattr(os, name) for name in ("pwrite", "rename", "fsync", "mkdir")}
    joined = join(root, each)
    dist.barrier()
    with (
        small(),
        mock.patch.multiple(os, **{name: pictured(real) for name, real in reals.items()}),
    ):
        save_local(joined, iteration, dealt(seed, seed), STATE, "partner")
    return taken


# ---- faults, and other arithmetic ------------------------------------------------


@contextlib.contextmanager
def _no_space_to_rebuild() -> Iterator[None]:
    """There is for what is read."""
    real = checkpoints._make

    def make(*args: object) -> None:
        with no_room():
            real(*args)

    with mock.patch.object(checkpoints, "_make", make):
        yield


def _damaged_pieces() -> contextlib.AbstractContextManager:
    real = redundancy._Mover.read

    def read(*place: object) -> torch.Tensor:
        piece = real(*place)
        piece[-1] ^= dist.get_rank() == 0
        return piece

    return mock.patch.object(redundancy._Mover, "read", read)


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "no space to rebuild": _no_space_to_rebuild,
    "the folder of any run": lambda: mock.patch.object(
        Nodes, "run_folder", property(lambda self: self.root / "run")
    ),
    "damaged on the way": _damaged_pieces,
    "nothing can be removed": lambda: mock.patch.object(
        checkpoints, "list_iterations", mock.Mock(side_effect=OSError(5, "Input/output error"))
    ),
}


# ---- whole runs ----------------------------------------------------------------------------------


def on_nodes(each: int, function: Callable, *args: object) -> object:
    """A function of reshard_cases, every `each` ranks of which see a node's folder of their own."""

    def apart(root: str | Path, ranks: Ranks) -> Nodes:
        return find_nodes(Path(root, str(ranks.world.rank // each)), ranks)

    with mock.patch.object(checkpoints, "find_nodes", apart):
        return function(*args)


def start_and_die(arguments: tuple[str, ...]) -> str:
    """A start that dies before the first step."""
    return start(arguments, lambda run: Exit(COMPLETE, 0))
