"""The memory estimate of pipeline ranks against stages that are built, and lines about stages."""

from __future__ import annotations

import math

import memory_models
import pytest
import torch
from megatron.tools._plan.memory import (
    MemoryPlan,
    PlannedSteps,
    rank_memories,
    schedule_of,
    stage_parameters,
)
from megatron.tools._plan.stages import stage_lines
from memory_models import BATCH, DRY, LLAMA, SEQ, VOCAB

from megatron.config.groups import Config
from megatron.distributed.groups import Axis
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import compute_dtype
from megatron.model.model_parallel import ModelParallel, TensorParallel
from megatron.model.stages import pipeline_stages
from megatron.parallel.blocks import build_blocks


def configure(pp: int, layers: int, flags: str, micro_batches: int = 8, tp: int = 1) -> Config:
    sizes = f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp}"
    batch = f"--num-layers {layers} --global-batch-size {BATCH * micro_batches}"
    return memory_models.configure(f"{sizes} {batch} {flags}", pp * tp)


@pytest.mark.parametrize(
    "pp, layers, flags",
    [
        (2, 4, "--pipeline-schedule zero-bubble-v"),
        (2, 4, "--fp64"),
        (4, 12, f"{DRY} --num-virtual-stages-per-pipeline-rank 3"),
        (3, 4, "--position-embedding-type none --pipeline-model-parallel-layout E|tttt|L"),
    ],
)
def test_static_bytes_are_those_of_the_stages_that_are_built(pp, layers, flags):
    tp = 2
    config = configure(pp, layers, flags, tp=tp)
    padded = padded_vocab_size(VOCAB, config.model, tp)
    stages, placement = pipeline_stages(config, padded), schedule_of(config, pp * tp).placement
    estimates = [rank.sizes() for rank in rank_memories(config, VOCAB, pp * tp)]
    dtype = compute_dtype(config.precision)
    for rank in range(pp):
        local = GPTModel(
            config.model,
            vocab_size=VOCAB,
            padded_vocab=padded,
            dtype=dtype,
            seed=1,
            parallel=ModelParallel(TensorParallel(Axis("tp", 0, tuple(range(tp))))),
            stages=tuple(
                stage for stage, where in zip(stages, placement, strict=True) if where == rank
            ),
        )
        blocks = build_blocks(local, torch.device("cpu"))
        count = sum(math.prod(entry.shape) for block in blocks for entry in block.entries)
        sizes = estimates[rank]
        planned = rank_memories(config, VOCAB, pp * tp)[rank]
        assert count == planned.parameters
        stored = sum(block.size for block in blocks)
        assert planned.static == {
            "parameters": dtype.itemsize * stored,
            "gradients": dtype.itemsize * stored,
            "optimizer": 2 * dtype.itemsize * stored,
            "host": 0,
            "disk": 0,
        }
        assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
    largest = max(estimates, key=lambda sizes: sizes["total"])
    assert MemoryPlan(config, VOCAB, pp * tp).fullest.sizes() == largest
    ranks = PlannedSteps(config, VOCAB, pp * tp, "cuda").largest_ranks()
    assert max(estimates[rank]["total"] for rank in ranks) == largest["total"]


def test_gpipe_keeps_every_micro_batch_and_1f1b_those_in_flight():
    def activations(schedule: str, micro_batches: int) -> int:
        config = configure(4, 8, f"{DRY} --pipeline-schedule {schedule}", micro_batches)
        return rank_memories(config, VOCAB, 4)[1].peak.most["activations"]

    message = SEQ * BATCH * 64 * 4  # of which two are on their way to a stage in the middle
    one = activations("1f1b", 1)
    assert activations("gpipe", 8) == 8 * one + 2 * message
    assert activations("1f1b", 8) == activations("1f1b", 16) == 3 * one + 2 * message


def test_the_table_of_stages():
    virtual = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
    config = configure(2, 4, f"{LLAMA} --untie-embeddings-and-output-weights {virtual}")
    lines = stage_lines(MemoryPlan(config, VOCAB, 2))
    assert lines[0].startswith("interleaved: 2 pipeline ranks x 2 stage(s), 8 micro-batches; ")
    assert lines[0].endswith("% idle, by FLOPs alone")
    parts = [line.split("; ") for line in lines[1:5]]
    assert [first for first, *_ in parts] == [
        "stage 0 on rank 0: embedding, layer 0",
        "stage 1 on rank 1: layer 1",
        "stage 2 on rank 0: layer 2",
        "stage 3 on rank 1: layer 3, head",
    ]
    assert [last for *_, last in parts] == [f"{count} in flight" for count in (4, 3, 2, 1)]
    stored = stage_parameters(config, pipeline_stages(config, 384), (0, 1, 0, 1), 384)
    for count, line in zip(stored, lines[1:5], strict=True):
        assert f"{count:,} parameters" in line
    shares = [float(line.split("% of the FLOPs")[0].split()[-1]) for line in lines[1:5]]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert shares[0] == shares[1] == shares[2] < shares[3]
    assert stage_lines(MemoryPlan(configure(1, 4, ""), VOCAB, 1)) == []
    assert lines[5].startswith("GiB by pipeline rank: ") and len(lines) == 6


def test_the_bubble_that_a_dry_run_tells():
    # a head that costs next to nothing
    model = f"{DRY} --ffn-hidden-size 4096 --untie-embeddings-and-output-weights"

    def idle(layout: str) -> float:
        config = configure(4, 8, f"{model} {layout}", 9)
        first = stage_lines(MemoryPlan(config, 8, 4))[0]
        return float(first.split("micro-batches; ")[1].split("%")[0]) / 100

    # (P - 1) / (m + P - 1)
    assert idle("") == pytest.approx(3 / 12, abs=0.01)
    # all wait for the largest stage
    assert idle("--pipeline-model-parallel-layout Et|tt|tt|tttL") > idle("") + 0.1
