"""The table of a study, from its raw rows alone.

Called from tools/study.py and study/chart.py.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.tools._study.equal_work import Agreement, agreement
from megatron.tools._study.intervals import ENOUGH, bootstrap, coverage, ratio_interval
from megatron.tools._study.raw import FINISHED, Line, RawRows

from megatron.config.errors import UserError

GIB = 2**30
NOT_RUN = "not run yet"
BEST, NOISE, SLOWER, OTHER_WORK = "best", "inside the noise", "slower", "OTHER WORK"
ONE_PAIR = "not decided by one repeat"


@dataclass(frozen=True)
class Outline:
    """One row of the table. Rates are tokens and samples of all ranks a second: the median over
    repeats with its interval. `ratio` and its interval compare with the best row of the same work,
    repeat by repeat. `failure` is the reason of a row that has no finished run.
    """

    name: str
    world_size: int
    finished: int
    status: str
    failure: str
    work: str = ""
    speed: tuple[float, float, float] | None = None
    samples: tuple[float, float, float] | None = None
    seconds: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    ratio: tuple[float, float, float] | None = None
    verdict: str = ""
    prediction: Line | None = None


@dataclass(frozen=True)
class Summary:
    """All rows, best first and failures last, with the notes under the table."""

    header: Line
    rows: tuple[Outline, ...]
    works: dict[str, Agreement | None]
    notes: tuple[str, ...]


def summary(raw: RawRows) -> Summary:
    """Everything in the raw rows. Raises UserError where there is no header."""
    header = raw.header
    if header is None:
        raise UserError("no raw rows of a study: run it first")
    predictions = raw.predictions_for(header["hardware"])
    runs = {row["key"]: _planned(raw.of(row["key"]), header) for row in header["rows"]}
    works = _works([line for lines in runs.values() for line in lines])
    # A to Z, AA to ZZ, AAA ...
    letters = {work: chr(ord("A") + i % 26) * (i // 26 + 1) for i, work in enumerate(works)}
    agreements = {letters[work]: agreement(lines) for work, lines in works.items()}
    speeds = {key: _speeds(lines, header["warmup"]) for key, lines in runs.items()}
    rows = [
        _outline(row, runs[row["key"]], speeds[row["key"]], letters, agreements, header["warmup"])
        for row in header["rows"]
    ]
    rows = [
        _with_prediction(_compared(outline, rows, header, speeds), predictions.get(row["key"]))
        for outline, row in zip(rows, header["rows"], strict=True)
    ]
    rows.sort(key=_place)
    return Summary(header, tuple(rows), agreements, tuple(_notes(header, runs, works, agreements)))


def _place(row: Outline) -> tuple[bool, int, str, float]:
    """Of a row in the table: by its work, the fastest first, failures last."""
    speed = row.speed[0] if row.speed else 0.0
    return row.speed is None, len(row.work), row.work, -speed


def _planned(lines: list[Line], header: Line) -> list[Line]:
    return [line for line in lines if line["repeat"] < header["repeats"]]


def _works(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Finished runs by what they compute, the work of most runs first."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["status"] == FINISHED:
            found.setdefault(line["work"], []).append(line)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _speeds(lines: Sequence[Line], warmup: int) -> dict[int, float]:
    """Tokens a second of each finished repeat: by the median of its iterations after warm-up."""
    return {
        line["repeat"]: line["tokens"] / statistics.median(line["iteration_s"][warmup:])
        for line in lines
        if line["status"] == FINISHED
    }


def _outline(
    row: Line,
    lines: list[Line],
    speeds: dict[int, float],
    letters: dict[str, str],
    agreements: dict[str, Agreement | None],
    warmup: int,
) -> Outline:
    done = [line for line in lines if line["status"] == FINISHED]
    failed = [line for line in lines if line["status"] != FINISHED]
    outline = Outline(
        name=row["name"],
        world_size=int(row["settings"].get("world-size", 1)),
        finished=len(done),
        status=failed[0]["status"] if failed else FINISHED if done else NOT_RUN,
        failure="; ".join(dict.fromkeys(line["reason"] for line in failed)),
    )
    if not done:
        return outline
    work = letters[done[0]["work"]]
    found = agreements[work]
    verdict = OTHER_WORK if found and row["name"] in found.faults else ""
    return replace(outline, work=work, verdict=verdict, **_figures(done, speeds, warmup))


def _figures(done: list[Line], speeds: dict[int, float], warmup: int) -> dict[str, Any]:
    """The measured fields of an Outline, of a row's finished runs."""
    speed = statistics.median(speeds.values()), *bootstrap(list(speeds.values()))
    per_token = done[0]["samples"] / done[0]["tokens"]
    mfu = [value for line in done for value in line["mfu"][warmup:]]
    return {
        "speed": speed,
        "samples": tuple(value * per_token for value in speed),
        "seconds": done[0]["tokens"] / speed[0],
        "mfu": statistics.median(mfu) if mfu else None,
        "peak_gib": max(line["peak_bytes"] for line in done) / GIB or None,
        "loss": float(done[0]["losses"][-1]),
    }


