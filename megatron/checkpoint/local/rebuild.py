"""A restart from local checkpoints: what the nodes have together, a lost node's shards from its
partner or XOR group, and reading on any layout.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.boxes import intersect
from megatron.checkpoint.index import load_bytes
from megatron.checkpoint.integrity import is_whole
from megatron.checkpoint.local.nodes import Nodes, RunId
from megatron.checkpoint.local.saves import GIB, NodeAttempt, raise_fault
from megatron.checkpoint.local.transfers import ShardTransfer, in_rounds, send_shards, share_bytes
from megatron.checkpoint.local.xor import Stream, Stripe, stripes_in
from megatron.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    CheckpointError,
    DigestTable,
    decode_manifest,
    iteration_folder,
    list_iterations,
    shard_file,
    table_digest,
    table_file,
)
from megatron.checkpoint.reader import Checkpoint
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject

if TYPE_CHECKING:
    from megatron.model.spec import Box

logger = logging.getLogger(__name__)

NAMED = 8  # most shards that a message lists
Head = tuple[bytes, bytes]  # a shard's table, and its header with the padding


@dataclass(frozen=True)
class Found:
    """A local checkpoint of which the nodes together have every shard, or can make it. `held`: the
    files that each node has whole: shards and, numbered after them, XOR parity blocks.
    """

    iteration: int
    manifest: bytes
    held: tuple[frozenset[int], ...]

    @cached_property
    def content(self) -> JsonObject:
        return decode_manifest(self.manifest, Path(MANIFEST))

    @property
    def records(self) -> list[JsonObject]:
        """Of the shards."""
        return self.content["shards"]

    @property
    def all_records(self) -> list[JsonObject]:
        """Of the shards and the XOR parity blocks."""
        return self.records + self.content.get("parities", [])

    @property
    def missing(self) -> list[int]:
        """Files that no node has."""
        return sorted(set(range(len(self.all_records))) - set.union(set(), *self.held))

    @property
    def lacking(self) -> list[int]:
        """Shards that some node does not have."""
        everywhere = frozenset.intersection(*self.held)
        return [number for number in range(len(self.records)) if number not in everywhere]

    def holders(self, number: int) -> list[int]:
        """The nodes that have a file."""
        return [node for node, held in enumerate(self.held) if number in held]


@dataclass
class _Candidate:
    """What the nodes report that they have of one save."""

    iteration: int
    source: int  # a rank that has the manifest
    shards: int  # how many there are in all
    stripes: list[Stripe]  # none without XOR parity blocks
    held: list[set[int]]  # the files of each node

    @property
    def lost(self) -> list[int]:
        """Shards that are on no node and cannot be made of what is."""
        present = set.union(*self.held)
        missing = set(range(self.shards)) - present
        if self.stripes:
            missing &= set().union(*(stripe.lost(present) for stripe in self.stripes))
        return sorted(missing)

    def warning(self) -> str:
        """Why it is not taken."""
        lost = self.lost
        shown = ", ".join(map(str, lost[:NAMED])) + (" ..." if len(lost) > NAMED else "")
        why = ""
        if self.stripes:
            why = "; with --local-redundancy xor one node of an XOR group may be lost, not two"
        return (
            f"the local checkpoint of iteration {self.iteration} is not taken: of its "
            f"{self.shards} shards {len(lost)} ({shown}) are whole on no node{why}"
        )


def newest_local(
    nodes: Nodes,
    run: RunId,
    oldest: int,
    before: float = math.inf,
) -> Found | None:
    """The newest local checkpoint of `run` of which the nodes have every shard or can make it, from
    iteration `oldest` on and below `before`; all of its bytes are verified.

    All ranks call this together; each reads its part of what its node has. Why newer ones are
    passed over is logged.
    """
    listed = nodes.ranks.gather_or_raise(
        lambda: _listed(nodes, run, oldest, before) if nodes.first else []
    )
    for candidate in _candidates(nodes, listed):
        held = candidate.held
        if not candidate.lost:
            _drop_damaged(nodes, run, candidate.iteration, held)
        if not candidate.lost:
            manifest = _shared_manifest(nodes, run, candidate.iteration, candidate.source)
            return Found(candidate.iteration, manifest, tuple(map(frozenset, held)))
        logger.warning(candidate.warning())
    return None


def _candidates(nodes: Nodes, listed: list[list]) -> list[_Candidate]:
    """The saves of which any node has something, newest first; `listed` is what `_listed` returned
    on every rank.
    """
    found: dict[tuple[int, str], _Candidate] = {}
    for node, (first, *_) in enumerate(nodes.members):
        for iteration, digest, whole, shards, sizes, sets in listed[first]:
            key = iteration, digest
            if key not in found:
                stripes = stripes_in([{"bytes": size} for size in sizes], sets)
                nothing: list[set[int]] = [set() for _ in nodes.members]
                found[key] = _Candidate(iteration, first, shards, stripes, nothing)
            found[key].held[node] = set(whole)
    return [found[key] for key in sorted(found, reverse=True)]


def _listed(
    nodes: Nodes, run: RunId, oldest: int, before: float
) -> list[tuple[int, str, list[int], int, list[int], list]]:
    """A row for each of this node's checkpoints of `run`: the iteration, the digest of the
    manifest, the files that are here, judged by table and size, the number of shards, their bytes,
    and the manifest's `sets`.
    """
    rows = []
    for iteration in list_iterations(nodes.root / run.folder):
        folder = nodes.folder(run, iteration)
        try:
            raw, content = _manifest(folder)
            if (
                content["run"] != asdict(run)
                or content["iteration"] != iteration
                or not oldest <= iteration < before
            ):
                continue
        except (CheckpointError, KeyError):
            continue  # the other nodes' tells what is missing here
        shards = content["shards"]
        whole = [
            i
            for i, record in enumerate(shards + content.get("parities", []))
            if _fits(folder, i, record)
        ]
        rows.append(
            (
                iteration,
                table_digest(raw),
                whole,
                len(shards),
                [record["bytes"] for record in shards],
                content.get("sets", []),
            )
        )
    return rows


def _manifest(folder: Path) -> tuple[bytes, JsonObject]:
    raw = load_bytes(folder / MANIFEST, MANIFEST_LIMIT)
    return raw, decode_manifest(raw, folder / MANIFEST)


def _fits(folder: Path, number: int, record: JsonObject) -> bool:
    try:
        table = load_bytes(folder / table_file(number), MANIFEST_LIMIT)
        return (
            table_digest(table) == record["table_digest"]
            and (folder / shard_file(number)).stat().st_size == record["bytes"]
        )
    except (CheckpointError, OSError):
        return False


def _drop_damaged(nodes: Nodes, run: RunId, iteration: int, held: list[set[int]]) -> None:
    """Read every file on its own node, shared out over the node's ranks, and remove those that are
    not as they were written from `held`.
    """
    folder = nodes.folder(run, iteration)
    own = sorted(held[nodes.index])
    mine = own[nodes.place :: len(nodes.members[nodes.index])]
    damaged = nodes.ranks.gather_or_raise(
        lambda: [number for number in mine if not _is_whole(folder, number)]
    )
    for node, ranks in enumerate(nodes.members):
        held[node] -= {number for rank in ranks for number in damaged[rank]}


def _is_whole(folder: Path, number: int) -> bool:
    try:
        _, table = _table(folder, number)
    except CheckpointError:
        return False
    return is_whole(folder / shard_file(number), table)


def _table(folder: Path, number: int) -> tuple[bytes, DigestTable]:
    """A shard's digest table, as it is in the file and read."""
    path = folder / table_file(number)
    raw = load_bytes(path, MANIFEST_LIMIT)
    return raw, DigestTable.decode(raw, path)


