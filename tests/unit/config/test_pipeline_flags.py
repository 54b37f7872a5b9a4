"""Pipeline flags: what they mean is Megatron-LM's, and the fix of a fault is accepted."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from config_lines import SHORT, faults, long, resolved
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.config.derive import RunView
from megatron.config.schedules import SCHEDULES
from megatron.config.stages import layers_of_stages, parse_layout
from megatron.config.validate import resolve
from megatron.model.arithmetic import unit_flops
from megatron.model.stages import pipeline_stages


def pipeline(flags: str, layers: int = 8, ranks: int = 4, world: int | None = None) -> RunView:
    line = f"--num-layers {layers} @pp {ranks} --global-batch-size 64 {flags}"
    return resolved(line, world or ranks)


@pytest.mark.parametrize(
    "text, counts",
    [
        ("Et|tL", (1, 1)),
        ("E|t|L", (0, 1, 0)),
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
    "flags, layers, ranks, counts",
    [
        ("", 8, 4, (2, 2, 2, 2)),
        ("@virtual 2", 8, 4, (1,) * 8),
        ("@per_virtual 2", 8, 2, (2,) * 4),
        ("@embedding @loss", 6, 4, (1, 2, 2, 1)),
        ("@embedding @loss @virtual 2", 6, 4, (0, 1, 1, 1, 1, 1, 1, 0)),
        ("@first 1 @last 3", 8, 4, (1, 2, 2, 3)),
        ("@last 5", 8, 4, (1, 1, 1, 5)),
        # Megatron-LM: a rank's layers are divided evenly over its virtual stages, which go round
        # the ranks
        ("@first 2 @last 4 @virtual 2", 14, 4, (1, 2, 2, 2, 1, 2, 2, 2)),
        # down the ranks and up again
        ("@first 2 @last 6 --pipeline-schedule zero-bubble-v", 12, 3, (1, 2, 3, 3, 2, 1)),
        ("@layout Et|ttt|tt|ttL", 8, 4, (1, 3, 2, 2)),
        ("@layout E|(tt|)*6,ttL", 14, 4, (0, 2, 2, 2, 2, 2, 2, 2)),
    ],
)
def test_what_flags_mean(flags, layers, ranks, counts):
    assert layers_of_stages(pipeline(flags, layers, ranks).config) == counts


@pytest.mark.parametrize("vocabulary", [128, 200_000])
def test_auto_shares_out_the_flops(vocabulary):
    """The largest stage has as few FLOPs as any cut of embedding, layers and head has."""
    config = pipeline("@layout auto --untie-embeddings-and-output-weights").config
    flops = unit_flops(config.model, config.data.seq_length, vocabulary)

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(flops[slice(*each)]) for each in pairwise((0, *ends, len(flops))))

    found = pipeline_stages(config, vocabulary)
    fewest = min(map(largest, combinations(range(1, len(flops)), 3)))
    assert len(found) == 4 and max(sum(flops[i] for i in stage.units) for stage in found) == fewest


def test_a_single_rank_holds_everything():
    """One line of flags runs in every layout: with one pipeline rank the others are remarks."""
    line = (
        "@virtual 3 @first 5 @embedding @layout Et|tL --pipeline-schedule zero-bubble-v "
        "--use-tp-pp-dp-mapping"
    )
    found = pipeline(line, 8, 1, world=2)
    distributed = found.config.distributed
    assert (
        distributed.num_virtual_stages_per_pipeline_rank,
        distributed.pipeline_schedule,
        layers_of_stages(found.config),
    ) == (1, "1f1b", (8,))
    idle = [
        note.split()[0].rstrip(":")
        for note in found.notes
        if "has no effect without --pipeline-model-parallel-size above 1" in note
    ]
    assert idle == long("@first @embedding @layout --use-tp-pp-dp-mapping").split()
    assert f"{SHORT['@virtual'][2:]} = 1: {SHORT['@pp']} 1 has one stage" in found.notes
    assert f"pipeline-schedule = 1f1b: {SHORT['@pp']} 1 has one order" in found.notes
    assert resolve(found.config, 2, 101).config == found.config


@pytest.mark.parametrize(
    "flags, schedule, virtual",
    [
        ("", "1f1b", 1),
        ("@virtual 2", "interleaved", 2),
        ("@per_virtual 1", "interleaved", 2),
        ("@layout Et|(t|)*6tL", "interleaved", 2),
        ("@layout auto @virtual 2", "interleaved", 2),
        ("--enable-zbh1-pipeline", "zero-bubble", 1),
        ("--pipeline-schedule zero-bubble-v @layout auto", "zero-bubble-v", 2),
    ],
)
def test_schedules_and_virtual_stages_that_follow(flags, schedule, virtual):
    found = pipeline(flags)
    distributed = found.config.distributed
    assert (distributed.pipeline_schedule, distributed.num_virtual_stages_per_pipeline_rank) == (
        schedule,
        virtual,
    )
    again = resolve(found.config, 4, 101)
    assert again.config == found.config and not any(" = " in note for note in again.notes)


@pytest.mark.parametrize(
    "flags", ["@per_virtual 1", "@layout Et|(t|)*6tL", "--pipeline-schedule zero-bubble-v"]
)
def test_the_note_on_virtual_stages_names_the_flag_that_decides(flags):
    reason = f"2: stages on each pipeline rank of {long(flags)}"
    assert any(note.endswith(reason) for note in pipeline(flags).notes)


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
@example(3, 6, None, None, None, None, False, False)  # more stages than units
def test_a_split_covers_the_layers_or_its_fix_is_accepted(
    layers, ranks, virtual, per_virtual, first, last, embedding, loss
):
    numbers = {"@virtual": virtual, "@per_virtual": per_virtual, "@first": first, "@last": last}
    words = [f"{name} {value}" for name, value in numbers.items() if value is not None]
    line = " ".join([*words, *["@embedding"] * embedding, *["@loss"] * loss])
    given_layers = f"--num-layers {layers} @pp {ranks}"
    found = faults(f"{given_layers} {line}", ranks)
    if not found:
        config = pipeline(line, layers, ranks).config
        counts, held = layers_of_stages(config), [0] * ranks
        rule = SCHEDULES[config.distributed.pipeline_schedule]
        ranked = rule.place(ranks, len(counts) // ranks)
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
        fixed = faults(f"--num-layers {match[1]} @pp {ranks} {line}", ranks)
        assert not [text for text in fixed if "multiple" in text]
    if long("@layout auto") in fault and "contradicts" not in fault:
        stages = f"@virtual {virtual}" if virtual else ""
        assert faults(f"{given_layers} @layout auto {stages}", ranks) == []
