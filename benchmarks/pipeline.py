"""The pipeline executor measured on CPU processes over Gloo: memory, time against the simulator,
overhead, speed against torch's own pipelines.

    python benchmarks/pipeline.py --out docs/results/pipeline.json                    # all of it
    python benchmarks/pipeline.py --sleeps --out docs/results/pipeline_sleeps.json    # one section

The machine should be quiet.

--memory    live bytes of every schedule's ranks for 4 to 64 micro-batches, GPipe against 1F1B, and
the bounds of 20 ranks at 90% efficiency.
--sleeps    4 processes whose computations sleep, so that two cores are enough for all: the time of
a step against the simulator's, for equal
            costs and for the costs of real stages, measured first; and the idle time of ZB-H1
            against that of 1F1B at m = 2 P.
--overhead  microseconds of CPU time that the executor takes for each action.
--torch     2 processes of one thread, 4 micro-batches: steps of torch.distributed.pipelining and of
the executor in turn, on the same stages,
            micro-batches and processes, so that the runtimes alone differ
            (peers/torch_pipelining.py). A pair is one turn of each; its ratio is torch's
            time by ours; it counts when other processes used less than --quiet cores in both. A row
            passes by ratio_rule.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().parent / "peers" / "pipeline_rank.py"
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.training import machine, wait_until_quiet
from megatron.tools._plan.schedule_check import check  # noqa: E402
from megatron.tools._plan.simulate import Costs, simulate  # noqa: E402

from megatron.parallel.schedule import Kind, build_schedule  # noqa: E402
from megatron.parallel.timeline import Span, Timeline  # noqa: E402

# stages a rank
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zero-bubble-v": 2}
SHAPES = {
    "full": {
        "layers": 8,
        "hidden": 256,
        "heads": 8,
        "ffn": 688,
        "seq": 256,
        "batch": 4,
        "vocab": 2048,
    },
    "tiny": {"layers": 8, "hidden": 32, "heads": 4, "ffn": 48, "seq": 16, "batch": 2, "vocab": 64},
}
RANKS = 4  # of all sections but --torch
UNIT = 0.025  # seconds that a forward pass of a whole rank sleeps, and each half of a backward pass
GOAL = 1.0


def launch(ranks: int, calls: list[dict[str, Any]]) -> list[list[Any]]:
    """Run measurements of pipeline_rank.py one after the other in new processes: the answers, by
    measurement, then by rank. Raises RuntimeError.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(SCRIPT),
        json.dumps(calls),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=tempfile.gettempdir()
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if ended.returncode or not lines:
        raise RuntimeError(
            f"{' '.join(command)}\nended with {ended.returncode}:\n"
            f"{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
        )
    return list(zip(*json.loads(lines[0].removeprefix("RESULT "))))


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of pipeline_rank.memory by rank, and the bounds of a large pipeline."""
    counts = [4, 8, 16, 32, 64]
    (ranks,) = launch(
        RANKS,
        [
            {
                "what": "memory",
                "names": list(SCHEDULES),
                "micro_batches": counts,
                "shape": SHAPES["tiny"],
            }
        ],
    )
    rows = [{"rank": rank, **row} for rank, found in enumerate(ranks) for row in found]
    large = []
    for name in ("gpipe", "1f1b", "zero-bubble"):
        schedule = build_schedule(name, 20, 1, 171)
        large.append(
            {
                "schedule": name,
                "ranks": 20,
                "micro_batches": 171,
                "efficiency": 1 - simulate(schedule, Costs.even(schedule)).bubble,
                "in_flight": max(check(schedule).in_flight),
            }
        )
    return {"shape": SHAPES["tiny"], "rows": rows, "large": large}


def memory_tables(found: dict[str, Any]) -> str:
    """Markdown."""
    held: dict[tuple[str, int], int] = {}
    for row in found["rows"]:
        key = row["schedule"], row["micro_batches"]
        held[key] = max(held.get(key, 0), row["held"])
    counts = sorted({count for _, count in held})
    lines = [
        "Live activation bytes on the fullest of 4 ranks at the ends of computations, KiB:",
        "",
        f"| micro-batches | {' | '.join(SCHEDULES)} | GPipe : 1F1B |",
        "|---|" + "---|" * (len(SCHEDULES) + 1),
    ]
    for count in counts:
        values = " | ".join(f"{held[name, count] / 1024:.0f}" for name in SCHEDULES)
        lines.append(f"| {count} | {values} | {held['gpipe', count] / held['1f1b', count]:.2f} |")
    over = max(row["held"] / row["bound"] for row in found["rows"])
    lines += [
        "",
        f"Largest share of the schedule's bound on any rank: {over:.4f}.",
        "",
        "| 20 ranks, 171 micro-batches | efficiency | most held on a rank |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row['schedule']} | {row['efficiency']:.3f} | {row['in_flight']} |"
        for row in found["large"]
    ]
    return "\n".join(lines)


def even_costs(name: str, unit: float) -> dict[str, list[float]]:
    """Seconds by kind and stage: a rank's whole layers take `unit` for each of F, I and W."""
    virtual = SCHEDULES[name]
    return {kind: [unit / virtual] * (RANKS * virtual) for kind in "FIW"}


