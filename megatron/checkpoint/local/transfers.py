"""Shards on their way between nodes: files cut into messages between two ranks, and small strings
that all ranks get.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import UserError
from megatron.distributed.collectives import all_reduce, is_gloo
from megatron.distributed.p2p import Receiving, Sending

PIECE = 8 << 20  # bytes of one message
PathOf = Callable[[int], Path]  # of a file by its number
FLYING = 2  # messages on their way at a time


@dataclass(frozen=True)
class ShardTransfer:
    """Shard `number`, `size` bytes, from a rank that has its file to one that gets it."""

    number: int
    size: int
    source: int
    to: int


def in_rounds(
    transfers: Iterable[ShardTransfer], nodes: Sequence[Sequence[int]]
) -> list[ShardTransfer]:
    """The order for `send_shards`, `nodes` being the ranks of each node: in every round a node
    sends to one node alone, receives from one alone, or rests.

    First from every node to the next one, then to the one after that, and so on; of the rings that
    these make every second node sends first.
    """
    home = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}

    def turn(transfer: ShardTransfer) -> tuple[int, int, int]:
        node = home[transfer.source]
        steps = (home[transfer.to] - home[transfer.source]) % len(nodes)
        rings = math.gcd(steps, len(nodes))
        length = len(nodes) // rings
        # on its ring: node = place * steps + node % rings
        place = node // rings * pow(steps // rings, -1, length) % length
        return steps, 2 if length % 2 and place == length - 1 else place % 2, transfer.number

    return sorted(transfers, key=turn)


def message_device(ranks: Ranks) -> torch.device:
    """Where messages between nodes travel."""
    alone = ranks.world.size == 1
    return torch.device("cpu") if alone or is_gloo(ranks.world) else ranks.device


def send_shards(
    transfers: Iterable[ShardTransfer],
    ranks: Ranks,
    path: PathOf,
    write: Callable[[int, Iterator[memoryview]], None],
) -> Exception | None:
    """Carry out transfers, one after the other as each rank sees it; all ranks call this with the
    same ones in the same order, so none waits in a circle.

    `path(number)` is the file to send, `write(number, pieces)` takes what arrives. What goes wrong
    here with a file is returned when all has been carried. Over NCCL pieces pass through the device
    (that way has never run).
    """
    fault: Exception | None = None
    me = ranks.world.rank
    device = message_device(ranks)
    for transfer in transfers:
        try:
            if transfer.source == me:
                _send(transfer, path, ranks, device)
            elif transfer.to == me:
                pieces = _arriving(transfer, ranks, device)
                try:
                    write(transfer.number, pieces)
                finally:
                    for _ in pieces:  # what was promised is taken, even when it cannot be written
                        pass
        except (OSError, UserError) as error:
            fault = fault or error
    return fault


def _pieces(transfer: ShardTransfer) -> Iterator[tuple[int, int]]:
    return ((start, min(PIECE, transfer.size - start)) for start in range(0, transfer.size, PIECE))


@dataclass
class ShardFiles:
    """Files at `path(number)` that are read in pieces. The first fault is kept: what cannot be read
    is sent as zeros, since the receiver counts on the bytes, and refused by its digest.
    """

    path: PathOf
    open: dict[int, int] = field(default_factory=dict)
    fault: Exception | None = None

    def read(self, number: int, at: int, size: int, *, whole: bool = False) -> Tensor:
        """The bytes from `at` on; zeros after the file's end, which is a fault where they must be
        `whole`.
        """
        piece = torch.zeros(size, dtype=torch.uint8)
        try:
            if number not in self.open:
                self.open[number] = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
            got = os.preadv(self.open[number], [memoryview(piece.numpy())], at)
            if whole and got != size:
                raise CheckpointError(f"{self.path(number)}: ends before byte {at + size}")
        except (OSError, CheckpointError) as error:
            self.fault = self.fault or error
        return piece

    def close(self) -> None:
        for file in self.open.values():
            os.close(file)


def _send(transfer: ShardTransfer, path: PathOf, ranks: Ranks, device: torch.device) -> None:
    files = ShardFiles(path)
    flying: list[Sending] = []
    for start, size in _pieces(transfer):
        piece = files.read(transfer.number, start, size, whole=True)
        flying.append(Sending(piece.to(device), transfer.to, ranks.world, 0))
        if len(flying) == FLYING:
            flying.pop(0).wait()
    for message in flying:
        message.wait()
    files.close()
    if files.fault is not None:
        raise files.fault


def _arriving(transfer: ShardTransfer, ranks: Ranks, device: torch.device) -> Iterator[memoryview]:
    """The bytes in pieces, each with memory of its own."""
    sizes = [size for _, size in _pieces(transfer)]
    flying: list[Receiving] = []
    while sizes or flying:
        while sizes and len(flying) < FLYING:
            flying.append(
                Receiving((sizes.pop(0),), torch.uint8, device, transfer.source, ranks.world, 0)
            )
        yield memoryview(flying.pop(0).wait().cpu().numpy())


def share_bytes(parts: dict[int, bytes], sizes: list[int], ranks: Ranks) -> list[bytes]:
    """Every rank gets all of the strings of `sizes` bytes; `parts` are those, by number, that this
    rank alone has.
    """
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    for number, data in parts.items():
        whole[starts[number] : starts[number + 1]] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )
    raw = (
        all_reduce(whole.to(ranks.device), ranks.world).cpu().numpy().tobytes()
        if sum(sizes)
        else b""
    )
    return [raw[start:stop] for start, stop in zip(starts, starts[1:])]
