"""Checkpoints in a folder of each node, such as /dev/shm: written often, and found again after the job (docs/checkpoint.md, "Tiers").

`<root>/run-<id>/iter_0000010/` holds on every node the manifest of all shards, and the shards of the node's own ranks; with a partner
those of the node before it too. What is there of an iteration is whole; whether all nodes together have all of it is found out at a restart.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.commit import Attempt
from megatron.checkpoint.files import clean, hold, new_file, sync_folder, write_all, write_shard_file
from megatron.checkpoint.local.nodes import Nodes, RunId, own_folder
from megatron.checkpoint.local.parcels import Parcel, carry, in_rounds
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.writer import write_shard

if TYPE_CHECKING:
    from megatron.model.layout import Box

KEPT = 2  # newest iterations that stay
GIB = 1 << 30


def save_local(
    nodes: Nodes, run: RunId, iteration: int, tensors: Iterable[tuple[Box, Tensor]], state: dict[str, Any], partner: bool = False,
) -> Path:
    """Write iteration `iteration` of `run` on every node, and return the folder on this one. All ranks call this together.

    `tensors` and `state` as for save_checkpoint. With `partner` each node keeps the shards of the one before it too. An iteration that
    exists already is replaced; the newest one before this is kept, and all others are removed, those of an abandoned later pass too.
    Raises ValueError on every rank when anything prevents the save on any; the checkpoints that were there are untouched by that.
    """
    pairs = [(box, tensor) for box, tensor in tensors if math.prod(box.extent)]
    with NodeAttempt(nodes, run, iteration) as attempt:
        index, shards = attempt.number_shards(state, bool(pairs))
        told = attempt.agree(lambda: (None if index is None else write_shard(attempt.folder, index, shards, iteration, pairs) | nodes.ranks.who,
                                      datetime.now(timezone.utc).isoformat(timespec="seconds")))
        records, created = [record for record, _ in told if record is not None], told[0][1]
        if partner:
            parcels = partner_parcels(nodes, [None if record is None else record["bytes"] for record, _ in told])
            attempt.take(parcels, attempt.folder, records)
        content = {"format": m.FORMAT, "version": m.VERSION, "iteration": iteration, "attempt": attempt.name, "created": created, "run": asdict(run),
                   "shards": records, "state": state}
        attempt.publish(m.encode_manifest(content))
        attempt.agree(attempt.thin)
        return attempt.root / m.iteration_folder(iteration)


def partner_parcels(nodes: Nodes, sizes: list[int | None]) -> list[Parcel]:
    """Every rank's shard, of `sizes` bytes by rank (None: it has none), goes to the rank of the same place on the next node."""
    numbers = {rank: number for number, rank in enumerate(rank for rank, size in enumerate(sizes) if size is not None)}
    after = [*nodes.members[1:], nodes.members[0]]
    return in_rounds([Parcel(numbers[rank], sizes[rank], rank, to) for here, there in zip(nodes.members, after) for rank, to in zip(here, there)
                      if rank in numbers], nodes.members)


class NodeAttempt(Attempt):
    """A temporary folder on each node for one iteration that is to be `done` (saved, rebuilt, read): made, and in the end removed, by the
    node's first rank."""

    def __init__(self, nodes: Nodes, run: RunId, iteration: int, done: str = "saved") -> None:
        self.nodes = nodes
        super().__init__(nodes.root / run.folder, iteration, nodes.ranks, partial(_not_done, nodes.root, iteration, done))

    def __enter__(self) -> NodeAttempt:
        self._choose(self.iteration, self._agree(lambda: self.name)[0])
        try:
            self._agree(self._make)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.nodes.first:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def _join(self) -> None:
        """The node's first rank holds the folder for all."""

    def _make(self) -> None:
        if self.nodes.first:
            own_folder(self.nodes.root)
            self.root.mkdir(mode=0o700, exist_ok=True)
            clean(self.root, self.name)
            self.folder.mkdir(mode=0o700)
            self.lock = hold(self.folder)

    def take(self, parcels: list[Parcel], source: Path, records: list[dict[str, Any]]) -> None:
        """Carry shards from `source` on one node into this folder on another; all are verified as they arrive."""

        def write(number: int, pieces: Iterator[memoryview]) -> None:
            header, rest = _split(pieces)
            written = write_shard_file(self.folder, number, header, rest)
            if any(records[number][key] != value for key, value in written.items()):
                raise CheckpointError(f"{self.folder}: {m.shard_file(number)} changed on its way from another node")

        def check() -> None:
            if fault is not None:
                raise fault

        fault = carry(parcels, self.ranks, lambda number: source / m.shard_file(number), write)
        self.agree(check)

    def publish(self, manifest: bytes, on: Callable[[int], bool] = lambda node: True) -> None:
        """Add the manifest and give the folder its name, in the place of one that is there, on the nodes chosen."""
        target = self.root / m.iteration_folder(self.iteration)

        def replace() -> str | None:
            if not self.nodes.first or not on(self.nodes.index):
                return None
            with new_file(self.folder / m.MANIFEST) as file:
                write_all(file, [memoryview(manifest)])
            sync_folder(self.folder)
            if os.path.lexists(target):
                os.rename(target, self._trash(self.iteration))
            os.rename(self.folder, target)
            sync_folder(self.root)
            return m.table_digest(manifest)

        digests = {digest for digest in self.agree(replace) if digest is not None}
        assert len(digests) == 1, "the nodes have different manifests"
        shutil.rmtree(self._trash(self.iteration), ignore_errors=True)

    def _trash(self, iteration: int) -> Path:
        return self.root / f".trash-iter-{iteration}-{self.name}"

    def thin(self) -> None:
        """Every node has this iteration: keep it and the newest before it."""
        if not self.nodes.first:
            return
        iterations = m.list_iterations(self.root)
        for iteration in set(iterations) - set([i for i in iterations if i <= self.iteration][:KEPT]):
            os.rename(self.root / m.iteration_folder(iteration), self._trash(iteration))
            shutil.rmtree(self._trash(iteration), ignore_errors=True)


