"""The first message between two ranks of a communicator blocks the hosts of both until each has
posted it, as over NCCL: no schedule hangs once all links are connected.
"""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.pool import RankError

from megatron.distributed import collectives
from megatron.distributed.collectives import Gloo, connect_channels
from megatron.distributed.groups import Axis, Layout
from megatron.distributed.setup import make_groups
from megatron.parallel.messages import StageMessages
from megatron.parallel.schedule import (
    Schedule,
    acknowledgements,
    build_schedule,
    message_made,
    message_needed,
)

CPU = torch.device("cpu")


class Connecting(Gloo):
    """Gloo, whose ranks meet in the store at their first message."""

    def __init__(self, run: str, seconds: float):
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(run, store)
        self.patience = timedelta(seconds=seconds)
        self.links: set[tuple[int, int]] = set()

    def isend(self, x, to, axis, tag):
        self._meet(axis.rank, to, axis)
        return super().isend(x, to, axis, tag)

    def irecv(self, x, source, axis, tag):
        self._meet(source, axis.rank, axis)
        return super().irecv(x, source, axis, tag)

    def _meet(self, source: int, to: int, axis: Axis) -> None:
        if (source, to) not in self.links:
            link = f"{axis.group.group_desc}: {source} to {to}"
            self.store.set(f"{link}, {axis.rank}", "here")
            self.store.wait([f"{link}, {source + to - axis.rank}"], self.patience)
            self.links.add((source, to))


def send_all(schedule: Schedule, is_connected: bool, run: str) -> None:
    """The messages of a rank, without computations."""
    groups = make_groups(Layout(pp=schedule.ranks))
    rank, placement = groups.pp.rank, schedule.placement
    backend = Connecting(run, 60 if is_connected else 1)
    with mock.patch.object(collectives, "GLOO", backend):
        if is_connected:
            connect_channels(groups, CPU)
            around = {(rank + step) % schedule.ranks for step in (1, -1)}
            assert backend.links == {link for x in around for link in ((rank, x), (x, rank))}
        messages = StageMessages(placement, groups, (1, 1, 1), torch.float32, CPU)
        messages.acknowledgements = acknowledgements(schedule, rank)
        for task, posted in zip(schedule.tasks(rank), schedule.receives[rank], strict=True):
            for message in posted:
                messages.receive(message)
            for action in task:
                if (needed := message_needed(action, placement)) is not None:
                    messages.wait_for(needed, action)
            for action in task:
                if (made := message_made(action, placement)) is not None:
                    messages.put(made, torch.ones(1, 1, 1))
                    messages.send(made)
        messages.finish()


@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "micro_batches"),
    [
        ("1f1b", 2, 1, 1),
        ("1f1b", 4, 1, 2),
        ("gpipe", 3, 1, 4),
        ("interleaved", 2, 2, 1),
        ("interleaved", 3, 2, 3),
        ("zero-bubble", 4, 1, 1),
        ("zero-bubble-v", 3, 2, 1),
    ],
)
def test_no_schedule_hangs_once_all_links_are_connected(
    gloo_world, tmp_path, name, ranks, virtual, micro_batches
):
    schedule = build_schedule(name, ranks, virtual, micro_batches)
    gloo_world(ranks).run(send_all, schedule, True, str(tmp_path))


def test_a_receive_that_is_posted_early_hangs_where_they_are_not(gloo_world, tmp_path):
    with pytest.raises(RankError, match="send the gradient of micro-batch 0"):
        gloo_world(2).run(send_all, build_schedule("1f1b", 2, 1, 1), False, str(tmp_path))
