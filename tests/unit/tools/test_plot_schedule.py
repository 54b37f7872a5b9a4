"""Pictures and figures of schedules: what is drawn is the time line, simulated above measured on
one scale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from megatron.tools import plot_schedule
from megatron.tools._plan.simulate import Costs, simulate

from megatron.parallel.schedule import build_schedule
from megatron.parallel.timeline import Timeline

ROOT = Path(__file__).resolve().parents[3]


def measured(
    tmp_path: Path, name: str = "1f1b", ranks: int = 2, m: int = 4, **costs: float
) -> tuple[Timeline, str]:
    schedule = build_schedule(name, ranks, 2 if name == "zero-bubble-v" else 1, m)
    line = simulate(schedule, Costs.even(schedule, **costs))
    file = tmp_path / "timeline.json"
    file.write_text(line.to_json())
    return line, str(file)


def test_a_chrome_trace_has_both_time_lines(tmp_path, capsys):
    line, file = measured(tmp_path, name="zero-bubble-v", latency=0.25)
    out = tmp_path / "trace.json"
    assert plot_schedule.main(["--measured", file, "--chrome", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == [
        f"{what} rank {rank}" for what in ("simulated", "measured") for rank in (0, 1)
    ]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] >= 2]
    assert len(spans) == sum(map(len, line.rows))
    last = max(spans, key=lambda event: event["ts"] + event["dur"])
    assert last["ts"] + last["dur"] == pytest.approx(1e6 * (line.end - line.begin))
    first = line.rows[1][0]
    (found,) = (event for event in spans if event["pid"] == 3 and event["ts"] == 1e6 * first.begin)
    assert found["name"] == f"forward stage {first.stage} micro-batch {first.micro}"
    assert found["dur"] == pytest.approx(1e6 * (first.end - first.begin))


SIZES = "--ranks 2 --micro-batches 2"
REFUSED = f"""
 => needs --schedule, --ranks, --micro-batches, or --measured FILE
--table --ranks 2 => --table needs --ranks and --micro-batches
--measured TIMELINE --ranks 3 => --ranks 3: TIMELINE has 2; leave the flag out
--measured TIMELINE --pairs => --pairs: TIMELINE has none; leave the flag out
--schedule 1f1b {SIZES} --exchanged 0.1,0.1 => --exchanged: only passes in pairs hide it
--schedule 1f1b {SIZES} --out a.pdf => --out a.pdf: must end in .svg or .png
""".strip("\n").splitlines()


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_drawn_is_refused(tmp_path, capsys, row):
    flags, message = row.replace("TIMELINE", measured(tmp_path)[1]).split(" => ")
    assert plot_schedule.main(flags.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs/images").glob("schedule-*.svg")), ids=lambda path: path.name
)
def test_the_pictures_of_the_documentation_are_what_the_tool_draws(picture, tmp_path):
    """docs/schedules.md has one command, and what is different for the schedule in pairs."""
    page = (ROOT / "docs/schedules.md").read_text()
    [command] = re.findall(r"^python tools/plot_schedule.py (.*) --out", page, re.MULTILINE)
    name = picture.stem.removeprefix("schedule-")
    pairs = re.search(rf"`{name}` with\s`(--schedule .*)`", page)
    command = command.replace("--schedule NAME", pairs[1] if pairs else f"--schedule {name}")
    assert plot_schedule.main([*command.split(), "--out", str(tmp_path / picture.name)]) == 0
    assert (tmp_path / picture.name).read_text() == picture.read_text()
    assert picture.stat().st_size < 60_000


@pytest.mark.parametrize("costs", [[], ["--latency", "0.1"]], ids=" ".join)
def test_the_tables_of_the_documentation_are_what_the_tool_prints(capsys, costs):
    page = (ROOT / "docs/schedules.md").read_text()
    start = page.index(
        f"`{' '.join(costs)}`"
        if costs
        else "`python tools/plot_schedule.py --table --ranks 8 --micro-batches 16`"
    )
    assert plot_schedule.main(["--table", "--ranks", "8", "--micro-batches", "16", *costs]) == 0
    shown = re.search(r"(?:^\|.*\n)+", page[start:], re.MULTILINE)[0].splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) >= 5 and [row for row in printed if row in shown] == shown
