"""The rank grid: which ranks share what. Built once, frozen, passed down; a layer receives only the one `Axis` that it uses.

Ranks are numbered with tp fastest: `arange(world).view(pp, dp, cp, tp)`. World 16 with tp2 cp2 dp2 pp2: tp [0 1], cp [0 2], dp [0 4], pp [0 8].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ORDER = ("pp", "dp", "cp", "tp")  # slowest first
TP_PP_DP_ORDER = ("dp", "pp", "cp", "tp")  # --use-tp-pp-dp-mapping


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. The world is their product."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = ORDER

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        at = {}
        for axis in reversed(self.order):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return at

    def rank(self, at: dict[str, int]) -> int:
        """The rank at these coordinates."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + at[axis]
        return rank

    def partition(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """All groups of ranks that differ only in `axes`, each in ascending order."""
        def offsets(chosen: list[str]) -> list[int]:
            numbers = [0]
            for axis in chosen:
                stride = self.rank({name: int(name == axis) for name in self.order})
                numbers = [number + stride * index for number in numbers for index in range(getattr(self, axis))]
            return numbers

        inside = offsets([axis for axis in self.order if axis in axes])
        for start in offsets([axis for axis in self.order if axis not in axes]):
            yield tuple(start + offset for offset in inside)


@dataclass(frozen=True)
class Axis:
    """One set of ranks as one of them sees it: `rank` is its place in `ranks` (global numbers); no process group where it is alone."""

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis("alone")


@dataclass(frozen=True)
class Groups:
    """Every axis as one rank sees it."""

    layout: Layout
    rank: int
    world: Axis
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    replicas: Axis  # dp x cp: the ranks that hold the same parameters and add their gradients
    replicas_gather: Axis  # the same ranks on a communicator of its own: two collectives on one would wait for each other
    kv: Axis  # the tp ranks that hold the same key/value head

    def describe(self) -> str:
        """`tp2 cp1 pp2 dp2 | rank 5 = pp1 dp0 cp0 tp1`: for the banner, the trackers and every error."""
        at = self.layout.coordinates(self.rank)
        return f"{describe_layout(self.layout)} | rank {self.rank} = " + " ".join(f"{axis}{at[axis]}" for axis in ("pp", "dp", "cp", "tp"))


def describe_layout(layout: Layout) -> str:
    """`tp2 cp1 pp2 dp2`."""
    return " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp"))


def kv_sharers(tp: int, kv_heads: int) -> int:
    """How many tp ranks hold the same key/value head: 1 unless there are fewer heads than ranks."""
    return max(1, tp // kv_heads)


def build_groups(layout: Layout, rank: int, new_group: Callable[[tuple[int, ...]], Any], kv_heads: int | None = None) -> Groups:
    """The groups of one rank. `new_group(ranks)` makes a process group; it is called for the same tuples in the same order on every rank,
    once for each distinct tuple of two or more ranks (and once more for `replicas_gather`).

    `kv_heads` is the number of key/value heads of the model (None: at least one for each tp rank).
    """
    assert 0 <= rank < layout.world
    made: dict[tuple[int, ...], Any] = {}

    def axis(name: str, partition: Iterator[tuple[int, ...]], *, own: bool = False) -> Axis:
        found = None
        for ranks in partition:
            group = None
            if len(ranks) > 1:
                group = new_group(ranks) if own else made[ranks] if ranks in made else made.setdefault(ranks, new_group(ranks))
            if rank in ranks:
                found = Axis(name, ranks.index(rank), ranks, group)
        return found

    share = kv_sharers(layout.tp, kv_heads or layout.tp)
    kv = (tp[i : i + share] for tp in layout.partition("tp") for i in range(0, layout.tp, share))
    return Groups(
        layout=layout, rank=rank, world=axis("world", layout.partition(*ORDER)),
        **{name: axis(name, layout.partition(name)) for name in ("tp", "cp", "dp", "pp")},
        replicas=axis("replicas", layout.partition("dp", "cp")),
        replicas_gather=axis("replicas_gather", layout.partition("dp", "cp"), own=True),
        kv=axis("kv", kv),
    )


def one_process() -> Groups:
    """The groups of a job of one process."""
    return build_groups(Layout(), 0, lambda ranks: None)
