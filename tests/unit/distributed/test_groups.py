"""The rank grid and the experts' grid over the ranks of a stage, without processes: new_group only
takes notes.
"""

from __future__ import annotations

import time

import pytest

from megatron.distributed.groups import (
    ALONE,
    TP_PP_DP_ORDER,
    Axis,
    Groups,
    Layout,
    build_groups,
    channel_count,
)

AXES = ("world", "tp", "cp", "dp", "pp", "replicas", "shard", "shard_gather", "same_shard", "kv")
LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(2, 2, 2, 2),
    Layout(2, 1, 3, 2),
    Layout(2, 3, 2, 2, TP_PP_DP_ORDER),
    Layout(8, 1, 1, 2),
    Layout(1, 2, 3, 1),
]
Calls = list[tuple[tuple[int, ...], str]]  # (ranks, what for) of each group that is made


def axis_of(groups: Groups, name: str) -> Axis:
    """An axis of the ranks, or of the buffers that all data-parallel ranks hold."""
    return getattr(groups.dense if hasattr(groups.dense, name) else groups, name)


def groups_of(layout: Layout, rank: int, **options) -> tuple[Groups, Calls]:
    """The groups of a rank, and the calls of new_group that made them."""
    calls: Calls = []

    def new_group(ranks, group_desc):
        calls.append((ranks, group_desc))
        return len(calls), ranks

    return build_groups(layout, rank, new_group, **options), calls


def of_all_ranks(layout: Layout, **options) -> tuple[list[Groups], Calls]:
    """The groups of every rank; all make the same ones in the same order, as torch needs it."""
    found = [groups_of(layout, rank, **options) for rank in range(layout.world)]
    assert all(calls == found[0][1] for _, calls in found)
    return [groups for groups, _ in found], found[0][1]


SIXTEEN = [
    (Layout(2, 2, 2, 2), 0, "0 1 | 0 2 | 0 4 | 0 8 | 0 2 4 6"),
    (Layout(2, 2, 2, 2), 13, "12 13 | 13 15 | 9 13 | 5 13 | 9 11 13 15"),
    # pipelines inside data-parallel copies
    (Layout(2, 2, 2, 2, TP_PP_DP_ORDER), 0, "0 1 | 0 2 | 0 8 | 0 4 | 0 2 8 10"),
]


