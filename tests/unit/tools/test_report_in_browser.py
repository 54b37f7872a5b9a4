"""Report pages in a real browser: what is drawn, what the switches change, and that nothing
overlaps, at two widths. Skipped, with the reason, where no browser can be installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import pytest
from headless_browser import Browser, missing_browser
from megatron.tools._report.goodput_account import CAUSES, goodput
from megatron.tools._report.metrics_file import read_metrics
from megatron.tools._report.step_parts import step_table

from pretrain_gpt import main
from tools import report

pytestmark = pytest.mark.full

RUN = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
--micro-batch-size 2 --global-batch-size 2 --train-iters 120 --mock-data
--tokenizer-type NullTokenizer --vocab-size 49 --lr-decay-style cosine --lr-warmup-iters 10
--log-interval 1 --eval-interval 30 --eval-iters 1
--profile --profile-step-start 3 --profile-step-end 5""".split()
# figure by title -> paths by class, texts
DRAWN = """Object.fromEntries([...document.querySelectorAll("main > .charts figure")].map(
  figure => {
  const chosen = ".picture path:not(.grid, .tick, .pointer, .zone, clipPath *)";
  const paths = [...figure.querySelectorAll(chosen)];
  const texts = [...figure.querySelectorAll(".picture text")].map(text => text.textContent);
  const names = ["class", "stroke", "d"];
  return [figure.querySelector("b").textContent, {
    texts, paths: paths.map(path => names.map(name => path.getAttribute(name)))}];
}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing_browser()
    if reason is not None:
        pytest.skip(f"no browser here: {reason}")
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two real runs with another learning rate, of which the first was stopped and resumed."""
    folder = tmp_path_factory.mktemp("pair")
    fast, slow = folder / "fast", folder / "slow & <small>"
    for save, flags in (
        (fast, ["--lr", "1e-2", "--exit-interval", "70"]),
        (fast, ["--lr", "1e-2"]),
        (slow, ["--lr", "1e-3"]),
    ):
        assert main([*RUN, "--save", str(save), "--load", str(save), *flags]) == 0
    assert report.main([str(fast), str(slow), "--output", str(folder / "pair.html")]) == 0
    assert report.main([str(fast), "--output", str(folder / "one.html")]) == 0
    return [fast, slow]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", path)]


def points(path: str) -> list[tuple[float, float]]:
    """Of a path of straight lines."""
    found = numbers(path)
    return list(zip(found[::2], found[1::2], strict=True))


def of_class(drawn: dict, title: str, kind: str) -> list[list[tuple[float, float]]]:
    return [points(path) for name, _, path in drawn[title]["paths"] if name == kind]


def choose(browser: Browser, switch: str, value: object) -> dict:
    """Set a switch as a reader does; what is drawn then."""
    shown = "checked" if isinstance(value, bool) else "value"
    browser.run(
        f"(() => {{ const one = document.querySelector({switch!r}); one.{shown} = "
        f"{str(value).lower()}; for (const name of ['input', 'change']) "
        "one.dispatchEvent(new Event(name)); })()"
    )
    return browser.run(DRAWN)


@pytest.mark.parametrize("name", ["one", "pair"])
def test_the_script_draws_what_is_drawn_without_it(browser: Browser, pair: list[Path], name: str):
    """Nothing is complained of and nothing asked for; every path of the picture that is in the
    page is drawn again in the same place.
    """
    file = pair[0].with_name(f"{name}.html")
    browser.open(file, script=False)
    still = browser.run(DRAWN)
    assert browser.run("document.querySelector('.switches').hidden")
    browser.open(file)
    assert browser.complaints == []
    drawn = browser.run(DRAWN)
    assert list(drawn) == list(still) and len(drawn) >= 6
    for title, picture_of in still.items():
        visible = [path for path in picture_of["paths"] if path[2]]
        assert picture_of["texts"] == drawn[title]["texts"], title
        assert len(visible) == len(drawn[title]["paths"]), title
        for (kind, colour, before), (kind_now, colour_now, now) in zip(
            visible, drawn[title]["paths"], strict=True
        ):
            assert (kind, colour) == (kind_now, colour_now)
            a, b = numbers(before), numbers(now)
            assert len(a) == len(b) and all(abs(x - y) < 0.11 for x, y in zip(a, b, strict=True)), (
                title,
                kind,
            )


