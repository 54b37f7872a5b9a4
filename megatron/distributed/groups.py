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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from megatron.config.derive import attention_ranks, data_parallel_size, expert_ranks
from megatron.config.groups import Config
from megatron.config.stages import placement_of

ORDER = ("pp", "dp", "cp", "tp")  # slowest first
TP_PP_DP_ORDER = ("dp", "pp", "cp", "tp")  # --use-tp-pp-dp-mapping
Ranks = tuple[int, ...]
# of the names of axes that are no dimensions of the grid themselves
DIMENSIONS = {
    **dict.fromkeys(("replicas", "shard", "shard_gather", "same_shard"), "dp"),
    **dict.fromkeys(("tp_cp", "cp_heads", "cp_ring"), "cp"),
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

    @property
    def sizes(self) -> list[int]:
        """Of the axes in `order`."""
        return [getattr(self, axis) for axis in self.order]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        return dict(zip(self.order, map(int, np.unravel_index(rank, self.sizes))))

    def rank(self, at: dict[str, int]) -> int:
        """The rank at these coordinates."""
        return int(np.ravel_multi_index([at[axis] for axis in self.order], self.sizes))

    def lines(self, axes: tuple[str, ...]) -> np.ndarray:
        """The ranks that differ only in `axes`, ascending: [lines, ranks of each]."""
        inside = [place for place, axis in enumerate(self.order) if axis in axes]
        grid = np.arange(self.world).reshape(self.sizes)
        grid = np.moveaxis(grid, inside, range(-len(inside), 0))
        return grid.reshape(-1, math.prod(grid.shape[-len(inside) :]))


class Partition(NamedTuple):
    """A way to form groups: `size` ranks each, `stride` apart in a line of ranks that differ only
    in `axes`.
    """

    axes: tuple[str, ...]
    size: int
    stride: int = 1

    def groups(self, layout: Layout, rank: int | None = None) -> list[Ranks]:
        """All groups, or only that of one rank."""
        blocks = layout.lines(self.axes).reshape(-1, self.size, self.stride)
        groups = blocks.swapaxes(1, 2).reshape(-1, self.size)
        if rank is not None:
            groups = groups[(groups == rank).any(axis=1)]
        return list(map(tuple, groups.tolist()))


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
        name = self.name.removeprefix("expert_")
        return DIMENSIONS.get(name, name)


ALONE = Axis("alone")
# of Groups, in the order of its fields
NAMES = "world tp cp cp_heads cp_ring dp pp tp_cp etp ep kv tied".split()


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
    step = (to - source) % size
    assert step in (1, size - 1), f"pipeline ranks {source} and {to} (of {size}) are not adjacent"
    link = source if step == 1 else to
    colour = 2 if size % 2 and link == size - 1 else link % 2
    return colour if step == 1 else colour + channel_count(size) // 2


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
    replicas = layout.dp * layout.cp
    shard = shard or replicas
    assert 0 <= rank < layout.world and replicas % shard == 0
    assert cp_heads * cp_ring in (1, layout.cp)

    # tp ranks hold the same key/value head where there are fewer heads than ranks
    share = max(1, layout.tp // (kv_heads or layout.tp))
    partitions = _partitions(layout, share, shard, cp_heads, cp_ring, experts)
    own = rank if own_only else None
    groups = {name: partition.groups(layout, own) for name, partition in partitions.items()}
    if tied and layout.pp > 1:
        groups["tied"] = _ends(groups["pp"], own)
    make = partial(_make_axes, rank, new_group)
    found = make(groups)
    # on separate process groups
    found |= make({"shard_gather": groups["shard"]})
    if experts:
        found |= make({"expert_shard_gather": groups["expert_shard"]})
    channels = tuple(
        make({"channel": groups["pp"]}, f"channel{number}")["channel"]
        for number in range(channel_count(layout.pp))
    )
    return Groups(
        layout=layout,
        rank=rank,
        buffers=_buffers(found, experts),
        channels=channels,
        **{name: found.get(name, ALONE) for name in NAMES},
    )


def _ends(lines: list[Ranks], rank: int | None) -> list[Ranks]:
    """The first and the last rank of each line, or only the pair of one rank."""
    pairs = [(line[0], line[-1]) for line in lines]
    return [pair for pair in pairs if rank is None or rank in pair]


def _make_axes(
    rank: int, new_group: Callable[..., Any], groups: dict[str, list[Ranks]], use: str = ""
) -> dict[str, Axis]:
    """One rank's axes, on new process groups that they share where their ranks are equal."""
    # axes with one group in common have all groups in common
    uses = defaultdict(list)
    for name, found in groups.items():
        for first in found[:1]:
            uses[first].append(name)
    made: dict[Ranks, Any] = {}
    for found in groups.values():
        for ranks in found:
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = new_group(ranks, group_desc=use or " ".join(uses[found[0]]))
    own = {name: ranks for name, found in groups.items() for ranks in found if rank in ranks}
    return {
        name: Axis(name, ranks.index(rank), ranks, made.get(ranks)) for name, ranks in own.items()
    }


def _buffers(axes: dict[str, Axis], experts: bool) -> dict[str, BufferGroups]:
    names = "replicas", "shard", "shard_gather", "same_shard"
    dense = BufferGroups(*(axes[name] for name in names))
    if not experts:
        return {"dense": dense}
    return {
        "dense": dense,
        "expert": BufferGroups(*(axes[f"expert_{name}"] for name in names)),
        "state": BufferGroups(dense.replicas, ALONE, ALONE, dense.replicas),
    }


def _partitions(
    layout: Layout, share: int, shard: int, heads: int, ring: int, experts: bool
) -> dict[str, Partition]:
    """`share` neighbours of tp hold the same key/value head; in attention `heads` neighbours of cp
    exchange heads, and `ring` such groups form rings.
    """
    replicas = layout.dp * layout.cp
    axes = {name: Partition((name,), getattr(layout, name)) for name in ORDER}
    return axes | {
        "world": Partition(ORDER, layout.world),
        "replicas": Partition(("dp", "cp"), replicas),
        "shard": Partition(("dp", "cp"), shard),
        "same_shard": Partition(("dp", "cp"), replicas // shard, stride=shard),
        "kv": Partition(("tp",), share),
        "cp_heads": Partition(("cp",), heads),
        "cp_ring": Partition(("cp",), ring, stride=heads),
        **(_expert_partitions(layout, shard) if experts else {}),
    }


def _expert_partitions(layout: Layout, shard: int) -> dict[str, Partition]:
    """The experts' grid. ZeRO shards an expert's buffer over those of its replicas that are among
    the `shard` neighbours over which it shards other buffers.
    """
    stage = "tp", "cp", "dp"
    ranks = layout.tp * layout.cp * layout.dp
    held = layout.etp * layout.ep  # ranks that hold all experts of a layer
    cut = expert_cut(ranks, held, shard * layout.tp)
    return {
        "tp_cp": Partition(("tp", "cp"), layout.tp * layout.cp),
        "etp": Partition(stage, layout.etp),
        "ep": Partition(stage, layout.ep, stride=layout.etp),
        "expert_replicas": Partition(stage, ranks // held, stride=held),
        "expert_shard": Partition(stage, cut, stride=held),
        "expert_same_shard": Partition(stage, ranks // held // cut, stride=held * cut),
    }


def expert_cut(stage: int, held: int, shard: int) -> int:
    """Number of ranks over which ZeRO shards an expert's buffer, when `held` of the `stage` ranks
    of a pipeline stage hold all experts, and other buffers are sharded over `shard` neighbours.
    """
    count = stage // held
    return math.gcd(count, max(1, shard * count // stage))


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
