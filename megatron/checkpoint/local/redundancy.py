"""The XOR parity blocks that nodes keep of one another's shards (`--local-redundancy`), and how
files are made out of what other ranks have.

XOR groups are nodes of which any one may be lost: up to eight (`xor`), or two (`partner`), where a
block is a copy of the other node's shard. The shards of the ranks at the same place on the
k nodes of a group form a stripe. Each shard is cut into k - 1 pieces of equal size, padded with
zeros at its end. Rank j keeps the XOR of one piece of every other rank's shard: of rank i's shard
it is piece (j - i - 1) mod k. So every piece is in one XOR parity block, on another node than the
piece itself. When one node of the k is lost, each piece of its shard is the XOR of a parity block
and of the k - 2 other pieces that went into that block.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.manifest import ALIGN, encode_header, shard_file
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject
from megatron.distributed.collectives import Handle, is_gloo, start_receive, start_send

WINDOW = 1 << 20  # bytes of one message, of which a rank that XORs several files holds many
PIECE = 8 << 20  # bytes of one message of a copy
IN_FLIGHT = 2  # windows whose messages are on their way
SENDS = 8  # a rank sends fewer messages than this per window
XOR_GROUP = 8  # most nodes of an XOR group

Members = Sequence[Sequence[int]]  # the ranks of each node
Owner = Callable[[int], int]  # the rank that reads a file, by its number
Part = tuple[int, int]  # a file's number, and a byte in it
# the piece of a stream that this rank makes, or None, and its messages
_Window = tuple[Tensor | None, list[Handle]]


# ---- which files -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """File `number` as rank `to` makes it: `runs` of bytes, each the XOR of as many bytes of the
    files in its parts (zeros after the end of a file).
    """

    number: int
    to: int
    runs: list[tuple[int, list[Part]]]
    is_block: bool = False  # an XOR parity block, of which this is the data

    @property
    def size(self) -> int:
        return sum(length for length, _ in self.runs)

    def windows(self) -> Iterator[tuple[int, list[Part]]]:
        """The runs, cut into messages."""
        for length, parts in self.runs:
            size = WINDOW if len(parts) > 1 else PIECE
            for start in range(0, length, size):
                yield min(size, length - start), [(number, at + start) for number, at in parts]


def xor_blocks(
    members: Members, records: Sequence[JsonObject], redundancy: str
) -> tuple[list[list[int | None]], list[Stream]]:
    """What nodes keep in addition to the shards `records`, just written: (the numbers of the shards
    of each stripe, the XOR parity blocks).
    """
    numbers = {record["rank"]: number for number, record in enumerate(records)}
    stripes = stripes_of(members, redundancy)
    sets = [[numbers.get(rank) for rank in ranks] for ranks in stripes]
    return sets, [
        stripe.xor_block(place, rank)
        for stripe, ranks in zip(stripes_in(records, sets), stripes)
        for place, rank in enumerate(ranks)
    ]


def kept_bytes(members: Members, sizes: Sequence[int], redundancy: str) -> list[int]:
    """What each node keeps of a checkpoint to which rank i adds `sizes[i]` bytes."""
    records = [{"rank": rank, "bytes": size} for rank, size in enumerate(sizes)]
    kept = list(sizes)
    for block in xor_blocks(members, records, redundancy)[1]:
        kept[block.to] += ALIGN + block.size
    return [sum(kept[rank] for rank in ranks) for ranks in members]


def xor_groups_of(nodes: int, redundancy: str) -> list[range]:
    """The nodes of each XOR group: as few groups as possible, of at most XOR_GROUP nodes, or pairs,
    of which one takes a third node if there is one. Neighbours, which may share a switch, are in
    different groups where there are several.
    """
    count = {"none": 0, "partner": nodes // 2, "xor": -(-nodes // XOR_GROUP)}[redundancy]
    return [range(first, nodes, count) for first in range(count)]


def stripes_of(members: Members, redundancy: str) -> list[list[int]]:
    """The ranks of each stripe."""
    return [
        [members[node][place] for node in nodes]
        for nodes in xor_groups_of(len(members), redundancy)
        for place in range(len(members[0]))
    ]


@dataclass(frozen=True)
class Stripe:
    """The files of a stripe: the numbers of its `shards` (None for a rank that has none), their
    `sizes` in bytes (0 for such a rank), and the number of the `first` XOR parity block; the
    numbers of the other blocks follow.
    """

    shards: list[int | None]
    sizes: list[int]
    first: int

    @property
    def piece(self) -> int:
        """Bytes of a piece, and of the data of each XOR parity block."""
        return -(-max(self.sizes) // (len(self.sizes) - 1))

    def _pieces(self, of: int, without: int = -1) -> list[Part]:
        """The pieces that go into a parity block, except that of the shard at place `without`."""
        return [
            (number, (of - i - 1) % len(self.shards) * self.piece)
            for i, number in enumerate(self.shards)
            if number is not None and i not in (of, without)
        ]

    def xor_block(self, place: int, to: int) -> Stream:
        """The data of an XOR parity block, made by rank `to`."""
        run = self.piece, self._pieces(place)
        return Stream(self.first + place, to, [run], is_block=True)

    def shard(self, place: int, to: int) -> Stream:
        """A lost shard, made by rank `to`."""
        runs = []
        for index, start in enumerate(range(0, self.sizes[place], self.piece)):
            holder = (place + 1 + index) % len(self.shards)
            parts = [(self.first + holder, ALIGN), *self._pieces(holder, place)]
            runs.append((min(self.piece, self.sizes[place] - start), parts))
        return Stream(self.shards[place], to, runs)

    @property
    def files(self) -> list[tuple[int | None, int]]:
        """The numbers of the shard and of the parity block of each place."""
        return list(zip(self.shards, itertools.count(self.first)))

    def lost(self, present: set[int]) -> set[int]:
        """Its shards that are neither among the files `present` nor can be made of them."""
        missing = {
            place: number
            for place, number in enumerate(self.shards)
            if number is not None and number not in present
        }
        others = {self.first + place for place in range(len(self.shards)) if place not in missing}
        return set() if len(missing) == 1 and others <= present else set(missing.values())


def stripes_in(shards: Sequence[JsonObject], sets: Sequence[Sequence[int | None]]) -> list[Stripe]:
    """The stripes that a manifest's `sets` describe. Parity blocks are numbered after all shards,
    stripe by stripe.
    """
    found, first = [], len(shards)
    for numbers in sets:
        sizes = [0 if number is None else shards[number]["bytes"] for number in numbers]
        found.append(Stripe(list(numbers), sizes, first))
        first += len(numbers)
    return found


def xor_block_header(iteration: int, number: int) -> bytes:
    """What precedes the data in the file of an XOR parity block: the header of a shard without
    tensors, ALIGN bytes long.
    """
    header = encode_header([], {"iteration": str(iteration), "parity": str(number)})
    assert len(header) == ALIGN
    return header


# ---- their bytes -------------------------------------------------------------------------------


def exchange(
    streams: Iterable[Stream],
    ranks: Ranks,
    owner: Owner,
    source: Path,
    write: Callable[[Stream, Iterator[memoryview]], JsonObject],
) -> list[tuple[int, JsonObject]]:
    """Make the files of `streams`: rank `owner(number)` has a file in `source`, and `write(stream,
    pieces)` takes one that this rank makes. Returns what it returned, by the files' numbers.

    All ranks call this with the same streams in the same order. What cannot be read is sent as
    zeros, and what cannot be written is taken, for the others wait for the messages: the first
    error is raised at the end. Over NCCL messages pass through the device (never run).
    """
    mover = _Mover(ranks, owner, source)
    made = []
    for turn in _turns(streams, owner):
        pieces = mover.pieces(turn)
        try:
            for stream in turn:
                if stream.to == ranks.world.rank:
                    made.append((stream.number, write(stream, pieces)))
        except (OSError, UserError) as error:
            mover.faults.append(error)
        for _ in pieces:
            pass
    if mover.faults:
        raise mover.faults[0]
    return made


def _turns(streams: Iterable[Stream], owner: Owner) -> list[list[Stream]]:
    """The streams that run at the same time: a rank makes one, and sends fewer than SENDS
    messages per window.
    """
    turns: list[tuple[dict[int, Stream], Counter[int]]] = []  # by the rank that makes it
    for stream in streams:
        numbers = {number for _, parts in stream.runs for number, _ in parts}
        sends = Counter(map(owner, numbers))
        for turn, busy in turns:
            fits = all(busy[rank] + count < SENDS for rank, count in sends.items())
            if fits and stream.to not in turn:
                break
        else:
            turn, busy = {}, Counter()
            turns.append((turn, busy))
        turn[stream.to] = stream
        busy.update(sends)
    return [list(turn.values()) for turn, _ in turns]


class _Mover:
    """What one rank reads, sends and makes in an exchange, and its errors."""

    def __init__(self, ranks: Ranks, owner: Owner, source: Path) -> None:
        self.world = ranks.world
        self.owner = owner
        self.source = source
        on_host = ranks.world.size == 1 or is_gloo(ranks.world)
        self.device = torch.device("cpu") if on_host else ranks.device
        self.faults: list[Exception] = []

    def pieces(self, turn: list[Stream]) -> Iterator[memoryview]:
        """The stream of a turn that this rank makes, while it sends what other ranks need."""
        in_flight: deque[list[_Window]] = deque()
        for windows in itertools.zip_longest(*(stream.windows() for stream in turn)):
            # Every rank starts its messages in the same order. Shorter streams end before others.
            pairs = zip(turn, windows, strict=True)
            in_flight.append([self.start(each, *window) for each, window in pairs if window])
            if len(in_flight) == IN_FLIGHT:
                yield from _finish(in_flight.popleft())
        for each in in_flight:
            yield from _finish(each)

    def start(self, stream: Stream, size: int, parts: list[Part]) -> _Window:
        """This rank's messages of one window of a stream."""
        made = torch.zeros(size, dtype=torch.uint8) if stream.to == self.world.rank else None
        messages: list[Handle] = []
        for number, at in parts:
            reader = self.owner(number)
            if reader == self.world.rank:
                piece = self.read(number, at, size)
                if made is None:
                    messages.append(start_send(piece.to(self.device), stream.to, self.world))
                else:
                    made.bitwise_xor_(piece)
            elif made is not None:
                messages.append(
                    start_receive((size,), torch.uint8, self.device, reader, self.world)
                )
        return made, messages

    def read(self, number: int, at: int, size: int) -> Tensor:
        """The bytes of a file from `at` on; zeros after its end, and where it cannot be read."""
        piece = torch.zeros(size, dtype=torch.uint8)
        try:
            with open(self.source / shard_file(number), "rb", buffering=0) as file:
                os.preadv(file.fileno(), [memoryview(piece.numpy())], at)
        except OSError as error:
            self.faults.insert(0, error)  # it comes before what it makes of the files written here
        return piece


def _finish(windows: list[_Window]) -> Iterator[memoryview]:
    """Wait for the messages of windows; the piece, if this rank makes one."""
    for made, messages in windows:
        for message in messages:
            received = message.wait()
            if made is not None:
                made.bitwise_xor_(received.cpu())
        if made is not None:
            yield memoryview(made.numpy())
