"""The persistent Gloo worlds themselves."""

import os

import pytest
import torch
import torch.distributed as dist
from distributed import pool  # noqa: I001  # tests/distributed, not torch's
from distributed.pool import RankError


def add_ranks(n):
    x = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(x)
    return os.getpid(), dist.get_rank(), torch.get_num_threads(), x


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"only rank {rank} knows this")
    dist.barrier()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have not failed get one second to report."""
    monkeypatch.setattr(pool, "GRACE", 1.0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_results_come_by_rank_and_worlds_stay_alive(gloo_world, size):
    results = gloo_world(size).run(add_ranks, 3)
    pids = [pid for pid, *_ in results]
    assert len(set(pids)) == size and os.getpid() not in pids
    for rank, (_, its_rank, threads, x) in enumerate(results):
        assert its_rank == rank and threads == 1 and x.tolist() == [size * (size - 1) / 2] * 3
    for _ in range(10):
        assert [pid for pid, *_ in gloo_world(size).run(add_ranks, 1)] == pids


def test_an_exception_is_shown_with_its_rank_and_the_world_lives_on(gloo_world, short_grace):
    with pytest.raises(RankError) as failure:
        gloo_world(2).run(fail_on, 1)
    text = str(failure.value)
    assert "rank 1 of 2:" in text and "rank 0 of 2:" not in text
    assert "in fail_on" in text and "ValueError: only rank 1 knows this" in text
    assert "ranks [0] had not ended" in text
    assert [rank for _, rank, *_ in gloo_world(2).run(add_ranks, 1)] == [0, 1]
