"""The table of recorded raw rows: what it holds, and that it depends on every one of them."""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from megatron.tools._study import raw
from megatron.tools._study.chart import draw
from megatron.tools._study.equal_work import agreement, loss_bound
from megatron.tools._study.table import csv_text, markdown, summary
from megatron.tools.study import main

from megatron.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "docs/results/two_cores"


@pytest.fixture
def recorded() -> raw.RawRows:
    """The raw rows of the study in docs/studies.md."""
    return copy.deepcopy(raw.read(RECORDED))


def finished(rows: raw.RawRows, name: str) -> list[raw.Line]:
    return [line for line in rows.runs.values() if line["name"] == name and line["status"] == "ok"]


def test_the_published_table_is_that_of_its_raw_rows(tmp_path):
    shutil.copy(RECORDED / "raw.jsonl", tmp_path)
    assert main([str(tmp_path)]) == 0
    for name in ("table.md", "table.csv", "chart.svg"):
        assert (tmp_path / name).read_text() == (RECORDED / name).read_text(), name
    ElementTree.parse(tmp_path / "chart.svg")
    page = (ROOT / "docs/studies.md").read_text()
    assert "<!-- =study.two_cores -->" in page and "(results/two_cores/chart.svg)" in page


def test_removing_any_raw_row_changes_the_table(tmp_path):
    lines = (RECORDED / "raw.jsonl").read_text().splitlines()
    (tmp_path / "raw.jsonl").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(UserError, match="run it first"):
        summary(raw.read(tmp_path))
    read = raw.read(RECORDED)
    whole = markdown(summary(read))
    shown = {row["key"] for row in read.header["rows"] if finished(read, row["name"])}
    for number in range(1, len(lines)):
        line = json.loads(lines[number])
        # a prediction for a row that never finished is next to no measurement
        is_shown = line["kind"] != "prediction" or line["key"] in shown
        rest = lines[:number] + lines[number + 1 :]
        (tmp_path / "raw.jsonl").write_text("\n".join(rest) + "\n")
        assert (markdown(summary(raw.read(tmp_path))) != whole) == is_shown, lines[number][:200]


def test_every_figure_of_a_row_by_hand(recorded):
    found = summary(recorded)
    row = found.rows[0]
    lines = finished(recorded, row.name)
    warmup = found.header["warmup"]
    speeds = [line["tokens"] / statistics.median(line["iteration_s"][warmup:]) for line in lines]
    assert row.speed[0] == statistics.median(speeds) and row.verdict == "best"
    assert row.speed[1:] == (min(speeds), max(speeds)), "of three repeats the range"
    assert row.seconds == pytest.approx(lines[0]["tokens"] / row.speed[0])
    assert row.peak_gib == max(line["peak_bytes"] for line in lines) / 2**30
    read = {each["row"]: each for each in csv.DictReader(io.StringIO(csv_text(found)))}
    assert len(read) == 12 and float(read[row.name]["tokens_per_s"]) == row.speed[0]


def test_failures_are_kept_with_their_reasons(recorded):
    failed = {row.status: row for row in summary(recorded).rows if row.speed is None}
    assert failed.keys() == {"out of memory", "crashed"}
    assert "allocate" in failed["out of memory"].failure
    assert "NaN or Inf" in failed["crashed"].failure
    shown = draw(summary(recorded))
    assert "out of memory: " in shown and "crashed: iteration 2" in shown


