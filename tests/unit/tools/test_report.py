"""Report pages: what they hold of one run and of many, what they print of missing data, expected
against got. What a browser makes of them is test_report_in_browser.py's.
"""

import json
import math
import re
from pathlib import Path

import pytest
from megatron.tools._report import curves
from megatron.tools._report.runs import (
    axes,
    load_runs,
    read_events,
)

from tools import report

STUDY = Path(__file__).resolve().parents[3] / "docs/results/two_cores"
ROWS = [
    {
        "iteration": i,
        "lm loss": 5 - i / 100,
        "learning-rate": 1e-3,
        "grad-norm": 1.0,
        "tokens-per-second-per-gpu": 900.0 + i,
        "consumed-tokens": 64 * i,
        "mem-max-allocated-bytes": 2**30,
        "mem-allocated-bytes": 2**29,
        **({"lm loss validation": 4.5, "lm loss validation ppl": 90.0} if i % 50 == 0 else {}),
        **({"resumed-from-iteration": 60} if i == 61 else {}),
    }
    for i in range(1, 201)
]


def folder(path, rows=ROWS, config=None):
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (path / "metrics.config.json").write_text(json.dumps(config))
    return str(path)


def page_of(run):
    """The HTML of a run's report."""
    assert report.main([run]) == 0
    return (Path(run) / "report.html").read_text()


