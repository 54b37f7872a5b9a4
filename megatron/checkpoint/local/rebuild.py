"""A restart from local checkpoints: what the nodes have together, a lost node's shards from its
partner or set, and reading on any layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import manifest as m
from megatron.checkpoint.boxes import intersect
from megatron.checkpoint.index import BATCH, load_bytes
from megatron.checkpoint.local.nodes import Nodes, RunId
from megatron.checkpoint.local.parcels import Parcel, carry, in_rounds, share_bytes
from megatron.checkpoint.local.parity import Column, columns_in
from megatron.checkpoint.local.saves import GIB, NodeAttempt
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.layers.spec import Box

NAMED = 8  # most shards that a message lists


@dataclass(frozen=True)
class Found:
    """A local checkpoint of which the nodes together have every shard, or can make it. `held`: the
    files that each node has whole, shards and, numbered after them, parities.
    """

    iteration: int
    manifest: bytes
    held: tuple[frozenset[int], ...]

    @cached_property
    def content(self) -> dict[str, Any]:
        return m.decode_manifest(self.manifest, Path(m.MANIFEST))

    @property
    def records(self) -> list[dict[str, Any]]:
        """Of the shards."""
        return self.content["shards"]

    @property
    def all_records(self) -> list[dict[str, Any]]:
        """Of the parities, too."""
        return self.records + self.content.get("parities", [])

    @property
    def missing(self) -> list[int]:
        """Files that no node has."""
        return sorted(set(range(len(self.all_records))) - set.union(set(), *self.held))


def newest_local(
    nodes: Nodes,
    run: RunId,
    oldest: int,
    say: Callable[[str], None] = print,
    before: float = math.inf,
) -> Found | None:
    """The newest local checkpoint of `run`, of iteration `oldest` or later and `before` another, of
    which the nodes have every shard or can make it; all bytes are verified.

    All ranks call this together; each reads its part of what its node has. The first rank's `say`
    is told why newer ones are passed over.
    """
    listed = nodes.ranks.agree(lambda: _listed(nodes, run, oldest, before) if nodes.first else [])
    candidates: dict[tuple[int, str], list[set[int]]] = {}
    sources: dict[tuple[int, str], int] = {}
    contents: dict[tuple[int, str], list] = {}
    for rank, rows in enumerate(listed):
        for iteration, digest, whole, *content in rows:
            held = candidates.setdefault((iteration, digest), [set() for _ in nodes.members])
            held[next(i for i, ranks in enumerate(nodes.members) if rank in ranks)] = set(whole)
            sources.setdefault((iteration, digest), rank)
            contents[iteration, digest] = content
    for key in sorted(candidates, reverse=True):
        held, (total, sizes, sets) = candidates[key], contents[key]
        columns = columns_in([{"bytes": size} for size in sizes], sets)
        if not _lost(total, columns, set.union(*held)):
            _drop_damaged(nodes, run, key[0], held)
        lost = sorted(_lost(total, columns, set.union(*held)))
        if not lost:
            return Found(
                key[0],
                _shared_manifest(nodes, run, key[0], sources[key]),
                tuple(map(frozenset, held)),
            )
        if nodes.ranks.first:
            shown = ", ".join(map(str, lost[:NAMED])) + (" ..." if len(lost) > NAMED else "")
            why = (
                "; with --local-redundancy xor one node of a set may be lost, not two"
                if sets
                else ""
            )
            say(
                f"warning: the local checkpoint of iteration {key[0]} is not taken: of its "
                f"{total} shards {len(lost)} ({shown}) are whole on no node{why}"
            )
    return None


def _lost(total: int, columns: list[Column], present: set[int]) -> set[int]:
    """Of `total` shards those that are neither among the files `present` nor can be made of
    them.
    """
    missing = set(range(total)) - present
    return (
        missing & set().union(*(column.lost(present) for column in columns)) if columns else missing
    )


def _listed(
    nodes: Nodes, run: RunId, oldest: int, before: float
) -> list[tuple[int, str, list[int], int, list[int], list]]:
    """Of this node's checkpoints of `run`: iteration, digest of the manifest, the files that are
    here by table and size; and what the manifest says of shards in all, their bytes, and sets.
    """
    root, rows = nodes.root / run.folder, []
    for iteration in m.list_iterations(root):
        try:
            raw, content = _manifest(root / m.iteration_folder(iteration))
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
            if _fits(root / m.iteration_folder(iteration), i, record)
        ]
        rows.append(
            (
                iteration,
                m.table_digest(raw),
                whole,
                len(shards),
                [record["bytes"] for record in shards],
                content.get("sets", []),
            )
        )
    return rows


def _manifest(folder: Path) -> tuple[bytes, dict[str, Any]]:
    raw = load_bytes(folder / m.MANIFEST, m.MANIFEST_LIMIT)
    return raw, m.decode_manifest(raw, folder / m.MANIFEST)


def _fits(folder: Path, number: int, record: dict[str, Any]) -> bool:
    try:
        table = load_bytes(folder / m.table_file(number), m.MANIFEST_LIMIT)
        return (
            m.table_digest(table) == record["table_digest"]
            and (folder / m.shard_file(number)).stat().st_size == record["bytes"]
        )
    except (CheckpointError, OSError):
        return False


def _drop_damaged(nodes: Nodes, run: RunId, iteration: int, held: list[set[int]]) -> None:
    """Read every shard on its node, its ranks in turns, and take those that are not as they were
    written from `held`.
    """
    folder, own = nodes.root / run.folder / m.iteration_folder(iteration), sorted(held[nodes.index])
    mine = own[nodes.place :: len(nodes.members[nodes.index])]
    damaged = nodes.ranks.agree(
        lambda: [number for number in mine if not _is_whole(folder, number)]
    )
    for node, ranks in enumerate(nodes.members):
        held[node] -= {number for rank in ranks for number in damaged[rank]}


def _is_whole(folder: Path, number: int) -> bool:
    path = folder / m.shard_file(number)
    try:
        table = m.DigestTable.decode(
            load_bytes(folder / m.table_file(number), m.MANIFEST_LIMIT), path
        )
        with open(path, "rb", buffering=0) as file:
            if m.chunk_digest(file.read(table.data_start)) != table.header:
                return False
            buffer, at = memoryview(bytearray(max(1, BATCH // table.chunk) * table.chunk)), 0
            while got := file.readinto(buffer):
                for start in range(0, got, table.chunk):
                    if (
                        m.chunk_digest(buffer[start : min(start + table.chunk, got)])
                        != table.chunks[at]
                    ):
                        return False
                    at += 1
            return at == len(table.chunks)
    except (CheckpointError, OSError, IndexError):
        return False


def _shared_manifest(nodes: Nodes, run: RunId, iteration: int, source: int) -> bytes:
    """Every rank gets the manifest that rank `source` has."""
    own = b""

    def read() -> int:
        nonlocal own
        if nodes.ranks.world.rank == source:
            own, _ = _manifest(nodes.root / run.folder / m.iteration_folder(iteration))
        return len(own)

    size = nodes.ranks.agree(read)[source]
    return share_bytes({0: own} if own else {}, [size], nodes.ranks)[0]


# ---- a lost node ---------------------------------------------------------------------------------


def restore_copies(
    nodes: Nodes, run: RunId, found: Found, say: Callable[[str], None] = print
) -> Found:
    """Give every shard that one node alone has to a second one, the emptiest: a new node gets what
    the lost one had. What is found then.

    When that fails (no room) the first rank's `say` is told, and nothing has changed.
    """
    records, load = found.records, _load(found)
    parcels, gains = [], [set() for _ in nodes.members]
    for number, record in enumerate(records):
        holders = [node for node, held in enumerate(found.held) if number in held]
        if len(holders) > 1 or len(nodes.members) == 1:
            continue
        to = min(
            (node for node in range(len(load)) if node not in holders),
            key=lambda node: (load[node], node),
        )
        load[to] += record["bytes"]
        gains[to].add(number)
        parcels.append(
            Parcel(number, record["bytes"], nodes.rank(holders[0], number), nodes.rank(to, number))
        )
    if not parcels:
        return found
    folder = nodes.root / run.folder / m.iteration_folder(found.iteration)
    try:
        with NodeAttempt(nodes, run, found.iteration, "rebuilt") as attempt:
            attempt.agree(
                lambda: (
                    _link(folder, attempt.folder, found.held[nodes.index]) if nodes.first else None
                )
            )
            attempt.take(in_rounds(parcels, nodes.members), folder, records)
            attempt.publish(found.manifest, lambda node: bool(gains[node]))
    except UserError as error:
        if nodes.ranks.first:
            say(
                f"warning: shards of the local checkpoint of iteration {found.iteration} "
                f"have one copy only: {error}"
            )
        return found
    if nodes.ranks.first:
        to = ", ".join(
            f"node {node} ({nodes.hosts[node]}): {len(numbers)}"
            for node, numbers in enumerate(gains)
            if numbers
        )
        say(
            f"shards of the local checkpoint of iteration {found.iteration} rebuilt from "
            f"their partners: {to}"
        )
    return Found(
        found.iteration,
        found.manifest,
        tuple(held | gained for held, gained in zip(found.held, map(frozenset, gains))),
    )


def _load(found: Found) -> list[int]:
    """Bytes of each node."""
    records = found.all_records
    return [sum(records[number]["bytes"] for number in held) for held in found.held]


def rebuild_lost(
    nodes: Nodes, run: RunId, found: Found, say: Callable[[str], None] = print
) -> Found | None:
    """Make what no node has out of the sets' parities, on the emptiest node that has nothing of the
    same column, where there is one.

    None when that fails and a shard is lost; the first rank's `say` is told, and nothing has
    changed.
    """
    missing = found.missing
    if not missing:
        return found
    records, shards, streams, load, gains = (
        found.all_records,
        range(len(found.records)),
        [],
        _load(found),
        [set() for _ in nodes.members],
    )
    for column in columns_in(found.records, found.content["sets"]):
        for place, number in enumerate(column.shards):
            lost = [each for each in (number, column.first + place) if each in missing]
            if not lost:
                continue
            beside = {*column.shards, *range(column.first, column.first + len(column.shards))} - {
                number,
                column.first + place,
            }
            to = min(
                range(len(load)),
                key=lambda node: (len(beside & found.held[node]), load[node], node),
            )
            load[to] += sum(records[each]["bytes"] for each in lost)
            gains[to].update(lost)
            streams += [
                (column.shard if each == number else column.parity)(place, nodes.rank(to, each))
                for each in lost
            ]
    folder = nodes.root / run.folder / m.iteration_folder(found.iteration)

    def owner(number: int) -> int:
        return nodes.rank(
            next(node for node, held in enumerate(found.held) if number in held), number
        )

    try:
        with NodeAttempt(nodes, run, found.iteration, "rebuilt") as attempt:
            attempt.agree(
                lambda: (
                    _link(folder, attempt.folder, found.held[nodes.index]) if nodes.first else None
                )
            )
            attempt.make(streams, len(shards), owner, folder, records)
            attempt.publish(found.manifest, lambda node: bool(gains[node]))
    except UserError as error:
        whole = missing[0] not in shards  # parities alone are lost
        if nodes.ranks.first:
            say(
                f"warning: the local checkpoint of iteration {found.iteration} "
                f"{'lacks a parity' if whole else 'is not taken'}: {error}"
            )
        return found if whole else None
    if nodes.ranks.first:
        to = ", ".join(
            f"node {node} ({nodes.hosts[node]}): {len(numbers & set(shards))}"
            for node, numbers in enumerate(gains)
            if numbers
        )
        say(
            f"shards of the local checkpoint of iteration {found.iteration} rebuilt from "
            f"their sets: {to}"
        )
    return Found(
        found.iteration,
        found.manifest,
        tuple(held | gained for held, gained in zip(found.held, map(frozenset, gains))),
    )


def _link(source: Path, target: Path, numbers: Iterable[int]) -> None:
    for number in numbers:
        for name in (m.shard_file(number), m.table_file(number)):
            os.link(source / name, target / name)


# ---- reading -------------------------------------------------------------------------------------


class LocalCheckpoint(Checkpoint):
    """A local checkpoint as any rank opens it: a folder with links to the shards of its node and,
    for the others, files that have their header and size and no data. `fetch` fills those that are
    read; what is not filled is refused by its digests. All ranks open, fetch and close together;
    closing removes the folder.
    """

    def __init__(self, nodes: Nodes, run: RunId, found: Found) -> None:
        self.nodes, self.found = nodes, found
        self._attempt = NodeAttempt(nodes, run, found.iteration, "read")
        heads = _heads(nodes, run, found)
        self._attempt.__enter__()
        try:
            self._attempt.agree(lambda: self._lay_out(heads) if nodes.first else None)
            self._attempt.agree(lambda: super(LocalCheckpoint, self).__init__(self._attempt.folder))
            self.path = self._attempt.root / m.iteration_folder(found.iteration)  # for people
        except BaseException:
            self._attempt.__exit__()
            raise

    def _lay_out(self, heads: dict[int, tuple[bytes, bytes]]) -> None:
        folder, held = self._attempt.folder, self.found.held[self.nodes.index]
        _link(self._attempt.root / m.iteration_folder(self.found.iteration), folder, held)
        for number, record in enumerate(self.found.records):
            if number not in held:
                table, header = heads[number]
                (folder / m.table_file(number)).write_bytes(table)
                (folder / m.shard_file(number)).write_bytes(header)
                os.truncate(folder / m.shard_file(number), record["bytes"])
        (folder / m.MANIFEST).write_bytes(self.found.manifest)

    def fetch(self, boxes: Iterable[Box]) -> int:
        """Bring the shards that hold anything of `boxes` to this rank's node; returns how many
        bytes of shards travelled, over all nodes.
        """
        nodes, held = self.nodes, self.found.held
        needed = set()
        for box in boxes:
            for piece in self.tensors[box.name].pieces if box.name in self.tensors else ():
                if intersect(
                    tuple(box.offset) or (0,),
                    tuple(box.extent) or (1,),
                    piece.offset or (0,),
                    piece.extent or (1,),
                ):
                    needed.add(piece.shard.number)
        told = nodes.ranks.agree(lambda: sorted(needed - held[nodes.index]))
        parcels, room = [], [0] * len(nodes.members)
        for node, ranks in enumerate(nodes.members):
            for number in sorted({number for rank in ranks for number in told[rank]}):
                holders = [other for other, numbers in enumerate(held) if number in numbers]
                size = self.shards[number].size
                parcels.append(
                    Parcel(
                        number,
                        size,
                        nodes.rank(holders[(node + number) % len(holders)], number),
                        nodes.rank(node, number),
                    )
                )
                room[node] += size
        self._attempt.agree(lambda: self._require(room[nodes.index]))
        fault = carry(
            in_rounds(parcels, nodes.members),
            nodes.ranks,
            lambda number: self.shards[number].path,
            self._fill,
        )
        self._attempt.agree(lambda: _reraise(fault))
        return sum(room)

    def _require(self, size: int) -> None:
        disk = os.statvfs(self.nodes.root)
        if size > disk.f_bavail * disk.f_frsize:
            raise CheckpointError(
                f"--local-checkpoint-dir {self.nodes.root} on node {self.nodes.index} "
                f"({self.nodes.hosts[self.nodes.index]}): on this layout its "
                f"ranks read shards of {size / GIB:.3g} GiB from other nodes, and "
                f"{disk.f_bavail * disk.f_frsize / GIB:.3g} GiB are free: make room, "
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


def _reraise(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def _heads(nodes: Nodes, run: RunId, found: Found) -> dict[int, tuple[bytes, bytes]]:
    """(table, header with its padding) of every shard that some node lacks, on every rank."""
    folder = nodes.root / run.folder / m.iteration_folder(found.iteration)
    lacking = [
        number
        for number in range(len(found.records))
        if any(number not in held for held in found.held)
    ]
    source = {
        number: nodes.rank(
            next(node for node, held in enumerate(found.held) if number in held), number
        )
        for number in lacking
    }
    own: dict[int, tuple[bytes, bytes]] = {}

    def read() -> dict[str, list[int]]:
        for at, number in enumerate(lacking):
            if source[number] == nodes.ranks.world.rank:
                raw = load_bytes(folder / m.table_file(number), m.MANIFEST_LIMIT)
                table = m.DigestTable.decode(raw, folder / m.table_file(number))
                own[at] = raw, load_bytes(folder / m.shard_file(number), table.data_start)
        return {str(at): [len(table), len(header)] for at, (table, header) in own.items()}

    lengths = {int(at): sizes for told in nodes.ranks.agree(read) for at, sizes in told.items()}
    whole = share_bytes(
        {at: table + header for at, (table, header) in own.items()},
        [sum(lengths[at]) for at in range(len(lacking))],
        nodes.ranks,
    )
    return {
        number: (raw[: lengths[at][0]], raw[lengths[at][0] :])
        for at, (number, raw) in enumerate(zip(lacking, whole))
    }
