"""Live bytes of real runs under every ZeRO stage: after the passes of a step those of the formula,
within them its slots, gathered blocks and scratch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from selection import one_in
from unit.zero.measure import measure
from unit.zero.rows import FOUR, RECOMPUTE, SMALL, SPLIT, Row, V, faults, fullest
from unit.zero.tracker import CALLS

from megatron.distributed.collectives import NATIVE

PIECES = 1 << 15  # of the small model: small enough that no bound is met by chance
HOST = "--param-cpu-offload"
LARGE_VOCABULARY = tuple({**SMALL, "vocab": 4096, "layers": 4}.items())

# Every pair of stage, ranks, pipeline and micro-batches, and of stage and precision; then what may
# upset it.
ROWS = [
    *(Row(stage, 2, 1, 4) for stage in (0, 1)),
    Row(0, 4, 1, 1, "fp16"),
    Row(0, 2, 2, 4, "fp32"),
    Row(1, 4, 1, 1, "fp16"),
    Row(1, 2, 2, 4, "fp32"),
    Row(2, 4, 1, 1, "fp32"),
    Row(2, 4, 2, 4),
    Row(3, 4, 1, 1, "fp32"),
    Row(3, 2, 2, 4, "fp16"),
    Row(2, 8, 1, 1, "fp16"),
    Row(3, 8, 1, 1),
    Row(1, 4, 1, 4, "narrow"),
    Row(2, 2, 1, 4, "narrow"),
    Row(2, 2, 1, 4, model="llama"),
    Row(2, 2, 1, 4, size=LARGE_VOCABULARY),
    Row(3, 2, 1, 4, model="llama", size=LARGE_VOCABULARY),
    Row(2, 2, 2, 4, flags=V, size=FOUR),
    Row(3, 2, 2, 4, flags=V, size=FOUR),
    Row(2, 2, 2, 4, flags=SPLIT),
    Row(3, 2, 2, 4, flags=SPLIT),
    Row(3, 2, 2, 4, flags=f"{V} --zero3-keep-gathered", size=FOUR),
    Row(3, 2, 1, 4, flags="--zero3-keep-gathered"),
    Row(3, 4, 1, 4, shard=2),
    Row(2, 4, 1, 1, shard=2),
    Row(3, 2, 1, 4, flags="--no-overlap-grad-reduce --no-overlap-param-gather"),
    Row(2, 2, 1, 4, flags="--grad-reduce-in-bf16"),
    Row(3, 1, 1, 4, flags=HOST),
    Row(3, 2, 2, 4, "fp32", flags=f"{V} {HOST}", size=FOUR),
    Row(3, 2, 1, 4, flags=f"{HOST} --zero3-keep-gathered"),
]


def held(gloo_world, row: Row, leak: str | None = None):
    """What `measure` found on each rank."""
    return gloo_world(row.world).run(measure, row.command, PIECES, leak)


def faults_of(row: Row, ranked) -> list[str]:
    return [fault for pipe, spans in ranked for fault in faults(row, pipe, spans, PIECES)]


# Every run shows one row in two; every pair of stage and number of ranks, of pipeline, precision
# and flag is in a campaign.
MARKED = one_in(2, [(row,) for row in ROWS], [str(row) for row in ROWS])


@pytest.mark.parametrize("row", sorted(MARKED, key=lambda param: param.values[0].world))
@pytest.mark.default("stage3-dp2-pp2-m4-bf16-gpt-4x112-v1024-pipeline-schedule-zero-bubble-v")
def test_a_run_holds_what_the_formula_says(gloo_world, row):
    found = faults_of(row, held(gloo_world, row))
    assert not found, "\n".join(found)


def test_the_peak_falls_from_stage_to_stage(gloo_world):
    """Where buffers that come and go are smaller than what is shared out, activations small."""
    peaks = []
    for stage in range(4):
        row = Row(stage, 2, 1, 2, flags=f"{RECOMPUTE} --train-iters 1 --eval-iters 0")
        assert row.falls(0) and row.largest_two(0) < sum(row.blocks(0).values())
        ranked = held(gloo_world, row)
        peaks.append(max(fullest(spans)[0] for _, spans in ranked))
    assert peaks == sorted(set(peaks), reverse=True), peaks


@pytest.mark.parametrize("leak, fault", [("block", "parameters"), ("slot", "slots")])
@pytest.mark.default("slot-slots")
def test_one_leak_is_seen(gloo_world, leak, fault):
    """A layer that is not released once, and one gradient buffer that somebody keeps."""
    row = Row(3, 2, 1, 4)
    found = faults_of(row, held(gloo_world, row, leak))
    assert any(fault in each for each in found), "\n".join(found)


def test_all_functions_of_torch_distributed_that_the_project_calls_are_sampled():
    source = "".join(
        path.read_text()
        for path in (Path(__file__).resolve().parents[3] / "megatron/distributed").glob("*.py")
    )
    called = {name for name in dir(dist) if f"dist.{name}(" in source}
    # one function calls what is looked up by name
    assert source.count("getattr(dist, ") == source.count("getattr(dist, NATIVE[operation])(") == 1
    called |= set(NATIVE.values())
    not_sampled = """init_process_group destroy_process_group new_group get_backend get_rank
    get_world_size is_initialized is_nccl_available batch_isend_irecv P2POp TCPStore PrefixStore
    all_gather_object broadcast_object_list"""
    assert called - set(CALLS) <= set(not_sampled.split()), called
