"""The report page: what it shows, what it says of missing data, expected against got."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import report

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


def folder(tmp_path, rows=ROWS, config=None):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (tmp_path / "metrics.config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_page_holds_plots_figures_and_configuration(tmp_path, capsys):
    run = folder(tmp_path, config={"config": {"model": {"num_layers": 7, "name": "<b>"}}})
    assert report.main([run]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    for text in (
        "Training report",
        "nats per token",
        "learning rate",
        "tokens/s",
        "GiB",
        "validation",
        "resumed from a checkpoint",
        "model.num_layers",
        "12,800",
        "4.5000",
    ):
        assert text in page, text
    assert "&lt;b&gt;" in page and "<b></td>" not in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_the_same_run_gives_the_same_page(tmp_path):
    run = folder(tmp_path)
    pages = []
    for name in ("a.html", "b.html"):
        assert report.main([run, "--output", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    "flags, code, words",
    [
        (
            ["--expected-validation-loss", "4.52", "--tolerance", "0.05"],
            0,
            "expected 4.5200 ± 0.05, got 4.5000 (difference -0.0200): as expected",
        ),
        (["--expected-validation-loss", "4.4", "--tolerance", "0.05"], 1, "NOT as expected"),
        (
            ["--expected-validation-loss", "4.4"],
            0,
            "expected 4.4000, got 4.5000 (difference +0.1000)",
        ),
    ],
)
def test_expected_against_got(tmp_path, capsys, flags, code, words):
    assert report.main([folder(tmp_path), *flags]) == code
    assert (
        words in capsys.readouterr().out
        and words[:30].removeprefix("expected") in (tmp_path / "report.html").read_text()
    )


def test_a_run_that_was_never_evaluated_is_not_as_expected(tmp_path, capsys):
    assert report.main([folder(tmp_path, ROWS[:3]), "--expected-validation-loss", "4"]) == 1
    assert "has not been evaluated" in capsys.readouterr().out


def test_missing_metrics_leave_a_sentence(tmp_path):
    assert report.main([folder(tmp_path, [{"iteration": 1, "lm loss": 3.0}])]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("nothing to draw") == 4 and page.count("<svg") == 1 and "is not known" in page


def test_non_finite_losses_are_marked(tmp_path):
    rows = [
        {"iteration": 1, "lm loss": 3.0},
        {"iteration": 2, "lm loss": "NaN"},
        {"iteration": 3, "lm loss": 2.0},
    ]
    assert report.main([folder(tmp_path, rows)]) == 0
    assert "NaN or Inf (1)" in (tmp_path / "report.html").read_text()


def test_nothing_to_report(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_long_curves_keep_their_spikes():
    points = [(i, 1.0) for i in range(100_000)]
    points[77_777] = (77_777, 50.0)
    kept = report.thinned(points)
    assert len(kept) <= report.MOST_POINTS and (77_777, 50.0) in kept and kept == sorted(kept)
    assert report.running_mean([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(1, 2.0), (2, 4.0)]