def real_costs(names: list[str], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """The same measured on real stages, by schedule."""
    found = {}
    for name, ranks in zip(
        names,
        launch(
            RANKS,
            [{"what": "calibrate", "name": name, "shape": SHAPES[args.size]} for name in names],
        ),
    ):
        schedule = build_schedule(name, RANKS, SCHEDULES[name], 1)
        turn = {
            rank: [stage for stage, where in enumerate(schedule.placement) if where == rank]
            for rank in range(RANKS)
        }
        found[name] = {
            kind: [
                ranks[rank][kind][turn[rank].index(stage)]
                for stage, rank in enumerate(schedule.placement)
            ]
            for kind in "FIW"
        }
    return found


def sleep_row(
    label: str,
    name: str,
    count: int,
    seconds: dict[str, list[float]],
    delay: float,
    ranks: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """The best of the tries against the simulator."""
    schedule = build_schedule(name, RANKS, SCHEDULES[name], count)
    simulated = simulate(schedule, Costs(*(tuple(seconds[kind]) for kind in "FIW"), latency=delay))
    tries = []
    for attempt in zip(*ranks):
        rows = tuple(
            tuple(Span(Kind(kind), *rest) for kind, *rest in rank["spans"]) for rank in attempt
        )
        tries.append(Timeline(name, schedule.placement, count, rows))
    best = min(tries, key=lambda line: line.end - line.begin)
    total = lambda line: sum(map(line.idle, range(RANKS))) / RANKS  # noqa: E731  # seconds a rank
    return {
        "costs": label,
        "schedule": name,
        "micro_batches": count,
        "seconds": seconds,
        "latency": delay,
        "simulated": simulated.end,
        "achieved": best.end - best.begin,
        "all_tries": [line.end - line.begin for line in tries],
        "idle_simulated": total(simulated),
        "idle": total(best),
    }


def measure_sleeps(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of sleep_row for equal costs at m = 2 P, and for those of real stages."""
    names, count = list(SCHEDULES), 2 * RANKS
    costs = {
        "equal": {name: even_costs(name, args.unit) for name in names},
        "of real stages": real_costs(names, args),
    }
    size = SHAPES[args.size]
    shape = [size["seq"], size["batch"], size["hidden"]]
    cases = [(label, name) for label in costs for name in names]
    calls = [
        {
            "what": "sleeps",
            "name": name,
            "micro_batches": count,
            "costs": costs[label][name],
            "shape": shape,
            "tries": args.tries,
        }
        for label, name in cases
    ]
    (delay, *_), *found = launch(RANKS, [{"what": "latency", "shape": shape}, *calls])
    return {
        "shape": shape,
        "rows": [
            sleep_row(label, name, count, costs[label][name], delay, ranks)
            for (label, name), ranks in zip(cases, found)
        ],
    }


def sleep_tables(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        (
            "| costs | schedule | simulated step, ms | achieved, ms | ratio | idle a rank, "
            "simulated, ms | measured, ms |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        simulated, achieved, idle_simulated, idle = (
            1e3 * row[key] for key in ("simulated", "achieved", "idle_simulated", "idle")
        )
        lines.append(
            f"| {row['costs']} | {row['schedule']} | {simulated:.1f} | {achieved:.1f} | "
            f"{achieved / simulated:.3f} | {idle_simulated:.1f} | {idle:.1f} |"
        )
    even = {row["schedule"]: row for row in found["rows"] if row["costs"] == "equal"}
    simulated, measured = (
        even["zero-bubble"][key] / even["1f1b"][key] for key in ("idle_simulated", "idle")
    )
    lines += [
        "",
        (
            "Idle time of zero-bubble by that of 1f1b at equal costs: simulated "
            f"{simulated:.3f}, measured {measured:.3f} (goal: at most 0.4)."
        ),
    ]
    return "\n".join(lines)


def measure_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """CPU microseconds of the executor's thread an action, with computations that do nothing and
    messages of 32 bytes.
    """
    rows, count = [], 64
    for ranks in (1, RANKS):
        names = ["1f1b"] if ranks == 1 else list(SCHEDULES)
        calls = [
            {
                "what": "sleeps",
                "name": name,
                "micro_batches": count,
                "shape": [1, 1, 8],
                "tries": 4 * args.tries,
                "costs": {kind: [0.0] * (ranks * SCHEDULES[name]) for kind in "FIW"},
            }
            for name in names
        ]
        for name, found in zip(names, launch(ranks, calls)):
            each = [1e6 * attempt["cpu"] / attempt["actions"] for rank in found for attempt in rank]
            rows.append(
                {
                    "schedule": name,
                    "ranks": ranks,
                    "micro_batches": count,
                    "actions": sum(rank[0]["actions"] for rank in found),
                    "microseconds": statistics.median(each),
                    "best": min(each),
                }
            )
    return {"rows": rows}


def overhead_tables(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| schedule | ranks | actions of all ranks | CPU microseconds an action | best |",
        "|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {row['schedule']} | {row['ranks']} | {row['actions']} | "
            f"{row['microseconds']:.1f} | {row['best']:.1f} |"
        )
        for row in found["rows"]
    ]
    return "\n".join(lines)


def measure_torch(args: argparse.Namespace) -> dict[str, Any]:
    """One row a schedule; all rounds are kept."""
    ranks_used, shape, rows = 2, SHAPES[args.size], []
    count = 2 * ranks_used
    for name in SCHEDULES:
        wait_until_quiet(args.quiet, args.patience)
        call = {
            "what": "against_torch",
            "name": name,
            "micro_batches": count,
            "shape": shape,
            "steps": args.steps,
            "pairs": args.pairs,
        }
        (ranks,) = launch(ranks_used, [call])
        rounds = []
        for each in zip(*(rank["rounds"] for rank in ranks)):
            entry = {}
            for side in ("ours", "torch"):
                seconds = max(rank[side]["seconds"] for rank in each)
                others = (each[0][side]["busy"] - sum(rank[side]["cpu"] for rank in each)) / seconds
                entry[side] = {
                    "seconds": seconds,
                    "cpu": sum(rank[side]["cpu"] for rank in each),
                    "others_cores": round(max(0.0, others), 3),
                }
            rounds.append(entry)
        counted = [
            entry
            for entry in rounds
            if all(entry[side]["others_cores"] < args.quiet for side in entry)
        ]
        row = {
            "schedule": name,
            "micro_batches": count,
            "shape": shape,
            "steps": args.steps,
            "rounds": rounds,
        }
        for side in ("ours", "torch"):
            row[side] = {
                "loss": sum(rank[side]["loss"] for rank in ranks),
                "gradients": [rank[side]["gradient"] for rank in ranks],
            }
        if counted:
            row |= {
                side + "_seconds": statistics.median(entry[side]["seconds"] for entry in counted)
                for side in ("ours", "torch")
            }
            row["verdict"] = asdict(
                ratio_rule.verdict(
                    [entry["torch"]["seconds"] / entry["ours"]["seconds"] for entry in counted],
                    GOAL,
                )
            )
        rows.append(row)
        print(torch_tables({"rows": [row]}).splitlines()[-1], flush=True)
    return {"rows": rows}


def torch_tables(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| schedule | our step, ms | torch's, ms | ratio (95% interval) | pairs | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if "verdict" not in row:
            lines.append(f"| {row['schedule']} | - | - | - | 0 | no quiet pair |")
            continue
        judged = row["verdict"]
        word = (
            "reached"
            if judged["passed"]
            else "lost"
            if judged["pairs"] >= ratio_rule.PAIRS
            else "too few quiet pairs"
        )
        lines.append(
            f"| {row['schedule']} | {1e3 * row['ours_seconds']:.1f} | "
            f"{1e3 * row['torch_seconds']:.1f} "
            f"| {judged['median']:.3f} ({judged['low']:.3f}-{judged['high']:.3f}) | "
            f"{judged['pairs']} | {word} |"
        )
    return "\n".join(lines)


SECTIONS: dict[
    str, tuple[Callable[[argparse.Namespace], dict[str, Any]], Callable[[dict[str, Any]], str]]
] = {
    "memory": (measure_memory, memory_tables),
    "overhead": (measure_overhead, overhead_tables),
    "sleeps": (measure_sleeps, sleep_tables),
    "torch": (measure_torch, torch_tables),
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SECTIONS:
        parser.add_argument(f"--{name}", action="store_true", help="this section; without any, all")
    parser.add_argument(
        "--size",
        choices=SHAPES,
        default="full",
        help="of the model of --torch, of calibrated sleeps and of their messages",
    )
    parser.add_argument(
        "--unit",
        type=float,
        default=UNIT,
        help="seconds that a forward pass sleeps where costs are equal",
    )
    parser.add_argument(
        "--tries", type=int, default=5, help="of each sleeping step; the best counts"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="in each half of a pair")
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        help="cores that others may use on average during a counted run",
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for that before each row"
    )
    parser.add_argument("--out", type=Path, help="JSON of every figure")
    args = parser.parse_args(argv)
    chosen = [name for name in SECTIONS if getattr(args, name)] or list(SECTIONS)
    document: dict[str, Any] = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": argv,
        "machine": machine(),
        "sections": {},
    }
    for name in chosen:
        measure, table = SECTIONS[name]
        found = document["sections"][name] = measure(args)
        print(f"\n## {name}\n\n{table(found)}", flush=True)
        if args.out:  # after every section: an interrupted measurement keeps what it has
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
