"""Blocks that are stepped on the host train the same bits, at every stage; a checkpoint and a log
line see them stepped.
"""

from __future__ import annotations

import pytest
import torch
from parity.layouts import BASE
from parity.worker import run_case

from megatron.parallel.blocks import on_host_of

OFFLOAD = "--optimizer-cpu-offload"
RUNS = {  # flags of two ranks
    "fp32": "--zero-stage 0 --log-num-zeros-in-grad",
    "fp32-zero1": "--zero-stage 1",
    "bf16-zero2": "--zero-stage 2 --bf16 --log-num-zeros-in-grad",
    # the first steps overflow
    "fp16-zero2": "--zero-stage 2 --fp16 --initial-loss-scale 1e12 --loss-scale-window 2",
    "bf16-zero3": "--zero-stage 3 --bf16 --eval-interval 3",
    "bf16-zero3-kept": "--zero-stage 3 --zero3-keep-gathered --bf16 --no-overlap-param-gather",
    "fp32-zero3-recompute": "--zero-stage 3 --recompute-granularity full",
    "bf16-zero2-pipeline": (
        "--zero-stage 2 --bf16 --pipeline-model-parallel-size 2 --pipeline-schedule "
        "zero-bubble-v --num-layers 4"
    ),
}


def reported(outcome) -> list[str]:
    """All that a run logs, NaN included; and the weights' names."""
    names = [(piece.name, piece.offset) for piece in outcome.weights]
    return list(map(repr, [*outcome.steps, *outcome.metrics, *names]))


@pytest.mark.parametrize("name", RUNS)
def test_a_step_on_the_host_has_the_same_bits(gloo_world, name):
    flags = (*BASE, "--train-iters", "8", "--micro-batch-size", "2", *RUNS[name].split())
    world = gloo_world(4 if "pipeline" in name else 2)
    plain = world.run(run_case, flags)
    for more in ((OFFLOAD,), (OFFLOAD, "--optimizer-offload-fraction", "0.4")):
        for one, other in zip(plain, world.run(run_case, (*flags, *more))):
            assert reported(one) == reported(other)
            assert all(torch.equal(a.values, b.values) for a, b in zip(one.weights, other.weights))
    assert any(step.skipped for step in plain[0].steps) == name.startswith("fp16")


def test_the_share_of_the_host_is_the_last_blocks():
    assert on_host_of([4, 2, 2, 2, 6], 1.0) == [True] * 5
    assert on_host_of([4, 2, 2, 2, 6], 0.0) == [False] * 5
    assert on_host_of([4, 2, 2, 2, 6], 0.5) == [False, False, False, True, True]
    # 2 of 16 are nearer to it than 6
    assert on_host_of([4, 2, 2, 2, 6], 0.1) == [False, False, False, True, False]
