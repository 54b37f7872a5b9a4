"""The table of a study, from its raw rows alone.

Called from tools/study.py and study/chart.py.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.errors import UserError
from megatron.study.equal_work import Agreement, agreement
from megatron.study.intervals import ENOUGH, bootstrap, coverage, ratio_interval
from megatron.study.raw import FINISHED, Line, RawRows

GIB = 2**30
NOT_RUN = "not run yet"
BEST, NOISE, SLOWER, OTHER_WORK = "best", "inside the noise", "slower", "OTHER WORK"


@dataclass(frozen=True)
class Outline:
    """One row of the table. Rates are tokens and samples of all ranks a second: the median over
    repeats with its interval. `ratio` and its interval compare with the best row of the same work,
    repeat by repeat. `failure` is the reason of a row that has no finished run.
    """

    name: str
    work: str
    world_size: int
    finished: int
    status: str
    failure: str
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
    """All rows, best first and failures last, with what the notes under the table say."""

    header: Line
    rows: tuple[Outline, ...]
    works: dict[str, Agreement | None]
    notes: tuple[str, ...]


def summary(raw: RawRows) -> Summary:
    """Everything that the raw rows say. Raises UserError where there is no header."""
    header = raw.header
    if header is None:
        raise UserError("no raw rows of a study: run it first")
    runs = {row["key"]: _planned(raw.of(row["key"]), header) for row in header["rows"]}
    works = _works([line for lines in runs.values() for line in lines])
    letters = {work: chr(ord("A") + index % 26) for index, work in enumerate(works)}
    agreements = {letters[work]: agreement(lines) for work, lines in works.items()}
    speeds = {key: _speeds(lines, header["warmup"]) for key, lines in runs.items()}
    rows = [
        _outline(row, runs[row["key"]], speeds[row["key"]], letters, agreements, header)
        for row in header["rows"]
    ]
    rows = [
        _with_prediction(_compared(outline, rows, header, speeds), raw, row["key"])
        for outline, row in zip(rows, header["rows"], strict=True)
    ]
    rows.sort(key=lambda row: (row.work, -row.speed[0]) if row.speed else ("~", 0.0))
    return Summary(header, tuple(rows), agreements, tuple(_notes(header, runs, works, agreements)))


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


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    return (statistics.median(values), *bootstrap(values))


def _outline(
    row: Line,
    lines: list[Line],
    speeds: dict[int, float],
    letters: dict[str, str],
    agreements: dict[str, Agreement | None],
    header: Line,
) -> Outline:
    done = [line for line in lines if line["status"] == FINISHED]
    failed = [line for line in lines if line["status"] != FINISHED]
    reason = "; ".join(dict.fromkeys(line["reason"] for line in failed))
    status = failed[0]["status"] if failed else NOT_RUN if not done else FINISHED
    world = int(row["settings"].get("world-size", 1))
    if not done:
        return Outline(row["name"], "", world, 0, status, reason)
    work = letters[done[0]["work"]]
    found = agreements[work]
    speed = _middle(list(speeds.values()))
    per_token = done[0]["samples"] / done[0]["tokens"]
    mfu = [value for line in done for value in line["mfu"][header["warmup"] :]]
    return Outline(
        name=row["name"],
        work=work,
        world_size=world,
        finished=len(done),
        status=status,
        failure=reason,
        speed=speed,
        samples=(speed[0] * per_token, speed[1] * per_token, speed[2] * per_token),
        seconds=done[0]["tokens"] / speed[0],
        mfu=statistics.median(mfu) if mfu else None,
        peak_gib=max(line["peak_bytes"] for line in done) / GIB or None,
        loss=float(done[0]["losses"][-1]),
        verdict=OTHER_WORK if found and row["name"] in found.faults else "",
    )


def _compared(
    row: Outline, rows: list[Outline], header: Line, speeds: dict[str, dict[int, float]]
) -> Outline:
    """The row with its ratio to the best of the same work and the verdict on it."""
    rivals = [one for one in rows if one.speed and one.work == row.work and not one.verdict]
    if row.speed is None or row.verdict or not rivals:
        return row
    best = max(rivals, key=lambda one: one.speed[0])
    if row is best:
        return _replaced(row, ratio=(1.0, 1.0, 1.0), verdict=BEST)
    keys = {one["name"]: one["key"] for one in header["rows"]}
    own, other = speeds[keys[row.name]], speeds[keys[best.name]]
    ratios = [own[repeat] / other[repeat] for repeat in sorted(own.keys() & other.keys())]
    if not ratios:
        return row
    low, high = ratio_interval(ratios)
    verdict = SLOWER if high < 1 else NOISE
    return _replaced(row, ratio=(statistics.median(ratios), low, high), verdict=verdict)


def _with_prediction(row: Outline, raw: RawRows, key: str) -> Outline:
    line = raw.predictions.get(key)
    return row if line is None else _replaced(row, prediction=line["prediction"])


def _replaced(row: Outline, **changes: Any) -> Outline:
    return Outline(**{**vars(row), **changes})


# ---- notes -------------------------------------------------------------------------------------


def _notes(
    header: Line,
    runs: dict[str, list[Line]],
    works: dict[str, list[Line]],
    agreements: dict[str, Agreement | None],
) -> list[str]:
    """What makes the table credible, as sentences."""
    lines = [line for found in runs.values() for line in found]
    done = [line for line in lines if line["status"] == FINISHED]
    left = header["iterations"] - header["warmup"]
    notes = [
        f"Each run does {header['iterations']} iterations; the first {header['warmup']} are "
        f"warm-up and left out, a run counts with the median of the other {left}. "
        f"{header['repeats']} repeats, in rounds over all rows, forwards and backwards in turn; "
        "a row that fails is not run again."
    ]
    counts = [sum(line["status"] == FINISHED for line in found) for found in runs.values()]
    fewest = min((count for count in counts if count), default=0)
    interval = "Speeds are medians over repeats with 95% bootstrap intervals"
    if 0 < fewest < ENOUGH:
        interval += (
            f"; below {ENOUGH} repeats this is their range, which of {fewest} holds the true "
            f"median in {coverage(fewest):.0%} of cases"
        )
    notes.append(
        f"{interval}. Ratios to the best row are taken repeat by repeat, their 95% interval is "
        f"Student's t on logarithms; *{NOISE}*: it holds 1, so that these runs do not decide which "
        "of the two is faster. Each row is judged by itself, without a correction for many rows."
    )
    for letter, found in agreements.items():
        notes.append(_equal_work(letter, found, list(works.values())[ord(letter) - ord("A")]))
    if len(works) > 1:
        notes += [f"Work {chr(ord('A') + at)}: {text}." for at, text in enumerate(_differ(works))]
    notes += _machines(done)
    if missing := sum(max(0, header["repeats"] - len(found)) for found in _going(runs)):
        notes.append(f"{missing} runs are still to be done.")
    return notes


def _going(runs: dict[str, list[Line]]) -> list[list[Line]]:
    """The runs of rows that have not failed."""
    return [found for found in runs.values() if all(line["status"] == FINISHED for line in found)]


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


def _machines(done: list[Line]) -> list[str]:
    """Versions, hosts, clocks, and how busy they were; a warning where rows differ in them."""
    if not done:
        return []
    versions = list(dict.fromkeys(", ".join(line["versions"]) for line in done))
    hosts = list(dict.fromkeys(line["host"] for line in done))
    loads = [line["load"][0] for line in done]
    cores = sorted({line["cores"] for line in done})
    devices = list(
        dict.fromkeys(line["device"][0].split(";")[0] for line in done if line["device"])
    )
    devices += list(dict.fromkeys(gpu.split(",")[0] for line in done for gpu in line["gpus"]))
    clocks = [line["cpu_mhz"] for line in done if line["cpu_mhz"]]
    megahertz = f", {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    notes = [
        f"{done[0]['started'][:10]} to {done[-1]['ended'][:10]} on {len(hosts)} host(s), "
        f"{'/'.join(map(str, cores))} cores{megahertz}; {'; '.join(devices)}; "
        f"load average when a run started {min(loads):.1f} to {max(loads):.1f}; "
        f"{' | '.join(versions)}."
    ]
    if len(versions) > 1:
        notes.append("**Rows were measured with different versions**: see the raw rows.")
    by_key: dict[str, set[str]] = {}
    for line in done:
        by_key.setdefault(line["name"], set()).add(line["config_digest"])
    if mixed := [name for name, digests in by_key.items() if len(digests) > 1]:
        notes.append(f"**The configuration changed between repeats** of {', '.join(mixed)}.")
    return notes


# ---- written out -------------------------------------------------------------------------------


def markdown(found: Summary) -> str:
    """The table and its notes."""
    several = len({row.work for row in found.rows if row.work}) > 1
    mfu = any(row.mfu is not None for row in found.rows)
    predicted = any(row.prediction for row in found.rows)
    columns = ["row", *(["work"] if several else []), "runs", "tokens/s (95%)", "of the best (95%)"]
    columns += ["verdict", "s/iteration", "tokens/s a rank", *(["MFU"] if mfu else [])]
    columns += ["peak GiB, rank 0", "last loss", *(["predicted s", "error"] if predicted else [])]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in found.rows:
        if row.speed is None:
            continue
        cells = [row.name, *([row.work] if several else []), str(row.finished)]
        cells += [_spread(row.speed, ",.0f"), _spread(row.ratio, ".3f") if row.ratio else ""]
        cells += [row.verdict, f"{row.seconds:.4g}", f"{row.speed[0] / row.world_size:,.0f}"]
        cells += ([f"{row.mfu:.1%}"] if row.mfu is not None else [""]) if mfu else []
        cells += [f"{row.peak_gib:.2f}" if row.peak_gib else "", f"{row.loss:.6f}"]
        cells += _predicted(row) if predicted else []
        lines.append(f"| {' | '.join(cells)} |")
    failed = [row for row in found.rows if row.status != FINISHED]
    if failed:
        lines += ["", "| row | status | finished runs | reason |", "|---" * 4 + "|"]
        lines += [
            f"| {row.name} | {row.status} | {row.finished} | {_cell(row.failure)} |"
            for row in failed
        ]
    return "\n".join([*lines, "", *(f"- {note}" for note in found.notes), ""])


def _spread(values: tuple[float, float, float], form: str) -> str:
    """Median and interval; one without a finite end decides nothing."""
    middle, low, high = (f"{value:{form}}" for value in values)
    return f"{middle} ({low} to {high})"


def _predicted(row: Outline) -> list[str]:
    if not row.prediction or row.seconds is None:
        return ["", ""]
    seconds = row.prediction["step_s"]
    return [f"{seconds:.4g}", f"{seconds / row.seconds - 1:+.0%}"]


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
