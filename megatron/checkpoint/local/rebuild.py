"""A restart from local checkpoints: what the nodes have together, a lost node's shards from its
partner or XOR group, and reading on any layout.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.files import GIB
from megatron.checkpoint.index import Head, load_bytes, read_head, verify_shard
from megatron.checkpoint.local.exchange import Stream
from megatron.checkpoint.local.nodes import Nodes
from megatron.checkpoint.local.saves import NodeAttempt
from megatron.checkpoint.local.xor import stripes_in
from megatron.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    CheckpointError,
    decode_manifest,
    list_iterations,
    shard_file,
    table_digest,
    table_file,
)
from megatron.checkpoint.reader import Checkpoint
from megatron.config.errors import UserError, some
from megatron.config.input_files import JsonObject
from megatron.model.spec import Box

logger = logging.getLogger(__name__)

MAX_NAMED = 8  # shards in one message


class Found:
    """A local checkpoint. `held`: the files that each node has whole: shards and, numbered after
    them, XOR parity blocks; their entries are `records`.
    """

    def __init__(self, nodes: Nodes, run: str, manifest: bytes, held: Sequence[set[int]]) -> None:
        self.nodes = nodes
        self.run = run
        self.manifest = manifest
        self.held = held
        self.content = decode_manifest(manifest, Path(MANIFEST))
        self.iteration: int = self.content["iteration"]
        self.records = file_records(self.content)
        self.shards = range(len(self.content["shards"]))
        self.stripes = stripes_in(self.content["shards"], self.content.get("sets", []))

    @property
    def folder(self) -> Path:
        """On this node."""
        return self.nodes.folder(self.run, self.iteration)

    @property
    def missing(self) -> set[int]:
        """Files that no node has."""
        return set(range(len(self.records))).difference(*self.held)

    @property
    def lost(self) -> list[int]:
        """Shards that no node has and that cannot be rebuilt."""
        lost = self.missing & set(self.shards)
        if self.stripes:
            present = set().union(*self.held)
            lost &= set().union(*(stripe.lost(present) for stripe in self.stripes))
        return sorted(lost)

    def holders(self, number: int) -> list[int]:
        """The nodes that have a file."""
        return [node for node, held in enumerate(self.held) if number in held]

    def reader(self, number: int) -> int:
        """The rank that reads a file for others."""
        holders = self.holders(number)
        return self.nodes.rank(holders[number % len(holders)], number)

    def log_lost(self) -> None:
        lost, why = self.lost, ""
        if self.stripes:
            why = "; with --local-redundancy xor one node of an XOR group may be lost, not two"
        logger.warning(
            f"the local checkpoint of iteration {self.iteration} is not taken: of its "
            f"{len(self.shards)} shards {len(lost)} ({some([*map(str, lost)], MAX_NAMED)}) are "
            f"whole on no node{why}"
        )


def file_records(content: JsonObject) -> list[JsonObject]:
    """A manifest's entries of shards and XOR parity blocks."""
    return content["shards"] + content.get("parities", [])


def newest_local(nodes: Nodes, run: str, oldest: int, *, copies: bool) -> Found | None:
    """The newest local checkpoint of `run`, from iteration `oldest` on, of which the nodes have
    every shard or can make it; all of its bytes are verified, and what a lost node had is on a new
    one (`restore`). All ranks call this together. Why newer ones are passed over is logged.
    """
    # What every node has, of all saves: an iteration may have been saved twice.
    listed = nodes.ranks.gather_or_raise(lambda: _listed(nodes, run, oldest) if nodes.first else [])
    of_nodes = [
        {(iteration, digest): files for iteration, digest, files in listed[ranks[0]]}
        for ranks in nodes.members
    ]
    for save in sorted(set().union(*of_nodes), reverse=True):
        # 1. The manifest of one node is for all; files count when every byte is as it specifies.
        source = next(ranks[0] for ranks, has in zip(nodes.members, of_nodes) if save in has)
        path = nodes.folder(run, save[0]) / MANIFEST
        manifest = nodes.ranks.gather_or_raise(
            lambda: (
                load_bytes(path, MANIFEST_LIMIT).decode()
                if nodes.ranks.world.rank == source
                else ""
            )
        )[source]
        found = Found(nodes, run, manifest.encode(), [set(has.get(save, ())) for has in of_nodes])
        if not found.lost:
            _remove_damaged(found)

        # 2. What is lost for good is passed over, and so is what there is no space to rebuild.
        if found.lost:
            found.log_lost()
        elif restore(found, copies=copies):
            return found
    return None