def test_every_row_is_a_point_and_in_its_place(browser: Browser, pair: list[Path]):
    browser.open(pair[0].with_name("pair.html"))
    drawn = browser.run(DRAWN)
    for title, metric in (("Training loss", "lm loss"), ("Learning rate", "learning-rate")):
        kind = "curve faint" if title == "Training loss" else "curve"
        lines = of_class(drawn, title, kind)
        values = [[row[metric] for row in read_metrics(run)] for run in pair]
        assert [len(line) for line in lines] == [len(column) for column in values] == [120, 120]
        # pixels are a straight function of values, the same for both runs
        flat = sorted(
            (value, y)
            for column, line in zip(values, lines, strict=True)
            for value, (_, y) in zip(column, line, strict=True)
        )
        (low, y_low), (high, y_high) = flat[0], flat[-1]
        for value, y in flat:
            assert abs(y_low + (value - low) / (high - low) * (y_high - y_low) - y) < 0.11
    kinds = [kind for kind, _, _ in drawn["Training loss"]["paths"]]
    assert kinds.count("mark evaluation") == kinds.count("mark checkpoint") == 2
    assert kinds.count("restart") == 1  # only the first run was resumed


def test_other_axes(browser: Browser, pair: list[Path]):
    """Along each axis the points lie where the rows put them."""
    browser.open(pair[0].with_name("one.html"))
    labels = browser.run("[...document.querySelectorAll('#axis option')].map(one => one.text)")
    rows = read_metrics(pair[0])
    columns = {
        "iteration": [row["iteration"] for row in rows],
        "samples": [row["consumed_samples"] for row in rows],
        "tokens": [row["consumed-tokens"] for row in rows],
        "training time, without restarts": accumulate(row["iteration-time"] for row in rows),
        "time since the first row": [row["timestamp"] for row in rows],
    }
    assert [label.split(" (")[0] for label in labels] == list(columns)
    for number, column in enumerate(columns.values()):
        drawn = choose(browser, "#axis", number)
        assert drawn["Loss"]["texts"][-1] == labels[number]
        (line,) = of_class(drawn, "Learning rate", "curve")
        x, values = [x for x, _ in line], list(column)
        width, extent = x[-1] - x[0], values[-1] - values[0]
        expected = [x[0] + (value - values[0]) / extent * width for value in values]
        assert width > 400 and x == pytest.approx(expected, abs=0.11)


def test_the_pointer_shows_values_and_a_drag_enlarges(browser: Browser, pair: list[Path]):
    browser.open(pair[0].with_name("pair.html"))
    box = browser.run(
        "(() => { const box = document.querySelector('.picture').getBoundingClientRect();"
        "return [box.left, box.top, box.width]; })()"
    )
    line = of_class(browser.run(DRAWN), "Training loss", "curve faint")[0]
    browser.mouse("mouseMoved", box[0] + line[29][0], box[1] + 100)
    shown = browser.run("document.querySelector('.tip').innerText")
    assert "iteration 30" in shown, shown
    for run in pair:
        loss = next(row["lm loss"] for row in read_metrics(run) if row["iteration"] == 30)
        assert f"{run.name} {loss:.5g}" in shown.replace("\n", " "), shown
    assert "evaluation, loss" in shown  # of iteration 30
    browser.mouse("mouseMoved", box[0] + line[49][0], box[1] + 100)
    browser.mouse("mousePressed", box[0] + line[49][0], box[1] + 100, pressed=True)
    browser.mouse("mouseMoved", box[0] + line[99][0], box[1] + 120, pressed=True)
    browser.mouse("mouseReleased", box[0] + line[99][0], box[1] + 120)
    drawn = browser.run(DRAWN)
    for title in ("Training loss", "Learning rate"):
        ticks = [int(text) for text in drawn[title]["texts"] if re.fullmatch("[1-9][0-9]+", text)]
        assert ticks and 50 <= min(ticks) and max(ticks) <= 100, (title, ticks)
    browser.run("document.getElementById('whole').click()")
    assert of_class(browser.run(DRAWN), "Training loss", "curve faint")[0] == line
    assert browser.run("document.getElementById('whole').hidden")
    drawn = choose(browser, "[data-run='1']", False)
    assert len(of_class(drawn, "Training loss", "curve faint")) == 1
    assert browser.complaints == []


