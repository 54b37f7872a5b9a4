"""Exact names: the table answers every recorded upstream flag and no other, and a typo is refused
with the flag that was meant.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import compatibility
from megatron.config.arguments import parse_arguments
from megatron.config.compatibility import data, recorded_names, table
from megatron.config.errors import ArgumentErrors
from megatron.config.help import COMMANDS
from megatron.config.options import key, options_by_flag

ROOT = Path(__file__).resolve().parents[3]
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
    "line, end",
    [
        ("--async-sav", "did you mean --async-save?"),
        ("--tp-comm-ovelap", "did you mean --tp-comm-overlap?"),
        ("--inprocess-restar", "did you mean --inprocess-restart?"),  # not of ours
        ("-lr", "did you mean --lr?"),
        ("--1r", "did you mean --lr?"),
        ("--use-sequence-parallel", "did you mean --sequence-parallel?"),
        ("--recompute-granul", "did you mean --recompute-granularity?"),
        ("--zzzzzzzzzzzz", "--zzzzzzzzzzzz: unknown flag"),
        ("--tp 2", "did you mean --tensor-model-parallel-size?"),
        ("--gbs 8", "did you mean --global-batch-size?"),
        (
            "--dp 8",
            "unknown flag; the data-parallel size is the number of ranks / (tensor x pipeline); "
            "drop it",
        ),
        (
            "--tokenizer-type TokenizerFromFileWithFIM",
            "give HuggingFaceTokenizer, without tokens for infilling (fill-in-the-middle)",
        ),
        ("--lr-warmup-tokens x", "expected one number of 0 or more"),
        ("--train-tokens 1e400 --seq-length 1", "expected one number of 0 or more"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_was_meant(line, end):
    fault = first_fault(*line.split())
    assert fault.startswith(line.split()[0]) and fault.endswith(end)


def test_a_habit_is_nobodys_flag_and_stands_for_a_known_one():
    habits = data()["habits"]
    short = " ".join([*habits.values(), *data()["follows"]]).split()
    assert len(set(short)) == len(short) and not {*short} & {*OURS, *compatibility.rows()}
    assert all(ours in OURS or compatibility.find(ours) for ours in habits)


def test_the_page_of_flags_is_current():
    command = [sys.executable, "tools/document_flags.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr
