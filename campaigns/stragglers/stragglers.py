"""Slow ranks are named, and no others: real training on Gloo ranks.

    python campaigns/stragglers/stragglers.py --json docs/results/stragglers.json

Three parts, each with the same flags. In `clean` nothing is wrong for --minutes but that a
neighbour keeps the machine busy; any name is false. Its times are judged once more without the
bounds of noise, which has to name a rank, or the part could not fail. In `stopped` the last rank
is stopped for 30% of the time (SIGSTOP, SIGCONT), in `data` every batch of rank 1 comes late: both
have to be named within two log intervals, in each of --tries.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.observe.stragglers import SECTIONS, StragglerWatch  # noqa: E402

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--micro-batch-size 2 --global-batch-size 8 --train-iters 1000000 --lr 1e-3 --eval-iters 0
--mock-data --tokenizer-type NullTokenizer --vocab-size 127""".split()
PERIOD, DUTY = 0.1, 0.3  # of the rank that is stopped: seconds, and the share in which it is
SLOW = 0.05  # seconds that a batch comes late
BEFORE = 3  # log intervals before a rank becomes slow


class Job:
    """The ranks of one run, which end with it. `slow`: the rank whose batches are slow, or -1."""

    def __init__(self, folder: Path, ranks: int, log_interval: int, slow: int = -1):
        self.tables = folder / "tables.jsonl"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            late = str(SLOW if rank == slow else 0)
            command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(self.tables)]
            flags = [*FLAGS, "--log-interval", str(log_interval)]
            with open(folder / f"rank{rank}.log", "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, late, *flags],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def rows(self) -> list[dict[str, Any]]:
        """What rank 0 has judged so far."""
        if any(process.poll() is not None for process in self.processes):
            raise SystemExit(f"a rank has ended: see {self.tables.parent}")
        return read(self.tables) if self.tables.exists() else []

    def end(self) -> None:
        """Kill all ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that another process may be writing."""
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def names(rows: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """(log interval, rank, section) of each verdict that named a rank."""
    return [
        (
            at,
            int(row["metrics"]["slowest-rank"]),
            SECTIONS[int(row["metrics"]["slowest-rank-section"])],
        )
        for at, row in enumerate(rows)
        if "slowest-rank" in row["metrics"]
    ]


def judged_again(rows: list[dict[str, Any]]) -> int:
    """Verdicts that name a rank without the bounds of noise."""
    watch = StragglerWatch([0] * len(rows[0]["table"]), 0.1, far=0.0)
    return sum("slowest-rank" in watch.add(row["table"]) for row in rows)


def clean(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Nothing is wrong, but that somebody else computes here, too."""
    job = Job(folder, options.ranks, options.log_interval)
    neighbour = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("neighbour.py")), "1"]
    )
    try:
        while not (rows := job.rows()) or (
            rows[-1]["time"] - rows[0]["time"] < options.minutes * 60
        ):
            time.sleep(1)
    finally:
        neighbour.kill()
        neighbour.wait()
        job.end()
    return {
        "minutes": round((rows[-1]["time"] - rows[0]["time"]) / 60, 1),
        "log_intervals": len(rows),
        "step_ms": round(
            (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1) / options.log_interval * 1000,
            1,
        ),
        "false_names": len(names(rows)),
        "false_names_without_bounds_of_noise": judged_again(rows),
    }


def stopped(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The last rank runs for a part of the time alone."""
    job = Job(folder, options.ranks, options.log_interval)
    victim = job.processes[-1]
    try:
        while len(job.rows()) < BEFORE:
            time.sleep(0.05)
        begun = len(job.rows())
        while len(job.rows()) < begun + 5:
            for number, seconds in (
                (signal.SIGSTOP, DUTY * PERIOD),
                (signal.SIGCONT, (1 - DUTY) * PERIOD),
            ):
                victim.send_signal(number)
                time.sleep(seconds)
        return when_named(job.rows(), begun, options.ranks - 1)
    finally:
        job.end()


def slow_data(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rank 1 is slow from the first step on."""
    job = Job(folder, options.ranks, options.log_interval, slow=1)
    try:
        while len(job.rows()) < 5:
            time.sleep(0.05)
        return when_named(job.rows(), 0, 1)
    finally:
        job.end()


def when_named(rows: list[dict[str, Any]], begun: int, victim: int) -> dict[str, Any]:
    """When the slow rank was named: after how many whole log intervals in which it was slow."""
    named = names(rows)
    first = next((at for at, rank, _ in named if rank == victim), None)
    # the interval in which it became slow is not a whole one, but where it always was
    whole = begun + 1 if begun else 0
    excess = [row["metrics"]["slowest-rank-excess"] for row in rows if len(row["metrics"]) > 3]
    return {
        "rank": victim,
        "named_after_whole_intervals": None if first is None else first - whole + 1,
        "sections": sorted({section for _, rank, section in named if rank == victim}),
        "excess": round(statistics.median(excess), 2) if excess else None,
        "other_names": sum(rank != victim for _, rank, _ in named),
    }


PARTS = {"stopped": stopped, "data": slow_data, "clean": clean}


def main() -> int:
    """0 when all parts are as promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of the clean part")
    parser.add_argument("--tries", type=int, default=5, help="of each of the other parts")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--log-interval", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", help="write the results to this file, next to its other parts")
    parser.add_argument("--keep", help="keep the files of the runs in this folder")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "flags": " ".join(FLAGS),
        "neighbour": "in clean: one process, bursts of 0.05 to 3 s and pauses of up to 2 s",
    }
    common = {
        "ranks": options.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "log_interval": options.log_interval,
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.parts:
            results[name] = {**common, "tries": []}
            for turn in range(1 if name == "clean" else options.tries):
                folder = Path(options.keep or temporary, f"{name}{turn}")
                folder.mkdir(parents=True)
                load = os.getloadavg()[0]
                found = PARTS[name](folder, options)
                found["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
                results[name]["tries"].append(found)
                print(name, json.dumps(found), flush=True)
    if options.json:
        before = json.loads(file.read_text()) if (file := Path(options.json)).exists() else {}
        file.write_text(json.dumps(before | results, indent=1) + "\n")
    tries = [(name, each) for name in options.parts for each in results[name]["tries"]]
    return 0 if all(as_promised(name, each) for name, each in tries) else 1


def as_promised(name: str, result: dict[str, Any]) -> bool:
    """Whether a part shows what the module claims."""
    if name == "clean":
        return not result["false_names"] and result["false_names_without_bounds_of_noise"] > 0
    return result["named_after_whole_intervals"] in (0, 1, 2) and not result["other_names"]


if __name__ == "__main__":
    sys.exit(main())
