"""What figures of the documents are made of: the results they are read from, tables, ratios.

Called from document_results.py, whose figures enter FIGURES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from megatron.tools._plan.rows import Row, read_rows
from megatron.tools._study.raw import read
from megatron.tools._study.table import markdown, summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FIGURES: dict[str, Callable[[], str]] = {}


def figure(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Enter a function into FIGURES."""
    return lambda compute: FIGURES.setdefault(name, compute)


@cache
def result(name: str) -> Any:
    """The content of docs/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


@figure("study.two_cores")
def study_two_cores() -> str:
    """The table of studies/two_cores.yaml, from its raw rows."""
    return f"\n{markdown(summary(read(RESULTS / 'two_cores')))}"


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table on its own lines; `header` holds the columns' names between bars."""
    lines = [f"| {header} |", "|---" * (header.count("|") + 1) + "|"]
    return "\n".join(["", *lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def ratio(row: Any, digits: int = 2) -> str:
    """Median and interval."""
    return f"{row['median']:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def verdict(row: Any) -> str:
    """Of the ratio rule."""
    return "reached" if row["passed"] else "**lost**"


def gpu_record(script: str) -> dict[str, Any]:
    """The record of a script of scripts/gpu/; without runs where it is still to be measured."""
    path = RESULTS / "gpu" / f"{script}.json"
    return json.loads(path.read_text()) if path.exists() else {"runs": {}}


def gpu_predicted() -> dict[str, dict[str, float]]:
    """Figures of each run, by hardware/script/stage."""
    return json.loads((RESULTS / "gpu" / "predictions.json").read_text())["rows"]


def gpu_measured(name: str) -> dict[str, float]:
    """Figures of the run script/stage; empty where it is still to be measured."""
    script, stage = name.split("/")
    return gpu_record(script)["runs"].get(stage, {}).get("measured", {})


def _step(found: dict[str, float]) -> str:
    if not found:
        return "awaiting GPU"
    step = f"{1e3 * found['step_s']:.0f} ms"
    mfu = f", {found['mfu']:.1%}" if "mfu" in found else ""
    return f"{step}{mfu}, {found['peak_gib']:.1f} GiB" if "peak_gib" in found else f"{step}{mfu}"


@figure("gpu.predictions")
def gpu_predictions() -> str:
    """Every run of pretrain_gpt.py in scripts/gpu/, predicted and measured."""
    rows = gpu_predicted()
    names = [name.removeprefix("h100/") for name in rows if name.startswith("h100/")]
    return table(
        "run | H100: step, MFU, peak memory | H200 | measured",
        (
            (name, *map(_step, (rows[f"h100/{name}"], rows[f"h200/{name}"], gpu_measured(name))))
            for name in names
        ),
    )


@figure("gpu.goals")
def gpu_goals() -> str:
    """The goals of a run each, with its prediction."""
    goals = {
        "first/ours": ("6 layers of an 8B model, 4 x 8,192 tokens", 0.55),
        "settle/1.3B": ("1.3B parameters, 4 x 4 x 2,048 tokens", 0.5),
        "settle/125M": ("125M parameters, 4 x 16 x 1,024 tokens", 0.4),
    }
    predictions, rows = gpu_predicted(), []
    for name, (what, goal) in goals.items():
        measured = gpu_measured(name)
        predicted = [predictions[f"{gpu}/{name}"]["mfu"] for gpu in ("h100", "h200")]
        found = f"{measured['mfu']:.1%}" if "mfu" in measured else "awaiting GPU"
        rows.append((what, f"MFU >= {goal:.0%}", *(f"{mfu:.1%}" for mfu in predicted), found))
    return table("what | goal | predicted, H100 | H200 | measured", rows)


@figure("experts.overlap")
def experts_overlap() -> str:
    """Steps with and without --overlap-moe-expert-parallel-comm, over several links."""
    return table(
        "link | a step without, ms | with, ms | ratio (95%) | pairs",
        (
            (
                row["rate"],
                f"{row['plain_ms']:.0f}",
                f"{row['paired_ms']:.0f}",
                ratio(row),
                row["pairs"],
            )
            for row in result("expert_overlap")["rows"]
        ),
    )


@figure("grouped_gemm.table")
def grouped_gemm_table() -> str:
    """A loop of experts' products against torch's grouped product, on a CPU."""
    return table(
        "precision | experts | rows of each | hidden | width | MFLOP | loop / grouped (95%)",
        (
            (
                row["dtype"],
                row["experts"],
                row["rows"],
                row["hidden"],
                row["width"],
                f"{row['mflop']:.1f}",
                ratio(row["verdict"]),
            )
            for row in result("grouped_gemm")["rows"]
        ),
    )


@figure("plan_steps.rows")
def plan_steps_rows() -> str:
    """Steps of a machine of CPUs against the plan."""
    return table(
        "run | ms | predicted | error",
        (
            (
                row["case"],
                f"{1e3 * row['measured_s']:.0f}",
                f"{1e3 * row['predicted_s']:.0f}",
                f"{row['error']:+.0%}" + " **missed**" * (abs(row["error"]) > found["goal"]),
            )
            for found in (result("plan_steps"),)
            for row in found["rows"]
        ),
    )


@figure("plan_steps.within")
def plan_steps_within() -> str:
    """How many of them reach the goal."""
    found = result("plan_steps")
    reached = sum(abs(row["error"]) <= found["goal"] for row in found["rows"])
    return f"{reached} of {len(found['rows'])}"


def errors_cells(found: Any) -> tuple[object, ...]:
    """Of a group of published rows."""
    shares = (found["median"], found["p90"], found["mean"], found["constant"])
    rank = "" if found["rank"] is None else f"{found['rank']:.2f}"
    regret = "" if found["regret"] is None else f"{found['regret']:.1%}"
    return (found["rows"], *(f"{each:.1%}" for each in shares), rank, regret)


ERRORS = "rows | number | median | 90th percentile | mean | constant | rank | regret"


@figure("plan_validation.parts")
def plan_validation_parts() -> str:
    """Errors of predicted tokens/s, of rows that were fitted to and of others."""
    found = result("plan_validation")["parts"]
    return table(ERRORS, [(each["name"], *errors_cells(each)) for each in found])


@figure("plan_validation.groups")
def plan_validation_groups() -> str:
    """The same by source, GPU and precision; of groups of three rows and more."""
    found = [each for each in result("plan_validation")["groups"][:-1] if each["rows"] >= 3]
    rows = []
    for each in found:
        source, *rest = each["name"].split(" | ")
        name = ", ".join([source.split(" (")[0], *rest]).replace("*", "")
        rows.append((name, *errors_cells(each), f"{each['mean'] / each['constant']:.2f}"))
    return table(f"{ERRORS} | of constant", rows)


@figure("plan_validation.worst")
def plan_validation_worst() -> str:
    """The rows with the largest errors."""
    rows = [each for each in result("plan_validation")["rows"] if "error" in each]
    worst = sorted(rows, key=lambda each: -abs(each["error"]))[:10]
    return table(
        "row | predicted tokens/s | ",
        [(each["row"], f"{each['error']:+.0%}", each["part"]) for each in worst],
    )


@figure("plan_experts.rows")
def plan_experts_rows() -> str:
    """Published runs of mixtures of experts next to the plan."""
    rows = read_rows(RESULTS / "expert_rows.csv")
    return table(
        "run on H100s | published tokens/s | predicted | | what differs",
        [
            _expert_cells(row, found)
            for row, found in zip(rows, result("plan_experts")["rows"], strict=True)
        ],
    )


def _expert_cells(row: Row, found: Any) -> tuple[str, ...]:
    """Of one run: what it is, both rates, the error and the note."""
    source, _, name = found["row"].partition(": ")
    version = row["source"].removeprefix(source).strip()
    predicted = found["tokens_per_s_per_gpu"]
    published = predicted / (1 + found["error"])
    cells = f"{published:,.0f}", f"{predicted:,.0f}", f"{found['error']:+.0%}"
    return f"{name} ({version})", *cells, row["note"]


@figure("plan_validation.memory")
def plan_validation_memory() -> str:
    """What the plan predicts of layouts that fitted and of those that ran out of memory."""
    words = ("yes", "tight", "no")
    rows = []
    for name, counted in result("plan_validation")["memory"].items():
        number = sum(counted.values())
        accepted = (counted.get("yes", 0) + counted.get("tight", 0)) / number
        cells = (counted.get(word, 0) for word in words)
        rows.append((f"layouts that {name}", number, *cells, f"{accepted:.0%}"))
    return table("layouts | number | fit | tight | do not fit | accepted", rows)
