"""The optimizer's step on a CPU, from bf16 gradients to bf16 weights: our pass against torch's
AdamW and DeepSpeedCPUAdam.

    python benchmarks/adam.py --setup DIR    # once: DeepSpeed's environment, pinned, and its kernel
    python benchmarks/adam.py --peers DIR --out docs/results/adam.json

The machine should be quiet.

Every side unscales and clips the gradient by one coefficient and updates fp32 master weights and
moments of 16 flat tensors, each as large as a layer 768 wide: 113M parameters, 14 GB for all sides.
Ours is one pass; the peers' are the passes that ZeRO-Offload makes: widen, scale, update, round
(peers/adam_step.py). Each side is a separate process that takes steps on request
and sleeps in between. A round is one turn of a few steps of each side, in turning order; a ratio
is a peer's seconds by ours in the same round; it counts when other processes used less than --quiet
cores in both turns. A row passes by ratio_rule.py. CPU seconds, of which every round counts, are
judged next to elapsed ones. Equal work shows in how far the weights have moved (its move by
ours). Our bf16 moments have no peer and no goal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.training import (
    SCRIPTS,
    busy_seconds,
    machine,
    setup,
    wait_until_quiet,
)

SEGMENTS, SIZE = 16, 12 * 768 * 768
OURS, NARROW, DEEPSPEED = "ours", "ours, bf16 moments", "DeepSpeedCPUAdam"
# least ratio of a peer's time by ours
GOALS = {"torch loop": 5.0, "torch foreach": 1.0, "torch fused": 1.0, DEEPSPEED: 1.0}
SIDES = [OURS, NARROW, *GOALS]
WARMUP = 2  # steps; the first ones make states
PATIENCE = 600.0  # seconds for one turn


class Side:
    """A process that takes steps on request."""

    def __init__(self, name: str, threads: int, segments: int, size: int, peers: Path):
        self.name = name
        folder = peers / "deepspeed"
        python = str(folder / "bin" / "python") if name == DEEPSPEED else sys.executable
        command = [
            python,
            str(SCRIPTS / "adam_step.py"),
            name,
            str(threads),
            str(segments),
            str(size),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        # ninja lies in its environment; its kernel is kept there, not in the user's cache
        if name == DEEPSPEED:
            environ |= {
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
                "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            }
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environ,
            cwd=tempfile.gettempdir(),
        )

    def turn(self, what: str) -> dict[str, Any]:
        """The answer to a line (peers/turns.py). Raises RuntimeError when the process
        ends instead.
        """
        patience = threading.Timer(PATIENCE, self.process.kill)
        patience.start()
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("TURN "):
                    return json.loads(line.removeprefix("TURN "))
        except BrokenPipeError:
            pass
        finally:
            patience.cancel()
        self.errors.seek(0)
        raise RuntimeError(
            f"{self.name} ended with {self.process.wait()}:\n{self.errors.read()[-4000:]}"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def build_kernel(peers: Path) -> None:
    """Have DeepSpeed build its kernel by a step of it: about a minute."""
    side = Side(DEEPSPEED, 1, 1, 64, peers)
    try:
        side.turn("time 1")
    finally:
        side.end()


def measure(args: argparse.Namespace, threads: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run for each side and round, and what each side's weights are at the end."""
    runs, sides = [], []
    try:
        for name in args.sides:
            sides.append(Side(name, threads, args.segments, args.size, args.peers))
            sides[-1].turn(f"time {WARMUP}")
        for index in range(args.rounds):
            wait_until_quiet(args.quiet, args.patience)
            turn = index % len(sides)
            for side in sides[turn:] + sides[:turn]:
                begun, busy = time.perf_counter(), busy_seconds()
                answer = side.turn(f"time {args.steps}")
                wall, busy = time.perf_counter() - begun, busy_seconds() - busy
                runs.append(
                    {
                        "threads": threads,
                        "round": index,
                        "side": side.name,
                        "seconds": answer["seconds"] / args.steps,
                        "cpu": answer["cpu"] / args.steps,
                        "others_cores": round(max(0.0, busy - answer["cpu"]) / wall, 3),
                    }
                )
            last = sorted(runs[-len(sides) :], key=lambda run: args.sides.index(run["side"]))
            said = (f"{run['side']} {1e3 * run['seconds']:.0f} ms" for run in last)
            print(f"{threads} threads, round {index}: " + "; ".join(said), flush=True)
        return runs, {side.name: side.turn("end") for side in sides}
    finally:
        for side in sides:
            side.end()