def _compared(
    row: Outline, rows: list[Outline], header: Line, speeds: dict[str, dict[int, float]]
) -> Outline:
    """The row with its ratio to the best of the same work and the verdict on it."""
    rivals = [one for one in rows if one.speed and one.work == row.work and not one.verdict]
    if row.speed is None or row.verdict or not rivals:
        return row
    best = max(rivals, key=lambda one: one.speed[0])
    if row is best:
        return replace(row, ratio=(1.0, 1.0, 1.0), verdict=BEST)
    keys = {one["name"]: one["key"] for one in header["rows"]}
    own, other = speeds[keys[row.name]], speeds[keys[best.name]]
    ratios = [own[repeat] / other[repeat] for repeat in sorted(own.keys() & other.keys())]
    if not ratios:
        return row
    low, high = ratio_interval(ratios)
    verdict = ONE_PAIR if len(ratios) == 1 else SLOWER if high < 1 else NOISE
    return replace(row, ratio=(statistics.median(ratios), low, high), verdict=verdict)


def _with_prediction(row: Outline, line: Line | None) -> Outline:
    return row if line is None else replace(row, prediction=line["prediction"])


# ---- notes -------------------------------------------------------------------------------------


def _notes(
    header: Line,
    runs: dict[str, list[Line]],
    works: dict[str, list[Line]],
    agreements: dict[str, Agreement | None],
) -> list[str]:
    """What makes the table credible, as sentences."""
    done = [line for found in runs.values() for line in found if line["status"] == FINISHED]
    notes = [_method(header), _statistics(runs)]
    for (letter, found), lines in zip(agreements.items(), works.values(), strict=True):
        notes.append(_equal_work(letter, found, lines))
    if len(works) > 1:
        groups = zip(agreements, _differ(works), strict=True)
        notes += [f"Work {letter}: {text}." for letter, text in groups]
    if done:
        notes += [_machines(done), *_warnings(done)]
    going = [found for found in runs.values() if all(x["status"] == FINISHED for x in found)]
    if missing := sum(header["repeats"] - len(found) for found in going):
        notes.append(f"{missing} runs are still to be done.")
    return notes


def _method(header: Line) -> str:
    left = header["iterations"] - header["warmup"]
    return (
        f"Each run does {header['iterations']} iterations; the first {header['warmup']} are "
        f"warm-up and left out, a run counts with the median of the other {left}. "
        f"{header['repeats']} repeats, in rounds over all rows, forwards and backwards in turn; "
        "a row that fails is not run again."
    )


def _statistics(runs: dict[str, list[Line]]) -> str:
    counts = [sum(line["status"] == FINISHED for line in found) for found in runs.values()]
    fewest = min((count for count in counts if count), default=0)
    few = ""
    if 0 < fewest < ENOUGH:
        few = (
            f"; below {ENOUGH} repeats this is their range, which of {fewest} holds the true "
            f"median in {coverage(fewest):.0%} of cases"
        )
    return (
        f"Speeds are medians over repeats with 95% bootstrap intervals{few}. Ratios to the best "
        "row are taken repeat by repeat, their 95% interval is Student's t on logarithms; "
        f"*{NOISE}*: the interval reaches 1, so that these runs do not decide which of the two is "
        "faster. Each row is judged by itself, without a correction for many rows."
    )


def _equal_work(letter: str, found: Agreement | None, lines: list[Line]) -> str:
    rows = len({line["key"] for line in lines})
    if found is None:
        return f"Equal work {letter}: not compared; no bound is known for {lines[0]['precision']}."
    steps = len(lines[0]["losses"])
    if not found.faults:
        return (
            f"Equal work {letter}: the losses of all {steps} iterations of {len(lines)} runs in "
            f"{rows} rows agree to a relative {found.largest:.2g}; the bound of "
            f"{lines[0]['precision']} rounding is {found.bound:.2g}."
        )
    faults = "; ".join(f"row {name}: {what}" for name, what in found.faults.items())
    return f"**Unequal work {letter}**: {faults}."


def _differ(works: dict[str, list[Line]]) -> list[str]:
    """The settings by which the works differ, for each of them."""
    configs = [[line["config"] for line in lines] for lines in works.values()]
    keys = sorted({key for group in configs for config in group for key in config})
    same = [key for key in keys if all(len({str(c.get(key)) for c in g}) == 1 for g in configs)]
    telling = [key for key in same if len({str(group[0].get(key)) for group in configs}) > 1]
    return [
        ", ".join(f"{key.split('.')[1]} {group[0].get(key, 'default')}" for key in telling)
        for group in configs
    ]


