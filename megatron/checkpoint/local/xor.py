"""XOR groups: nodes that keep XOR parity blocks of one another's shards, so that any one node of a
group may be lost (`--local-redundancy xor`).

The shards of the ranks at the same place on the k nodes of a group form a stripe. Each shard is cut
into k - 1 pieces of equal size, padded with zeros at its end. Rank j keeps the XOR of one piece of
every other rank's shard: of rank i's shard it is piece (j - i - 1) mod k. So every piece is in one
XOR parity block, on another node than the piece itself. When one node of the k is lost, each piece
of its shard is the XOR of a parity block and of the k - 2 other pieces that went into that block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.local.transfers import PathOf, ShardFiles, message_device
from megatron.checkpoint.manifest import ALIGN, encode_header
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import UserError
from megatron.distributed.p2p import Receiving, Sending

XOR_GROUP = 8  # most nodes of an XOR group
WINDOW = 1 << 20  # bytes of one message
# windows on their way at a time: of each a rank sends and receives fewer than XOR_GROUP messages
FLYING = 2

Owner = Callable[[int], int]  # the rank that reads a file, by its number
Part = tuple[int, int]  # a file's number, and a byte in it


def xor_groups_of(nodes: int) -> list[range]:
    """The nodes of each XOR group: as few groups as possible, of at most XOR_GROUP nodes, whose
    sizes differ by one at most. Neighbours, which may share a switch, are in different groups where
    there are several.
    """
    count = -(-nodes // XOR_GROUP)
    return [range(first, nodes, count) for first in range(count)]


def stripes_of(members: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each stripe; `members` are the ranks of each node."""
    return [
        [members[node][place] for node in nodes]
        for nodes in xor_groups_of(len(members))
        for place in range(len(members[0]))
    ]


