"""Exact names: the table answers every recorded upstream flag and no other, and a typo is refused
with the flag that was meant.
"""

from __future__ import annotations

import random

import flag_typos
import pytest

from megatron.config import compatibility
from megatron.config.arguments import parse_arguments, suggestions
from megatron.config.compatibility import data, recorded_names, table
from megatron.config.errors import ArgumentErrors
from megatron.config.help import COMMANDS
from megatron.config.options import key, options_by_flag
from megatron.config.spelling import one_edit, same_meaning

OURS = {*options_by_flag(), *map(key, COMMANDS)}


def first_fault(*argv: str) -> str:
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(list(argv))
    return caught.value.faults[0]


def test_the_table_answers_the_recorded_names_and_no_other():
    recorded = {key(name) for name in recorded_names()}
    counts = {source: len(text.split()) for source, text in data()["names"].items()}
    assert list(counts.values())[:4] == [898, 115, 55, 4]
    assert len(set(recorded_names())) == len(recorded_names()) == sum(counts.values())
    assert recorded - OURS <= set(compatibility.rows()) <= recorded
    for row in table():
        for flag in row.flags:
            if flag.endswith("*"):
                assert any(compatibility.find(name) is row for name in recorded), (
                    f"{flag} is short for no recorded flag"
                )


@pytest.mark.parametrize(
    "typo, meant",
    [
        ("--async-sav", "--async-save"),
        ("--ddp-bukcet-size", "--ddp-bucket-size"),
        ("--tp-comm-ovelap", "--tp-comm-overlap"),
        ("--profile-step-stat", "--profile-step-start"),
        ("--fp8-fromat", "--fp8-format"),
        ("--inprocess-restar", "--inprocess-restart"),
        ("--moe-router-topk1", "--moe-router-topk"),
        ("--zero_stag", "--zero-stage"),
        ("-lr", "--lr"),
        ("---lr", "--lr"),
        ("--1r", "--lr"),
    ],
)
def test_a_typo_in_a_family_is_refused(typo, meant):
    assert first_fault(typo).startswith(f"{typo}: ") and first_fault(typo).endswith(
        f"did you mean {meant}?"
    )


def test_what_is_near_no_flag_gets_no_suggestion_or_the_likeliest():
    assert first_fault("--moe-typo", "1").startswith("--moe-typo 1: unknown flag")
    assert first_fault("--zzzzzzzzzzzz") == "--zzzzzzzzzzzz: unknown flag"
    assert first_fault("--fp6").endswith("did you mean --fp16 or --fp64?")


@pytest.mark.parametrize(
    "flag, other",
    [
        ("--qk-rope-head-width", "--qk-head-dim"),
        ("--embed-norm", "--qk-layernorm"),
        ("--use-mpirun", "--use-mup"),
        ("--grad-accumulation", "--global-batch-size"),
        ("--log-gradients", "--log-straggler"),
        ("--no-rope-scaling", "--use-rope-scaling"),
        ("--moe-router-groups-dropped", "--moe-router-num-groups"),
        ("--max-lr-decay", "--lr-decay-style"),
        ("--valid-interval", "--save-interval"),
        ("--attention-z-loss", "--moe-z-loss-coeff"),
    ],
)
def test_no_hint_names_a_flag_of_another_meaning(flag, other):
    assert other not in suggestions(flag)


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--num-lay", "--num-layers"),
        ("--hidden-siz", "--hidden-size"),
        ("--use-sequence-parallel", "--sequence-parallel"),
        ("--recompute-granul", "--recompute-granularity"),
        ("--init-std-method", "--init-method-std"),
    ],
)
def test_words_in_another_order_and_abbreviations_are_recognized(flag, meant):
    assert suggestions(flag) == [meant]


@pytest.mark.full
def test_every_foreign_flag_would_get_no_hint_of_another_meaning():
    """As if the table did not have it."""
    for name in sorted({key(name) for name in recorded_names()} - OURS):
        for other in suggestions(name):
            assert one_edit(name, other) or same_meaning(name, other), (name, other)


def test_a_sample_of_typos_is_refused_with_the_right_suggestion():
    """The whole is flag_typos.py, whose result is docs/results/flag_typos.json."""
    draw, known, tried = random.Random(20260822), flag_typos.known_flags(), 0
    flags = [*flag_typos.our_flags(), *sorted(compatibility.rows())]
    while tried < 400:
        flag = draw.choice(flags[: len(flag_typos.our_flags())] if tried % 2 else flags)
        typo = draw.choice(list(flag_typos.typos(flag)))
        if key(typo) in known:
            continue
        assert flag_typos.verdict(flag, typo, flag_typos.whole) == "refused", (flag, typo)
        tried += 1


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ("ab", "ab", False),
        ("ab", "abc", True),
        ("abc", "ab", True),
        ("abc", "axc", True),
        ("abc", "acb", True),
        ("abcd", "badc", False),
        ("", "a", True),
        ("aab", "ab", True),
        ("abc", "cba", False),
        ("ab", "ba", True),
        ("a", "bcd", False),
    ],
)
def test_one_edit(one, other, expected):
    assert one_edit(one, other) == one_edit(other, one) == expected


@pytest.mark.parametrize(
    "line, answer",
    [
        ("--tp 2", "did you mean --tensor-model-parallel-size?"),
        ("--pp 2", "did you mean --pipeline-model-parallel-size?"),
        ("--zero 3", "did you mean --zero-stage?"),
        ("--bs 8", "did you mean --micro-batch-size?"),
        ("--gbs 8", "did you mean --global-batch-size?"),
        (
            "--dp 8",
            (
                "unknown flag; the data-parallel size is the number of ranks / (tensor x "
                "pipeline); drop it"
            ),
        ),
        ("--use-dist-opt", "did you mean --use-distributed-optimizer?"),
        ("--seq-len 4", "did you mean --seq-length?"),
        (
            "--tokenizer-type TokenizerFromFileWithFIM",
            "give HuggingFaceTokenizer, without tokens for infilling (fill-in-the-middle)",
        ),
        ("--lr-warmup-tokens x", "expected one number of 0 or more"),
        ("--train-tokens 1e400 --seq-length 1", "expected one number of 0 or more"),
    ],
)
def test_habits_are_answered_with_what_to_do(line, answer):
    assert first_fault(*line.split()).endswith(answer)


def test_a_habit_is_nobodys_flag_and_stands_for_a_known_one():
    habits = data()["habits"]
    short = " ".join([*habits.values(), *data()["follows"]]).split()
    assert len(set(short)) == len(short) and not {*short} & {*OURS, *compatibility.rows()}
    assert all(ours in OURS or compatibility.find(ours) for ours in habits)
