"""The rank grid: which ranks form which groups. Built once and frozen; a layer receives only the
`Axis` that it uses.

Ranks are numbered with tp fastest: `arange(world).view(pp, dp, cp, tp)`. World 16 with tp2 cp2 dp2
pp2: tp [0 1], cp [0 2], dp [0 4], pp [0 8].

Experts have a separate grid over the ranks of a pipeline stage (parallel folding, Liu et al. 2025):
tp x cp x dp = etp x ep x edp, with etp fastest. etp ranks share each matrix of an expert, etp x ep
ranks hold all experts of a layer, and edp ranks hold the same ones. In the example with etp1 ep4:
ep [0 1 2 3], edp [0 4].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from megatron.config.derive import attention_ranks, data_parallel_size, expert_ranks
from megatron.config.groups import Config
from megatron.config.stages import placement_of

ORDER = ("pp", "dp", "cp", "tp")  # slowest first
TP_PP_DP_ORDER = ("dp", "pp", "cp", "tp")  # --use-tp-pp-dp-mapping
Ranks = tuple[int, ...]
# of the names of axes that are no dimensions of the grid themselves
DIMENSIONS = {
    **dict.fromkeys(("replicas", "shard", "shard_gather", "same_shard"), "dp"),
    **dict.fromkeys(
        ("expert_replicas", "expert_shard", "expert_shard_gather", "expert_same_shard"), "dp"
    ),
    "tp_cp": "cp",
    **dict.fromkeys(("cp_heads", "cp_ring"), "cp"),
    **dict.fromkeys(("channel", "tied"), "pp"),
    "kv": "tp",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. The world is the product of the first four; `ep` and `etp` divide the
    ranks of a stage once more.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = ORDER
    ep: int = 1
    etp: int = 1

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

    @lru_cache
    def offsets(self, *axes: str) -> tuple[int, ...]:
        """What moving along `axes` adds to a rank's number, ascending from 0."""
        numbers = [0]
        for axis in self.order:
            if axis in axes:
                stride = self.rank({name: int(name == axis) for name in self.order})
                size = getattr(self, axis)
                numbers = [number + stride * i for number in numbers for i in range(size)]
        return tuple(numbers)

    def group_of(self, rank: int, *axes: str) -> Ranks:
        """The ranks that differ from `rank` only in `axes`, ascending."""
        at = self.coordinates(rank)
        return self._group_from(self.rank({**at, **dict.fromkeys(axes, 0)}), *axes)

    @lru_cache
    def _group_from(self, first: int, *axes: str) -> Ranks:
        return tuple(first + offset for offset in self.offsets(*axes))

    @lru_cache
    def partition(self, *axes: str) -> tuple[Ranks, ...]:
        """All groups of ranks that differ only in `axes`, each in ascending order."""
        others = [axis for axis in self.order if axis not in axes]
        inside = self.offsets(*axes)
        return tuple(tuple(first + offset for offset in inside) for first in self.offsets(*others))


