"""The rank grid: which ranks share what. Built once, frozen, passed down; a layer receives only the
one `Axis` that it uses.

Ranks are numbered with tp fastest: `arange(world).view(pp, dp, cp, tp)`. World 16 with tp2 cp2 dp2
pp2: tp [0 1], cp [0 2], dp [0 4], pp [0 8].

Experts have a grid of their own over the same ranks of a pipeline stage (parallel folding, Liu et
al. 2025): tp x cp x dp = etp x ep x edp, with etp fastest. etp ranks share each matrix of an
expert, ep times so many hold all experts of a layer, and edp ranks hold the same ones. In the
example with etp1 ep4: ep [0 1 2 3], edp [0 4].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megatron.config.derive import attention_ranks, data_parallel_size, expert_ranks
from megatron.config.groups import Config
from megatron.config.stages import placement_of

ORDER = ("pp", "dp", "cp", "tp")  # slowest first
TP_PP_DP_ORDER = ("dp", "pp", "cp", "tp")  # --use-tp-pp-dp-mapping
Partition = tuple[tuple[int, ...], ...]  # groups of ranks, none in two of them
# of the names of axes that are no dimensions of the grid themselves
DIMENSIONS = {
    **dict.fromkeys(("replicas", "shard", "shard_gather", "replicate"), "dp"),
    **dict.fromkeys(
        ("expert_replicas", "expert_shard", "expert_shard_gather", "expert_replicate"), "dp"
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

    @lru_cache  # a plan asks for those of thousands of ranks again and again
    def partition(self, *axes: str) -> Partition:
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

    @property
    def dimension(self) -> str:
        """The axis of the grid that its ranks lie on, as traces name it."""
        return DIMENSIONS.get(self.name, self.name)


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
    cp_heads: Axis  # ranks of cp that exchange heads for positions in attention
    cp_ring: Axis  # ranks of cp that keys and values go round
    dp: Axis
    pp: Axis
    # of parameters by the group that they declare (model/spec.py): "dense" is dp x cp, "expert"
    # edp, and of "state", which nobody cuts or reduces, dp x cp as well
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
    """`tp2 cp1 pp2 dp2`, with ` ep2 etp1` where experts are divided."""
    axes = ("tp", "cp", "pp", "dp", *(("ep", "etp") if layout.ep * layout.etp > 1 else ()))
    return " ".join(f"{axis}{getattr(layout, axis)}" for axis in axes)


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
    new_group: Callable[..., Any],
    kv_heads: int | None = None,
    *,
    tied: bool = False,
    shard: int | None = None,
    cp_heads: int = 1,
    cp_ring: int = 1,
    experts: bool = False,
) -> Groups:
    """The groups of one rank. `new_group(ranks, group_desc=uses)` makes a process group; it is
    called for the same tuples in the same order on every rank, once for each distinct tuple of two
    or more ranks (and once more for `shard_gather` and each of `channels`). `uses` are the names of
    the axes that share the group, with spaces between them.

    `kv_heads` is the number of key/value heads of the model (None: at least one for each tp rank);
    `tied`: the first and the last pp rank both hold the word embedding; `shard` neighbours of those
    that hold the same parameters share them out (None: all). `cp_heads` neighbours of cp exchange
    heads, `cp_ring` such groups make a ring. `experts`: layers have experts.
    """
    shard = shard or layout.dp * layout.cp
    assert 0 <= rank < layout.world and layout.dp * layout.cp % shard == 0
    assert cp_heads * cp_ring in (1, layout.cp)
    share = kv_sharers(layout.tp, kv_heads or layout.tp)
    partitions = _partitions(layout, share, tied, shard) | _of_attention(layout, cp_heads, cp_ring)
    partitions |= _of_experts(layout, shard) if experts else _WITHOUT_EXPERTS
    make = _Communicators(rank, new_group, partitions)
    axes = {name: make.axis(name) for name in partitions}
    dense = make.buffer_groups("", axes)
    buffers = {"dense": dense}
    if experts:
        buffers["expert"] = make.buffer_groups("expert_", axes)
        buffers["state"] = BufferGroups(dense.replicas, ALONE, ALONE, dense.replicas)
    return Groups(
        layout=layout,
        rank=rank,
        buffers=buffers,
        channels=tuple(
            make.own_axis("channel", partitions["pp"], f"channel{number}")
            for number in range(channel_count(layout.pp))
        ),
        **axes,
    )


def _partitions(layout: Layout, share: int, tied: bool, shard: int) -> dict[str, Partition]:
    """The groups of each axis: `share` neighbours of tp hold the same key/value head."""
    lines = layout.partition("pp")
    replicas = layout.partition("dp", "cp")
    return {
        "world": layout.partition(*ORDER),
        **{name: layout.partition(name) for name in ("tp", "cp", "dp", "pp")},
        "replicas": replicas,
        "shard": _cut(replicas, shard),
        "replicate": tuple(ranks[i::shard] for ranks in replicas for i in range(shard)),
        "kv": _cut(layout.partition("tp"), share),
        "tied": tuple((line[0], line[-1]) for line in lines) if tied and layout.pp > 1 else (),
    }


# the axes of experts where there are none
_WITHOUT_EXPERTS: dict[str, Partition] = {"tp_cp": (), "etp": (), "ep": ()}


def expert_cut(stage: int, held: int, shard: int) -> int:
    """Over how many ranks ZeRO cuts an expert's buffer: of the `stage` ranks of a pipeline stage
    each `held` hold all experts, and other buffers are cut among `shard` neighbours.
    """
    count = stage // held
    return math.gcd(count, max(1, shard * count // stage))


def _of_experts(layout: Layout, shard: int) -> dict[str, Partition]:
    """The groups of the experts' grid. ZeRO cuts an expert's buffer over those of the ranks that
    hold the same one that are among the `shard` neighbours over which it cuts other buffers.
    """
    stages = layout.partition("tp", "cp", "dp")
    held = layout.etp * layout.ep  # ranks that hold all experts of a layer
    replicas = tuple(ranks[i::held] for ranks in stages for i in range(held))
    cut = expert_cut(len(stages[0]), held, shard * layout.tp)
    return {
        "tp_cp": layout.partition("tp", "cp"),
        "etp": _cut(stages, layout.etp),
        "ep": tuple(
            ranks[start + i : start + held : layout.etp]
            for ranks in stages
            for start in range(0, len(ranks), held)
            for i in range(layout.etp)
        ),
        "expert_replicas": replicas,
        "expert_shard": _cut(replicas, cut),
        "expert_replicate": tuple(ranks[i::cut] for ranks in replicas for i in range(cut)),
    }


def _of_attention(layout: Layout, heads: int, ring: int) -> dict[str, Partition]:
    """The groups of cp in which attention exchanges heads, and those that are rings."""
    lines = layout.partition("cp")
    rings = tuple(ranks[i::heads] for ranks in lines for i in range(heads))
    return {"cp_heads": _cut(lines, heads), "cp_ring": rings if ring > 1 else _cut(lines, 1)}


def _cut(partition: Partition, size: int) -> Partition:
    """Each group cut into groups of `size` neighbours."""
    return tuple(ranks[i : i + size] for ranks in partition for i in range(0, len(ranks), size))


class _Communicators:
    """Makes process groups: one for each tuple of ranks of `partitions`, whichever of them name it,
    and own ones.
    """

    def __init__(
        self, rank: int, new_group: Callable[..., Any], partitions: Mapping[str, Partition]
    ) -> None:
        self.rank, self.new_group, self.partitions = rank, new_group, partitions
        self.made: dict[tuple[int, ...], Any] = {}
        # by the first group: partitions that have it in common have all
        self.uses: dict[tuple[int, ...], list[str]] = {}
        for name, partition in partitions.items():
            if partition:
                self.uses.setdefault(partition[0], []).append(name)

    def axis(self, name: str) -> Axis:
        """The part of a partition that holds this rank."""
        partition = self.partitions[name]
        for ranks in partition:
            if len(ranks) > 1 and ranks not in self.made:
                uses = " ".join(self.uses[partition[0]])
                self.made[ranks] = self.new_group(ranks, group_desc=uses)
        return self._part(name, partition, self.made)

    def buffer_groups(self, kind: str, axes: dict[str, Axis]) -> BufferGroups:
        """Those of the partitions whose names begin with `kind`, which it takes out of `axes`."""
        gather = f"{kind}shard_gather"
        return BufferGroups(
            replicas=axes.pop(f"{kind}replicas"),
            shard=axes.pop(f"{kind}shard"),
            shard_gather=self.own_axis(gather, self.partitions[f"{kind}shard"], gather),
            replicate=axes.pop(f"{kind}replicate"),
        )

    def own_axis(self, name: str, partition: Partition, use: str) -> Axis:
        """The part of a partition that holds this rank, on a group that no other axis has."""
        made = {
            ranks: self.new_group(ranks, group_desc=use) for ranks in partition if len(ranks) > 1
        }
        return self._part(name, partition, made)

    def _part(self, name: str, partition: Partition, made: Mapping[tuple[int, ...], Any]) -> Axis:
        for ranks in partition:
            if self.rank in ranks:
                return Axis(name, ranks.index(self.rank), ranks, made.get(ranks))
        return ALONE


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
    """What `build_groups` has to know of a resolved configuration beside its layout."""
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
