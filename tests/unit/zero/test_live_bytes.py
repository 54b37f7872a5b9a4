"""Live bytes of real runs under every ZeRO stage: after the passes of a step those of the formula,
within them its slots, gathered blocks and scratch.
"""

from __future__ import annotations

import pytest
from selection import one_in
from unit.zero.measure import measure
from unit.zero.rows import SMALL, Row, faults

PIECES = 1 << 15  # of the small model: small enough that no bound is met by chance
V = "--pipeline-schedule zero-bubble-v"
SPLIT = "--pipeline-schedule zero-bubble"
HOST = "--param-cpu-offload"
LARGE_VOCABULARY = tuple({**SMALL, "vocab": 4096, "layers": 4}.items())
FOUR = tuple({**SMALL, "layers": 4}.items())  # a layer for each stage of a V

# Every pair of stage, ranks, pipeline and micro-batches, and of stage and precision; then what may
# upset it.
ROWS = [
    *(Row(stage, 2, 1, 4) for stage in range(4)),
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


@pytest.mark.parametrize(
    "row, bytes_each",
    [
        (Row(0, 4), 18),
        (Row(1, 4), 9),
        (Row(2, 4), 6),
        (Row(3, 4), 4),
        (Row(2, 4, 2, 4), 6),
        (Row(3, 2, 2, 4, flags=V, size=FOUR), 8),
        *((Row(stage, 4, precision="fp32"), each) for stage, each in enumerate((16, 10, 7, 4))),
        *(
            (Row(stage, 4, precision="narrow"), each)
            for stage, each in enumerate((16, 7, 5.5, 3.5))
        ),
        (Row(3, 4, shard=2), 8),
    ],
    ids=str,
)
def test_the_formula_by_hand_is_that_of_the_table(row, bytes_each):
    """18 | 6 + 12/N | 2 + 16/N | 16/N bytes a parameter, 16 | 8 + 8/N | 4 + 12/N | 16/N in fp32,
    and two less where gradients are bf16.
    """
    for pipe in range(row.pp):
        assert sum(row.resident(pipe).values()) == bytes_each * sum(row.blocks(pipe).values())


@pytest.mark.parametrize("leak, fault", [("block", "parameters"), ("slot", "slots")])
@pytest.mark.default("slot-slots")
def test_one_leak_is_seen(gloo_world, leak, fault):
    """A layer that is not released once, and one gradient buffer that somebody keeps."""
    row = Row(3, 2, 1, 4)
    found = faults_of(row, held(gloo_world, row, leak))
    assert any(fault in each for each in found), "\n".join(found)
