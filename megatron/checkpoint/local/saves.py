"""Checkpoints in a folder of each node, such as /dev/shm (docs/checkpoint.md, "Local checkpoints").

`<root>/run-<id>/iter_0000010/` holds on every node the manifest of all shards, and the shards of
the node's own ranks; with a partner those of the node before it, too; in an XOR group a parity
block for each of its ranks, numbered after all shards. What a folder holds is whole; whether all
nodes together hold all of it is found out at a restart.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.commit import Attempt, in_words, trash_folder
from megatron.checkpoint.files import (
    GIB,
    split_header,
    sync_folder,
    write_file,
    write_shard_file,
)
from megatron.checkpoint.local.exchange import Owner, Stream, exchange
from megatron.checkpoint.local.nodes import Nodes, own_folder
from megatron.checkpoint.local.xor import stripes_in, stripes_of, xor_block_header, xor_groups_of
from megatron.checkpoint.manifest import (
    ALIGN,
    MANIFEST,
    CheckpointError,
    encode_manifest,
    iteration_folder,
    list_iterations,
    manifest_of,
    shard_file,
    utc_now,
)
from megatron.checkpoint.writer import BoxTensor, not_empty, write_shard
from megatron.config.errors import some
from megatron.config.input_files import JsonObject

logger = logging.getLogger(__name__)

NUM_KEPT = 2  # newest iterations that stay


def save_local(
    nodes: Nodes,
    run: str,
    iteration: int,
    tensors: Iterable[BoxTensor],
    state: JsonObject,
    redundancy: str = "none",
) -> Path:
    """Write iteration `iteration` of `run` on every node, and return the folder on this one. All
    ranks call this together; `tensors` and `state` as for save_checkpoint. `redundancy`:
    --local-redundancy.

    An iteration that exists already is replaced; the newest one before this is kept, and all others
    are removed, those of an abandoned later pass too. Raises UserError on every rank when anything
    prevents the save on any; the checkpoints that were there are untouched by that.
    """
    pairs = not_empty(tensors)
    with NodeAttempt(nodes, run, iteration, state=state, own=int(bool(pairs))) as attempt:
        # 1. Every rank writes its shard; copies and blocks are made of what has been written.
        where = attempt.folder, attempt.index, attempt.shards, iteration
        gathered = attempt.gather_or_raise(
            lambda: (write_shard(*where, pairs) | nodes.ranks.who if pairs else None, utc_now())
        )
        records = [entry for entry, _ in gathered if entry is not None]
        parities = attempt.add_redundancy(redundancy, records)

        # 2. The same manifest on every node, then the name, then older ones go.
        content = manifest_of(iteration, attempt.name, records, state, gathered[0][1])
        attempt.publish(encode_manifest(content | {"run": {"name": run}, **parities}))
        attempt.gather_or_raise(attempt.thin)
        return attempt.root / iteration_folder(iteration)


def partner_copies(nodes: Nodes, records: list[JsonObject]) -> list[Stream]:
    """Every rank's shard goes to the rank at the same place on the next node."""
    ranks = [rank for row in nodes.members for rank in row]
    size = len(nodes.members[0])
    partner = dict(zip(ranks, ranks[size:] + ranks[:size]))
    return [
        Stream.copy(number, record["bytes"], partner[record["rank"]])
        for number, record in enumerate(records)
    ]


class NodeAttempt(Attempt):
    """A temporary folder on each node for one iteration that is to be `done` (saved, rebuilt,
    read): made, and in the end removed, by the node's first rank.
    """

    mode = 0o700

    def __init__(
        self, nodes: Nodes, run: str, iteration: int, done: str = "saved", **saved: Any
    ) -> None:
        self.nodes = nodes
        explain = partial(_not_done, nodes.root, iteration, done)
        root = nodes.run_folder(run)
        super().__init__(root, iteration, nodes.ranks, explain=explain, **saved)
        self.makes = nodes.first

    def _make_root(self) -> None:
        own_folder(self.nodes.root)
        self.root.mkdir(mode=self.mode, exist_ok=True)

    def add_redundancy(self, redundancy: str, records: list[JsonObject]) -> JsonObject:
        """Add copies or XOR parity blocks of all shards, whose entries are `records`; return the
        manifest's fields of parity blocks.
        """
        owners = [record["rank"] for record in records]
        streams: list[Stream] = []
        sets: list[list[int | None]] = []
        if redundancy == "partner":
            streams = partner_copies(self.nodes, records)
        elif redundancy == "xor":
            numbers = {rank: number for number, rank in enumerate(owners)}
            stripes = stripes_of(self.nodes.members)
            sets = [[numbers.get(rank) for rank in ranks] for ranks in stripes]
            for stripe, ranks in zip(stripes_in(records, sets), stripes):
                streams += [stripe.xor_block(place, rank) for place, rank in enumerate(ranks)]
        if not streams:
            return {}
        made = self.make(streams, records, owners.__getitem__, self.folder, len(records))
        parities = [made[stream.number] for stream in streams]
        return {"sets": sets, "parities": parities} if sets else {}

    def make(
        self,
        streams: list[Stream],
        records: Sequence[JsonObject],
        owner: Owner,
        source: Path,
        shards: int,
    ) -> dict[int, JsonObject]:
        """Make files out of others, which rank `owner(number)` has in `source`; return their
        entries by number. A file with an entry in `records` must become the same again. From number
        `shards` on they are XOR parity blocks.
        """
        made: list[tuple[int, JsonObject]] = []

        def write(number: int, pieces: Iterator[memoryview]) -> None:
            header, data = xor_block_header(self.iteration, number), pieces
            if number < shards:
                header, data = split_header(pieces, shard_file(number))
            entry = write_shard_file(self.folder, number, header, data)
            if number < len(records) and not entry.items() <= records[number].items():
                raise CheckpointError(f"{self.folder}: {shard_file(number)} is not what was saved")
            made.append((number, entry))

        def carry_out() -> list[tuple[int, JsonObject]]:
            exchange(streams, self.ranks, owner, source, write)
            return made

        return {number: entry for each in self.gather_or_raise(carry_out) for number, entry in each}

    def publish(self, manifest: bytes, here: bool = True) -> None:
        """Add the manifest and give the folder its name, in the place of one that is there: on this
        node only if `here`, for a kill between the two renames loses what was there.
        """
        target = self.root / iteration_folder(self.iteration)

        def replace() -> None:
            if not (self.nodes.first and here):
                return
            write_file(self.folder / MANIFEST, manifest)
            sync_folder(self.folder)
            if os.path.lexists(target):
                os.rename(target, self._trash(self.iteration))
            os.rename(self.folder, target)
            sync_folder(self.root)

        # what was replaced goes when every node has its new folder
        self.gather_or_raise(replace)
        shutil.rmtree(self._trash(self.iteration), ignore_errors=True)

    def _trash(self, iteration: int) -> Path:
        return trash_folder(self.root, iteration, self.name)

    def thin(self) -> None:
        """Every node has this iteration: keep it and the newest before it."""
        if not self.nodes.first:
            return
        iterations = list_iterations(self.root)
        kept = [each for each in iterations if each <= self.iteration][:NUM_KEPT]
        for iteration in set(iterations).difference(kept):
            os.rename(self.root / iteration_folder(iteration), self._trash(iteration))
            shutil.rmtree(self._trash(iteration), ignore_errors=True)