def text_of(page):
    """What a reader sees, without style, script and tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S))


def figure_of(page, title):
    """The HTML of the chart with a title."""
    figures = re.findall("<figure.*?</figure>", page, flags=re.S)
    return next(one for one in figures if f"<b>{title}</b>" in one)


def test_the_page_holds_curves_figures_and_configuration(tmp_path, capsys):
    run = folder(tmp_path, config={"config": {"model": {"num_layers": 7, "name": "<b>"}}})
    page = page_of(run)
    assert page.endswith("</html>\n")
    assert page.count("class=picture") == 5
    shown = "nats per token;Learning rate;tokens/s;GiB;validation;restart;12,800;4.5000"
    for text in ("Training report", "model.num_layers", *shown.split(";")):
        assert text in text_of(page), text
    assert "&lt;b&gt;" in page and "<b></td>" not in page
    assert "://" not in page
    assert str(tmp_path / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize(
    "expected, code, words",
    [
        ("4.52", 0, "expected 4.5200 ± 0.05, got 4.5000 (difference -0.0200): as expected"),
        ("4.4", 1, "NOT as expected"),
    ],
)
def test_expected_against_got(tmp_path, capsys, expected, code, words):
    flags = "--expected-validation-loss", expected, "--tolerance", "0.05"
    assert report.main([folder(tmp_path), *flags]) == code
    assert words in capsys.readouterr().out
    assert words[:30].removeprefix("expected") in (tmp_path / "report.html").read_text()


def test_several_runs_are_compared(tmp_path):
    """The table, the legend with the flags that differ and no others, losses where both have been,
    and of each metric a curve a run.
    """
    settings = {"lr": 0.1, "seed": 1, "save": "x", "adam_beta1": 0.9}
    longer = folder(tmp_path / "a", config={"config": {"optimizer": settings}})
    shorter = [{**row, "lm loss": row["lm loss"] + 1} for row in ROWS[:100]]
    changed = {"config": {"optimizer": {**settings, "lr": 0.2, "save": "y"}}}
    output = tmp_path / "page.html"
    other = folder(tmp_path / "b", shorter, changed)
    assert report.main([longer, other, "--output", str(output)]) == 0
    page = output.read_text()
    seen = " ".join(text_of(page).split())
    assert "training loss at iteration 100" in seen
    assert "b 100 6,400 5.0000" in seen and "a 200 12,800 3.0000" in seen
    assert re.search(r"a 200 .*? 4\.0000 4\.5000 .*?b 100 .*? 5\.0000 4\.5000", seen)
    assert "a lr 0.1" in seen and "b lr 0.2" in seen and "--lr 0.1 0.2" in seen
    assert "--save" not in seen.partition("Configuration differences")[2].partition("Events")[0]
    for title in ("Training loss", "Validation loss", "Throughput", "Memory of rank 0"):
        colours = re.findall(r'class="curve(?: smooth)?" stroke="(#\w+)"', figure_of(page, title))
        assert colours == list(curves.COLOURS[:2]), title


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    run = folder(tmp_path)
    output = Path(run) / "metrics.jsonl" / "page.html"
    assert report.main([run, "--output", str(output)]) == 2
    assert capsys.readouterr().err.endswith("; give another --output\n")


def test_time_in_training_leaves_out_what_was_no_training(tmp_path):
    """Rows every 10 iterations of 2 s; a save of 100 s, and a restart that repeats 10 iterations
    after an hour.
    """
    steps = [(10, 2.0, 1000.0, 40), (20, 2.0, 1020.0, 80)]
    steps += [(30, 2.0, 1140.0, 120), (30, 3.0, 4740.0, 120)]
    names = "iteration", "iteration-time", "timestamp", "consumed_samples"
    rows = [dict(zip(names, step, strict=True)) for step in steps]
    rows.insert(2, {"iteration": 25, "save-checkpoint-seconds": 100.0, "timestamp": 1130.0})
    rows[-1]["resumed-from-iteration"] = 25
    runs = load_runs([folder(tmp_path, rows)])
    found = {key: (label, columns) for key, label, columns in axes(runs)}
    assert found["iteration"][1] == [[10, 20, 25, 30]]
    assert found["samples"][1] == [[40, 80, 80, 120]]
    assert found["training"] == ("training time, without restarts (seconds)", [[20, 40, 40, 70]])
    label, ((*before, end),) = found["elapsed"]
    assert label.endswith("(minutes)") and before == [0, 20 / 60, 130 / 60] and end == 3740 / 60
    assert "tokens" not in found  # which these rows do not know


def test_events_of_rows_and_of_the_events_file(tmp_path):
    rows = [
        {"iteration": 1, "skipped-train-samples": 0},
        {"iteration": 2, "skipped-train-samples": 8, "lm loss validation": 3.0},
        {"iteration": 3, "resumed-from-iteration": 2},
        {"iteration": 4, "save-checkpoint-seconds": 1.5, "skipped-train-samples": 8},
    ]
    run = folder(tmp_path, rows)
    of_rows = [(mark.kind, mark.iteration) for mark in load_runs([run])[0].marks]
    assert of_rows == [("evaluation", 2), ("skipped", 2), ("restart", 2), ("checkpoint", 4)]
    lines = [
        {"event": "start", "time": 1.0, "iteration": 0},
        {"event": "steps", "time": 2.0, "iteration": 2, "count": 2},
        {"event": "evaluation-begin", "time": 2.0, "iteration": 2},
        {"event": "evaluation", "time": 3.0, "iteration": 2, "seconds": 0.25},
        {"event": "start", "time": 9.0, "iteration": 2},
        {"event": "checkpoint", "time": 11.0, "iteration": 3, "seconds": 0.5},
        {"event": "<i>never heard of</i>", "iteration": 4, "where": {"rank": 1}, "rank": 1},
        {"event": "of no iteration"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "events.jsonl").write_text('[1]\n{"iteration": 3}\n' + text + '{"event": "to')
    marks = load_runs([run])[0].marks
    assert [(mark.kind, mark.iteration, mark.text) for mark in marks] == [
        ("evaluation", 2, "evaluation, seconds 0.25; evaluation, loss 3.0000"),
        ("restart", 2, "restart"),
        ("skipped", 2, "8 samples of skipped steps"),
        ("checkpoint", 3, "checkpoint, seconds 0.5; checkpoint in 1.5 s"),
        ("other", 4, "<i>never heard of</i>, rank 1"),
        ("other", None, "of no iteration"),
    ]
    assert read_events(tmp_path / "none") == []
    page = page_of(run)
    assert "&lt;i&gt;never" in page and "<i>never" not in page


def test_prediction_next_to_measurement(tmp_path):
    rows = [
        {"iteration": i, "iteration-time": t, "predicted-iteration-time": 0.9}
        for i, t in enumerate((5.0, 1.0, 1.0), 1)
    ]
    page = page_of(folder(tmp_path, rows))
    assert "time of an iteration 0.9 s 1 s -10.0%" in " ".join(text_of(page).split())
    figure = figure_of(page, "Time of an iteration")
    assert figure.count("class=curve stroke") == 2  # samples of the legend
    assert figure.count('class="curve"') == 2
    bare = [{"iteration": 1, "iteration-time": 1.0}]
    assert "Prediction" not in page_of(folder(tmp_path, bare))


EVENTS = [
    {"event": "start", "time": 10.0, "iteration": 0},
    {"event": "ready", "time": 13.0, "iteration": 0, "seconds": 3.0},
    {"event": "steps", "time": 20.0, "iteration": 2, "count": 2, "seconds": 6.0},
    {"event": "end", "time": 20.0, "iteration": 2, "code": 0},
]


def test_goodput_where_there_are_events(tmp_path):
    """It names what is missing; events of another kind or without their numbers break nothing."""
    run = folder(tmp_path)
    assert "Goodput" not in page_of(run)
    odd = [{"event": "steps", "time": 12.0, "iteration": 1, "count": 1}, {"event": "x"}, [1]]
    odd += [{"event": "steps", "time": 1.0, "iteration": 1, "count": 10**400, "seconds": 10**400}]
    lines = [EVENTS[0], *odd, *EVENTS[1:]]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = " ".join(text_of(page_of(run)).split())
    assert "Goodput 60.0% of 10.0 s, 1 starts, 0 steps repeated, 0 skipped" in seen
    assert "productive: steps that changed the weights 6.0 60.0%" in seen
    assert "other: not explained 1.0 10.0% wall time 10.0 100.0%" in seen
    assert "explain all but 1.0 s of the wall time" in seen


def test_how_to_get_a_profile_and_a_damaged_one(tmp_path):
    """One run without a profile is shown how to get one; a trace that is none is named."""
    one, two = (folder(tmp_path / name) for name in ("a", "b"))
    output = tmp_path / "page.html"
    assert report.main([one, "--output", str(output)]) == 0
    assert "--profile-step-start" in output.read_text()
    assert report.main([one, two, "--output", str(output)]) == 0
    assert "--profile-step-start" not in output.read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for text in ("{", "[" * 100_000):
        (elsewhere / "rank-0.trace.json").write_text(text)
        (elsewhere / "rank-x.trace.json").write_text(text)
        config = {"config": {"logging": {"profile_dir": str(elsewhere)}}}
        assert report.main([folder(tmp_path / "a", config=config), "--output", str(output)]) == 0
        assert "rank-0.trace.json: not a trace of --profile" in output.read_text()


def test_studies_are_sections_or_a_page(tmp_path, capsys):
    """By themselves they make a page without script; what only runs have is refused for them."""
    study = tmp_path / "study"
    study.mkdir()
    (study / "raw.jsonl").write_text((STUDY / "raw.jsonl").read_text())
    page = page_of(str(study))
    assert "Study two_cores" in page and "<script" not in page and "://" not in page
    assert "<i>inside the noise</i>" in page and page.count("class=study") == 1
    output = tmp_path / "page.html"
    run = folder(tmp_path / "run")
    assert report.main([run, str(study), "--output", str(output)]) == 0
    page = output.read_text()
    assert "Training report" in page and "Study two_cores" in page and "<script" in page
    with pytest.raises(SystemExit):
        report.main([str(study), "--expected-validation-loss", "4"])
    assert "is of one run" in capsys.readouterr().err
    (study / "raw.jsonl").write_text('{"kind": "run"}\n')
    assert report.main([str(study)]) == 2


def test_long_curves_keep_their_spikes():
    points = [(i, 1.0) for i in range(100_000)]
    points[77_777] = (77_777, 50.0)
    kept = curves.thinned(points)
    assert len(kept) <= curves.MOST_POINTS and (77_777, 50.0) in kept and kept == sorted(kept)
    means = curves.stretch_means(points)
    assert sum(count for _, _, count in means) == len(points) and means[-1][0] == 99_999
    assert math.isclose(sum(mean * count for _, mean, count in means), 100_049)
