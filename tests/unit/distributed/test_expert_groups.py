"""The experts' grid over the ranks of a stage, without processes."""

from __future__ import annotations

import pytest

from megatron.distributed.groups import TP_PP_DP_ORDER, Groups, Layout, build_groups

LAYOUTS = [
    (Layout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1), None),
    (Layout(tp=2, dp=4, ep=2, etp=2), 2),
    (Layout(dp=8, ep=2), 4),
    (Layout(tp=2, cp=2, dp=2, pp=2, order=TP_PP_DP_ORDER, ep=2, etp=1), None),
]


def all_groups(layout: Layout, shard: int | None) -> list[Groups]:
    """Those of every rank; all make the same communicators in the same order."""
    found, calls = [], []
    for rank in range(layout.world):
        made: list[tuple[tuple[int, ...], str]] = []

        def new_group(ranks, group_desc, made=made):
            made.append((ranks, group_desc))
            return ranks

        found.append(build_groups(layout, rank, new_group, shard=shard, experts=True))
        calls.append(made)
    assert all(each == calls[0] for each in calls)
    return found


@pytest.mark.parametrize("layout, shard", LAYOUTS, ids=str)
def test_the_grid_covers_the_ranks_of_a_stage(layout, shard):
    groups = all_groups(layout, shard)
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


def test_hybrid_shards_lie_within_the_same_neighbours():
    groups = all_groups(Layout(tp=2, dp=4, ep=2, etp=1), 2)
    # ZeRO cuts over 2 dp ranks, which are 4 ranks with tp: they hold 2 copies of each expert
    assert groups[0].buffers["expert"].shard.ranks == (0, 2)
    assert groups[0].buffers["expert"].same_shard.ranks == (0, 4)


def test_the_state_is_cut_by_nobody():
    (first, *_) = all_groups(Layout(tp=2, dp=2, ep=2), None)
    assert first.buffers["state"].shard.size == 1
    assert first.buffers["state"].replicas.ranks == first.dense.replicas.ranks