def _shared_manifest(nodes: Nodes, run: RunId, iteration: int, source: int) -> bytes:
    """Every rank gets the manifest that rank `source` has."""
    own = b""

    def read() -> int:
        nonlocal own
        if nodes.ranks.world.rank == source:
            own, _ = _manifest(nodes.folder(run, iteration))
        return len(own)

    size = nodes.ranks.gather_or_raise(read)[source]
    return share_bytes({0: own} if own else {}, [size], nodes.ranks)[0]


# ---- a lost node ---------------------------------------------------------------------------------


def restore_copies(nodes: Nodes, run: RunId, found: Found) -> Found:
    """Copy every shard that only one node has to a second node, the emptiest one, so that a new
    node gets what the lost one had. Returns what is found then.

    When that fails (no space), a warning is logged, and nothing has changed.
    """
    transfers, gains = _plan_copies(nodes, found)
    if not transfers:
        return found

    def fill(attempt: NodeAttempt, folder: Path) -> None:
        attempt.take(in_rounds(transfers, nodes.members), folder, found.records)

    try:
        whole = _add_files(nodes, run, found, gains, fill)
    except UserError as error:
        logger.warning(
            f"shards of the local checkpoint of iteration {found.iteration} "
            f"have one copy only: {error}"
        )
        return found
    logger.info(_rebuilt(nodes, found, gains, "partners"))
    return whole