def _listed(nodes: Nodes, run: str, oldest: int) -> list[tuple[int, str, list[int]]]:
    """Of each of this node's checkpoints of `run` the iteration, the digest of the manifest, and
    the files that are here.
    """
    rows = []
    for iteration in list_iterations(nodes.run_folder(run)):
        folder = nodes.folder(run, iteration)
        try:
            raw = load_bytes(folder / MANIFEST, MANIFEST_LIMIT)
            content = decode_manifest(raw, folder / MANIFEST)
            if content["run"]["name"] != run or content["iteration"] != iteration:
                continue
            numbers = range(len(file_records(content)))
            files = [number for number in numbers if (folder / shard_file(number)).exists()]
        except (CheckpointError, KeyError, OSError):
            continue  # the manifest of another node lists what is missing here
        if iteration >= oldest:
            rows.append((iteration, table_digest(raw), files))
    return rows


def _remove_damaged(found: Found) -> None:
    """Read every file on its own node, shared out over its ranks; what is damaged is not held."""
    nodes = found.nodes
    own = sorted(found.held[nodes.index])
    mine = own[nodes.place :: len(nodes.members[nodes.index])]
    damaged = nodes.ranks.gather_or_raise(
        lambda: [i for i in mine if not _is_whole(found.folder, i, found.records[i])]
    )
    for held, ranks in zip(found.held, nodes.members):
        held.difference_update(*(damaged[rank] for rank in ranks))


def _is_whole(folder: Path, number: int, record: JsonObject) -> bool:
    """Whether every byte of a file and of its digest table is as its entry specifies."""
    with suppress(CheckpointError, OSError):
        verify_shard(folder, number, record)
        return True
    return False


# ---- a lost node ---------------------------------------------------------------------------------


def restore(found: Found, *, copies: bool) -> bool:
    """Rebuild the files that no node has from the XOR parity blocks or, with `copies`, give every
    shard that only one node has a second one; whether every shard is there then. When that fails
    (no space) a warning is logged and nothing has changed.
    """
    streams: list[Stream] = []
    if found.stripes:
        streams = _rebuilt(found)
    elif copies and len(found.held) > 1:
        streams = _second_copies(found)
    try:
        if streams:
            _make(found, streams)
    except UserError as error:
        is_complete = not found.missing & set(found.shards)
        outcome = "is taken without its redundancy" if is_complete else "is not taken"
        logger.warning(f"the local checkpoint of iteration {found.iteration} {outcome}: {error}")
        return is_complete
    return True


def _make(found: Found, streams: list[Stream]) -> None:
    """Replace the folder of every node that gets files by one with links to its old files, and the
    new ones. Raises UserError on every rank when that fails; nothing has changed then.
    """
    nodes = found.nodes
    made = [{each.number for each in streams if each.to in ranks} for ranks in nodes.members]

    def link() -> None:
        for number in found.held[nodes.index] if nodes.first else ():
            for name in (shard_file(number), table_file(number)):
                os.link(found.folder / name, attempt.folder / name)

    # All nodes make their files, or none: what is there stays until everything is whole.
    with NodeAttempt(nodes, found.run, found.iteration, "rebuilt") as attempt:
        attempt.gather_or_raise(link)
        attempt.make(streams, found.records, found.reader, found.folder, len(found.shards))
        attempt.publish(found.manifest, bool(made[nodes.index]))
    for held, numbers in zip(found.held, made):
        held |= numbers
    to = ", ".join(
        f"node {node} ({nodes.hosts[node]}): {len(numbers & set(found.shards))}"
        for node, numbers in enumerate(made)
        if numbers
    )
    logger.info(
        f"shards of the local checkpoint of iteration {found.iteration} rebuilt from their "
        f"{'XOR groups' if found.stripes else 'partners'}: {to}"
    )


def _second_copies(found: Found) -> list[Stream]:
    """Every shard that one node alone has goes to the other one with the fewest files."""
    streams = []
    load = [len(held) for held in found.held]
    for number in found.shards:
        holders = found.holders(number)
        if len(holders) == 1:
            others = [node for node in range(len(load)) if node not in holders]
            node = min(others, key=load.__getitem__)
            load[node] += 1
            size, to = found.records[number]["bytes"], found.nodes.rank(node, number)
            streams.append(Stream.copy(number, size, to))
    return streams