@dataclass(frozen=True)
class Axis:
    """A set of ranks as one of them sees it. `rank`: its index in `ranks` (global numbers);
    `group`: the process group, None for a single rank.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def dimension(self) -> str:
        """The axis of the grid that its ranks lie on, as traces name it."""
        return DIMENSIONS.get(self.name, self.name)


ALONE = Axis("alone")


@dataclass(frozen=True)
class BufferGroups:
    """The ranks that hold copies of a flat buffer, and how ZeRO shards it over them."""

    replicas: Axis  # ranks that hold the same parameters and sum their gradients
    shard: Axis  # those of replicas over which ZeRO shards a buffer; all unless set otherwise
    # the same ranks on a separate communicator: two collectives on one would wait for each other
    shard_gather: Axis
    same_shard: Axis  # those of replicas that hold the same shard; one rank when all of them shard


@dataclass(frozen=True)
class Groups:
    """Every axis as one rank sees it."""

    layout: Layout
    rank: int
    world: Axis
    tp: Axis
    cp: Axis
    cp_heads: Axis  # ranks of cp that exchange heads for positions in attention
    cp_ring: Axis  # ranks of cp that keys and values go round
    dp: Axis
    pp: Axis
    # by the group that parameters declare (model/spec.py): "dense" is dp x cp, "expert" edp, and
    # "state", which is neither sharded nor reduced, dp x cp as well
    buffers: dict[str, BufferGroups]
    tp_cp: Axis  # the ranks that hold parts of the same samples' hidden states in a stage
    etp: Axis  # those that share the matrices of an expert
    ep: Axis  # those that hold different experts
    kv: Axis  # the tp ranks that hold the same key/value head
    tied: Axis  # the first and the last of pp, where both hold the word embedding
    # pp again, on communicators for messages between neighbours: `channel`
    channels: tuple[Axis, ...]

    @property
    def dense(self) -> BufferGroups:
        """The groups of ordinary parameters."""
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
    """`tp2 cp1 pp2 dp2`, with ` ep2 etp1` where experts are divided."""
    axes = ("tp", "cp", "pp", "dp", *(("ep", "etp") if layout.ep * layout.etp > 1 else ()))
    return " ".join(f"{axis}{getattr(layout, axis)}" for axis in axes)


def _channel(size: int, source: int, to: int) -> int:
    """Neighbouring links alternate between two channels each way (around an odd ring the last one
    has a third); two ranks have one each way.
    """
    assert (to - source) % size in (1, size - 1), (
        f"pipeline ranks {source} and {to} (of {size}) are not adjacent"
    )
    up = (to - source) % size == 1
    link = source if up else to
    colour = 2 if size % 2 and link == size - 1 else link % 2
    return colour if up or size == 2 else colour + (3 if size % 2 else 2)


def channel_count(size: int) -> int:
    """Number of channels that `size` pipeline ranks need."""
    return {1: 0, 2: 2}.get(size, 6 if size % 2 else 4)


def build_groups(
    layout: Layout,
    rank: int,
    new_group: Callable[..., Any],
    kv_heads: int | None = None,
    *,
    tied: bool = False,
    shard: int | None = None,
    cp_heads: int = 1,
    cp_ring: int = 1,
    experts: bool = False,
    own_only: bool = False,
) -> Groups:
    """The groups of one rank. `new_group(ranks, group_desc=uses)` makes a process group. It is
    called for the same tuples in the same order on every rank, once for each distinct tuple of two
    or more ranks, and once more for `shard_gather` and each of `channels`. `uses` are the names of
    the axes that share the group, separated by spaces. `own_only`: call it for this rank's groups
    alone, where it is no collective call: a dry run may have 100,000 ranks.

    `kv_heads`: key/value heads of the model (None: at least one for each tp rank). `tied`: the
    first and the last pp rank both hold the word embedding. `shard`: number of neighbouring
    replicas over which ZeRO shards (None: all). `cp_heads` neighbours of cp exchange heads,
    `cp_ring` such groups make a ring. `experts`: layers have experts.
    """
    shard = shard or layout.dp * layout.cp
    assert 0 <= rank < layout.world and layout.dp * layout.cp % shard == 0
    assert cp_heads * cp_ring in (1, layout.cp)
    # tp ranks hold the same key/value head where there are fewer heads than ranks
    share = max(1, layout.tp // (kv_heads or layout.tp))
    partitions = _dense_partitions(layout, share, tied, shard, cp_heads, cp_ring)
    if experts:
        partitions |= _expert_partitions(layout, shard)

    make = _GroupMaker(rank, new_group, own_only)
    axes = make.axes(partitions)
    dense = make.buffer_groups("", axes, partitions)
    buffers = {"dense": dense}
    if experts:
        buffers["expert"] = make.buffer_groups("expert_", axes, partitions)
        buffers["state"] = BufferGroups(dense.replicas, ALONE, ALONE, dense.replicas)
    else:
        axes |= {"tp_cp": ALONE, "etp": ALONE, "ep": ALONE}
    channels = tuple(
        make.separate_axis("channel", partitions["pp"], f"channel{number}")
        for number in range(channel_count(layout.pp))
    )
    return Groups(layout=layout, rank=rank, buffers=buffers, channels=channels, **axes)


@dataclass(frozen=True)
class Partition:
    """Divides the ranks into groups: those that differ only in `axes`, each split into parts."""

    layout: Layout
    axes: tuple[str, ...]
    split: Callable[[Ranks], Iterable[Ranks]] = lambda ranks: (ranks,)

    def group_of(self, rank: int) -> Ranks:
        """The group that contains `rank`; empty when none does."""
        parts = self.split(self.layout.group_of(rank, *self.axes))
        return next((part for part in parts if rank in part), ())

    def __iter__(self) -> Iterator[Ranks]:
        for ranks in self.layout.partition(*self.axes):
            yield from self.split(ranks)


def _neighbours(size: int) -> Callable[[Ranks], Iterable[Ranks]]:
    """Splits ranks into parts of `size` consecutive ones."""
    return lambda ranks: (ranks[i : i + size] for i in range(0, len(ranks), size))


def _strided(step: int) -> Callable[[Ranks], Iterable[Ranks]]:
    """Splits ranks into `step` parts, of every `step`-th rank each."""
    return lambda ranks: (ranks[i::step] for i in range(step))


def _dense_partitions(
    layout: Layout, share: int, tied: bool, shard: int, heads: int, ring: int
) -> dict[str, Partition]:
    """`share` neighbours of tp hold the same key/value head; in attention `heads` neighbours of cp
    exchange heads, and `ring` such groups form rings.
    """

    def ends(line: Ranks) -> Iterable[Ranks]:
        return ((line[0], line[-1]),) if tied and layout.pp > 1 else ()

    replicas = "dp", "cp"
    return {
        "world": Partition(layout, ORDER),
        **{name: Partition(layout, (name,)) for name in ("tp", "cp", "dp", "pp")},
        "replicas": Partition(layout, replicas),
        "shard": Partition(layout, replicas, _neighbours(shard)),
        "same_shard": Partition(layout, replicas, _strided(shard)),
        "kv": Partition(layout, ("tp",), _neighbours(share)),
        "tied": Partition(layout, ("pp",), ends),
        "cp_heads": Partition(layout, ("cp",), _neighbours(heads)),
        "cp_ring": Partition(layout, ("cp",), _strided(heads) if ring > 1 else _neighbours(1)),
    }


def expert_cut(stage: int, held: int, shard: int) -> int:
    """Number of ranks over which ZeRO shards an expert's buffer, when `held` of the `stage` ranks
    of a pipeline stage hold all experts, and other buffers are sharded over `shard` neighbours.
    """
    count = stage // held
    return math.gcd(count, max(1, shard * count // stage))


def _expert_partitions(layout: Layout, shard: int) -> dict[str, Partition]:
    """The experts' grid. ZeRO shards an expert's buffer over those of its replicas that are among
    the `shard` neighbours over which it shards other buffers.
    """
    stage = "tp", "cp", "dp"
    held = layout.etp * layout.ep  # ranks that hold all experts of a layer
    cut = expert_cut(len(layout.offsets(*stage)), held, shard * layout.tp)

    def ep_groups(ranks: Ranks) -> Iterable[Ranks]:
        for all_experts in _neighbours(held)(ranks):
            yield from _strided(layout.etp)(all_experts)

    def split_replicas(split: Callable[[Ranks], Iterable[Ranks]]) -> Partition:
        def parts(ranks: Ranks) -> Iterable[Ranks]:
            for replicas in _strided(held)(ranks):
                yield from split(replicas)

        return Partition(layout, stage, parts)

    return {
        "tp_cp": Partition(layout, ("tp", "cp")),
        "etp": Partition(layout, stage, _neighbours(layout.etp)),
        "ep": Partition(layout, stage, ep_groups),
        "expert_replicas": Partition(layout, stage, _strided(held)),
        "expert_shard": split_replicas(_neighbours(cut)),
        "expert_same_shard": split_replicas(_strided(cut)),
    }


@dataclass(frozen=True)
class _GroupMaker:
    """Makes process groups, and the axes of one rank on them."""

    rank: int
    new_group: Callable[..., Any]
    own_only: bool

    def axes(self, partitions: dict[str, Partition]) -> dict[str, Axis]:
        """The axes on one process group for each distinct tuple of two or more ranks, described by
        the names of all partitions that contain it.
        """
        groups = {
            name: [partition.group_of(self.rank)] if self.own_only else list(partition)
            for name, partition in partitions.items()
        }
        # partitions with one group in common have all groups in common
        uses: dict[Ranks, list[str]] = {}
        for name, found in groups.items():
            if found:
                uses.setdefault(found[0], []).append(name)
        made: dict[Ranks, Any] = {}
        for found in groups.values():
            for ranks in found:
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = self.new_group(ranks, group_desc=" ".join(uses[found[0]]))
        return {name: self._axis(name, partition, made) for name, partition in partitions.items()}

    def _axis(self, name: str, partition: Partition, made: dict[Ranks, Any]) -> Axis:
        ranks = partition.group_of(self.rank)
        return Axis(name, ranks.index(self.rank), ranks, made.get(ranks)) if ranks else ALONE

    def separate_axis(self, name: str, partition: Partition, use: str) -> Axis:
        """An axis on process groups that it shares with no other axis."""
        (axis,) = self.axes({use: partition}).values()
        return replace(axis, name=name) if axis is not ALONE else ALONE

    def buffer_groups(
        self, prefix: str, axes: dict[str, Axis], partitions: dict[str, Partition]
    ) -> BufferGroups:
        """Moves the axes whose names begin with `prefix` out of `axes`."""
        gather = f"{prefix}shard_gather"
        return BufferGroups(
            replicas=axes.pop(f"{prefix}replicas"),
            shard=axes.pop(f"{prefix}shard"),
            shard_gather=self.separate_axis(gather, partitions[f"{prefix}shard"], gather),
            same_shard=axes.pop(f"{prefix}same_shard"),
        )


def layout_of(config: Config, world_size: int) -> Layout:
    """The rank grid that the flags ask for."""
    distributed = config.distributed
    return Layout(
        tp=distributed.tensor_model_parallel_size,
        cp=distributed.context_parallel_size,
        dp=data_parallel_size(config, world_size),
        pp=distributed.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if distributed.use_tp_pp_dp_mapping else ORDER,
        **expert_ranks(config)._asdict(),
    )


def group_options(config: Config) -> dict[str, Any]:
    """The keyword arguments of `build_groups` for a resolved configuration."""
    placement = placement_of(config)
    tied = placement[0] != placement[-1] and not config.model.untie_embeddings_and_output_weights
    heads, ring = attention_ranks(config.distributed)
    return {
        "kv_heads": config.model.num_query_groups,
        "tied": tied,
        "shard": config.distributed.zero_shard_size,
        "cp_heads": heads,
        "cp_ring": ring,
        "experts": config.model.num_experts is not None,
    }


def one_process() -> Groups:
    """The groups of a job of one process."""
    return build_groups(Layout(), 0, lambda ranks, group_desc: None, experts=True)