class _Gains:
    """What each node is to get: its `files`, and the bytes that it has with them, `load`."""

    def __init__(self, nodes: Nodes, found: Found) -> None:
        self.records = found.all_records
        self.files: list[set[int]] = [set() for _ in nodes.members]
        self.load = [sum(self.records[number]["bytes"] for number in held) for held in found.held]

    def give(self, numbers: Iterable[int], node: int) -> None:
        self.files[node].update(numbers)
        self.load[node] += sum(self.records[number]["bytes"] for number in numbers)


def _plan_copies(nodes: Nodes, found: Found) -> tuple[list[ShardTransfer], _Gains]:
    """A transfer to the emptiest other node for every shard that one node alone has."""
    transfers = []
    gains = _Gains(nodes, found)
    for number, record in enumerate(found.records):
        holders = found.holders(number)
        if len(holders) > 1 or len(nodes.members) == 1:
            continue
        others = [node for node in range(len(nodes.members)) if node not in holders]
        to = min(others, key=gains.load.__getitem__)
        gains.give([number], to)
        source = _source(nodes, found, number)
        transfers.append(ShardTransfer(number, record["bytes"], source, nodes.rank(to, number)))
    return transfers, gains


def _add_files(
    nodes: Nodes,
    run: RunId,
    found: Found,
    gains: _Gains,
    fill: Callable[[NodeAttempt, Path], object],
) -> Found:
    """Replace the folder of every node that gains files by one that holds links to what the node
    has, and the files that `fill(attempt, folder)` brings from the old folders. Returns what is
    found then.

    Raises UserError on every rank when that fails; nothing has changed then.
    """
    folder = nodes.folder(run, found.iteration)
    own = found.held[nodes.index]
    with NodeAttempt(nodes, run, found.iteration, "rebuilt") as attempt:
        attempt.gather_or_raise(lambda: _link(folder, attempt.folder, own) if nodes.first else None)
        fill(attempt, folder)
        attempt.publish(found.manifest, lambda node: bool(gains.files[node]))
    held = tuple(old | new for old, new in zip(found.held, gains.files))
    return Found(found.iteration, found.manifest, held)


def _rebuilt(nodes: Nodes, found: Found, gains: _Gains, source: str) -> str:
    """What is logged about the shards that nodes have got."""
    shards = range(len(found.records))
    to = ", ".join(
        f"node {node} ({nodes.hosts[node]}): {len(numbers & set(shards))}"
        for node, numbers in enumerate(gains.files)
        if numbers
    )
    return (
        f"shards of the local checkpoint of iteration {found.iteration} rebuilt from "
        f"their {source}: {to}"
    )


