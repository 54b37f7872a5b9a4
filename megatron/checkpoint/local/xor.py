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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.local.exchange import Part, Stream
from megatron.checkpoint.manifest import ALIGN, encode_header

XOR_GROUP = 8  # most nodes of an XOR group


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
