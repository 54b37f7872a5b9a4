"""What --overlap-moe-expert-parallel-comm hides: steps of two processes that hold half of the
experts each, with and without it, over links of several speeds.

    python benchmarks/expert_overlap.py --out docs/results/expert_overlap.json   # as root: needs tc

The model is that of benchmarks/training.py with 8 experts, four micro-batches a step, each process
on one core. The two talk over the loopback interface of a network namespace of their own, whose
rate a token bucket limits; without a limit it is memory's. Runs with and without the flag take
turns, in turning order, and are timed from the end of their warm-up to the end of their last step.
A ratio is the step's time with the flag by that without in the same round; equal losses show equal
work. A ratio below 1 is a gain. The `plain` rows of the file give what there was to hide: the time
over a link beyond the time without a limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.loopback import own_loopback
from megatron.benchmarks.training import (
    DP2,
    EP2,
    Rule,
    command_of,
    failed,
    machine,
    our_answer,
    wait_until_quiet,
    watched,
)

FLAG = "--overlap-moe-expert-parallel-comm"
WORK = replace(DP2, **EP2, accumulation=4, micro_batch=2, steps=6, warmup=2, threads=1)
PLAIN = "without"  # the side that a ratio divides by
RATES = ("unlimited", "500mbit")


def limit(rate: str) -> None:
    """Let what goes through the loopback interface have this rate. Raises RuntimeError with tc's
    message.
    """
    if rate == "unlimited":
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
        return
    bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
    done = subprocess.run(
        ["tc", "qdisc", "replace", "dev", "lo", "root", *bucket], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"tc: {done.stderr.strip()}")


def run(rate: str, overlaps: bool) -> dict:
    """One job: milliseconds of a step, its losses, and how busy the machine was with other work."""
    limit(rate)
    command = command_of("ours", WORK, Path(), Path()) + [FLAG] * overlaps
    lines, facts = watched(command, WORK.threads, GLOO_SOCKET_IFNAME="lo")
    if facts["exit_code"]:
        raise failed(command, lines, facts["exit_code"])
    answer = our_answer(lines, WORK)
    milliseconds = 1000 * WORK.step_tokens / answer["tokens_per_second"]
    return {"step_ms": round(milliseconds, 2), "losses": answer["losses"], **facts}


def summary(runs: list[dict], quiet: float) -> list[dict]:
    """A row for each rate; its pairs are the rounds in which both runs had the machine."""
    found = []
    sides = [
        {**each, "setting": each["rate"], "who": "ours" if each["overlaps"] else PLAIN}
        for each in runs
    ]
    for rate in dict.fromkeys(each["rate"] for each in runs):
        pairs = Rule(ratio_rule.PAIRS, quiet, "step_ms").counted(sides, rate, PLAIN)
        if pairs:
            paired, plain = (statistics.median(side) for side in zip(*pairs))
            judged = ratio_rule.verdict([a / b for a, b in pairs], 1.0, upper_limit=True)
            found.append({"rate": rate, "paired_ms": paired, "plain_ms": plain, **asdict(judged)})
    return found


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| link | a step without, ms | with, ms | ratio (95% interval) | pairs |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row['median']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
        times = f"{row['plain_ms']:.0f} | {row['paired_ms']:.0f}"
        lines.append(f"| {row['rate']} | {times} | {ratio} | {row['pairs']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=ratio_rule.PAIRS)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="as of tc, or unlimited")
    parser.add_argument(
        "--quiet", type=float, default=0.2, help="cores that others may use during a counted run"
    )
    parser.add_argument("--out", type=Path, help="JSON of every run")
    arguments = parser.parse_args()
    if not own_loopback():
        raise SystemExit("no separate network namespace: the kernel refuses (root is needed)")
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": machine(),
        "work": asdict(WORK),
        "rows": [],
        "runs": [],
    }
    for index in range(arguments.pairs):
        for rate in arguments.rates:
            for overlaps in (True, False) if index % 2 else (False, True):
                wait_until_quiet(arguments.quiet)
                one = {"rate": rate, "round": index, "overlaps": overlaps, **run(rate, overlaps)}
                document["runs"].append(one)
                print(
                    f"{rate}, round {index}, {'with' if overlaps else 'without'}: "
                    f"{one['step_ms']:.0f} ms; others used {one['others_cores']} cores",
                    flush=True,
                )
        document["rows"] = summary(document["runs"], arguments.quiet)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["rows"]))


if __name__ == "__main__":
    main()