def rebuild_lost(nodes: Nodes, run: RunId, found: Found) -> Found | None:
    """Rebuild the files that no node has from the XOR parity blocks, where possible on the emptiest
    node that has nothing else of the same stripe.

    Returns None when that fails and a shard is lost: a warning is logged, and nothing has changed.
    """
    missing = found.missing
    if not missing:
        return found
    streams, gains = _plan_rebuilding(nodes, found)
    shards = len(found.records)

    def fill(attempt: NodeAttempt, folder: Path) -> None:
        owner = partial(_source, nodes, found)
        attempt.make(streams, shards, owner, folder, found.all_records)

    try:
        whole = _add_files(nodes, run, found, gains, fill)
    except UserError as error:
        blocks_alone = missing[0] >= shards
        logger.warning(
            f"the local checkpoint of iteration {found.iteration} "
            f"{'lacks an XOR parity block' if blocks_alone else 'is not taken'}: {error}"
        )
        return found if blocks_alone else None
    logger.info(_rebuilt(nodes, found, gains, "XOR groups"))
    return whole


def _plan_rebuilding(nodes: Nodes, found: Found) -> tuple[list[Stream], _Gains]:
    """A stream for every file that no node has. A shard and the block of the same place go to one
    node: of those with the fewest files of the stripe the emptiest.
    """
    missing = set(found.missing)
    streams = []
    gains = _Gains(nodes, found)
    for stripe in stripes_in(found.records, found.content["sets"]):
        blocks = range(stripe.first, stripe.first + len(stripe.shards))
        for place, (shard, block) in enumerate(zip(stripe.shards, blocks)):
            lost = [number for number in (shard, block) if number in missing]
            if not lost:
                continue
            beside = {*stripe.shards, *blocks} - {shard, block}
            shared = [len(beside & held) for held in found.held]
            to = min(range(len(shared)), key=lambda node: (shared[node], gains.load[node]))
            gains.give(lost, to)
            for number in lost:
                make = stripe.shard if number == shard else stripe.xor_block
                streams.append(make(place, nodes.rank(to, number)))
    return streams, gains


def _source(nodes: Nodes, found: Found, number: int) -> int:
    """The rank that reads a file for others: one of the first node that has it."""
    return nodes.rank(found.holders(number)[0], number)


def _link(source: Path, target: Path, numbers: Iterable[int]) -> None:
    for number in numbers:
        for name in (shard_file(number), table_file(number)):
            os.link(source / name, target / name)


# ---- reading -------------------------------------------------------------------------------------


