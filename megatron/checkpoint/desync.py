"""Finds replicas that have diverged: ranks that hold the same values compare digests of them at
every save: a block's weights over all ranks that compute with them, master weights and moments over
those that step the same slice, what tensor-parallel ranks hold alike, and both copies of a tied
embedding. A digest is a sum that is formed where the data is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError, chunk_digest
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import some
from megatron.distributed.groups import Axis, Groups
from megatron.distributed.rendezvous import name_ranks
from megatron.model.spec import holders
from megatron.optimizer.optimizer import MASTER, Optimizer
from megatron.parallel.blocks import Block, BufferEntry

WORDS = 1 << 20  # that are multiplied at a time
FACTOR = -7046029254386353131  # odd: 2**64 divided by the golden ratio
HELD_BY = {
    "tp": "among tensor-parallel ranks",
    "kv": "among ranks with the same key/value head",
    "tied": "at both ends of the pipeline",
}
MAX_NAMED = 4  # tensors in the error


class Key(NamedTuple):
    """A digest that is compared: among which ranks (`first` is the lowest), and of what."""

    among: str
    first: int
    tensor: str


class DesyncCheck:
    """Digests of everything that this rank and others hold, as it is now: on a GPU they are queued
    on the current stream. All weights must have arrived (`Zero.wait_for_weights`). Not compared:
    weights gathered at ZeRO stage 3, which live for a pass, and state in files.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.sums: dict[Key, Tensor] = {}
        for key, data in shared_parts(optimizer):
            self.sums[key] = position_sum(data.detach(), self.sums.get(key))

    def check(self, ranks: Ranks) -> None:
        """Raise CheckpointError, the same on all ranks, where values that several ranks hold are
        not the same bits. All ranks call this together.
        """
        values = [total.to(ranks.device) for total in self.sums.values()]
        sums = list(zip(self.sums, torch.stack(values).tolist())) if values else []

        # Two rounds: a digest of each comparison first, those of its tensors only if it fails.
        totals: dict[Key, list[int]] = defaultdict(list)
        for key, total in sums:
            totals[key._replace(tensor="")].append(total)
        combined = [(key, chunk_digest(str(all_).encode()).hex()) for key, all_ in totals.items()]
        failed = differences(ranks.gather_or_raise(lambda: combined))
        if not failed:
            return
        lines = [(key, total) for key, total in sums if key._replace(tensor="") in failed]
        differing = [
            f"{key.tensor} differs between {' and '.join(map(name_ranks, groups))}"
            for key, groups in differences(ranks.gather_or_raise(lambda: lines)).items()
        ]
        raise CheckpointError(
            f"replicas have diverged: {some(differing, MAX_NAMED, '; ')}. These ranks no longer "
            "train the same model: a fault of memory or of a device, or an operation that is not "
            "deterministic. Resume from an older checkpoint; where one group is smaller, without "
            "its machine"
        )


def differences(gathered: list[list]) -> dict[Key, list[list[int]]]:
    """Of the (key, digest) pairs of all ranks the keys with several digests: the ranks of each
    digest, the most frequent one first.
    """
    found: dict[Key, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, pairs in enumerate(gathered):
        for key, digest in pairs:
            found[Key(*key)][digest].append(rank)
    return {
        key: sorted(values.values(), key=len, reverse=True)
        for key, values in found.items()
        if len(values) > 1
    }


def shared_parts(optimizer: Optimizer) -> Iterator[tuple[Key, Tensor]]:
    """Everything in memory that this rank and others hold, in the same order on each of them."""
    for block in optimizer.blocks:
        copies = block.groups.replicas
        if block.zero_stage < 3:
            yield from _parts(block, "weights", block.weight, 0, copies, optimizer)
        if block.zero_stage > 0:
            copies = block.groups.same_shard  # that step the same slice
        for kind, buffer in optimizer.states[block].items():
            weights = block.weight.untyped_storage().data_ptr() if block.zero_stage < 3 else None
            if kind != MASTER or buffer.untyped_storage().data_ptr() != weights:
                name = "master weights" if kind == MASTER else kind
                yield from _parts(block, name, buffer, block.own[0], copies, optimizer)


def _parts(
    block: Block, kind: str, buffer: Tensor, first: int, copies: Axis, optimizer: Optimizer
) -> Iterator[tuple[Key, Tensor]]:
    """Of a buffer that begins with element `first` of the block, and of which `copies` exist."""
    for entry in block.entries:
        for by, axis, name, start, stop in _held_by_several(entry, copies, optimizer.groups):
            data = buffer[max(start - first, 0) : max(stop - first, 0)]
            if axis.size > 1 and len(data):
                # dense and expert weights are held by different ranks, maybe with the same lowest
                among = f"{kind} {by} ({block.layout.group})"
                yield Key(among, axis.ranks[0], f"{name} ({kind})"), data


def _held_by_several(
    entry: BufferEntry, copies: Axis, groups: Groups
) -> Iterator[tuple[str, Axis, str, int, int]]:
    """What several ranks may hold of an entry: (how they are described, the ranks, the tensor, its
    first element in the block, and where it ends).
    """
    yield "among data-parallel ranks", copies, entry.name, entry.start, entry.stop
    for box in entry.boxes:
        if box.replicated:
            axis = holders(box, groups)
            for start, stop, _ in entry.runs(box):
                yield HELD_BY[box.replicated], axis, box.name, start, stop


def position_sum(data: Tensor, total: Tensor | None = None) -> Tensor:
    """A digest of `data` [n], int64 modulo 2**64, that continues `total` of the parts before.
    Every word is multiplied by an odd factor that depends on its position: a single changed word
    changes the sum, and so do two that are swapped or whose signs change. Never run on a GPU.
    """
    words = data.view(torch.int16 if data.element_size() == 2 else torch.int32)
    for piece in words.split(WORDS):
        factors = torch.arange(1, 2 * len(piece), 2, device=data.device)
        found = (piece * factors).sum()
        total = found if total is None else total * FACTOR + found
    return total
