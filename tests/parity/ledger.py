"""What a rank sends: every call of torch.distributed, by its arguments, with the collective and the
pass that it belongs to.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.benchmarks.loopback import own_loopback, sent_bytes  # noqa: F401
from parity.worker import run_case
from torch.distributed import distributed_c10d
from unit.zero.tracker import frames

from megatron.distributed.collectives import ALL_GATHER, REDUCE_SCATTER
from megatron.model.layer import TransformerLayer
from megatron.parallel.layer_runner import LayerRunner

# Functions of distributed/collectives.py that send and receive, and what they are.
KINDS = {
    "start_send": "message",
    "start_all_reduce": "all-reduce",
    "start_all_gather": "all-gather",
    "gather_parts": "all-gather",
    "start_all_to_all_rows": "all-to-all",
    "start_ring_hop": "hop",
    "_GlooReduceScatter": "reduce-scatter",
}


@dataclass(frozen=True)
class Call:
    """One call. `bytes`: those that this rank sends by the textbook: of a message its size, of a
    ring all-reduce 2 (N-1)/N of the tensor.
    """

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, hop, message
    ranks: tuple[int, ...]
    bytes: float
    phase: str  # forward, backward: of a layer; else elsewhere
    caller: str  # qualified name of the function of ours that asked
    to: int | None = None  # of what is sent to one rank
    tag: int = 0


def _who() -> tuple[str, str]:
    """(kind of the call in distributed/collectives.py, the function that called it)."""
    kind = None
    for frame in frames():
        name = frame.f_code.co_qualname
        if Path(frame.f_code.co_filename).name == "collectives.py":
            kind = KINDS.get(name.split(".")[0], kind)
        elif kind is not None:
            return kind, name.removesuffix(".<locals>.<listcomp>")
    raise AssertionError("torch.distributed was not called through distributed/collectives.py")


class Ledger:
    """All calls while it is open."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.phase = "elsewhere"

    def _note(
        self, tensor: Any, group: Any, share: float, to: int | None = None, tag: int = 0
    ) -> None:
        kind, caller = _who()
        ranks = tuple(dist.get_process_group_ranks(group))
        size = share * tensor.numel() * tensor.element_size()
        self.calls.append(Call(kind, ranks, size, self.phase, caller, to, tag))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase, before = phase, self.phase
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def open(self) -> Iterator[Ledger]:
        isend, all_reduce = dist.isend, dist.all_reduce
        forward, backward = TransformerLayer.forward, LayerRunner.backward
        differentiate = torch.autograd.backward
        layer: Any = None  # whose backward pass runs

        def noted_isend(tensor, dst=None, group=None, tag=0, **kwargs):
            self._note(tensor, group, 1.0, dst, tag)
            return isend(tensor, dst, group, tag, **kwargs)

        def noted_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            size = dist.get_world_size(group)
            self._note(tensor, group, 2 * (size - 1) / size)
            return all_reduce(tensor, op, group, async_op)

        def refused(*args, **kwargs):
            raise AssertionError("a collective that sends more on Gloo than it needs to")

        def layer_forward(layer, *args):
            with self.during("forward"):
                return forward(layer, *args)

        def layer_backward(runner, kind, of, *args):
            nonlocal layer
            layer = of
            return backward(runner, kind, of, *args)

        def autograd_backward(*args, **kwargs):
            with self.during("backward" if isinstance(layer, TransformerLayer) else self.phase):
                return differentiate(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            for module in (dist, distributed_c10d):  # P2POp compares with the second
                stack.enter_context(mock.patch.object(module, "isend", noted_isend))
            stack.enter_context(mock.patch.object(dist, "all_reduce", noted_all_reduce))
            others = "all_gather reduce_scatter all_to_all all_to_all_single broadcast reduce send"
            for name in (ALL_GATHER, REDUCE_SCATTER, *others.split()):
                stack.enter_context(mock.patch.object(dist, name, refused))
            stack.enter_context(mock.patch.object(TransformerLayer, "forward", layer_forward))
            stack.enter_context(mock.patch.object(LayerRunner, "backward", layer_backward))
            stack.enter_context(mock.patch.object(torch.autograd, "backward", autograd_backward))
            yield self


def count(flags: tuple[str, ...]) -> list[Call]:
    """The calls of a whole run on this rank."""
    with Ledger().open() as ledger:
        run_case(flags)
    return ledger.calls


def measure(flags: tuple[str, ...]) -> tuple[float, int]:
    """(bytes that the calls of all ranks send by their arguments, bytes that went over the loopback
    interface during it).
    """
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    sent = sum(call.bytes for call in count(flags))
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.barrier()
    after = sent_bytes()
    dist.barrier()
    dist.all_gather_object(everyone, sent)
    return sum(everyone), after - before


def main(cases: list[list[str]]) -> None:
    """Print the results of `measure` for each case: the quietest of five runs, on a fresh pair of
    processes.
    """
    from distributed.pool import World

    world = World(2)
    for flags in cases:
        runs: list[tuple[float, int]] = []
        while len(runs) < 5 and not any(seen <= 1.05 * counted for counted, seen in runs):
            runs.append(world.run(measure, tuple(flags))[0])
        print(json.dumps(min(runs, key=lambda run: run[1] / run[0])))
    world.close()


if __name__ == "__main__":
    import parity.ledger  # under the name by which the ranks find its functions

    parity.ledger.main(json.loads(sys.argv[1]))