class LocalCheckpoint(Checkpoint):
    """A local checkpoint as any rank opens it: a folder with links to the shards of its node and,
    for the others, files that have their header and size and no data. `fetch` fills those that are
    read; what is not filled is refused by its digests. All ranks open, fetch and close together;
    closing removes the folder.
    """

    def __init__(self, nodes: Nodes, run: RunId, found: Found) -> None:
        self.nodes = nodes
        self.found = found
        self._attempt = NodeAttempt(nodes, run, found.iteration, "read")
        heads = _heads(nodes, run, found)
        self._attempt.__enter__()
        try:
            self._attempt.gather_or_raise(lambda: self._lay_out(heads) if nodes.first else None)
            self._attempt.gather_or_raise(
                lambda: super(LocalCheckpoint, self).__init__(self._attempt.folder)
            )
            self.path = self._attempt.root / iteration_folder(found.iteration)  # for people
        except BaseException:
            self._attempt.__exit__()
            raise

    def _lay_out(self, heads: dict[int, Head]) -> None:
        folder = self._attempt.folder
        held = self.found.held[self.nodes.index]
        _link(self._attempt.root / iteration_folder(self.found.iteration), folder, held)
        for number, record in enumerate(self.found.records):
            if number not in held:
                table, header = heads[number]
                (folder / table_file(number)).write_bytes(table)
                (folder / shard_file(number)).write_bytes(header)
                os.truncate(folder / shard_file(number), record["bytes"])
        (folder / MANIFEST).write_bytes(self.found.manifest)

    def fetch(self, boxes: Iterable[Box]) -> int:
        """Bring the shards that hold anything of `boxes` to this rank's node; returns how many
        bytes of shards travelled, over all nodes.
        """
        nodes = self.nodes
        lacking = self._shards_of(boxes) - self.found.held[nodes.index]
        arriving = self._transfers(nodes.ranks.gather_or_raise(lambda: sorted(lacking)))
        sizes = [sum(transfer.size for transfer in transfers) for transfers in arriving]
        self._attempt.gather_or_raise(lambda: self._require(sizes[nodes.index]))
        fault = send_shards(
            in_rounds(itertools.chain(*arriving), nodes.members),
            nodes.ranks,
            lambda number: self.shards[number].path,
            self._fill,
        )
        self._attempt.gather_or_raise(lambda: raise_fault(fault))
        return sum(sizes)

    def _shards_of(self, boxes: Iterable[Box]) -> set[int]:
        """The shards that hold anything of `boxes`."""
        needed = set()
        for box in boxes:
            if box.name not in self.tensors:
                continue
            offset = tuple(box.offset) or (0,)
            extent = tuple(box.extent) or (1,)
            for piece in self.tensors[box.name].pieces:
                if intersect(offset, extent, piece.offset or (0,), piece.extent or (1,)):
                    needed.add(piece.shard.number)
        return needed

    def _transfers(self, lacking: list[list[int]]) -> list[list[ShardTransfer]]:
        """What each node gets from others, which take turns: the shards that its ranks lack."""
        nodes = self.nodes
        transfers: list[list[ShardTransfer]] = []
        for node, ranks in enumerate(nodes.members):
            transfers.append([])
            for number in sorted({number for rank in ranks for number in lacking[rank]}):
                holders = self.found.holders(number)
                source = nodes.rank(holders[(node + number) % len(holders)], number)
                to = nodes.rank(node, number)
                transfers[node].append(ShardTransfer(number, self.shards[number].size, source, to))
        return transfers

    def _require(self, size: int) -> None:
        free = shutil.disk_usage(self.nodes.root).free
        if size > free:
            raise CheckpointError(
                f"--local-checkpoint-dir {self.nodes.root} on node {self.nodes.index} "
                f"({self.nodes.hosts[self.nodes.index]}): on this layout its "
                f"ranks read shards of {size / GIB:.3g} GiB from other nodes, and "
                f"{free / GIB:.3g} GiB are free: free space, "
                "start with the layout and the nodes of before, or take a checkpoint of "
                "--load with --ckpt-step"
            )

    def _fill(self, number: int, pieces: Iterator[memoryview]) -> None:
        with open(self.shards[number].path, "r+b", buffering=0) as file:
            for piece in pieces:
                while len(piece):
                    piece = piece[file.write(piece) :]

    def _instead(self) -> str:
        return "take a checkpoint of --load with --ckpt-step"

    def close(self) -> None:
        super().close()
        self._attempt.__exit__()


def _heads(nodes: Nodes, run: RunId, found: Found) -> dict[int, Head]:
    """(table, header with its padding) of every shard that some node lacks, on every rank."""
    folder = nodes.folder(run, found.iteration)
    lacking = found.lacking
    own: dict[int, Head] = {}

    def read() -> list[tuple[int, int, int]]:
        for number in lacking:
            if _source(nodes, found, number) == nodes.ranks.world.rank:
                own[number] = _head(folder, number)
        return [(number, len(table), len(header)) for number, (table, header) in own.items()]

    sizes = {number: sizes for rows in nodes.ranks.gather_or_raise(read) for number, *sizes in rows}
    parts: dict[int, bytes] = {}
    for at, number in enumerate(lacking):
        if number in own:
            parts[2 * at], parts[2 * at + 1] = own[number]
    whole = share_bytes(parts, [size for number in lacking for size in sizes[number]], nodes.ranks)
    return dict(zip(lacking, zip(whole[::2], whole[1::2])))


def _head(folder: Path, number: int) -> Head:
    raw, table = _table(folder, number)
    return raw, load_bytes(folder / shard_file(number), table.data_start)
