"""Checkpoints in a folder of each node, such as /dev/shm (docs/checkpoint.md, "Local checkpoints"):
saved often, next to those of --save. All ranks call everything together.

`<root>/run-<id>/iter_0000010/` holds on every node the manifest of all shards, and the shards of
the node's own ranks; in an XOR group a parity block for each of its ranks, numbered after all
shards. What a folder holds is whole; whether all nodes together hold all of it is found out at a
restart.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.checkpoint.commit import Attempt, fix_of, in_words, trash_folder
from megatron.checkpoint.files import (
    GB,
    GIB,
    split_header,
    sync_folder,
    write_file,
    write_shard_file,
)
from megatron.checkpoint.index import (
    Head,
    load_bytes,
    newest_first,
    read_head,
    read_manifest,
    verify_shard,
)
from megatron.checkpoint.local.nodes import (
    Nodes,
    find_nodes,
    is_same,
    own_folder,
    read_run,
)
from megatron.checkpoint.local.redundancy import (
    Owner,
    Stream,
    exchange,
    kept_bytes,
    stripes_in,
    xor_block_header,
    xor_blocks,
)
from megatron.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    CheckpointError,
    decode_manifest,
    encode_manifest,
    iteration_folder,
    list_iterations,
    manifest_of,
    shard_file,
    table_digest,
    table_file,
    utc_now,
)
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import BoxTensor, not_empty, shard_bytes, write_shard
from megatron.config.errors import UserError, some
from megatron.config.input_files import JsonObject
from megatron.model.spec import Box

logger = logging.getLogger(__name__)

NUM_KEPT = 2  # newest iterations that stay
MAX_NAMED = 8  # shards or groups in one message
FROM_LOAD = "take a checkpoint of --load with --ckpt-step"


class LocalCheckpoints:
    """The local tier of a run. `redundancy`: --local-redundancy. Raises CheckpointError unless
    every rank has a counterpart in the same place on another node, where it needs one.
    """

    def __init__(self, root: str | Path, ranks: Ranks, redundancy: str):
        self.nodes = nodes = find_nodes(root, ranks)
        self.redundancy = redundancy
        if redundancy == "none":
            return
        flag = f"--local-redundancy {redundancy}"
        sizes = [len(each) for each in nodes.members]
        if len(sizes) == 1 or len(set(sizes)) > 1:
            shown = ", ".join(f"{host} {size}" for host, size in zip(nodes.hosts, sizes))
            raise CheckpointError(
                f"{flag}: needs two or more nodes (ranks that see the same {nodes.root}) with the "
                f"same number of ranks, found {shown}: start as many on each, or give "
                "--local-redundancy none"
            )

    def adopt(self, run: str) -> None:
        """Take the checkpoints of the run with this id from now on, and save them."""
        self.nodes = replace(self.nodes, run=run)

    def newest(self, load: str, save: str | None, older: bool) -> Checkpoint | None:
        """The newest checkpoint of `load`, or of the local ones where `load` is the folder that the
        run saves to; of one iteration the local one.

        A local one of an iteration before the newest of `load` is taken when that is damaged and
        `older` allows it, else never. Raises as open_checkpoint.
        """
        # 1. The run that continues, and its newest iteration.
        ranks = self.nodes.ranks

        def look() -> tuple[str | None, int]:
            run = read_run(load) if is_same(load, save) else None
            return run, max(newest_first(Path(load))[0], default=-1)

        run, newest = ranks.from_first(look)

        # 2. A local one that is as new as --load's newest is taken without opening that.
        found = None
        if run is not None:
            self.adopt(run)
            found = newest_local(self.nodes, 0 if older else newest)
        if found is None or found.iteration < newest:
            checkpoint = open_checkpoint(load, None, ranks, older, or_none=found is not None)
            if found is None or (checkpoint and checkpoint.iteration > found.iteration):
                return checkpoint
        shared = f"iteration {newest}" if newest >= 0 else "none"
        damaged = ", which is not whole" if newest > found.iteration else ""
        logger.info(
            f" taking the local checkpoint of iteration {found.iteration} ({self.nodes.root}): "
            f"--load {load} has {shared}{damaged}"
        )
        return LocalCheckpoint(found)

    def require_space(self, own_bytes: int, flushes: bool) -> None:
        """Raise CheckpointError on every rank unless each node's folder has space for NUM_KEPT
        checkpoints, the one that is being written and, with `flushes`, one that is still on its way
        to --save. `own_bytes`: of this rank's shard. What this run has there counts as free.
        """
        nodes = self.nodes
        sizes = nodes.ranks.gather_or_raise(lambda: own_bytes)
        one = kept_bytes(nodes.members, sizes, self.redundancy)[nodes.index]
        count = NUM_KEPT + 1 + flushes

        def check() -> None:
            own = _size(nodes.run_folder)
            free = shutil.disk_usage(nodes.root).free + own
            if count * one <= free:
                return
            fix = ", or --local-redundancy none" if self.redundancy != "none" else ""
            raise CheckpointError(
                f"--local-checkpoint-dir {nodes.root} on {nodes.host}: {count} checkpoints "
                f"({NUM_KEPT} kept, {count - NUM_KEPT} being written) of {one / GIB:.3g} GiB each "
                f"need {count * one / GIB:.3g} GiB, and {free / GIB:.3g} GiB are free (other runs "
                f"have {(_size(nodes.root) - own) / GIB:.3g} GiB there). Remove run-* no longer "
                f"needed, give a larger folder{fix}"
            )

        nodes.ranks.gather_or_raise(lambda: check() if nodes.first else None)

    def save(
        self,
        iteration: int,
        pairs: Sequence[BoxTensor],
        state: JsonObject,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save locally; whether that went well. A failed save is logged, and stops nothing. `check`
        may refuse with a UserError on all ranks.
        """
        began = time.perf_counter()
        try:
            check()
            save_local(self.nodes, iteration, pairs, state, self.redundancy)
        except (UserError, OSError) as error:
            logger.warning(f"iteration {iteration} was NOT saved locally. {error}")
            return False
        size = shard_bytes(pairs) / GB
        seconds = time.perf_counter() - began
        logger.info(
            f" saved local checkpoint of iteration {iteration}: {size:.2f} GB of this "
            f"rank in {seconds:.1f} s, {size / seconds:.2f} GB/s"
        )
        return True

    def shard(self, iteration: int, index: int) -> tuple[Path, JsonObject]:
        """(file, entry in the manifest) of a shard that this node has of a local checkpoint. Raises
        CheckpointError.
        """
        folder = self.nodes.folder(iteration)
        return folder / shard_file(index), read_manifest(folder)["shards"][index]


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


