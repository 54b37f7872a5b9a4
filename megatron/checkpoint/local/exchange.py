"""Moves files between nodes: each is copied, or is the XOR of several that other ranks have."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.manifest import shard_file
from megatron.checkpoint.ranks import Ranks
from megatron.config.errors import UserError
from megatron.distributed.collectives import Receiving, Sending, is_gloo
from megatron.distributed.groups import Axis

WINDOW = 1 << 20  # bytes of one message, of which a rank that XORs several files holds many
PIECE = 8 << 20  # bytes of one message of a copy
IN_FLIGHT = 2  # windows whose messages are on their way
SENDS = 8  # a rank sends fewer messages than this per window

Owner = Callable[[int], int]  # the rank that reads a file, by its number
Reader = Callable[[int, int, int], Tensor]  # of a file by its number: from a byte on, a size
Part = tuple[int, int]  # a file's number, and a byte in it


@dataclass(frozen=True)
class Stream:
    """File `number` as rank `to` makes it: runs of bytes, each the XOR of as many bytes of the
    files in `parts` (zeros after the end of a file).
    """

    number: int
    to: int
    runs: tuple[tuple[int, tuple[Part, ...]], ...]

    @classmethod
    def copy(cls, number: int, size: int, to: int) -> Stream:
        return cls(number, to, ((size, ((number, 0),)),))

    @property
    def size(self) -> int:
        return sum(length for length, _ in self.runs)

    def windows(self) -> Iterator[tuple[int, list[Part]]]:
        """The runs, cut into messages."""
        for length, parts in self.runs:
            size = WINDOW if len(parts) > 1 else PIECE
            for start in range(0, length, size):
                yield min(size, length - start), [(number, at + start) for number, at in parts]


def read_piece(path: Path, at: int, size: int) -> Tensor:
    """The bytes of a file from `at` on; zeros after its end."""
    piece = torch.zeros(size, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as file:
        os.preadv(file.fileno(), [memoryview(piece.numpy())], at)
    return piece


def exchange(
    streams: Iterable[Stream],
    ranks: Ranks,
    owner: Owner,
    source: Path,
    write: Callable[[int, Iterator[memoryview]], None],
) -> None:
    """Make the files of `streams`: rank `owner(number)` has a file in `source`, and `write(number,
    pieces)` takes what a rank makes.

    All ranks call this with the same streams in the same order. What cannot be read is sent as
    zeros, and what cannot be written is taken, for the others wait for the messages: the first
    error is raised at the end. Over NCCL messages pass through the device (never run).
    """
    faults: list[Exception] = []

    def read(number: int, at: int, size: int) -> Tensor:
        try:
            return read_piece(source / shard_file(number), at, size)
        except OSError as error:
            faults.insert(0, error)  # it comes before what it makes of the files written here
            return torch.zeros(size, dtype=torch.uint8)

    on_host = ranks.world.size == 1 or is_gloo(ranks.world)
    device = torch.device("cpu") if on_host else ranks.device
    for turn in _turns(streams, owner):
        pieces = _pieces(turn, ranks.world, device, owner, read)
        try:
            for stream in turn:
                if stream.to == ranks.world.rank:
                    write(stream.number, pieces)
        except (OSError, UserError) as error:
            faults.append(error)
        for _ in pieces:
            pass
    if faults:
        raise faults[0]


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


def _pieces(
    turn: list[Stream], world: Axis, device: torch.device, owner: Owner, read: Reader
) -> Iterator[memoryview]:
    """The stream of a turn that this rank makes, while it sends what other ranks need. Every rank
    starts its messages in the same order.
    """
    in_flight: deque[tuple] = deque()
    for windows in zip_longest(*(stream.windows() for stream in turn)):
        made: Tensor | None = None
        receiving: list[Receiving] = []
        sending: list[Sending] = []
        for stream, window in zip(turn, windows, strict=True):
            if window is None:  # a shorter one is over
                continue
            size, parts = window
            mine = stream.to == world.rank
            if mine:
                made = torch.zeros(size, dtype=torch.uint8)
            for number, at in parts:
                reader = owner(number)
                if mine and reader == world.rank:
                    made.bitwise_xor_(read(number, at, size))
                elif mine:
                    receiving.append(Receiving((size,), torch.uint8, device, reader, world, 0))
                elif reader == world.rank:
                    piece = read(number, at, size).to(device)
                    sending.append(Sending(piece, stream.to, world, 0))
        in_flight.append((made, receiving, sending))
        if len(in_flight) == IN_FLIGHT:
            yield from _finish(*in_flight.popleft())
    while in_flight:
        yield from _finish(*in_flight.popleft())


def _finish(
    made: Tensor | None, receiving: list[Receiving], sending: list[Sending]
) -> Iterator[memoryview]:
    """Wait for the messages of a window; the piece, if this rank makes one."""
    for message in receiving:
        made.bitwise_xor_(message.wait().cpu())
    for sent in sending:
        sent.wait()
    if made is not None:
        yield memoryview(made.numpy())