def _machines(done: list[Line]) -> str:
    """Dates, hosts, clocks, devices, how busy they were, and versions."""
    cores = "/".join(sorted({str(line["cores"]) for line in done}))
    clocks = sorted(line["cpu_mhz"] for line in done if line["cpu_mhz"])
    devices = [line["device"][0].split(";")[0] for line in done if line["device"]]
    devices += [gpu.split(",")[0] for line in done for gpu in line["gpus"]]
    loads = sorted(line["load"][0] for line in done)
    parts = [
        f"{len({line['host'] for line in done})} host(s) of {cores} cores",
        f"{clocks[0]} to {clocks[-1]} MHz" if clocks else "",
        " and ".join(dict.fromkeys(devices)),
        f"load average when a run started {loads[0]:.1f} to {loads[-1]:.1f}",
        f"{min(line['started'] for line in done)} to {max(line['ended'] for line in done)}",
        " | ".join(_versions(done)),
    ]
    return "; ".join(part for part in parts if part) + "."


def _versions(done: list[Line]) -> list[str]:
    return list(dict.fromkeys(", ".join(line["versions"]) for line in done))


def _warnings(done: list[Line]) -> list[str]:
    """Where runs of one table are not of one program or one configuration."""
    notes = []
    if len(_versions(done)) > 1:
        notes.append("**Rows were measured with different versions**: see the raw rows.")
    digests: dict[str, set[str]] = {}
    for line in done:
        digests.setdefault(line["name"], set()).add(line["config_digest"])
    if mixed := [name for name, found in digests.items() if len(found) > 1]:
        notes.append(f"**The configuration changed between repeats** of {', '.join(mixed)}.")
    return notes


# ---- written out -------------------------------------------------------------------------------


FAILURES = ["row", "status", "finished runs", "reason"]


def cells_of(found: Summary) -> dict[str, list[str]]:
    """The columns of the rows that ran, by heading, without the empty ones."""
    ran = [row for row in found.rows if row.speed is not None]
    columns = {heading: [cell(row) for row in ran] for heading, cell in CELLS.items()}
    if len({row.work for row in ran}) < 2:
        del columns["work"]
    return {name: cells for name, cells in columns.items() if any(cells) or name == "row"}


def failures_of(found: Summary) -> list[list[str]]:
    """FAILURES and a line for each row that did not end as it should; empty where all did."""
    lines = [
        [row.name, row.status, str(row.finished), row.failure]
        for row in found.rows
        if row.status != FINISHED
    ]
    return [FAILURES, *lines] if lines else []


def markdown(found: Summary) -> str:
    """The table and its notes."""
    columns = cells_of(found)
    lines = _lines(list(columns), zip(*columns.values(), strict=True))
    if failed := failures_of(found):
        heads, *rows = failed
        lines += ["", *_lines(heads, ((*cells, _cell(reason)) for *cells, reason in rows))]
    return "\n".join([*lines, "", *(f"- {note}" for note in found.notes), ""])


def _lines(headings: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


CELLS: dict[str, Callable[[Outline], str]] = {  # empty columns are left out
    "row": lambda row: row.name,
    "work": lambda row: row.work,
    "runs": lambda row: str(row.finished),
    "tokens/s": lambda row: _spread(row.speed, ",.0f"),
    "of the best": lambda row: _spread(row.ratio, ".3f"),
    "verdict": lambda row: row.verdict,
    "s/iteration": lambda row: f"{row.seconds:.4g}",
    "tokens/s a rank": lambda row: f"{row.speed[0] / row.world_size:,.0f}",
    "MFU": lambda row: "" if row.mfu is None else f"{row.mfu:.1%}",
    "peak GiB, rank 0": lambda row: f"{row.peak_gib:.2f}" if row.peak_gib else "",
    "last loss": lambda row: f"{row.loss:.7g}",
    "predicted s": lambda row: f"{row.prediction['step_s']:.4g}" if row.prediction else "",
    "prediction's error": lambda row: (
        f"{row.prediction['step_s'] / row.seconds - 1:+.0%}" if row.prediction else ""
    ),
}


def _spread(values: tuple[float, float, float] | None, form: str) -> str:
    """Median and interval."""
    if values is None:
        return ""
    middle, low, high = (f"{value:{form}}" for value in values)
    return f"{middle} ({low} to {high})" if math.isfinite(values[2]) else middle


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


COLUMNS = (
    "row work status finished_runs reason world_size tokens_per_s low high samples_per_s "
    "seconds_per_iteration ratio_to_best ratio_low ratio_high verdict mfu peak_gib_rank_0 "
    "last_loss predicted_s"
).split()


def csv_text(found: Summary) -> str:
    """The same figures, unrounded, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.rows:
        speed, ratio = row.speed or ("", "", ""), row.ratio or ("", "", "")
        predicted = row.prediction["step_s"] if row.prediction else ""
        head = [row.name, row.work, row.status, row.finished, " ".join(row.failure.split())]
        figures = [*speed, row.samples[0] if row.samples else "", row.seconds, *ratio]
        rest = [row.verdict, row.mfu, row.peak_gib, row.loss, predicted]
        writer.writerow([*head, row.world_size, *figures, *rest])
    return out.getvalue()