# ---- saving --------------------------------------------------------------------------------------


def save_local(
    nodes: Nodes,
    iteration: int,
    tensors: Iterable[BoxTensor],
    state: JsonObject,
    redundancy: str = "none",
) -> Path:
    """Write iteration `iteration` of the run on every node, and return the folder on this one;
    `tensors` and `state` as for save_checkpoint.

    An iteration that exists already is replaced; the newest one before this is kept, and all others
    are removed, those of an abandoned later pass too. Raises UserError on every rank when anything
    prevents the save on any; the checkpoints that were there are untouched by that.
    """
    pairs = not_empty(tensors)
    with NodeAttempt(nodes, iteration, state=state, own=int(bool(pairs))) as attempt:
        # 1. Every rank writes its shard.
        where = attempt.folder, attempt.index, attempt.shards, iteration
        gathered = attempt.gather_or_raise(
            lambda: (write_shard(*where, pairs) | nodes.ranks.who if pairs else None, utc_now())
        )
        records = [entry for entry, _ in gathered if entry is not None]
        content = manifest_of(iteration, attempt.name, records, state, gathered[0][1])
        content["run"] = {"name": nodes.run}

        # 2. Parity blocks are made of what has been written.
        sets, blocks = xor_blocks(nodes.members, records, redundancy)
        owners = [record["rank"] for record in records]
        made = attempt.make(blocks, records, owners.__getitem__, attempt.folder)
        if sets:
            content["sets"] = sets
            content["parities"] = [made[block.number] for block in blocks]

        # 3. The same manifest on every node, then the name, then older ones go.
        attempt.publish(encode_manifest(content))
        attempt.gather_or_raise(attempt.thin)
        return attempt.root / iteration_folder(iteration)


