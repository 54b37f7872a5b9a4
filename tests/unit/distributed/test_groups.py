"""The rank grid, without processes: new_group only takes notes."""

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


def axis_of(groups: Groups, name: str) -> Axis:
    """An axis of the ranks, or of the buffers that all data-parallel ranks hold."""
    return getattr(groups.dense if hasattr(groups.dense, name) else groups, name)


def groups_of(layout: Layout, rank: int, *options, **more):
    """The groups of a rank, and the calls of new_group that made them."""
    groups, calls = made_groups(layout, rank, *options, **more)
    return groups, [ranks for ranks, _ in calls]


def made_groups(
    layout: Layout,
    rank: int,
    kv_heads: int | None = None,
    tied: bool = False,
    shard: int | None = None,
):
    """The groups of a rank, and (ranks, what for) of each that was made."""
    calls: list[tuple[tuple[int, ...], str]] = []

    def new_group(ranks, group_desc):
        calls.append((ranks, group_desc))
        return len(calls), ranks

    return build_groups(layout, rank, new_group, kv_heads, tied=tied, shard=shard), calls


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
    everyone = [groups_of(layout, rank, kv_heads=2) for rank in range(layout.world)]
    calls = everyone[0][1]
    assert all(other == calls for _, other in everyone), (
        "torch needs the same calls in the same order on every rank"
    )
    assert all(list(ranks) == sorted(ranks) and len(ranks) > 1 for ranks in calls)
    gathers = {axis.ranks for groups, _ in everyone if (axis := groups.dense.shard_gather).size > 1}
    channels = channel_count(layout.pp) * (layout.world // layout.pp)
    assert len(calls) == len(set(calls)) + len(gathers) + channels, (
        "one for each set of ranks, one more for shard_gather and each channel"
    )
    for name in AXES:
        seen = [axis_of(groups, name) for groups, _ in everyone]
        assert sorted(rank for ranks in {axis.ranks for axis in seen} for rank in ranks) == list(
            range(layout.world)
        )
        for rank, axis in enumerate(seen):
            assert (
                axis.name == name and axis.ranks[axis.rank] == rank and axis.size == len(axis.ranks)
            )
            assert (
                axis.group is None
                if axis.size == 1
                else axis.group[1] == axis.ranks == calls[axis.group[0] - 1]
            )
    for groups, _ in everyone:
        assert (
            groups.dense.shard_gather.size == 1
            or groups.dense.shard_gather.group != groups.dense.shard.group
        )


@pytest.mark.parametrize("shard", [None, 2])
@pytest.mark.parametrize(
    "layout", [*LAYOUTS[1:], Layout(pp=2), Layout(dp=8), Layout(cp=2, dp=2)], ids=str
)
def test_a_group_says_all_that_it_is_for(layout, shard):
    """Each group is described by the axes that use it, on all ranks alike."""
    if shard and layout.dp * layout.cp % shard:
        shard = None
    uses: dict[int, set[str]] = {}
    for rank in range(layout.world):
        groups, calls = made_groups(layout, rank, 2, True, shard)
        axes = [*(axis_of(groups, name) for name in AXES), groups.tied]
        for name, axis in [
            *((axis.name, axis) for axis in axes),
            *((f"channel{number}", axis) for number, axis in enumerate(groups.channels)),
        ]:
            if axis.size > 1:
                uses.setdefault(axis.group[0], set()).add(name)
        assert calls == made_groups(layout, 0, 2, True, shard)[1]
    assert [set(text.split()) for _, text in calls] == [uses[i + 1] for i in range(len(calls))]


@pytest.mark.parametrize(
    "tp, heads, share", [(8, 2, 4), (8, 1, 8), (8, 8, 1), (4, 6, 1), (4, None, 1), (1, 1, 1)]
)
def test_kv_joins_the_neighbours_that_hold_one_key_value_head(tp, heads, share):
    layout = Layout(tp=tp, dp=2)
    for rank in range(layout.world):
        kv = groups_of(layout, rank, heads)[0].kv
        start = rank // share * share
        assert kv.ranks == tuple(range(start, start + share))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_no_rank_sends_and_receives_on_one_channel_and_no_two_neighbours_share_one(size):
    line = [groups_of(Layout(tp=2, pp=size), 2 * rank)[0] for rank in range(size)]
    # (rank, channel's communicator) -> what passes through it
    uses: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for source in range(size):
        for to in {(source + 1) % size, (source - 1) % size}:
            channel = line[source].channel(source, to)
            assert (
                channel.group == line[to].channel(source, to).group
                and channel.ranks == line[0].pp.ranks
            )
            uses.setdefault((source, channel.group[0]), set()).add(("to", to))
            uses.setdefault((to, channel.group[0]), set()).add(("from", source))
    assert all(len(use) == 1 for use in uses.values())


def test_the_ends_of_a_pipeline_share_a_tied_matrix():
    for rank in range(12):
        groups, calls = groups_of(Layout(tp=2, pp=3, dp=2), rank, tied=True)
        ends = (rank % 4, rank % 4 + 8)
        assert groups.tied == (
            ALONE if 4 <= rank < 8 else Axis("tied", ends.index(rank), ends, groups.tied.group)
        )
        assert calls == groups_of(Layout(tp=2, pp=3, dp=2), 0, tied=True)[1]
    pair, _ = groups_of(Layout(pp=2), 1, tied=True)
    assert pair.tied.ranks == (0, 1) and pair.tied.group == pair.pp.group
    assert groups_of(Layout(pp=2), 1)[0].tied == ALONE


def test_a_dry_run_of_a_million_ranks_describes_one_rank_alone():
    layout, rank, calls = Layout(tp=8, dp=15625, pp=8), 77, []

    def new_group(ranks, group_desc):
        calls.append((ranks, group_desc))

    begun = time.process_time()
    build_groups(layout, rank, new_group, tied=True, experts=True, own_only=True)
    assert time.process_time() - begun < 5  # all groups take ten times as long
    assert all(rank in ranks for ranks, _ in calls) and len(calls) < 20


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_own_groups_are_those_of_all_groups_that_contain_the_rank(layout):
    for rank in range(layout.world):
        found: list[list[tuple]] = [[], []]
        for own_only, calls in enumerate(found):
            build_groups(
                layout,
                rank,
                lambda ranks, group_desc, calls=calls: calls.append((ranks, group_desc)),
                2,
                tied=True,
                experts=True,
                own_only=bool(own_only),
            )
        every, own = found
        assert own == [(ranks, uses) for ranks, uses in every if rank in ranks]