def test_a_difference_inside_the_noise_is_said(recorded):
    """Two rows of equal speed are not distinguished, nor is one that is slower in one round only;
    one that is always slower by a tenth is.
    """
    best = summary(recorded).rows[0].name
    other = summary(recorded).rows[1].name
    own = {line["repeat"]: line for line in finished(recorded, best)}
    for repeat, line in own.items():  # the machine grows slower from round to round
        line["iteration_s"] = [0.01 * (1 + repeat)] * len(line["iteration_s"])

    def verdict(factors: list[float]) -> tuple[str, str]:
        for line in finished(recorded, other):
            times = own[line["repeat"]]["iteration_s"]
            line["iteration_s"] = [time * factors[line["repeat"]] for time in times]
            line["tokens"] = own[line["repeat"]]["tokens"]
        rows = {row.name: row for row in summary(recorded).rows}
        return rows[best].verdict, rows[other].verdict

    assert verdict([1.0001, 1.0002, 0.9999]) == ("best", "inside the noise")
    assert verdict([1.3, 1.001, 1.01]) == ("best", "inside the noise")
    assert verdict([1.1, 1.11, 1.09]) == ("best", "slower")
    assert "inside the noise" in markdown(summary(recorded))
    for line in finished(recorded, other)[1:]:
        line["status"] = "killed"
    assert summary(recorded).rows[1].verdict == "not decided by one repeat"


def test_a_row_that_did_other_work_is_found(recorded, tmp_path):
    name = summary(recorded).rows[1].name
    bound = loss_bound("fp32", 4)
    losses = finished(recorded, name)[0]["losses"]
    last = losses[-1]
    for share, is_other in ((0.5, False), (2.0, True)):
        losses[-1] = last * (1 + share * bound)
        (row,) = (row for row in summary(recorded).rows if row.name == name)
        assert (row.verdict == "OTHER WORK") == is_other
    losses[-1] = last
    finished(recorded, name)[0]["losses"][4] *= 1.01
    text = markdown(summary(recorded))
    assert f"**Unequal work A**: row {name}: loss " in text and "at iteration 5" in text
    lines = [recorded.header, *recorded.runs.values()]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path)]) == 1


def test_rows_of_a_narrow_format_are_held_to_each_other():
    """bf16 rounds so much that its bound alone would pass other data; rows show the rounding."""
    noise = [0.0, 1e-4, -2e-4, 3e-4, 2e-4, 1e-4]

    def runs(last: float, count: int = 6) -> list[raw.Line]:
        factors = [1 + value for value in [*noise[: count - 1], last]]
        return [
            {"name": str(i), "precision": "bf16", "layers": 32, "losses": [10.8, 10.5 * factor]}
            for i, factor in enumerate(factors)
        ]

    assert loss_bound("bf16", 32) > 0.2
    assert not agreement(runs(1e-3)).faults
    assert agreement(runs(5e-3)).faults.keys() == {"5"}
    assert agreement(runs(5e-3)[::-1]).faults.keys() == {"5"}, "whichever row is first"
    assert not agreement(runs(5e-3, count=4)).faults, "too few rows to show it"


def test_a_torn_line_is_skipped_and_ended(tmp_path):
    (tmp_path / "raw.jsonl").write_text('{"kind": "study", "name": "a"}\n{"kind": "run", "ke')
    raw.append(tmp_path, {"kind": "run", "key": "k", "repeat": 0})
    raw.append(tmp_path, {"kind": "run", "key": [1], "repeat": 0})
    found = raw.read(tmp_path)
    assert found.header["name"] == "a" and list(found.runs) == [("k", 0)]
    (tmp_path / "raw.jsonl").write_text("\n")
    assert not any(raw.read(tmp_path))
    (tmp_path / "raw.jsonl").write_text("nothing\n")
    with pytest.raises(UserError, match="no line has a kind"):
        raw.read(tmp_path)


def test_works_beyond_the_alphabet_are_distinguished(recorded):
    row = recorded.header["rows"][0]
    line = recorded.runs[row["key"], 0]
    keys = [f"key {number}" for number in range(28)]
    header = recorded.header | {"rows": [row | {"key": key, "name": key} for key in keys]}
    runs = {(key, 0): line | {"key": key, "name": key, "work": key} for key in keys}
    found = summary(raw.RawRows(header, runs, {})).rows
    assert [found[number].work for number in (0, 1, 26, 27)] == ["A", "B", "AA", "BB"]