class NodeAttempt(Attempt):
    """A temporary folder on each node for one iteration that is to be `done` (saved, rebuilt,
    read): made, and in the end removed, by the node's first rank.
    """

    mode = 0o700

    def __init__(self, nodes: Nodes, iteration: int, done: str = "saved", **saved: Any) -> None:
        self.nodes = nodes
        self.done = done
        super().__init__(nodes.run_folder, iteration, nodes.ranks, explain=self._not_done, **saved)
        self.makes = nodes.first

    def _not_done(self, error: Exception) -> str:
        instead = "Older ones are untouched"
        if self.done == "read":
            instead = f"Start with the layout and nodes of before, or {FROM_LOAD}"
        return (
            f"--local-checkpoint-dir {self.nodes.root}: the local checkpoint of iteration "
            f"{self.iteration} was not {self.done}: {in_words(error)}{fix_of(error)}. {instead}"
        )

    def _make_root(self) -> None:
        own_folder(self.nodes.root)
        self.root.mkdir(mode=self.mode, exist_ok=True)

    def make(
        self, streams: list[Stream], records: Sequence[JsonObject], owner: Owner, source: Path
    ) -> dict[int, JsonObject]:
        """Make files out of others, which rank `owner(number)` has in `source`; return their
        entries by number. A file with an entry in `records` must become the same again.
        """

        def write(stream: Stream, pieces: Iterator[memoryview]) -> JsonObject:
            number, name = stream.number, shard_file(stream.number)
            if stream.is_block:
                header, data = xor_block_header(self.iteration, number), pieces
            else:
                header, data = split_header(pieces, name)
            entry = write_shard_file(self.folder, number, header, data)
            if number < len(records) and not entry.items() <= records[number].items():
                raise CheckpointError(f"{self.folder}: {name} is not what was saved")
            return entry

        if not streams:
            return {}
        made = self.gather_or_raise(lambda: exchange(streams, self.ranks, owner, source, write))
        return {number: entry for by_rank in made for number, entry in by_rank}

    def publish(self, manifest: bytes, here: bool = True) -> None:
        """Add the manifest and give the folder its name, in the place of one that is there: on this
        node only if `here`, for a kill between the two renames loses what was there.
        """
        target = self.root / iteration_folder(self.iteration)

        def replace_folder() -> None:
            if not (self.nodes.first and here):
                return
            write_file(self.folder / MANIFEST, manifest)
            sync_folder(self.folder)
            if os.path.lexists(target):
                os.rename(target, self._trash(self.iteration))
            os.rename(self.folder, target)
            sync_folder(self.root)

        # what was replaced goes when every node has its new folder
        self.gather_or_raise(replace_folder)
        shutil.rmtree(self._trash(self.iteration), ignore_errors=True)

    def _trash(self, iteration: int) -> Path:
        return trash_folder(self.root, iteration, self.name)

    def thin(self) -> None:
        """Every node has this iteration: keep it and the newest before it. An error of the file
        system is logged, and fails no save.
        """
        if not self.nodes.first:
            return
        try:
            iterations = list_iterations(self.root)
            kept = [each for each in iterations if each <= self.iteration][:NUM_KEPT]
            for iteration in set(iterations).difference(kept):
                os.rename(self.root / iteration_folder(iteration), self._trash(iteration))
                shutil.rmtree(self._trash(iteration), ignore_errors=True)
        except (CheckpointError, OSError) as error:
            logger.warning(f"{self.root}: older local checkpoints were not deleted: {error}")


