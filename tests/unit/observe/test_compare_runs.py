"""tools/compare_runs.py as a command: what it prints and its exit code."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path

import pytest

from megatron.config.groups import CheckpointConfig, Config, DataConfig
from megatron.observe.tracking import Tracker
from tools import compare_runs


def run(folder: Path, losses: list[float], first: int = 1, resumed: int = 0, **more: float) -> Path:
    tracker = Tracker(
        Config(data=DataConfig(seq_length=8), checkpoint=CheckpointConfig(save=str(folder))),
        {},
        resumed,
    )
    for iteration, loss in enumerate(losses, first):
        # throughput and memory differ in every run
        tracker.log(
            iteration,
            {
                "lm loss": loss,
                "throughput": id(folder) + loss,
                "data-time": id(tracker) * 1.0,
                "mem-allocated-bytes": id(tracker),
                **more,
            },
        )
    tracker.close()
    return folder


def compare(*arguments: str | Path) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = compare_runs.main([*map(str, arguments)])
    return code, printed.getvalue()


def test_equal_runs_although_one_was_resumed(tmp_path):
    a = run(tmp_path / "a", [3.0, math.nan, 1.0])
    b = run(tmp_path / "b", [3.0, math.nan, 7.0])
    run(b, [1.0], first=3, resumed=2)
    # of a save between two log intervals
    (b / "metrics.jsonl").open("a").write('{"iteration": 4, "save-checkpoint-seconds": 2.0}\n')
    code, text = compare(a, b / "metrics.jsonl")
    assert code == 0 and "SAME: 3 values exactly equal" in text


def test_one_unit_in_the_last_place_is_named(tmp_path):
    a = run(tmp_path / "a", [3.0, 2.0, 1.0, 1.0])
    b = run(tmp_path / "b", [3.0, 2.0, math.nextafter(1.0, 2.0), 2.0])
    code, text = compare(a, b)
    assert (
        code == 1
        and "first difference: iteration 3: lm loss is 1.0 in A and 1.0000000000000002 in B" in text
        and "(2 in all)" in text
    )
    assert "lm loss: largest relative difference 0.5, at iteration 4" in text
    assert compare(a, b, "--rtol", "0.4")[0] == 1
    code, text = compare(a, b, "--rtol", "0.6")
    assert code == 0 and "equal within a relative 0.6" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_tolerance_covers_a_value_that_is_not_finite(tmp_path, value):
    assert (
        compare(run(tmp_path / "a", [1.0]), run(tmp_path / "b", [value]), "--rtol", "1e9")[0] == 1
    )


def test_missing_iterations_and_names_differ(tmp_path):
    a, short = run(tmp_path / "a", [3.0, 2.0, 1.0]), run(tmp_path / "short", [3.0, 2.0])
    code, text = compare(a, short)
    assert code == 1 and "iteration 3 is only in A" in text
    assert compare(a, short, "--common")[0] == 0
    code, text = compare(short, run(tmp_path / "more", [3.0, 2.0], **{"grad-norm": 1.0}))
    assert code == 1 and "iteration 1: grad-norm is only in B" in text


def test_nothing_to_compare_is_an_error(tmp_path):
    a, later = run(tmp_path / "a", [3.0]), run(tmp_path / "later", [3.0], first=2)
    assert compare(a, later, "--common")[0] == 2
    code, text = compare(a, tmp_path / "nowhere")
    assert code == 2 and "nowhere: no such file" in text
    (tmp_path / "empty.jsonl").write_text("")
    code, text = compare(a, tmp_path / "empty.jsonl")
    assert code == 2 and "no rows" in text
