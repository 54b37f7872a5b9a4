"""Weights that are in host memory between their uses train the same bits in every schedule, and
leave the same checkpoints.
"""

from __future__ import annotations

import math
import os
from unittest import mock

import pytest
import torch
from parity import worker
from parity.layouts import BASE
from parity.worker import Outcome, run_case
from unit.optimizer.test_nvme import same_bits, same_checkpoints

HOST = "--param-cpu-offload"
FLAGS = (*BASE, "--micro-batch-size", "2", "--zero-stage", "3")
PP = "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule"
RUNS = {  # flags that both have, flags of the one
    "fp32, evaluated": ("--eval-interval 3", ""),
    "fp32, copies, files": ("--zero-shard-size 2", "--optimizer-nvme-offload"),
    "fp16, the first steps overflow": (
        f"{PP} zero-bubble --fp16 --initial-loss-scale 1e12 --loss-scale-window 2",
        "",
    ),
    "bf16, kept gathered, no overlap": (
        f"{PP} zero-bubble-v --bf16 --zero3-keep-gathered --no-overlap-param-gather",
        "",
    ),
    "bf16, files": (f"{PP} gpipe --bf16", "--optimizer-nvme-offload"),
    "bf16, recompute, half of it": (
        f"{PP} 1f1b --bf16 --recompute-granularity full",
        "--optimizer-offload-fraction 0.4",
    ),
    "bf16, frozen": (
        f"{PP} interleaved --num-virtual-stages-per-pipeline-rank 2 --bf16 --freeze layers.0",
        "",
    ),
}


def offloaded(flags: tuple[str, ...]) -> tuple[Outcome, int]:
    """A run that ends with no weights on the device but masters that are stepped there: its
    outcome, and how many blocks left nothing.
    """
    counts, check = [], worker.published_weights_are_the_masters

    def look(run) -> None:
        check(run)
        for block in run.optimizer.blocks:
            assert block.offloaded == (block.on_host or not block.trained) and block.is_released
            assert block.offloaded or block.rounded is None
            for piece, held in run.optimizer.pieces(block, ("master",), "read"):
                assert torch.equal(
                    block.gathered_from[piece].to(block.weight), held["master"].to(block.weight)
                )
        counts.append(sum(block.offloaded for block in run.optimizer.blocks))

    with mock.patch.object(worker, "published_weights_are_the_masters", look):
        return run_case(flags), counts[0]


@pytest.mark.parametrize("name", RUNS)
def test_weights_on_the_host_train_the_same_bits(gloo_world, tmp_path, name):
    both, own = RUNS[name]
    flags = (*FLAGS, "--train-iters", "6", *both.split())
    world = gloo_world(2 if name == "fp32, evaluated" else 4)
    plain = world.run(run_case, flags)
    found = world.run(
        offloaded, (*flags, HOST, *own.split(), *([str(tmp_path)] if "nvme" in own else []))
    )
    for one, (other, count) in zip(plain, found):
        same_bits(one, other)
        assert count > 0
    assert any(step.skipped for step in plain[0].steps) == name.startswith("fp16") and all(
        math.isfinite(step.loss) for step in plain[0].steps
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "flags",
    ["", "--bf16 --freeze embedding", "--fp16 --initial-loss-scale 1e12 --loss-scale-window 2"],
)
def test_one_rank_that_shares_with_nobody_trains_the_same_bits(one_thread, flags):
    """Without the flag it is at stage 0, which with one micro-batch adds nothing up in another
    order.
    """
    flags = (*FLAGS, "--train-iters", "6", "--micro-batch-size", "8", *flags.split())
    found, count = offloaded((*flags, HOST))
    same_bits(run_case(flags), found)
    assert count == 3


def test_checkpoints_are_those_of_any_other_run(gloo_world, tmp_path):
    """Saved with the flag and without, loaded by one rank with it and without, and by two: always
    the same bits.
    """
    flags = (*FLAGS, *"--train-iters 6 --save-interval 3 --bf16 --micro-batch-size 4".split())
    here, there = tmp_path / "here", tmp_path / "there"
    gloo_world(2).run(run_case, (*flags, "--save", str(here)))
    gloo_world(2).run(run_case, (*flags, HOST, "--save", str(there)))
    assert same_checkpoints(here, there, 3) and same_checkpoints(here, there, 6)
    for ranks in (2, 1):
        folders = []
        for source, more in ((there, ()), (here, (HOST,))):
            folders.append(tmp_path / f"{source.name} on {ranks}")
            resumed = (
                *flags,
                *more,
                "--micro-batch-size",
                str(8 // ranks),
                "--load",
                str(source),
                "--ckpt-step",
                "3",
                "--save",
                str(folders[-1]),
            )
            gloo_world(ranks).run(run_case, resumed)
        assert same_checkpoints(*folders, 6) and (
            ranks == 1 or same_checkpoints(folders[0], here, 6)
        )