def summary(runs: list[dict[str, Any]], quiet: float) -> list[dict[str, Any]]:
    """A row for each number of threads, side that is not ours with fp32 moments, and clock."""
    rows = []
    taken = {(run["threads"], run["round"], run["side"]): run for run in runs}
    for threads, side in dict.fromkeys(
        (run["threads"], run["side"]) for run in runs if run["side"] != OURS
    ):
        pairs = [
            (taken[threads, index, OURS], run)
            for (count, index, who), run in taken.items()
            if (count, who) == (threads, side) and (threads, index, OURS) in taken
        ]
        for clock in ("seconds", "cpu"):
            counted = [
                pair
                for pair in pairs
                if clock == "cpu" or all(run["others_cores"] < quiet for run in pair)
            ]
            if counted:
                mine, theirs = ([run[clock] for run in sides] for sides in zip(*counted))
                verdict = ratio_rule.verdict(
                    [b / a for a, b in zip(mine, theirs)], GOALS.get(side, 0.0)
                )
                rows.append(
                    {
                        "threads": threads,
                        "side": side,
                        "clock": clock,
                        "ours_seconds": statistics.median(mine),
                        "side_seconds": statistics.median(theirs),
                        **asdict(verdict),
                    }
                )
    return rows


def table(rows: list[dict[str, Any]], ends: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        (
            "| threads | against | clock | our step, ms | its step, ms | its by ours (95% "
            "interval) | goal | pairs | verdict | its move by ours |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moved = ends[str(row["threads"])]
        word = (
            "reached"
            if row["passed"]
            else "lost"
            if row["pairs"] >= ratio_rule.PAIRS
            else "too few quiet pairs"
        )
        goal, word = (f"{row['goal']:g}", word) if row["goal"] else ("-", "-")
        clock = "elapsed" if row["clock"] == "seconds" else "CPU"
        times = f"{1e3 * row['ours_seconds']:.1f} | {1e3 * row['side_seconds']:.1f}"
        lines.append(
            f"| {row['threads']} | {row['side']} | {clock} | {times} | {row['median']:.3f} "
            f"({row['low']:.3f}-{row['high']:.3f}) | {goal} | {row['pairs']} | {word} | "
            f"{moved[row['side']]['moved'] / moved[OURS]['moved']:.6f} |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setup", type=Path, metavar="DIR", help="make the peers' environments in DIR"
    )
    parser.add_argument(
        "--peers",
        type=lambda path: Path(path).resolve(),
        metavar="DIR",
        help="where they are: measure",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--segments", type=int, default=SEGMENTS, help="tensors of a side")
    parser.add_argument("--size", type=int, default=SIZE, help="elements of each")
    parser.add_argument("--rounds", type=int, default=ratio_rule.PAIRS + 2)
    parser.add_argument("--steps", type=int, default=5, help="in each turn")
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        help="cores that others may use on average during a counted turn",
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for that before each round"
    )
    parser.add_argument("--out", type=Path, help="JSON of every run")
    args = parser.parse_args(argv)
    if not (args.setup or args.peers):
        parser.error("give --setup DIR, --peers DIR or both")
    if OURS not in args.sides:
        parser.error("--sides: ours is what the others are compared with; name it too")
    if args.setup:
        setup(args.setup, ["deepspeed"])
        build_kernel(args.setup.resolve())
    if not args.peers:
        return
    document: dict[str, Any] = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": argv,
        "machine": machine(),
        "quiet": args.quiet,
        "parameters": args.segments * args.size,
        "steps": args.steps,
        "ends": {},
        "rows": [],
        "runs": [],
    }
    for threads in args.threads:
        runs, ends = measure(args, threads)
        document["runs"] += runs
        document["ends"][str(threads)] = ends
        document["rows"] = summary(document["runs"], args.quiet)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
    print("\n" + table(document["rows"], document["ends"]))


if __name__ == "__main__":
    main(sys.argv[1:])
