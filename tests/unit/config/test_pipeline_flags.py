"""Pipeline flags: what they mean is Megatron-LM's, every fault names its fix, and the fix is
accepted.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.schedules import place
from megatron.config.stages import layers_of_stages, parse_layout
from megatron.config.validate import cross_field_faults, resolve

BASE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 64 --lr 1e-3 --train-iters 10 --mock-data "
    "--vocab-size 100 --save new --dry-run"
)
PP, VIRTUAL = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
PER_VIRTUAL, LAYOUT = "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def configure(
    extra: str, layers: int = 8, ranks: int = 4, world: int | None = None
) -> tuple[Config, int]:
    world = world or ranks
    return parse_arguments(
        f"{BASE} --num-layers {layers} {PP} {ranks} --world-size {world} {extra}".split()
    ).config, world


def faults(extra: str, layers: int = 8, ranks: int = 4, world: int | None = None) -> list[str]:
    return cross_field_faults(*configure(extra, layers, ranks, world), 101)


def split(extra: str, layers: int = 8, ranks: int = 4) -> tuple[int, ...]:
    return layers_of_stages(resolve(*configure(extra, layers, ranks), 101).config)


@pytest.mark.parametrize(
    "text, counts",
    [
        ("Et|tL", (1, 1)),
        ("E|t|L", (0, 1, 0)),
        ("Ettt|(tt|)*3L", (3, 2, 2, 2, 0)),
        ("Et*3|(tt|)*29,L", (3, *[2] * 29, 0)),
        ("E(|t*2)*2|,t*2,L", (0, 2, 2, 2)),
    ],
)
def test_layout_strings(text, counts):
    assert parse_layout(text) == counts


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "must begin with its one E"),
        ("Et|t", "and end with its one L"),
        ("Et||tL", "stage 1 (from 0) is empty"),
        ("Et|(tt|)*3,m|L", "m, a layer that"),
        ("Et|x|L", "'x' is none of E"),
        ("Et|(t|tL", "'(' is none of"),
        ("E((t|)*2)*2L", "'(' is none of"),
        ("E(t)*99999999L", "repeats more than 100000 units"),
    ],
)
def test_faults_of_layout_strings(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_layout(text)


@given(st.text("EtLm|,()*0123", max_size=12))
def test_any_layout_string_is_read_or_refused(text):
    try:
        counts = parse_layout(text)
    except ValueError as problem:
        assert str(problem)
    else:
        assert counts and min(counts) >= 0


@pytest.mark.parametrize(
    "extra, layers, ranks, counts",
    [
        ("", 8, 4, (2, 2, 2, 2)),
        (f"{VIRTUAL} 2", 8, 4, (1,) * 8),
        (f"{PER_VIRTUAL} 2", 8, 2, (2,) * 4),
        (f"{PER_VIRTUAL} 2", 8, 4, (2,) * 4),
        (f"{EMBEDDING} {LOSS}", 6, 4, (1, 2, 2, 1)),
        (f"{EMBEDDING} {LOSS} {VIRTUAL} 2", 6, 4, (0, 1, 1, 1, 1, 1, 1, 0)),
        (f"{FIRST} 1 {LAST} 3", 8, 4, (1, 2, 2, 3)),
        (f"{LAST} 5", 8, 4, (1, 1, 1, 5)),
        # Megatron-LM: a rank's layers are divided evenly over its virtual stages, which go round
        # the ranks
        (f"{FIRST} 2 {LAST} 4 {VIRTUAL} 2", 14, 4, (1, 2, 2, 2, 1, 2, 2, 2)),
        # down the ranks and up again
        (f"{FIRST} 2 {LAST} 6 --pipeline-schedule zero-bubble-v", 12, 3, (1, 2, 3, 3, 2, 1)),
        (f"{LAYOUT} Et|ttt|tt|ttL", 8, 4, (1, 3, 2, 2)),
        (f"{LAYOUT} E|(tt|)*6,ttL", 14, 4, (0, 2, 2, 2, 2, 2, 2, 2)),
    ],
)
def test_what_flags_mean(extra, layers, ranks, counts):
    assert split(extra, layers, ranks) == counts


def test_a_single_rank_holds_everything():
    """One line of flags runs in every layout: with one pipeline rank the others are remarks."""
    line = (
        f"{VIRTUAL} 3 {FIRST} 5 {EMBEDDING} {LAYOUT} Et|tL --pipeline-schedule zero-bubble-v "
        "--use-tp-pp-dp-mapping"
    )
    resolved = resolve(*configure(line, 8, 1, world=2), 101)
    distributed = resolved.config.distributed
    assert (
        distributed.num_virtual_stages_per_pipeline_rank,
        distributed.pipeline_schedule,
        layers_of_stages(resolved.config),
    ) == (1, "1f1b", (8,))
    idle = [
        note.split()[0].rstrip(":")
        for note in resolved.notes
        if "has no effect without --pipeline-model-parallel-size above 1" in note
    ]
    assert idle == [FIRST, EMBEDDING, LAYOUT, "--use-tp-pp-dp-mapping"]
    assert f"{VIRTUAL[2:]} = 1: {PP} 1 has one stage" in resolved.notes
    assert f"pipeline-schedule = 1f1b: {PP} 1 has one order" in resolved.notes
    assert resolve(resolved.config, 2, 101).config == resolved.config


@pytest.mark.parametrize(
    "extra, schedule, virtual",
    [
        ("", "1f1b", 1),
        (f"{VIRTUAL} 2", "interleaved", 2),
        (f"{PER_VIRTUAL} 1", "interleaved", 2),
        (f"{LAYOUT} Et|(t|)*6tL", "interleaved", 2),
        (f"{LAYOUT} auto {VIRTUAL} 2", "interleaved", 2),
        ("--pipeline-schedule zero-bubble-v", "zero-bubble-v", 2),
        ("--enable-zbh1-pipeline", "zero-bubble", 1),
        (f"--pipeline-schedule zero-bubble-v {LAYOUT} auto", "zero-bubble-v", 2),
    ],
)
def test_schedules_and_virtual_stages_that_follow(extra, schedule, virtual):
    resolved = resolve(*configure(extra), 101)
    distributed = resolved.config.distributed
    assert (distributed.pipeline_schedule, distributed.num_virtual_stages_per_pipeline_rank) == (
        schedule,
        virtual,
    )
    again = resolve(resolved.config, 4, 101)
    assert again.config == resolved.config and not any(" = " in note for note in again.notes)


@pytest.mark.parametrize(
    "extra, layers, ranks, expected",
    [
        ("", 30, 4, f"--num-layers 30: must be a multiple of {PP} 4; the nearest is 32, or give"),
        ("", 3, 8, f"multiple of {PP} 8; the nearest is 8, or give fewer pipeline ranks"),
        (f"{VIRTUAL} 2", 12, 4, f"multiple of {PP} 4 x {VIRTUAL} 2 = 8; the nearest is 16"),
        (f"{LOSS}", 8, 4, f"8 (9 with those of {LOSS}): must be a multiple of {PP} 4; the near"),
        (f"{PER_VIRTUAL} 3", 16, 4, f"{PP} 4 x {PER_VIRTUAL} 3 = 12; the nearest is 12"),
        (f"{PER_VIRTUAL} 2 {VIRTUAL} 4", 16, 4, f"{PER_VIRTUAL} 2: contradicts {VIRTUAL} 4; drop"),
        (f"{FIRST} 3", 8, 4, f"{FIRST} 3: leave 5 of --num-layers 8 to 3 other pipeline rank(s)"),
        (f"{FIRST} 3 {VIRTUAL} 2", 9, 4, f"each number divisible by {VIRTUAL} 2; change the numb"),
        (f"{LAYOUT} auto {FIRST} 3", 8, 4, f"{LAYOUT} auto: contradicts {FIRST} 3; keep one way"),
        (f"{LAYOUT} Et|tL {EMBEDDING} {PER_VIRTUAL} 1", 2, 2, f"{EMBEDDING} and {PER_VIRTUAL} 1;"),
        (f"{LAST} 2 {PER_VIRTUAL} 1", 8, 4, f"({VIRTUAL} goes with each)"),
        (f"{LAYOUT} Et|t|tL", 3, 2, f"{LAYOUT} Et|t|tL: has 3 stages, not a multiple of {PP} 2"),
        (f"{LAYOUT} Et|tL", 3, 2, f"{LAYOUT} Et|tL: has 2 layers (t), not --num-layers 3"),
        (f"{LAYOUT} Et|t|t|tL {VIRTUAL} 3", 4, 2, f"4 stages, which contradicts {VIRTUAL} 3"),
        (f"{LAYOUT} auto {VIRTUAL} 2", 8, 8, f"{PP} 8 x {VIRTUAL} 2 = 16: more stages than the 10"),
        # schedules
        ("--pipeline-schedule interleaved", 8, 4, "needs several stages on each pipeline rank"),
        (f"--pipeline-schedule 1f1b {VIRTUAL} 2", 8, 4, "takes 1 stage(s) on each pipeline rank"),
        (f"--pipeline-schedule zero-bubble {LAYOUT} Et|t|t|tL", 4, 2, "Et|t|t|tL makes 2"),
        (f"--pipeline-schedule zero-bubble-v {VIRTUAL} 1", 8, 4, f"{VIRTUAL} 1 makes 1; change"),
    ],
)
def test_one_fault(extra, layers, ranks, expected):
    found = faults(extra, layers, ranks)
    assert len(found) == 1 and expected in found[0], found


@settings(max_examples=100)
@given(
    st.integers(1, 40),
    st.integers(2, 6),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 1, 3, 5]),
    st.booleans(),
    st.booleans(),
)
def test_a_split_covers_the_layers_or_its_fix_is_accepted(
    layers, ranks, virtual, per_virtual, first, last, embedding, loss
):
    flags = {
        VIRTUAL: virtual,
        PER_VIRTUAL: per_virtual,
        FIRST: first,
        LAST: last,
        EMBEDDING: embedding or None,
        LOSS: loss or None,
    }
    line = " ".join(
        f"{flag} {value}" if value is not True else flag
        for flag, value in flags.items()
        if value is not None
    )
    found = faults(line, layers, ranks)
    if not found:
        config = resolve(*configure(line, layers, ranks), 101).config
        counts, held = layers_of_stages(config), [0] * ranks
        ranked = place(config.distributed.pipeline_schedule, ranks, len(counts) // ranks)
        for stage, (rank, count) in enumerate(zip(ranked, counts, strict=True)):
            held[rank] += count
            assert count + (stage == 0) + (stage == len(counts) - 1) > 0
        assert (
            sum(counts) == layers
            and len(counts) == ranks * config.distributed.num_virtual_stages_per_pipeline_rank
        )
        assert first in (None, held[0]) and last in (None, held[-1])
        return
    (fault,) = found
    if match := re.search(r"the nearest is (\d+)", fault):
        assert not [text for text in faults(line, int(match[1]), ranks) if "multiple" in text]
    if f"{LAYOUT} auto" in fault and "contradicts" not in fault:
        assert (
            faults(f"{LAYOUT} auto" + (f" {VIRTUAL} {virtual}" if virtual else ""), layers, ranks)
            == []
        )


def test_few_micro_batches_are_a_remark():
    notes = resolve(*configure("--global-batch-size 12", 8, 4, world=8), 101).notes
    text = (
        "--global-batch-size 12: 3 micro-batch(es) for 4 pipeline ranks leave (P-1)/(m+P-1) "
        "= 50% of a step idle under 1f1b"
    )
    assert any(note.startswith(text) for note in notes)
    enough = resolve(*configure("--global-batch-size 16", 8, 4, world=8), 101).notes
    assert not any("micro-batch(es)" in note for note in enough)
