"""The rank grid: which ranks share what. Built once, frozen, passed down; a layer receives only the
one `Axis` that it uses.

Ranks are numbered with tp fastest: `arange(world).view(pp, dp, cp, tp)`. World 16 with tp2 cp2 dp2
pp2: tp [0 1], cp [0 2], dp [0 4], pp [0 8].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megatron.config.derive import data_parallel_size
from megatron.config.groups import Config
from megatron.config.stages import placement_of

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

    @lru_cache  # a plan asks for those of thousands of ranks again and again
    def partition(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only in `axes`, each in ascending order."""

        def offsets(chosen: list[str]) -> list[int]:
            numbers = [0]
            for axis in chosen:
                stride = self.rank({name: int(name == axis) for name in self.order})
                numbers = [
                    number + stride * index
                    for number in numbers
                    for index in range(getattr(self, axis))
                ]
            return numbers

        inside = offsets([axis for axis in self.order if axis in axes])
        starts = offsets([axis for axis in self.order if axis not in axes])
        if len(inside) == 1:
            return tuple((start,) for start in starts)
        return tuple(tuple(start + offset for offset in inside) for start in starts)


@dataclass(frozen=True)
class Axis:
    """One set of ranks as one of them sees it: `rank` is its place in `ranks` (global numbers); no
    process group where it is alone.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None

    @cached_property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis("alone")


@dataclass(frozen=True)
class BufferGroups:
    """Who holds copies of a flat buffer, and how they share its gradients and weights."""

    replicas: Axis  # the ranks that hold the same parameters and add their gradients
    # those of replicas among which ZeRO cuts a buffer; all of them unless told otherwise
    shard: Axis
    # the same ranks on a communicator of its own: two collectives on one would wait for each other
    shard_gather: Axis
    replicate: Axis  # those of replicas that hold the same slice; alone when all of replicas share


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
    # of parameters by the group that they declare (layers/spec.py): "dense" is dp x cp
    buffers: dict[str, BufferGroups]
    kv: Axis  # the tp ranks that hold the same key/value head
    tied: Axis  # the first and the last of pp, where both hold the word embedding
    # pp again, on communicators for messages between neighbours: `channel`
    channels: tuple[Axis, ...]

    @property
    def dense(self) -> BufferGroups:
        """The groups of all parameters that are not told apart."""
        return self.buffers["dense"]

    def channel(self, source: int, to: int) -> Axis:
        """The communicator of messages from one pp rank to a neighbour, in order. A rank never
        sends and receives on the same one, so that no message waits for another that goes
        elsewhere: NCCL carries out what is on one communicator one by one.
        """
        return self.channels[_channel(self.pp.size, source, to)]

    def describe(self) -> str:
        """`tp2 cp1 pp2 dp2 | rank 5 = pp1 dp0 cp0 tp1`: for the banner, the trackers and every
        error.
        """
        at = self.layout.coordinates(self.rank)
        return f"{describe_layout(self.layout)} | rank {self.rank} = " + " ".join(
            f"{axis}{at[axis]}" for axis in ("pp", "dp", "cp", "tp")
        )


def describe_layout(layout: Layout) -> str:
    """`tp2 cp1 pp2 dp2`."""
    return " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp"))


def _channel(size: int, source: int, to: int) -> int:
    """Neighbouring links alternate between two channels each way (around an odd ring the last one
    has a third); two ranks have one each way.
    """
    assert (to - source) % size in (1, size - 1), (
        f"pp ranks {source} and {to} of {size} are no neighbours"
    )
    up = (to - source) % size == 1
    link = source if up else to
    colour = 2 if size % 2 and link == size - 1 else link % 2
    return colour if up or size == 2 else colour + (3 if size % 2 else 2)


def channel_count(size: int) -> int:
    """How many channels `size` pipeline ranks need."""
    return {1: 0, 2: 2}.get(size, 6 if size % 2 else 4)


def kv_sharers(tp: int, kv_heads: int) -> int:
    """How many tp ranks hold the same key/value head: 1 unless there are fewer heads than ranks."""
    return max(1, tp // kv_heads)


def build_groups(
    layout: Layout,
    rank: int,
    new_group: Callable[[tuple[int, ...]], Any],
    kv_heads: int | None = None,
    *,
    tied: bool = False,
    shard: int | None = None,
) -> Groups:
    """The groups of one rank. `new_group(ranks)` makes a process group; it is called for the same
    tuples in the same order on every rank, once for each distinct tuple of two or more ranks (and
    once more for `shard_gather` and each of `channels`).

    `kv_heads` is the number of key/value heads of the model (None: at least one for each tp rank);
    `tied`: the first and the last pp rank both hold the word embedding; `shard` neighbours of those
    that hold the same parameters share them out (None: all).
    """
    shard = shard or layout.dp * layout.cp
    assert 0 <= rank < layout.world and layout.dp * layout.cp % shard == 0
    axis = _Communicators(rank, new_group).axis
    share = kv_sharers(layout.tp, kv_heads or layout.tp)
    lines = layout.partition("pp")
    ends = [(line[0], line[-1]) for line in lines] if tied and layout.pp > 1 else []
    kv = [tp[i : i + share] for tp in layout.partition("tp") for i in range(0, layout.tp, share)]
    return Groups(
        layout=layout,
        rank=rank,
        world=axis("world", layout.partition(*ORDER)),
        **{name: axis(name, layout.partition(name)) for name in ("tp", "cp", "dp", "pp")},
        buffers={"dense": _buffer_groups(axis, layout.partition("dp", "cp"), shard)},
        kv=axis("kv", kv),
        tied=axis("tied", ends),
        channels=tuple(axis("channel", lines, own=True) for _ in range(channel_count(layout.pp))),
    )


class _Communicators:
    """Makes process groups, one for each tuple of ranks."""

    def __init__(self, rank: int, new_group: Callable[[tuple[int, ...]], Any]) -> None:
        self.rank, self.new_group = rank, new_group
        self.made: dict[tuple[int, ...], Any] = {}

    def axis(self, name: str, partition: Iterable[tuple[int, ...]], *, own: bool = False) -> Axis:
        """The part of the partition that holds this rank. `own`: with groups of its own."""
        found = ALONE
        for ranks in partition:
            group = self._group(ranks, own) if len(ranks) > 1 else None
            if self.rank in ranks:
                found = Axis(name, ranks.index(self.rank), ranks, group)
        return found

    def _group(self, ranks: tuple[int, ...], own: bool) -> Any:
        if own:
            return self.new_group(ranks)
        if ranks not in self.made:
            self.made[ranks] = self.new_group(ranks)
        return self.made[ranks]


def _buffer_groups(
    axis: Callable[..., Axis], replicas: Sequence[tuple[int, ...]], shard: int
) -> BufferGroups:
    """Of parameters that all of `replicas` hold, shared out over `shard` neighbours."""
    shards = [ranks[i : i + shard] for ranks in replicas for i in range(0, len(ranks), shard)]
    replicate = [ranks[i::shard] for ranks in replicas for i in range(shard)]
    return BufferGroups(
        replicas=axis("replicas", replicas),
        shard=axis("shard", shards),
        shard_gather=axis("shard_gather", shards, own=True),
        replicate=axis("replicate", replicate),
    )


def layout_of(config: Config, world_size: int) -> Layout:
    """The rank grid that the flags ask for."""
    distributed = config.distributed
    return Layout(
        tp=distributed.tensor_model_parallel_size,
        dp=data_parallel_size(config, world_size),
        pp=distributed.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if distributed.use_tp_pp_dp_mapping else ORDER,
    )


def group_options(config: Config) -> dict[str, Any]:
    """What `build_groups` has to know of a resolved configuration beside its layout."""
    placement = placement_of(config)
    tied = placement[0] != placement[-1] and not config.model.untie_embeddings_and_output_weights
    return {
        "kv_heads": config.model.num_query_groups,
        "tied": tied,
        "shard": config.distributed.zero_shard_size,
    }


def one_process() -> Groups:
    """The groups of a job of one process."""
    return build_groups(Layout(), 0, lambda ranks: None)