def _not_done(root: Path, iteration: int, done: str, error: Exception) -> str:
    text = (
        f"--local-checkpoint-dir {root}: the local checkpoint of iteration {iteration} was "
        f"not {done}: {in_words(error)}"
    )
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        text += "; free space there, or give a larger folder"
    return f"{text}. Older ones are untouched"


# ---- before training -----------------------------------------------------------------------------


def require_redundancy(nodes: Nodes, redundancy: str) -> None:
    """Raise CheckpointError unless every rank has a counterpart in the same place elsewhere."""
    sizes = [len(ranks) for ranks in nodes.members]
    flag = f"--local-redundancy {redundancy}"
    if len(sizes) == 1 or len(set(sizes)) > 1:
        shown = ", ".join(f"{host} {size}" for host, size in zip(nodes.hosts, sizes))
        raise CheckpointError(
            f"{flag}: needs two or more nodes (ranks that see the same {nodes.root}) with the same "
            f"number of ranks, found {shown}: start as many on each, or give "
            "--local-redundancy none"
        )
    if len(set(nodes.hosts)) < len(sizes):
        logger.warning(
            f"{flag}: {len(sizes)} folders {nodes.root} on {len(set(nodes.hosts))} host(s): when "
            "a host is lost, so may be several nodes"
        )
    if redundancy == "xor":
        groups = some([str(len(group)) for group in xor_groups_of(len(sizes))], 8)
        logger.info(f" {flag}: nodes in XOR groups of {groups}; one node of each may be lost")


def require_space(
    nodes: Nodes, run: str, own_bytes: int, redundancy: str, flushes: bool = False
) -> None:
    """Raise CheckpointError on every rank unless each node's folder has space for NUM_KEPT
    checkpoints, the one that is being written and, with `flushes`, one that is still on its way to
    --save. `own_bytes`: of this rank's shard. What this run has there already counts as free.
    """
    by_rank = nodes.ranks.gather_or_raise(lambda: own_bytes)
    by_node = [sum(by_rank[rank] for rank in ranks) for ranks in nodes.members]
    one = max(by_node)
    if redundancy == "partner":
        one = by_node[nodes.index] + by_node[nodes.index - 1]
    elif redundancy == "xor":
        smallest = min(map(len, xor_groups_of(len(nodes.members))))
        one += one // (smallest - 1) + ALIGN * len(nodes.members[0])
    count = NUM_KEPT + 1 + flushes

    def check() -> None:
        own = _size(nodes.run_folder(run))
        free = shutil.disk_usage(nodes.root).free + own
        if count * one <= free:
            return
        others = _size(nodes.root) - own
        fix = ", or --local-redundancy none" if redundancy != "none" else ""
        raise CheckpointError(
            f"--local-checkpoint-dir {nodes.root} on {nodes.host}: {count} checkpoints ({NUM_KEPT} "
            f"kept, {count - NUM_KEPT} being written) of {one / GIB:.3g} GiB each need "
            f"{count * one / GIB:.3g} GiB, and {free / GIB:.3g} GiB are free (other runs have "
            f"{others / GIB:.3g} GiB there). Remove run-* no longer needed, give a larger "
            f"folder{fix}"
        )

    nodes.ranks.gather_or_raise(lambda: check() if nodes.first else None)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder of folders, some of which may be removed at the same time;
    a file with several names counts once, where all of them are there.
    """
    size = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(Path(base, name))
                size += 512 * status.st_blocks // status.st_nlink
    return size
