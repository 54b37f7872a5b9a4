"""What ranks report of themselves, and what is made of it."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed import HashStore

from megatron.distributed import collectives, peers
from megatron.distributed.groups import Axis
from megatron.distributed.peers import PEERS, PeerError, Peers, waiting


@pytest.fixture
def three(monkeypatch) -> list[Peers]:
    """Ranks that share a store and report when they are asked to."""
    monkeypatch.setattr(peers, "OBSERVE_S", 0.05)
    store, ranks = HashStore(), [Peers(rank=rank, world=3, holder="rank 0") for rank in range(3)]
    for each in ranks:
        each.store = store
        each.report()
    return ranks


def test_rank_0_warns_once_of_a_silent_rank(three, log_lines):
    first, second, _ = three
    seen = {}
    for seconds in (0, 0, 31, 31, 31):
        seen = {rank: (report, since - seconds) for rank, (report, since) in seen.items()}
        second.iteration = 7
        second.report()
        first._warn(seen)
    (line,) = log_lines
    assert "rank 2 (process" in line and "rank 1" not in line
    assert "is silent; its last report, 0 s ago: before the first iteration, computing" in line


def test_a_rank_that_ended_is_named_with_its_error(three):
    first, second, _ = three
    second.iteration = 4
    second.end("ZeroDivisionError: division by zero")
    assert "rank 1 (process" in first.find(0.0) and first.find(0.0).endswith(
        "ended 0 s ago: ZeroDivisionError: division by zero"
    )


def test_ranks_that_wait_are_not_blamed(three, monkeypatch):
    """No rank is silent, one has not come to the operation: that one is named, and not those that
    ended since they waited.
    """
    first, second, third = three
    second.waits.append(
        (lambda seconds: f"waited {seconds:.0f} s in an all-reduce", time.monotonic())
    )
    second.end("rank 1 waited 5 s in an all-reduce")
    third.iteration = 3
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (third.report(), real(seconds)))
    found = first.find(60.0)
    assert found.startswith("rank 2 (process") and found.endswith(
        "lives and does not wait for others: in iteration 3, computing"
    )


def test_an_error_of_the_device_is_blamed_on_nobody():
    """CUDA reports that of a kernel at a later call, which may be one that waits for others."""
    with pytest.raises(torch.AcceleratorError), waiting(lambda seconds: "rank 0 waited"):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_memory_that_runs_out_is_blamed_on_nobody():
    """A real allocation that fails while others are waited for; the control is another error."""
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised,
        waiting(lambda seconds: "rank 0 waited"),
    ):
        torch.empty(1 << 46)
    assert not isinstance(raised.value, PeerError)
    with pytest.raises(PeerError), waiting(lambda seconds: "rank 0 waited"):
        torch.empty(2).view(3)


def test_a_rank_waits_while_it_exchanges_messages(monkeypatch):
    waits = []
    for name in ("all_gather_object", "broadcast_object_list"):
        exchange = lambda *_, **__: waits.append(len(PEERS.waits))
        monkeypatch.setattr(collectives.dist, name, exchange)
    two = Axis("world", 0, (0, 1))
    collectives.gather_objects("text", two)
    collectives.broadcast_object("text", two)
    assert waits == [1, 1]
