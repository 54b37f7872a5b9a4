"""What benchmarks/pipeline.py runs on each rank, with a tiny model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.benchmarks.peers.pipeline_rank import TINY, Job, against_torch

from megatron.distributed.groups import Layout
from megatron.distributed.setup import make_groups


def halves(name: str) -> list[int]:
    groups = make_groups(Layout(pp=dist.get_world_size()))
    return Job(name, groups, TINY).halves(groups.pp.rank, lambda: 0)


def one_step_of_each(name: str) -> list[dict]:
    groups = make_groups(Layout(pp=dist.get_world_size()))
    return against_torch(groups, name, 4, TINY, steps=1, pairs=1)["rounds"]


def test_a_stage_runs_outside_of_a_schedule(gloo_world):
    assert gloo_world(2).run(halves, "1f1b") == [[0] * 4] * 2


@pytest.mark.parametrize("name", ["zero-bubble", "zero-bubble-v"])
def test_torch_splits_its_backward_passes(gloo_world, name):
    """After ours have run: TorchPipeline asserts it, and that the gradients are equal."""
    for rounds in gloo_world(2).run(one_step_of_each, name):
        assert rounds[0].keys() == {"ours", "torch"}