def below(browser: Browser, heading: str, selector: str, value: str) -> list:
    """A value in JavaScript of each element `one` below a heading, as a reader sees it."""
    return browser.run(
        "(() => { const found = []; let at = [...document.querySelectorAll('h2')].find("
        f"one => one.innerText === {heading!r}).nextElementSibling;"
        "for (; at && at.tagName !== 'H2'; at = at.nextElementSibling)"
        f"  found.push(...[...at.querySelectorAll({selector!r})].map(one => {value}));"
        "return found; })()"
    )


def tables(browser: Browser, heading: str) -> list[list[list[str]]]:
    """The cells of the tables below a heading."""
    cells = "[...one.rows].map(row => [...row.cells].map(cell => cell.innerText))"
    return below(browser, heading, "table", cells)


def bars(browser: Browser, heading: str) -> list[list[float]]:
    """The widths of the parts of each bar below a heading, as shares of what they fill."""
    widths = "[...one.children].map(part => part.getBoundingClientRect().width)"
    found = below(browser, heading, ".stack", widths)
    return [[width / sum(parts) for width in parts] for parts in found]


@pytest.mark.parametrize("width", [400, 1400])
def test_time_is_shown_as_the_files_say(browser: Browser, pair: list[Path], width: int):
    """Goodput and the parts of the profiled steps, as numbers and bars."""
    found = goodput(pair[0])
    browser.open(pair[0].with_name("one.html"), width)
    ((head, *rows),) = tables(browser, "Goodput")
    assert head == ["cause", "seconds", "share"] and rows.pop()[1] == f"{found.wall:,.1f}"
    assert [row[0].split(":")[0] for row in rows] == ["productive", *CAUSES, "other"]
    expected = [seconds for _, seconds in found.rows()]
    assert [row[1] for row in rows] == [f"{seconds:,.1f}" for seconds in expected]
    assert [row[2] for row in rows] == [f"{each / found.wall:.1%}" for each in expected]
    (bar,) = bars(browser, "Goodput")
    above = [max(0.0, seconds) for seconds in expected]
    assert bar == pytest.approx([each / sum(above) for each in above if each], abs=0.01)
    text = browser.run("document.body.innerText")
    assert f"Goodput {found.productive / found.wall:.1%} of {found.wall:.1f} s" in text

    steps = step_table(pair[0] / "profile")
    assert [step.iteration for step in steps] == [4, 5]
    ((head, row),) = tables(browser, "Where the steps went")
    whole = fmean(step.seconds for step in steps)
    assert row[:4] == ["rank 0", "", "2", f"{1000 * whole:.1f}"] and {"compute", "host"} < {*head}
    parts = [fmean(step.parts.get(name, 0.0) for step in steps) for name in head[4:]]
    assert sum(parts) == pytest.approx(whole)
    assert row[4:] == [f"{1000 * part:.1f} ({100 * part / whole:.0f}%)" for part in parts]
    (bar,) = bars(browser, "Where the steps went")
    assert bar == pytest.approx([part / whole for part in parts if part], abs=0.01)
    assert browser.complaints == []
