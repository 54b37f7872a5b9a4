"""What a stage holds while the executor runs, counted and in bytes, against the schedule's own
bounds; and the table that users are shown.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from megatron.benchmarks.peers.pipeline_rank import TINY, VIRTUAL, Job
from megatron.tools._plan.schedule_check import check
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.distributed.groups import Layout
from megatron.distributed.setup import make_groups
from megatron.model.layer import Layer
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.schedule import Kind, build_schedule, forward_only


class Counted(LayerRunner):
    """Watches the inputs of each stage's first layer, and what its backward pass leaves of it,
    until their memory is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[StorageWeakRef] = []
        self.stash: list[StorageWeakRef] = []
        self.peak: Counter[str] = Counter()
        self.firsts: set[Layer] = set()

    def look(self) -> None:
        self.inputs, self.stash = (
            [ref for ref in refs if not ref.expired()] for refs in (self.inputs, self.stash)
        )
        self.peak |= {
            "saved": len(self.inputs),
            "stashed": len(self.stash),
            "in flight": len(self.inputs) + len(self.stash),
        }

    def forward(self, layer, x, micro, scalars):
        result = super().forward(layer, x, micro, scalars)
        if layer in self.firsts:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
        self.look()
        return result

    def backward(self, kind, layer, dy, saved, aux_scale=0.0):
        # what the computation before has left; this one's input is still held by its caller
        self.look()
        dx, kept = super().backward(kind, layer, dy, saved, aux_scale)
        if kind is Kind.BACKWARD_INPUT and layer in self.firsts:
            # of the layer's first product: the output of a norm
            self.stash.append(StorageWeakRef(kept[-1].x.untyped_storage()))
        return dx, kept


def count_live(names: list[str], micro_batches: list[int]) -> list[dict[str, dict[str, int]]]:
    groups = make_groups(Layout(pp=dist.get_world_size()))
    found = []
    for name in names:
        counted = Counted()
        job = Job(name, groups, TINY, counted)
        counted.firsts = {
            next(layer for _, layer in chunk if layer.splits_backward)
            for chunk in job.model.layers_by_stage
        }
        for count in micro_batches:
            row = {}
            for kind in ("training", "evaluation"):
                training = kind == "training"
                counted.peak.clear()
                schedule = (
                    build_schedule(name, groups.pp.size, job.virtual, count)
                    if training
                    else forward_only(job.placement, count)
                )
                with torch.set_grad_enabled(training):
                    job.step(schedule)
                row[kind] = dict(counted.peak)
            counted.look()
            assert not counted.inputs and not counted.stash
            found.append(row)
    return found


NAMES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]


def test_stage_inputs_alive_are_those_of_the_schedule(gloo_world):
    """The executor holds each pair of stage and micro-batch exactly as long as the list does."""
    ranks, counts = 4, [2, 9]
    ranked = gloo_world(ranks).run(count_live, NAMES, counts)
    for index, (name, count) in enumerate((name, count) for name in NAMES for count in counts):
        bounds = check(build_schedule(name, ranks, VIRTUAL.get(name, 1), count))
        for rank in range(ranks):
            where, (training, evaluation) = (name, count, rank), ranked[rank][index].values()
            assert training["saved"] == bounds.saved[rank], where
            assert training.get("stashed", 0) == bounds.deferred[rank], where
            assert training["in flight"] == bounds.in_flight[rank], where
            assert evaluation.get("saved", 0) <= 1 + (name == "zero-bubble-v"), where