@pytest.mark.parametrize("layout, rank, ranks", SIXTEEN, ids=str)
def test_the_example_of_sixteen_ranks(layout, rank, ranks):
    groups, _ = groups_of(layout, rank)
    axes = [axis_of(groups, name) for name in ("tp", "cp", "dp", "pp", "replicas")]
    assert " | ".join(" ".join(map(str, axis.ranks)) for axis in axes) == ranks
    assert all(axis.ranks[axis.rank] == rank for axis in axes)
    assert groups.world.ranks == tuple(range(16))
    assert groups.dense.shard.ranks == groups.dense.replicas.ranks
    assert groups.kv.ranks == groups.dense.same_shard.ranks == (rank,)
    if rank == 13:
        assert groups.describe() == "tp2 cp2 pp2 dp2 | rank 13 = pp1 dp1 cp0 tp1"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_is_in_one_group_of_each_axis_and_all_see_the_same(layout):
    everyone, made = of_all_ranks(layout, kv_heads=2)
    calls = [ranks for ranks, _ in made]
    assert all(list(ranks) == sorted(ranks) and len(ranks) > 1 for ranks in calls)
    gathers = {axis.ranks for groups in everyone if (axis := groups.dense.shard_gather).size > 1}
    channels = channel_count(layout.pp) * (layout.world // layout.pp)
    assert len(calls) == len(set(calls)) + len(gathers) + channels, (
        "one for each set of ranks, one more for shard_gather and each channel"
    )
    for name in AXES:
        seen = [axis_of(groups, name) for groups in everyone]
        members = [rank for ranks in {axis.ranks for axis in seen} for rank in ranks]
        assert sorted(members) == list(range(layout.world))
        for rank, axis in enumerate(seen):
            assert axis.name == name and axis.ranks[axis.rank] == rank
            if axis.size == 1:
                assert axis.group is None
            else:
                assert axis.group[1] == axis.ranks == calls[axis.group[0] - 1]
    for groups in everyone:
        gather, shard = groups.dense.shard_gather, groups.dense.shard
        assert gather.size == 1 or gather.group != shard.group


@pytest.mark.parametrize("shard", [None, 2])
@pytest.mark.parametrize(
    "layout", [*LAYOUTS[1:], Layout(pp=2), Layout(dp=8), Layout(cp=2, dp=2)], ids=str
)
def test_a_group_says_all_that_it_is_for(layout, shard):
    """Each group is described by the axes that use it, on all ranks alike."""
    if shard and layout.dp * layout.cp % shard:
        shard = None
    everyone, calls = of_all_ranks(layout, kv_heads=2, tied=True, shard=shard)
    uses: dict[int, set[str]] = {}
    for groups in everyone:
        axes = {name: axis_of(groups, name) for name in (*AXES, "tied")}
        axes |= {f"channel{number}": axis for number, axis in enumerate(groups.channels)}
        for name, axis in axes.items():
            if axis.size > 1:
                uses.setdefault(axis.group[0], set()).add(name)
    assert [set(text.split()) for _, text in calls] == [uses[i + 1] for i in range(len(calls))]


@pytest.mark.parametrize(
    "tp, heads, share", [(8, 2, 4), (8, 1, 8), (8, 8, 1), (4, 6, 1), (4, None, 1), (1, 1, 1)]
)
def test_kv_joins_the_neighbours_that_hold_one_key_value_head(tp, heads, share):
    for rank, groups in enumerate(of_all_ranks(Layout(tp=tp, dp=2), kv_heads=heads)[0]):
        start = rank // share * share
        assert groups.kv.ranks == tuple(range(start, start + share))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_no_rank_sends_and_receives_on_one_channel_and_no_two_neighbours_share_one(size):
    line = of_all_ranks(Layout(tp=2, pp=size))[0][::2]
    # (rank, channel's communicator) -> what passes through it
    uses: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for source in range(size):
        for to in {(source + 1) % size, (source - 1) % size}:
            channel = line[source].channel(source, to)
            assert channel.group == line[to].channel(source, to).group
            assert channel.ranks == line[0].pp.ranks
            uses.setdefault((source, channel.group[0]), set()).add(("to", to))
            uses.setdefault((to, channel.group[0]), set()).add(("from", source))
    assert all(len(use) == 1 for use in uses.values())


def test_the_ends_of_a_pipeline_share_a_tied_matrix():
    for rank, groups in enumerate(of_all_ranks(Layout(tp=2, pp=3, dp=2), tied=True)[0]):
        ends = (rank % 4, rank % 4 + 8)
        assert groups.tied.ranks == ((0,) if 4 <= rank < 8 else ends)
        if groups.tied.size > 1:
            assert groups.tied.ranks[groups.tied.rank] == rank
    pair, _ = groups_of(Layout(pp=2), 1, tied=True)
    assert pair.tied.ranks == (0, 1) and pair.tied.group == pair.pp.group
    assert groups_of(Layout(pp=2), 1)[0].tied == ALONE


def test_a_dry_run_of_a_million_ranks_describes_one_rank_alone():
    layout, rank = Layout(tp=8, dp=15625, pp=8), 77
    begun = time.process_time()
    _, calls = groups_of(layout, rank, tied=True, experts=True, own_only=True)
    assert time.process_time() - begun < 5  # all groups take ten times as long
    assert all(rank in ranks for ranks, _ in calls) and len(calls) < 20


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_own_groups_are_those_of_all_groups_that_contain_the_rank(layout):
    for rank in range(layout.world):
        every, own = (
            groups_of(layout, rank, kv_heads=2, tied=True, experts=True, own_only=own_only)[1]
            for own_only in (False, True)
        )
        assert own == [(ranks, uses) for ranks, uses in every if rank in ranks]


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, shard",
    [
        (Layout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1), None),
        (Layout(tp=2, dp=4, ep=2, etp=2), 2),
        (Layout(dp=8, ep=2), 4),
        (Layout(tp=2, cp=2, dp=2, pp=2, order=TP_PP_DP_ORDER, ep=2, etp=1), None),
    ],
    ids=str,
)
def test_the_experts_grid_covers_the_ranks_of_a_stage(layout, shard):
    groups, _ = of_all_ranks(layout, shard=shard, experts=True)
    for own in groups:
        experts = own.buffers["expert"]
        stage = {rank for rank, other in enumerate(groups) if other.pp.rank == own.pp.rank}
        held = layout.ep * layout.etp
        assert (own.ep.size, own.etp.size) == (layout.ep, layout.etp)
        assert experts.replicas.size == len(stage) // held
        for axis in (own.ep, own.etp, experts.replicas, own.tp_cp):
            assert axis.ranks[axis.rank] == own.rank
            assert set(axis.ranks) <= stage
        # the ranks of ep hold the same part of other experts, those of edp the same of the same
        for rank in experts.replicas.ranks:
            other = groups[rank]
            assert (other.ep.rank, other.etp.rank) == (own.ep.rank, own.etp.rank)
        for rank in own.ep.ranks:
            assert groups[rank].etp.rank == own.etp.rank
            assert groups[rank].buffers["expert"].replicas.rank == experts.replicas.rank
        assert experts.shard.size * experts.same_shard.size == experts.replicas.size
        assert set(experts.shard.ranks) <= set(experts.replicas.ranks)
        assert experts.shard_gather.ranks == experts.shard.ranks
        assert own.tp_cp.size == layout.tp * layout.cp
        # state of layers is not sharded
        assert own.buffers["state"].shard.size == 1
        assert own.buffers["state"].replicas.ranks == own.dense.replicas.ranks


def test_hybrid_shards_of_experts_lie_within_the_same_neighbours():
    """ZeRO cuts over 2 dp ranks, which are 4 ranks with tp: they hold 2 copies of each expert."""
    groups, _ = groups_of(Layout(tp=2, dp=4, ep=2, etp=1), 0, shard=2, experts=True)
    assert groups.buffers["expert"].shard.ranks == (0, 2)
    assert groups.buffers["expert"].same_shard.ranks == (0, 4)
