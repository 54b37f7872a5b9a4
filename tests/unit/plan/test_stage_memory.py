"""Micro-batches in flight in the plan of a pipeline, and lines about stages."""

from __future__ import annotations

import memory_models
import pytest
from megatron.tools._plan.memory import (
    MemoryPlan,
    rank_memories,
    stage_parameters,
)
from megatron.tools._plan.stages import stage_lines
from memory_models import BATCH, DRY, LLAMA, SEQ, VOCAB

from megatron.config.groups import Config
from megatron.model.stages import pipeline_stages


def configure(pp: int, layers: int, flags: str, micro_batches: int = 8, tp: int = 1) -> Config:
    sizes = f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp}"
    batch = f"--num-layers {layers} --global-batch-size {BATCH * micro_batches}"
    return memory_models.configure(f"{sizes} {batch} {flags}", pp * tp)


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
