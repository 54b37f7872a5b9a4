"""Ranks that hold the same values compare digests of them: a replica that has diverged is found at
the next save, and named.

Compared are a block's weights over all that compute with them, master weights and moments over
those that step the same slice, what tensor-parallel ranks hold alike, and both ends' copies of a
tied embedding. One small exchange tells every rank whether all agree; when they do not, a second
one of each tensor's digest finds which. Memory of the host is digested by xxh3-128, by a thread,
for which training need not wait; a device's by a sum that is formed there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError, chunk_hasher
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import some
from megatron.distributed.groups import Groups
from megatron.model.spec import holders
from megatron.optimizer.optimizer import MASTER, Optimizer
from megatron.parallel.blocks import Block

WORDS = 1 << 20  # of a device's memory, multiplied at a time: 8 MiB of products
PIECE = 16 << 20  # bytes that are brought to the host at a time
FACTOR = -7046029254386353131  # odd: 2**64 divided by the golden ratio
HELD_BY = {
    "tp": "among tensor-parallel ranks",
    "kv": "among ranks with the same key/value head",
    "tied": "at both ends of the pipeline",
}
NAMED = 4  # most tensors that the error lists


class Part(NamedTuple):
    """Contiguous elements `data` [n] whose bits other ranks hold too."""

    among: str  # the comparison that it belongs to
    first: int  # the lowest of the ranks that compare
    tensor: str
    data: Tensor
    to_host: bool  # where one of the ranks may keep it there, and another on its device


@dataclass(frozen=True)
class Difference:
    """A comparison that failed: the ranks whose value most have (none where that is undecided), and
    those of each other value.
    """

    among: str
    tensor: str
    most: list[int]
    others: list[list[int]]


class DesyncCheck:
    """Digests of all that this rank holds and others hold too, as it is now: nothing of it may be
    written before `wait` returns.

    No weight may be on its way (`Zero.wait_for_weights`). Not compared: weights gathered at ZeRO
    stage 3, which live for a pass, and state in files.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # by comparison, tensor and the lowest of the ranks that compare
        self.made: dict[tuple[str, str, int], _Digest] = defaultdict(_Digest)
        factors: dict[torch.device, Tensor] = {}
        host = []
        for part in shared_parts(optimizer):
            digest = self.made[part.among, part.tensor, part.first]
            data = part.data.detach()
            if data.device.type == "cpu" or part.to_host:
                host.append((digest, data))
                continue
            if data.device not in factors:
                factors[data.device] = odd_factors(data.device)
            digest.total = position_sum(data, factors[data.device], digest.total)

        def add_all() -> None:
            for digest, data in host:
                digest.add(data)

        threads = ThreadPoolExecutor(1, "replicas")
        self.thread = threads.submit(add_all)
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Until all has been read; on a GPU, until it is queued before what comes next on the
        current stream.
        """
        self.thread.result()

    def check(self, ranks: Ranks) -> None:
        """Raise CheckpointError, the same on all ranks, which call this together, where values that
        several ranks hold are not the same bits.
        """
        texts: list[list[Any]] = []

        def of_each_comparison() -> list[list[Any]]:
            self.wait()
            totals: dict[tuple[str, int], Any] = defaultdict(chunk_hasher)
            for (among, tensor, first), text in zip(
                self.made, _texts(list(self.made.values())), strict=True
            ):
                texts.append([among, tensor, first, text])
                totals[among, first].update(text.encode())
            return [
                [among, "", first, total.hexdigest()] for (among, first), total in totals.items()
            ]

        found = differences(ranks.gather_or_raise(of_each_comparison))
        if found:
            failed = {each.among for each in found}
            involved = any(
                ranks.world.rank in group for each in found for group in (each.most, *each.others)
            )
            lines = ranks.gather_or_raise(
                lambda: [line for line in texts if line[0] in failed] if involved else []
            )
            raise CheckpointError(explain(differences(lines)))


def differences(gathered: list[list[list[Any]]]) -> list[Difference]:
    """What does not agree in [comparison, tensor, lowest of the ranks that compare, digest] of all
    ranks.
    """
    compared: dict[tuple[str, str, int], dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, lines in enumerate(gathered):
        for among, tensor, first, digest in lines:
            compared[among, tensor, first][digest].append(rank)
    found = []
    for (among, tensor, _), values in compared.items():
        groups = sorted(values.values(), key=len, reverse=True)
        if len(groups) > 1:
            decided = len(groups[0]) > len(groups[1])
            found.append(
                Difference(
                    among, tensor, groups[0] if decided else [], groups[1:] if decided else groups
                )
            )
    return found


def explain(found: list[Difference]) -> str:
    """The one error of all ranks."""
    lines = [
        f"{each.tensor} "
        + (
            (
                f"of {' and of '.join(map(_ranks, each.others))} differs from the same of "
                f"{_ranks(each.most)}"
            )
            if each.most
            else f"differs between {' and '.join(map(_ranks, each.others))}"
        )
        for each in found
    ]
    return (
        f"replicas have diverged: {some(lines, NAMED, '; ')}. These ranks no longer "
        "train the same model: a fault of memory or of a "
        "device, or an operation that is not deterministic. Resume from an older checkpoint, "
        "without the machine named above"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(list(map(str, ranks)), 8)}"


# ---- what is held more than once -----------------------------------------------------------------


def shared_parts(optimizer: Optimizer) -> Iterator[Part]:
    """All in memory that this rank holds and others hold too, in the same order on each of them."""
    for block in optimizer.blocks:
        if block.stage < 3:
            yield from _parts(block, "weights", block.weight, 0, optimizer.groups, whole=True)
        for kind, buffer in optimizer.kept[block].tensors.items():
            if (
                kind != MASTER
                or block.stage == 3
                or buffer.untyped_storage().data_ptr() != block.weight.untyped_storage().data_ptr()
            ):
                name = "master weights" if kind == MASTER else kind
                yield from _parts(
                    block, name, buffer, block.own[0], optimizer.groups, whole=block.stage == 0
                )


def _parts(
    block: Block, kind: str, buffer: Tensor, first: int, groups: Groups, whole: bool
) -> Iterator[Part]:
    """Of a buffer that begins with element `first` of the block; `whole`: all of its replicas hold
    all of it.
    """

    def cut(start: int, stop: int) -> Tensor:
        return buffer[max(start - first, 0) : max(stop - first, 0)]

    copies = block.groups.replicas if whole else block.groups.replicate
    for entry in block.entries:
        held = [("among data-parallel ranks", copies, entry.name, entry.start, entry.stop)]
        for box in entry.boxes:
            held += [
                (HELD_BY[box.replicated], holders(box, groups), box.name, *run[:2])
                for run in entry.runs(box)
                if box.replicated
            ]
        for by, axis, name, start, stop in held:
            data = cut(start, stop)
            if axis.size > 1 and len(data):
                # ranks that share the dense weights are others than those that share experts, and
                # may have the same lowest one
                among = f"{kind} {by} ({block.plan.group})"
                yield Part(among, axis.ranks[0], f"{name} ({kind})", data, by == HELD_BY["tied"])


class _Digest:
    """Of the parts of a tensor one after the other: xxh3-128 of those in host memory, the sum
    `total` of a device's.
    """

    def __init__(self) -> None:
        self.hasher = chunk_hasher()
        self.total: Tensor | None = None

    def add(self, data: Tensor) -> None:
        for piece in data.split(PIECE // data.element_size()):
            self.hasher.update(memoryview(piece.cpu().view(torch.uint8).numpy()))


def _texts(digests: list[_Digest]) -> list[str]:
    """What tells the digests apart; sums leave their device together."""
    sums = [digest.total for digest in digests if digest.total is not None]
    numbers = iter(torch.stack(sums).tolist() if sums else ())
    return [
        digest.hasher.hexdigest()
        + ("" if digest.total is None else f"{next(numbers) % 2**64:016x}")
        for digest in digests
    ]


def position_sum(data: Tensor, factors: Tensor, total: Tensor | None = None) -> Tensor:
    """What `total` of the parts before becomes by `data` [n]: [], int64, modulo 2**64, the same
    whatever the order of the additions.

    Every word is multiplied by an odd factor that depends on its place, so that a changed word, or
    one more change of sign, changes the sum. Never run on a GPU.
    """
    words = data.view(torch.int16 if data.element_size() == 2 else torch.int32)
    for piece in words.split(WORDS):
        found = (piece * factors[: len(piece)]).sum()
        total = found if total is None else total * FACTOR + found
    return total


def odd_factors(device: torch.device) -> Tensor:
    """[WORDS], int64 that stand for uint64: the first outputs of SplitMix64 (Steele, Lea and Flood
    2014) from the seed 0, made odd.
    """
    x = torch.arange(1, WORDS + 1, device=device) * FACTOR
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1) | 1
