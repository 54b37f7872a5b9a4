"""The printed lines, character by character."""

from __future__ import annotations

import math
from datetime import datetime

import pytest

from megatron.observe.console import (
    BANNER_WIDTH,
    NOT_DONE,
    banner,
    duration,
    evaluation_lines,
    training_line,
)

MEGATRON = (
    " [2026-10-22 16:59:16.123456] iteration        1/  500000 | consumed samples:           "
    " 8 | elapsed time per iteration (ms): 16442.7 |"
    " throughput per GPU (TFLOP/s/GPU): 1.8 | learning rate: 3.900183E-07 | global batch "
    "size:     8 | lm loss: 1.219037E+01 | loss scale: 1.0 |"
    " grad norm: 18.417 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
ROW = {
    "consumed_samples": 8,
    "iteration-time": 16.4427,
    "throughput": 1.8,
    "learning-rate": 3.900183e-07,
    "batch-size": 8,
    "lm loss": 12.19037,
    "loss-scale": 1.0,
    "grad-norm": 18.417,
    "tokens-per-second-per-gpu": 996.43,
    "mfu": 0.4126,
    "mem-max-allocated-bytes": 61.2 * 2**30,
}
NOW = datetime(2026, 10, 22, 16, 59, 16, 123456)


def line(row: dict[str, float], **changes) -> str:
    return training_line(
        1, 500000, row, **{"skipped": 0, "nan": 0, "eta_seconds": 93784.0, "now": NOW} | changes
    )


def test_training_line_is_megatrons_followed_by_ours():
    ours = (
        " tokens per second per GPU: 996.4 | MFU: 41.3% | memory (GiB): 61.20 | ETA: 1d 02:03:04 |"
    )
    assert line(ROW) == MEGATRON + ours


def test_optional_fields_stand_where_megatron_puts_them():
    more = {"num-zeros": 17.0, "params-norm": 123.4567, "decoupled-learning-rate": 5e-4}
    text = line(ROW | more)
    assert (
        " grad norm: 18.417 | num zeros: 17.0 | params norm: 123.457 | number of skipped "
        "iterations:   0 |"
    ) in text
    assert (
        " | learning rate: 3.900183E-07 | decoupled learning rate: 5.000000E-04 | global batch "
    ) in text
    bare = {name: ROW[name] for name in ROW if name not in ("mfu", "mem-max-allocated-bytes")}
    end = " tokens per second per GPU: 996.4 | MFU: n/a | ETA: 1d 02:03:04 |"
    assert line(bare) == MEGATRON + end


def test_nan_is_printed_as_nan():
    text = line(
        ROW | {"lm loss": math.nan, "grad-norm": math.nan}, skipped=12, nan=3, eta_seconds=math.nan
    )
    assert (
        " lm loss: NaN | loss scale: 1.0 | grad norm: NaN | number of skipped iterations:  "
        "12 | number of nan iterations:   3 |"
    ) in text
    assert text.endswith(" ETA: NaN |") and "NAN" not in text and "nan |" not in text


def test_evaluation_lines():
    dashes, text, below = evaluation_lines(100, math.log(256)).split("\n")
    values = "lm loss value: 5.545177E+00 | lm loss PPL: 2.560000E+02 | "
    assert text == f" validation loss at iteration 100 | {values}"
    assert dashes == below == "-" * (len(text) + 1)
    _, text, _ = evaluation_lines(7, 1.0, split="test", source="wiki").split("\n")
    assert text.startswith(" test loss at iteration 7 on wiki | lm loss value: 1.000000E+00 |")


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "00:00:00"), (59.6, "00:01:00"), (86400 * 12 + 3661, "12d 01:01:01"), (math.inf, "NaN")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_banner_is_a_fixed_width_screen():
    path = "/data/" + "x" * 150 + "/checkpoints"
    text = banner({"versions": ["torch 2.13", "word " * 40], "empty": [], "paths": [path]})
    rows = text.split("\n")
    assert rows[0] == rows[-1] == "=" * BANNER_WIDTH
    assert rows[1] == " versions       torch 2.13" and rows[2].startswith(" " * 16 + "word word")
    assert all(len(row) <= BANNER_WIDTH for row in rows if path not in row)
    assert f" paths          {path}" in rows and "empty" not in text


def test_what_is_asked_for_and_not_done_stands_first():
    missing = ["--profile: no profile is written", "--nvtx-ranges: " + "word " * 40]
    first, title, profile, ranges, more, last, versions, _ = banner(
        {"versions": ["torch"], NOT_DONE: missing}
    ).split("\n")
    assert first == last == "!" * BANNER_WIDTH and title == " asked for, not done"
    assert profile == "   --profile: no profile is written"
    assert ranges.startswith("   --nvtx-ranges: word") and more.startswith("     word")
    assert versions == " versions       torch"
    assert banner({"versions": ["torch"], NOT_DONE: []}) == banner({"versions": ["torch"]})
