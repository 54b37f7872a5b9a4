"""Steps of this machine against what `tools/plan.py step` predicts of them.

    python benchmarks/plan_steps.py --out docs/results/plan_steps.json

Short trainings of several layouts run one after another, some rounds of them. Before each group of
runs (a size and a micro-batch), `tools/plan.py measure` takes the constants of the machine as it is
then: a shared machine drifts by a tenth in a quarter of an hour. `--hardware FILE` takes one
measurement for all. A layout's step is the median of its iterations, its error the median of its
rounds' errors. None of the layouts is one that `measure` fits to.

`others` of a row is how many cores other programs kept busy during it: above some hundredths the
machine was not quiet, and steps of more processes than free cores are slower than any plan
predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import torch
from megatron.tools._plan.fit import Sample, run_sample
from megatron.tools._plan.hardware import Hardware, load_hardware, write_hardware
from megatron.tools._plan.measure import ShortRun, measure_machine, timed_run

GOAL = 0.15  # of the error of a step
ROUNDS, WARM = 3, 4
ZERO = {f"dp4, ZeRO-{stage}": (4, f"--zero-stage {stage}") for stage in (1, 2, 3)}
LAYOUTS = {
    "1 process": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    **ZERO,
}
MODELS = {"small": (256, 4, 128), "large": (384, 4, 128)}  # channels, layers, tokens
MICRO_BATCHES = (1, 4)


def groups() -> list[dict[str, ShortRun]]:
    """The runs by their name, those of a size and a micro-batch together."""
    found = []
    for size, (hidden, layers, seq) in MODELS.items():
        for micro in MICRO_BATCHES:
            runs = {
                f"{size}, micro-batch {micro}, {layout}": ShortRun(
                    hidden, layers, seq, ranks, flags, micro, 16
                )
                for layout, (ranks, flags) in LAYOUTS.items()
            }
            found.append(runs)
    return found


def busy_seconds() -> tuple[float, float]:
    """Seconds of processors that (all programs, this one and its children) have used so far."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    jiffies = [int(word) for word in words[:8]]
    idle = jiffies[3] + jiffies[4]
    all_busy = (sum(jiffies) - idle) / os.sysconf("SC_CLK_TCK")
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return all_busy, sum(each.ru_utime + each.ru_stime for each in uses)


def timed(run: ShortRun, environment: dict[str, str], device: str) -> tuple[Sample, float]:
    """(a run's step, how many cores others used in that time)."""
    before, own_before, began = *busy_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sample = run_sample(timed_run(Path(folder), run, environment), device, WARM)
    after, own_after, seconds = *busy_seconds(), time.monotonic() - began
    return sample, max(0.0, after - before - own_after + own_before) / seconds


def measured_and_predicted(
    runs: dict[str, ShortRun], hardware: Hardware
) -> dict[str, dict[str, Any]]:
    """Seconds of each run, both ways."""
    found = {}
    for name, run in runs.items():
        sample, others = timed(run, dict(os.environ), hardware.device)
        time_ = sample.model.time(hardware)
        found[name] = {
            "ranks": run.ranks,
            "measured_s": sample.seconds,
            "predicted_s": time_.seconds,
            "others": others,
            "spent_s": time_.spent,
        }
        print(
            f"{name}: {1e3 * sample.seconds:.0f} ms, planned {1e3 * time_.seconds:.0f} "
            f"({time_.seconds / sample.seconds - 1:+.0%}), others used {others:.2f} cores",
            flush=True,
        )
    return found


def one_round(number: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All runs that --only names, each group behind its measurement of the machine."""
    found: dict[str, dict[str, Any]] = {}
    for place, runs in enumerate(groups()):
        chosen = {
            name: run for name, run in runs.items() if any(part in name for part in options.only)
        }
        if chosen:
            hardware = constants(f"machine_{number}_{place}.json", options)
            found |= measured_and_predicted(chosen, hardware)
    return found


def constants(file_name: str, options: argparse.Namespace) -> Hardware:
    """Those of --hardware, or of the machine as it is now, which --keep takes under this name."""
    if options.hardware:
        return load_hardware(options.hardware)
    hardware, sources = measure_machine(dict(os.environ))
    if options.keep:
        write_hardware(options.keep / file_name, hardware, sources)
    return hardware


def summary(rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: medians of its rounds."""
    rows = []
    for name in rounds[0]:
        each = [found[name] for found in rounds]

        def middle(key: str, each: list[dict[str, Any]] = each) -> float:
            return statistics.median(one[key] for one in each)

        errors = [one["predicted_s"] / one["measured_s"] - 1 for one in each]
        rows.append(
            {
                "case": name,
                "ranks": each[0]["ranks"],
                "measured_s": middle("measured_s"),
                "predicted_s": middle("predicted_s"),
                "error": statistics.median(errors),
                "errors": errors,
                "others": middle("others"),
            }
        )
    return rows


def processor() -> str:
    """Its name and cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def main(words: list[str] | None = None) -> int:
    """Run, compare and write; exit code 1 where a step is further off than the goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", metavar="FILE", help="in place of measuring in each round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has such a part")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="for the measured constants")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(words)
    rounds = [one_round(number, options) for number in range(options.rounds)]
    rows = summary(rounds)
    header = {
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "goal": GOAL,
    }
    written = {**header, "rows": rows, "rounds": rounds}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    off = [row["case"] for row in rows if abs(row["error"]) > GOAL]
    print(f"{len(rows) - len(off)} of {len(rows)} steps within {GOAL:.0%}")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
