"""What the network carries: between pairs of nodes, each on its own connection, so that a node
is blamed and not a group; and within every group of every axis of the layout.

Called from tools/_preflight/meeting.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.tools._preflight.probes import LOADS, synchronize
from torch import Tensor
from torch.distributed import PrefixStore, Store

from megatron.distributed.collectives import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_ring_hop,
)
from megatron.distributed.groups import Axis, Groups

REPEATS = 3  # of which the fastest counts
ROUNDS = 8  # most other nodes that a node is paired with
AXES = ("tp", "cp", "dp")  # whose ranks add up and gather; those of pp send to their neighbours


class Speed(NamedTuple):
    """GB/s of one operation in one group of an axis, as one of its ranks has measured it."""

    axis: str
    operation: str
    size: int  # bytes
    ranks: tuple[int, ...]
    speed: float


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every node has another partner: all of them by the circle method, or the
    first ROUNDS. One node sits each round out where their number is odd.
    """
    seats = list(range(nodes + nodes % 2))  # the last seat of an odd number stays empty
    rounds = []
    for _ in range(min(len(seats) - 1, ROUNDS) if nodes > 1 else 0):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def partner_of(rank: int, nodes: Sequence[Sequence[int]], number: int) -> tuple[int, int] | None:
    """(the rank that this one is paired with in a round, the number of its node) or None. The i-th
    ranks of two nodes are a pair.
    """
    mine = next(i for i, ranks in enumerate(nodes) if rank in ranks)
    for pair in pairings(len(nodes))[number]:
        if mine in pair:
            other = pair[0] + pair[1] - mine
            place = nodes[mine].index(rank)
            return (nodes[other][place], other) if place < len(nodes[other]) else None
    return None


def pair_speed(
    rank: int,
    partner: int,
    store: Store,
    backend: str,
    device: torch.device,
    seconds: float,
) -> float:
    """GB/s that two ranks exchange, first one way, then the other, on a process group of their own.
    Raises RuntimeError after the time limit.
    """
    timeout = timedelta(seconds=seconds)
    mine = int(rank > partner)
    own = PrefixStore(f"{min(rank, partner)}-{max(rank, partner)}", store)
    group: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(own, mine, 2, options)
    else:
        group = dist.ProcessGroupGloo(own, mine, 2, timeout)
        device = torch.device("cpu")
    x = torch.ones(max(LOADS[device.type].messages), dtype=torch.uint8, device=device)

    def exchange(part: Tensor) -> None:
        for turn in (0, 1):
            work = (group.send if turn == mine else group.recv)([part], 1 - mine, 0)
            work.wait(timeout)

    # before the clock starts the partner is there
    return 2 * x.numel() / 1e9 / _fastest(lambda: exchange(x), lambda: exchange(x[:1]), device)


class AxisLinks:
    """Measures every axis; `doing` names the current one."""

    def __init__(self) -> None:
        self.doing = "making the process groups of the layout"
        self.found: list[Speed] = []

    def run(self, make_groups: Callable[[], Groups], device: torch.device) -> None:
        """All axes of this rank's groups. Raises RuntimeError where others do not answer."""
        groups = make_groups()
        for name in (*AXES, "pp"):
            axis: Axis = getattr(groups, name)
            if axis.size == 1:
                continue
            for size in LOADS[device.type].messages:
                self._measure(axis, size, device)

    def _measure(self, axis: Axis, size: int, device: torch.device) -> None:
        count = max(1, size // 4 // axis.size)
        whole = torch.ones(count * axis.size, device=device)
        part = whole[:count].clone()
        few = torch.ones(axis.size, device=device)
        share = (axis.size - 1) / axis.size
        # bytes that each rank has to send, over the bytes of the whole tensor
        kinds: dict[str, tuple[float, Callable[[], Any]]] = {
            "all-reduce": (2 * share, lambda: start_all_reduce(whole, axis).wait()),
            "all-gather": (share, lambda: start_all_gather(part, axis).wait()),
            "reduce-scatter": (share, lambda: start_reduce_scatter(whole, axis).wait()),
        }
        if axis.name == "pp":
            kinds = {"send/recv": (1.0, lambda: start_ring_hop(whole, axis).wait())}
        for operation, (sent, part_of) in kinds.items():
            self.doing = f"{operation} of {size} bytes over {axis.name}"
            taken = _fastest(part_of, lambda: start_all_reduce(few, axis).wait(), device)
            speed = sent * whole.numel() * 4 / 1e9 / taken
            self.found.append(Speed(axis.name, operation, size, axis.ranks, speed))


def _fastest(part: Callable[[], Any], meet: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of several repetitions, each begun when all have met; one more comes
    first, which opens connections.
    """
    taken = []
    for _ in range(1 + REPEATS):
        meet()
        synchronize(device)
        begun = time.perf_counter()
        part()
        synchronize(device)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])
