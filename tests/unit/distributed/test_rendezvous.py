"""The rendezvous, with a thread for each rank: everybody gets the store, or everybody gets the one
error.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
import traceback
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from megatron.distributed.rendezvous import Launch, LaunchError, meet

FLAGS = {"training": {"lr": 0.1, "seed": 1}, "versions": {"torch": "2.13.0"}}
SECONDS = 1.5  # for those whom a rank leaves waiting
PLENTY = 120.0  # no rank waits that long, even on a busy machine


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def launches(size: int, port: int, **fields) -> list[Launch]:
    return [
        Launch(rank, size, rank, size, "environment", "127.0.0.1", port, "job", **fields)
        for rank in range(size)
    ]


def meet_all(
    ranks: list[Launch],
    *,
    delays: dict[int, float] | None = None,
    seconds: dict[int, float] | None = None,
    flags: dict[int, dict] | None = None,
    wait: float = PLENTY,
) -> list:
    """What `meet` returned or raised for each of `ranks`; the dictionaries are by place in that
    list.
    """
    results: list = [None] * len(ranks)

    def one(index: int) -> None:
        time.sleep((delays or {}).get(index, 0))
        try:
            results[index] = meet(
                ranks[index],
                (seconds or {}).get(index, wait),
                (flags or {}).get(index, FLAGS),
            )
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def the_error(results: list) -> str:
    """The one message that all ranks raised, from code of ours, so that pretrain_gpt.py shows it
    without a traceback.
    """
    for error in results:
        assert isinstance(error, LaunchError), results
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        assert innermost.f_globals["__name__"].startswith("megatron.distributed")
    assert len({str(error) for error in results}) == 1, results
    return str(results[0])


def test_all_meet_however_late(port):
    begun = time.monotonic()
    stores = meet_all(launches(4, port), delays={0: 0.4, 2: 0.2})
    stores[3].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 4
    assert time.monotonic() - begun < PLENTY


def test_missing_ranks_are_named_on_all_others(port):
    begun = time.monotonic()
    ranks = launches(9, port)
    error = the_error(meet_all([ranks[rank] for rank in (0, 1, 2, 6, 8)], wait=SECONDS))
    assert re.match("ranks 3-5, 7 of 9 did not arrive .*; ranks 0-2, 6, 8 did", error)
    assert SECONDS < time.monotonic() - begun < PLENTY


def test_different_flags_are_named_with_both_ranks_and_values(port):
    other = {"training": {"lr": 0.2, "seed": 1}, "versions": {"torch": "2.11.0"}}
    error = the_error(
        meet_all(launches(4, port), flags={2: other, 3: {**other, "model": {"hidden_size": 8}}})
    )
    assert error.startswith(
        "the ranks were started differently: --lr: 0.1 on rank 0, 0.2 on rank 2; versions torch: "
        "2.13.0 on rank 0, 2.11.0 on rank 2; --hidden-size: nothing on rank 0, 8 on rank 3. "
    )


@pytest.mark.parametrize(
    "ranks, message",
    [
        ((0, (1, 2), 2), "disagree on their number: rank 0 has WORLD_SIZE 3, rank 1 has 2"),
        ((0, 1, 1), "rank 1 was started twice"),
    ],
)
def test_ranks_that_were_numbered_incorrectly(port, ranks, message):
    """A rank, or a rank and its WORLD_SIZE."""
    given = [rank if isinstance(rank, tuple) else (rank, 3) for rank in ranks]
    started = [
        dataclasses.replace(launches(3, port)[rank], world_size=size) for rank, size in given
    ]
    assert re.search(message, the_error(meet_all(started)))


def test_no_rank_zero(port):
    errors = [str(error) for error in meet_all(launches(3, port)[1:], wait=SECONDS)]
    for rank, error in enumerate(errors, 1):
        assert error.startswith(f"rank {rank} cannot reach rank 0 at 127.0.0.1:{port}")


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        [error] = meet_all(launches(2, port)[:1])
    assert str(error).startswith(f"rank 0 cannot listen at port {port}")
    assert "address already in use" in str(error).lower()


def test_a_server_that_says_nothing(monkeypatch):
    monkeypatch.setattr("megatron.distributed.rendezvous.ERROR_GRACE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        begun = time.monotonic()
        [error] = meet_all(launches(2, port)[1:], seconds={0: 0.5})
        place = f"127.0.0.1:{port}"
        assert str(error).startswith(f"rank 1: what listens at {place} is not a rendezvous store")
        assert time.monotonic() - begun < PLENTY


class TestTorchrunsStore:
    """The agent's store outlives the processes, so that a second attempt finds what the first one
    left there.
    """

    @pytest.fixture
    def agent(self):
        return TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )

    def test_lines_of_a_failed_attempt_do_not_count(self, agent):
        ranks = launches(3, agent.port, agent_store=True)
        for missing in (1, 2):
            others = [ranks[0], ranks[3 - missing]]
            error = the_error(meet_all(others, wait=SECONDS))
            assert error.startswith(f"rank {missing} of 3 did not arrive")
        assert not any(isinstance(result, Exception) for result in meet_all(ranks, delays={2: 0.5}))

    def test_no_rank_zero(self, agent):
        error = the_error(meet_all(launches(4, agent.port, agent_store=True)[1:3], wait=SECONDS))
        assert error.startswith("ranks 0, 3 of 4 did not arrive") and "; ranks 1-2 did. " in error

    def test_a_store_that_goes_away(self, agent, monkeypatch):
        """The store's host dies while a rank waits there."""

        def broken(*_):
            raise RuntimeError("Connection reset by peer")

        monkeypatch.setattr(PrefixStore, "wait", broken)
        [error] = meet_all(launches(2, agent.port, agent_store=True)[1:], wait=SECONDS)
        assert str(error).startswith("rank 1: lost the connection to torchrun's store")