def _rebuilt(found: Found) -> list[Stream]:
    """A missing shard and the block of the same place go to one node: that with the fewest other
    files of the stripe, then of all.
    """
    streams = []
    load = [len(held) for held in found.held]
    missing = found.missing
    for stripe in found.stripes:
        blocks = range(stripe.first, stripe.first + len(stripe.shards))
        for place, (shard, block) in enumerate(zip(stripe.shards, blocks)):
            others = {*stripe.shards, *blocks} - {shard, block}
            shared = [len(others & held) for held in found.held]
            node = min(range(len(load)), key=lambda node: (shared[node], load[node]))
            for number, make in ((shard, stripe.shard), (block, stripe.xor_block)):
                if number in missing:
                    load[node] += 1
                    streams.append(make(place, found.nodes.rank(node, number)))
    return streams


# ---- reading -------------------------------------------------------------------------------------


class LocalCheckpoint(Checkpoint):
    """A local checkpoint as any rank opens it: headers come from the nodes that have them, and
    `fetch` brings the shards that are read to this rank's node, until it is closed. All ranks do
    this together.
    """

    def __init__(self, found: Found) -> None:
        self.nodes = found.nodes
        self.found = found
        self._attempt: NodeAttempt | None = None
        heads = _heads(found)
        self.nodes.ranks.gather_or_raise(
            lambda: super(LocalCheckpoint, self).__init__(
                found.folder, manifest=found.content, heads=heads
            )
        )

    def fetch(self, boxes: Iterable[Box]) -> int:
        """Bring the shards that hold anything of `boxes` to this rank's node; returns how many
        bytes of shards travelled, over all nodes.
        """
        # 1. One copy for each node that has a rank which reads the shard.
        nodes = self.nodes
        by_rank = nodes.ranks.gather_or_raise(lambda: self._lacking(boxes))
        streams = [
            Stream.copy(number, self.shards[number].size, nodes.rank(node, number))
            for node, ranks in enumerate(nodes.members)
            for number in sorted({number for rank in ranks for number in by_rank[rank]})
        ]
        if not streams:
            return 0
        here = [each for each in streams if each.to in nodes.members[nodes.index]]

        # 2. Copies are whole, or the restart ends with an error on all ranks.
        records, shards = self.found.records, len(self.shards)
        attempt = NodeAttempt(nodes, self.found.run, self.found.iteration, "read").__enter__()
        self._attempt = attempt
        attempt.gather_or_raise(lambda: self._require_space(sum(each.size for each in here)))
        attempt.make(streams, records, self.found.reader, self.path, shards)

        # 3. From now on they are read from here.
        for each in here:
            self.shards[each.number] = replace(self.shards[each.number], folder=attempt.folder)
        return sum(stream.size for stream in streams)

    def _lacking(self, boxes: Iterable[Box]) -> list[int]:
        """The shards of `boxes` that this node does not have."""
        needed = {
            piece.shard.number
            for box in boxes
            if box.name in self.tensors
            for piece, *_ in self.overlaps(box)
        }
        return sorted(needed - self.found.held[self.nodes.index])

    def _require_space(self, size: int) -> None:
        free = shutil.disk_usage(self.nodes.root).free
        if size > free:
            raise CheckpointError(
                f"--local-checkpoint-dir {self.nodes.root} on {self.nodes.host}: on this layout "
                f"its ranks read shards of {size / GIB:.3g} GiB from other nodes, and "
                f"{free / GIB:.3g} GiB are free: free space, start with the layout and nodes of "
                f"before, or {self._instead()}"
            )

    def _instead(self) -> str:
        return "take a checkpoint of --load with --ckpt-step"

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.__exit__()
            self._attempt = None


def _heads(found: Found) -> dict[int, Head]:
    """`read_head` of every shard that some node lacks, on every rank."""
    ranks = found.nodes.ranks
    everywhere = set.intersection(*found.held)

    def read() -> list[tuple[int, int, str]]:
        heads = []
        for number in found.shards:
            if number not in everywhere and found.reader(number) == ranks.world.rank:
                chunk, header = read_head(found.folder, number, found.records[number])
                heads.append((number, chunk, header.decode("latin-1")))
        return heads

    gathered = ranks.gather_or_raise(read)
    return {
        number: (chunk, header.encode("latin-1"))
        for heads in gathered
        for number, chunk, header in heads
    }