@dataclass(frozen=True)
class Stripe:
    """The files of a stripe: the numbers of its `shards` (None for a rank that has none), their
    `sizes` in bytes (0 for such a rank), and the number of the `first` XOR parity block; the
    numbers of the other blocks follow.
    """

    shards: tuple[int | None, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def piece(self) -> int:
        return -(-max(self.sizes) // (len(self.shards) - 1))

    def _pieces(self, of: int, without: int = -1) -> list[Part]:
        """The pieces that go into a parity block, except that of the shard at place `without`."""
        k = len(self.shards)
        return [
            (number, (of - i - 1) % k * self.piece)
            for i, number in enumerate(self.shards)
            if number is not None and i not in (of, without)
        ]

    def xor_block(self, place: int, to: int) -> Stream:
        """The data of an XOR parity block, made by rank `to`."""
        return Stream(self.first + place, to, ((self.piece, tuple(self._pieces(place))),))

    def shard(self, place: int, to: int) -> Stream:
        """A lost shard, made by rank `to`."""
        k = len(self.shards)
        runs = []
        for number in range(k - 1):
            holder = (place + 1 + number) % k
            length = min(self.piece, self.sizes[place] - number * self.piece)
            if length > 0:
                runs.append((length, ((self.first + holder, ALIGN), *self._pieces(holder, place))))
        return Stream(self.shards[place], to, tuple(runs))

    def lost(self, present: set[int]) -> set[int]:
        """Its shards that are neither among the files `present` nor can be made of them."""
        missing = [
            place
            for place, number in enumerate(self.shards)
            if number is not None and number not in present
        ]
        others = {self.first + place for place in range(len(self.shards)) if place not in missing}
        return (
            set()
            if len(missing) == 1 and others <= present
            else {self.shards[place] for place in missing}
        )


def stripes_in(
    shards: Sequence[dict[str, Any]], sets: Sequence[Sequence[int | None]]
) -> list[Stripe]:
    """The stripes that a manifest's `sets` describe. Parity blocks are numbered after all shards,
    stripe by stripe.
    """
    starts = itertools.accumulate((len(numbers) for numbers in sets), initial=len(shards))
    return [
        Stripe(
            tuple(numbers),
            tuple(0 if number is None else shards[number]["bytes"] for number in numbers),
            start,
        )
        for numbers, start in zip(sets, starts)
    ]


def xor_block_header(iteration: int, number: int) -> bytes:
    """What precedes the data in the file of an XOR parity block: the header of a shard without
    tensors, ALIGN bytes long.
    """
    header = encode_header([], {"iteration": str(iteration), "parity": str(number)})
    assert len(header) == ALIGN
    return header


# ---- moving it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """File `number` as rank `to` makes it: runs of bytes, each the XOR of as many bytes of the
    files in `parts` (zeros after a file's end).
    """

    number: int
    to: int
    runs: tuple[tuple[int, tuple[Part, ...]], ...]

    def windows(self) -> Iterator[tuple[int, list[Part]]]:
        """The runs in messages' lengths."""
        for length, parts in self.runs:
            for start in range(0, length, WINDOW):
                yield min(WINDOW, length - start), [(number, at + start) for number, at in parts]


def exchange(
    streams: Iterable[Stream],
    ranks: Ranks,
    owner: Owner,
    path: PathOf,
    write: Callable[[int, Iterator[memoryview]], None],
) -> Exception | None:
    """Make the files of `streams`; all ranks call this with the same ones in the same order.
    `owner(number)` is the rank that reads a file at `path(number)`, `write(number, pieces)` takes
    what a rank makes. What goes wrong here is returned when all has been moved. Memory:
    4 * XOR_GROUP messages. Over NCCL they pass through the device (that way has never run).
    """
    fault: Exception | None = None
    for turn in _turns(streams, owner):
        pieces = _windows(turn, ranks, owner, ShardFiles(path))
        own = next((stream for stream in turn if stream.to == ranks.world.rank), None)
        try:
            if own is not None:
                write(own.number, pieces)
        except (OSError, UserError) as error:
            fault = fault or error
        finally:
            try:
                # others wait for what is sent here, even when nothing can be written
                for _ in pieces:
                    pass
            except OSError as error:
                fault = fault or error
    return fault


def _turns(streams: Iterable[Stream], owner: Owner) -> list[list[Stream]]:
    """Those that are made at the same time: a rank makes one, and sends to fewer than XOR_GROUP."""
    turns: list[tuple[list[Stream], Counter[int]]] = []
    for stream in streams:
        sends = Counter(
            owner(number) for number in {number for _, parts in stream.runs for number, _ in parts}
        )
        for turn, busy in turns:
            if all(other.to != stream.to for other in turn) and all(
                busy[rank] + count < XOR_GROUP for rank, count in sends.items()
            ):
                break
        else:
            turn = []
            busy = Counter()
            turns.append((turn, busy))
        turn.append(stream)
        busy.update(sends)
    return [turn for turn, _ in turns]


class _Window:
    """A window of every stream of a turn, its messages on their way. `own`: the bytes of the stream
    that this rank makes, XORed so far; None when it makes none.
    """

    def __init__(self) -> None:
        self.own: Tensor | None = None
        self.coming: list[Receiving] = []
        self.sent: list[Sending] = []

    def finish(self) -> Iterator[memoryview]:
        """Await the messages; this rank's piece when it makes one."""
        for message in self.coming:
            self.own.bitwise_xor_(message.wait().cpu())
        for sending in self.sent:
            sending.wait()
        if self.own is not None:
            yield memoryview(self.own.numpy())


@dataclass(frozen=True)
class _Messages:
    """Starts what this rank receives and sends for windows; `owner` as for `exchange`."""

    ranks: Ranks
    owner: Owner
    files: ShardFiles
    device: torch.device

    def start(
        self, turn: list[Stream], windows: Sequence[tuple[int, list[Part]] | None]
    ) -> _Window:
        """The next window of each stream of a turn, None of one that has ended."""
        started = _Window()
        for stream, window in zip(turn, windows, strict=True):
            if window is None:
                continue
            if stream.to == self.ranks.world.rank:
                self._receive(started, *window)
            else:
                self._send(started, stream.to, *window)
        return started

    def _receive(self, started: _Window, size: int, parts: list[Part]) -> None:
        started.own = torch.zeros(size, dtype=torch.uint8)
        world = self.ranks.world
        for number, at in parts:
            owner = self.owner(number)
            if owner == world.rank:
                started.own.bitwise_xor_(self.files.read(number, at, size))
            else:
                message = Receiving((size,), torch.uint8, self.device, owner, world, 0)
                started.coming.append(message)

    def _send(self, started: _Window, to: int, size: int, parts: list[Part]) -> None:
        world = self.ranks.world
        for number, at in parts:
            if self.owner(number) == world.rank:
                piece = self.files.read(number, at, size).to(self.device)
                started.sent.append(Sending(piece, to, world, 0))


def _windows(
    turn: list[Stream], ranks: Ranks, owner: Owner, files: ShardFiles
) -> Iterator[memoryview]:
    """This rank's stream of a turn, piece by piece, while it sends what the others' need. Messages
    are started in one order on all ranks.
    """
    messages = _Messages(ranks, owner, files, message_device(ranks))
    flying: list[_Window] = []
    try:
        for windows in itertools.zip_longest(*(stream.windows() for stream in turn)):
            flying.append(messages.start(turn, windows))
            if len(flying) == FLYING:
                yield from flying.pop(0).finish()
        while flying:
            yield from flying.pop(0).finish()
    finally:
        files.close()
    if files.fault is not None:
        raise files.fault