def _split(pieces: Iterator[memoryview]) -> tuple[bytes, Iterator[memoryview]]:
    """A shard's bytes before the data, and the pieces of its data."""
    head = bytearray()
    for piece in pieces:
        head += piece
        end = 8 + int.from_bytes(head[:8], "little")
        if end <= len(head):
            return bytes(head[:end]), chain([memoryview(head)[end:]], pieces)
    raise CheckpointError("a shard from another node has no header")


def _not_done(root: Path, iteration: int, done: str, error: Exception) -> str:
    words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    text = f"--local-checkpoint-dir {root}: the local checkpoint of iteration {iteration} was not {done}: {words}"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        text += "; free space there, or give a larger folder"
    return f"{text}. Older ones are untouched"


# ---- before training --------------------------------------------------------------------------------------------------


def require_partners(nodes: Nodes, say: Callable[[str], None] = print) -> None:
    """Raise CheckpointError unless every rank has a partner on another node."""
    sizes = [len(ranks) for ranks in nodes.members]
    if len(sizes) == 1:
        raise CheckpointError(f"--local-redundancy partner: all ranks see the same {nodes.root}, which counts as one node, and a partner is another "
                              "one: start on two or more nodes, or give --local-redundancy none")
    if len(set(sizes)) > 1:
        shown = ", ".join(f"{host} {size}" for host, size in zip(nodes.hosts, sizes))
        raise CheckpointError(f"--local-redundancy partner: needs the same number of ranks on every node, found {shown}: start as many on each, or "
                              "give --local-redundancy none")
    if len(set(nodes.hosts)) < len(sizes):
        say(f"warning: --local-redundancy partner: {len(sizes)} folders {nodes.root} on {len(set(nodes.hosts))} host(s): when a host is lost, so may "
            "be both copies")


def require_room(nodes: Nodes, run: RunId, own_bytes: int, partner: bool, drains: bool = False) -> None:
    """Raise CheckpointError on every rank unless each node's folder has room for KEPT checkpoints and the one that is being written; and, with
    `drains`, for one that is no longer kept and still on its way to --save.

    `own_bytes`: of this rank's shard. What this run has there already counts as room.
    """
    by_rank = nodes.ranks.agree(lambda: own_bytes)
    own = [sum(by_rank[rank] for rank in ranks) for ranks in nodes.members]
    one = own[nodes.index] + (own[nodes.index - 1] if partner else 0)
    most = KEPT + 1 + drains

    def check() -> None:
        if not nodes.first:
            return
        disk = os.statvfs(nodes.root)
        free, held = disk.f_bavail * disk.f_frsize, _size(nodes.root / run.folder)
        others = sum(_size(path) for path in nodes.root.glob("run-*") if path.name != run.folder)
        if most * one > free + held:
            left = f" Other runs have left {others / GIB:.3g} GiB there (run-*): remove what is no longer needed." if others else ""
            draining = ", one on its way to --save" if drains else ""
            raise CheckpointError(
                f"--local-checkpoint-dir {nodes.root} on node {nodes.index} ({nodes.hosts[nodes.index]}): {most} checkpoints ({KEPT} kept, one being "
                f"written{draining}) of {one / GIB:.3g} GiB each need {most * one / GIB:.3g} GiB, and {(free + held) / GIB:.3g} GiB are free.{left} "
                f"Give a larger folder{', or --local-redundancy none' if partner else ''}")

    nodes.ranks.agree(check)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder of folders, a file with several names once."""
    found = {}
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(Path(base, name))
                found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())