# ---- what the nodes have together ----------------------------------------------------------------


class Found:
    """A local checkpoint. `held`: the files that each node has whole: shards and, numbered after
    them, XOR parity blocks; their entries are `records`. All ranks make it together.
    """

    def __init__(self, nodes: Nodes, manifest: bytes) -> None:
        self.nodes = nodes
        self.manifest = manifest
        self.content = decode_manifest(manifest, Path(MANIFEST))
        self.iteration: int = self.content["iteration"]
        self.folder = nodes.folder(self.iteration)  # on this node
        self.records = self.content["shards"] + self.content.get("parities", [])
        self.shards = range(len(self.content["shards"]))
        self.stripes = stripes_in(self.content["shards"], self.content.get("sets", []))
        files = nodes.ranks.gather_or_raise(self._whole_files)
        self.held = [set().union(*(files[rank] for rank in ranks)) for ranks in nodes.members]

    def _whole_files(self) -> list[int]:
        """This rank's share of the files that the node has whole; every byte is read."""
        whole = []
        ranks = len(self.nodes.members[self.nodes.index])
        for number in range(self.nodes.place, len(self.records), ranks):
            with suppress(CheckpointError, OSError):
                verify_shard(self.folder, number, self.records[number])
                whole.append(number)
        return whole

    @property
    def missing(self) -> set[int]:
        """Files that no node has."""
        return set(range(len(self.records))).difference(*self.held)

    @property
    def lost(self) -> list[int]:
        """Shards that no node has and that cannot be rebuilt."""
        if not self.stripes:
            return sorted(self.missing)
        present = set().union(*self.held)
        return sorted(set().union(*(stripe.lost(present) for stripe in self.stripes)))

    def reader(self, number: int) -> int:
        """The rank that reads a file for others."""
        holders = [node for node, held in enumerate(self.held) if number in held]
        return self.nodes.rank(holders[number % len(holders)], number)


def newest_local(nodes: Nodes, oldest: int) -> Found | None:
    """The newest local checkpoint of the run, from iteration `oldest` on, of which the nodes have
    every shard or can make it; all of its bytes are verified, and what a lost node had is on a new
    one (`restore`). Why newer ones are passed over is logged.
    """
    # What every node has, of all saves: an iteration may have been saved twice.
    listed = nodes.ranks.gather_or_raise(lambda: _listed(nodes, oldest) if nodes.first else [])
    saves = [set(map(tuple, listed[ranks[0]])) for ranks in nodes.members]
    for save in sorted(set().union(*saves), reverse=True):
        # 1. The manifest of one node is for all; files count when every byte is as it specifies.
        source = next(ranks[0] for ranks, has in zip(nodes.members, saves) if save in has)
        path = nodes.folder(save[0]) / MANIFEST
        is_source = nodes.ranks.world.rank == source
        manifest = nodes.ranks.gather_or_raise(
            lambda: load_bytes(path, MANIFEST_LIMIT).decode() if is_source else ""
        )[source]
        found = Found(nodes, manifest.encode())

        # 2. What is lost for good is passed over, and so is what there is no space to rebuild.
        if not found.lost:
            if restore(found):
                return found
            continue
        names = some([*map(str, found.lost)], MAX_NAMED)
        xor = "; of the nodes of an XOR group one may be lost, not two"
        logger.warning(
            f"the local checkpoint of iteration {found.iteration} is not taken: of its "
            f"{len(found.shards)} shards {len(found.lost)} ({names}) are whole on no node"
            f"{xor if found.stripes else ''}"
        )
    return None


