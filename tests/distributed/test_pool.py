"""The persistent Gloo worlds themselves."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool  # noqa: I001  # tests/distributed, not torch's
from distributed.pool import Hang, RankError, World


def add_ranks(n):
    x = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(x)
    return os.getpid(), dist.get_rank(), torch.get_num_threads(), x


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"only rank {rank} knows this")
    dist.barrier()


def wait_without(rank):
    if dist.get_rank() != rank:
        dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(60)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def world():
    """Two ranks of this test alone."""
    made = World(2)
    yield made
    made.close()


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


def test_a_hang_ends_with_the_stacks_and_the_world_is_restarted(world):
    before = [pid for pid, *_ in world.run(add_ranks, 1)]
    message = r"ranks \[1\] of 2 had not ended after 1 s\n(.|\n)*in wait_without"
    with pytest.raises(Hang, match=message):
        world.run(wait_without, 0, timeout=1)
    after = [pid for pid, *_ in world.run(add_ranks, 1)]
    assert not set(before) & set(after) and not any(map(is_alive, before))
    world.close()
    assert not any(map(is_alive, after))


def test_a_dead_rank_is_named(world, short_grace):
    with pytest.raises(RankError, match="rank 1 of 2:\nthe process ended with exit code 7"):
        world.run(die_on, 1)
    assert not world.processes
