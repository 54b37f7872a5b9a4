"""Collect the results of a script into one record.

    python scripts/gpu/record.py STAGE FOLDER

FOLDER is the OUT of scripts/gpu/STAGE.sh. Writes FOLDER/STAGE.json with device, versions, date, the
command, limit, exit code and rows of every run, the JSON files of its tools, and for each run of
pretrain_gpt.py measured step time, MFU and peak memory next to the prediction for that GPU. Copy it
to docs/results/gpu/. A rehearsal on a CPU is marked as such.
"""

from __future__ import annotations

import json
import statistics
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages import HARDWARE, PREDICTIONS, Stage, stages_of

OWN = ("rows.jsonl", "all.tgz", "report.txt")


def tool_files(archive: Path) -> dict[str, Any]:
    """The JSON files of a stage's tools by name; traces are not among them."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = member.name.removeprefix("./")
            if "/" not in name and name.endswith(".json") and member.isfile():
                with suppress(ValueError):  # a killed tool did not finish it
                    found[name] = json.load(tar.extractfile(member))
    return found


def measured(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Median step time, MFU and peak memory of a run without its first log interval and, where
    there are more than two, its last one, which --profile slows down. None without such a row.
    """
    steps = [row for row in rows if "iteration-time" in row]
    steady = steps[1:-1] or steps[1:]
    if not steady:
        return None
    found = {"step_s": statistics.median(row["iteration-time"] for row in steady)}
    if "mfu" in steady[0]:
        found["mfu"] = statistics.median(row["mfu"] for row in steady)
    peaks = [row["mem-max-allocated-bytes"] for row in steps if "mem-max-allocated-bytes" in row]
    if peaks:
        found["peak_gib"] = max(peaks) / 2**30
    return found


def held_against(found: dict[str, float], predicted: dict[str, Any]) -> dict[str, Any]:
    """A measurement with its prediction, and the relative error of each figure that both have."""
    errors = {
        name: round(predicted[name] / value - 1, 4)
        for name, value in found.items()
        if predicted.get(name)
    }
    return {"measured": found, "predicted": predicted, "errors": errors}


def record(stage: str, folder: Path) -> dict[str, Any]:
    """The record of a stage. Raises OSError where FOLDER holds no results of it."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    by_run: dict[str, dict[str, Any]] = {}
    commands: dict[str, Stage] = {each.name: each for each in stages_of(stage)}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a line that a killed run did not finish
        run = by_run.setdefault(entry["stage"], {"rows": []})
        if "row" in entry:
            run["rows"].append(entry["row"])
        else:
            run |= {name: entry[name] for name in ("exit_code", "seconds", "limit")}
    facts = (by_run.pop("facts", {}).get("rows") or [{}])[0]
    device = facts.get("device", "unknown")  # where the stage `facts` was killed
    hardware = next((name for name in HARDWARE if name.upper() in device), None)
    predictions = json.loads(PREDICTIONS.read_text())["rows"]
    for name, run in by_run.items():
        if name in commands:
            run["command"] = commands[name].words
        predicted = predictions.get(f"{hardware}/{stage}/{name}")
        found = measured(run["rows"])
        if found and predicted:
            run |= held_against(found, predicted)
    return {
        "stage": stage,
        **facts,
        "kind": "rehearsal" if device == "cpu" else "measurement",
        "runs": by_run,
        "files": tool_files(folder / "all.tgz"),
    }


def title(operator: str, key: Mapping[str, Any]) -> str:
    """A row of kernels/configurations.json as checks.py takes it."""
    return " ".join([operator, *map(str, key.values())])


def failed_operators(path: Path) -> list[str]:
    """The rows, as checks.py takes them, with a wrong result in the record of first.sh, and the
    operators that ended without one; none where there is no record.
    """
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["runs"].get("checks", {}).get("rows", [])
    names = [
        ":".join(filter(None, [title(row["operator"], row.get("key", {})), row.get("dtype")]))
        for row in rows
        if not row["ok"]
    ]
    return list(dict.fromkeys(names))


def main(words: list[str]) -> int:
    stage, folder = words[0], Path(words[1])
    try:
        found = record(stage, folder)
    except OSError as error:
        print(f"{folder}: {error}: not a folder of scripts/gpu/{stage}.sh", file=sys.stderr)
        return 2
    (folder / f"{stage}.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, run in found["runs"].items():
        if "errors" in run:
            print(f"{name}: predicted by measured - 1: {run['errors']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