def _listed(nodes: Nodes, oldest: int) -> list[tuple[int, str]]:
    """(iteration, digest of the manifest) of each of this node's checkpoints of the run."""
    rows = []
    for iteration in list_iterations(nodes.run_folder):
        path = nodes.folder(iteration) / MANIFEST
        # one that is damaged here may be whole on another node
        with suppress(CheckpointError, KeyError):
            raw = load_bytes(path, MANIFEST_LIMIT)
            content = decode_manifest(raw, path)
            is_own = (content["run"]["name"], content["iteration"]) == (nodes.run, iteration)
            if is_own and iteration >= oldest:
                rows.append((iteration, table_digest(raw)))
    return rows


# ---- a lost node ---------------------------------------------------------------------------------


def restore(found: Found) -> bool:
    """Rebuild the files that no node has; whether every shard is there then. When that fails (no
    space) a warning is logged and nothing has changed.
    """
    streams = _replacements(found)
    try:
        if streams:
            _make(found, streams)
    except UserError as error:
        is_complete = not found.missing & set(found.shards)
        outcome = "is taken without its redundancy" if is_complete else "is not taken"
        logger.warning(f"the local checkpoint of iteration {found.iteration} {outcome}: {error}")
        return is_complete
    return True


def _replacements(found: Found) -> list[Stream]:
    """The files that `restore` makes."""
    streams = []
    missing = found.missing
    load = [len(held) for held in found.held]
    for stripe in found.stripes:
        for place, (shard, block) in enumerate(stripe.files):
            # Both go to the node with the fewest other files of the stripe, then of all files.
            others = set(chain(*stripe.files)) - {shard, block}
            shared = [len(others & held) for held in found.held]
            _, _, node = min(zip(shared, load, range(len(load))))
            if shard in missing:
                streams.append(stripe.shard(place, found.nodes.rank(node, shard)))
            if block in missing:
                streams.append(stripe.xor_block(place, found.nodes.rank(node, block)))
            load[node] += len(missing & {shard, block})
    return streams


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
    with NodeAttempt(nodes, found.iteration, "rebuilt") as attempt:
        attempt.gather_or_raise(link)
        attempt.make(streams, found.records, found.reader, found.folder)
        attempt.publish(found.manifest, bool(made[nodes.index]))
    to = []
    for node, numbers in enumerate(made):
        found.held[node].update(numbers)
        if numbers:
            to.append(f"node {node} ({nodes.hosts[node]}): {len(numbers & set(found.shards))}")
    logger.info(
        f"shards of the local checkpoint of iteration {found.iteration} rebuilt from their "
        f"XOR groups: {', '.join(to)}"
    )


# ---- reading -------------------------------------------------------------------------------------


class LocalCheckpoint(Checkpoint):
    """A local checkpoint as any rank opens it: headers come from the nodes that have them, and
    `fetch` brings the shards that are read to this rank's node, until it is closed.
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
        bytes of shards travelled, over all nodes. Raises UserError on every rank when one cannot
        be brought.
        """
        # 1. One copy for each node that has a rank which reads the shard.
        nodes = self.nodes
        by_rank = nodes.ranks.gather_or_raise(lambda: self._lacking(boxes))
        streams = [
            Stream(number, nodes.rank(node, number), [(self.shards[number].size, [(number, 0)])])
            for node, ranks in enumerate(nodes.members)
            for number in sorted({number for rank in ranks for number in by_rank[rank]})
        ]
        if not streams:
            return 0

        # 2. From now on they are read from here.
        attempt = self._attempt = NodeAttempt(nodes, self.iteration, "read").__enter__()
        attempt.make(streams, self.found.records, self.found.reader, self.path)
        for each in streams:
            if each.to in nodes.members[nodes.index]:
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

    def _instead(self) -> str:
        return FROM_LOAD

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

    by_rank = ranks.gather_or_raise(read)
    return {
        number: (chunk, header.encode("latin-1"))
        for heads in by_rank
        for number, chunk, header in heads
    }
