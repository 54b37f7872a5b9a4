"""ZeRO stages 0-3 against DeepSpeed's, torch's FSDP2 and torch's DistributedDataParallel: memory,
bytes on the wire and time of a step.

    python benchmarks/zero.py --setup DIR    # once: DeepSpeed's environment, pinned
    python benchmarks/zero.py --peers DIR --memory --out docs/results/zero_peers.json
    python benchmarks/zero.py --peers DIR --time --out docs/results/zero_peers.json

--memory gives the same on any machine; for --time it should be quiet.

All train the same GPT of 12.5M parameters (peers/) from the same weights on the same tokens in 2
and 4 processes of one thread over Gloo, with 1 and 4 micro-batches a step, in bf16 with fp32 master
weights; ours is `pretrain_gpt.py` itself. Gradients are accumulated and sent in fp32, except where
a peer refuses (peers/zero_peer.py). Equal work shows in equal losses of the first step.

--memory    of the fullest rank, in bytes per parameter, summed over live storages after every
dispatched operator
            (peers/live_bytes.py): `resident` between two steps, `between` micro-batches,
            the `peak` of a step, that of its `update` alone, and what a forward pass adds
            (`activations`); and bytes sent per rank and step, from the counters of a loopback
            interface that only this measurement uses, by parameters. A row is lost when the best
            peer has less by more than 0.1% + 64 KiB (memory) or by more than 1% (wire, whose
            counters include TCP's headers).
--time      DeepSpeed runs twice: with the small buckets of the memory table, and as it comes
            (`deepspeed-N-default`). All programs keep freed memory (turn_group.py). Elapsed and CPU
            seconds of steps taken in turn by all systems of a row, which are alive together and
            sleep in between. A pair is one turn of ours and one of a peer; its ratio is the peer's
            seconds by ours; it counts when other processes used less than --quiet cores in both. A
            row passes by ratio_rule.py.
            With 1 micro-batch also our stage 2 by our stage 1 (at most 1.05).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.loopback import own_loopback, sent_bytes
from megatron.benchmarks.training import (
    SCRIPTS,
    Work,
    busy_seconds,
    machine,
    our_flags,
    setup,
    wait_until_quiet,
    write_start,
)
from megatron.benchmarks.turn_group import Group

MODEL = Work(
    layers=8,
    hidden=320,
    heads=5,
    ffn=864,
    seq=128,
    vocab=4096,
    micro_batch=1,
    precision="bf16",
    steps=400,
    warmup=100,
    threads=1,
)
SYSTEMS = {  # system -> its row
    **{f"ours-{stage}": str(stage) for stage in range(4)},
    "ours-3-keep": "3, kept gathered",
    **{f"deepspeed-{stage}": str(stage) for stage in range(4)},
    **{f"deepspeed-{stage}-default": str(stage) for stage in range(4)},
    "ddp-0": "0",
    "ddp-1": "1",
    "fsdp2-keep": "3, kept gathered",
    "fsdp2": "3",
}
# buckets as DeepSpeed comes: for speed
TIMED_ONLY = tuple(system for system in SYSTEMS if system.endswith("-default"))
NARROW = "deepspeed-0"  # accumulates in bf16: shown, but no yardstick for memory
ROWS = ("0", "1", "2", "3", "3, kept gathered")
# rows whose systems are alive at the same time, when time is measured
TOGETHER = (ROWS[:1], ROWS[1:3], ROWS[3:])
MEASURES = ("resident", "between", "peak", "update", "wire")
TIMED_MICRO_BATCH = 2  # sequences; memory is measured with one, where activations hide the least
WARMUP, WIRED = 3, 2  # steps
STAGE2_GOAL = 1.05


def works(processes: list[int], micro_batches: list[int]) -> list[Work]:
    """The settings."""
    return [
        replace(MODEL, data_parallel=n, accumulation=m) for n in processes for m in micro_batches
    ]


def setting_of(work: Work) -> str:
    """A setting's name."""
    return f"N={work.data_parallel}, m={work.accumulation}"


def flags_of(system: str, work: Work) -> list[str]:
    """Of pretrain_gpt.py, for one of ours."""
    _, stage, *keep = system.split("-")
    return [*our_flags(work), "--zero-stage", stage, *["--zero3-keep-gathered"] * len(keep)]


def start_group(system: str, work: Work, peers: Path, start: Path) -> Group:
    """The processes of one system."""
    if system.startswith("ours"):
        command = [sys.executable, str(SCRIPTS / "zero_ours.py"), *flags_of(system, work)]
    else:
        python = (
            str(peers / "deepspeed" / "bin" / "python")
            if system.startswith("deepspeed")
            else sys.executable
        )
        command = [python, str(SCRIPTS / "zero_peer.py"), system, str(start), *work.arguments()]
    return Group(system, command, work.processes)


def mean_loss(answers: list[dict[str, Any]], ours: bool) -> list[float]:
    """Of each step; ours is the mean over ranks on every rank."""
    return (
        answers[0]["losses"]
        if ours
        else [statistics.mean(losses) for losses in zip(*(answer["losses"] for answer in answers))]
    )


def measure_memory(args: argparse.Namespace, work: Work, folder: Path) -> list[dict[str, Any]]:
    """One run for each system."""
    runs = []
    for system in (system for system in args.systems if system not in TIMED_ONLY):
        group = start_group(system, work, args.peers, folder)
        try:
            losses = mean_loss(group.turn(f"time {WARMUP}"), system.startswith("ours"))
            before = sent_bytes()
            group.turn(f"time {WIRED}")
            sent = (sent_bytes() - before) / WIRED / work.processes
            watched = [answer["bytes"] for answer in group.turn("watch 2")]
        finally:
            group.end()
        runs.append(
            {
                "system": system,
                "wire": sent,
                "losses": losses,
                **{name: max(rank[name] for rank in watched) for name in watched[0]},
            }
        )
        print(
            (
                f"{setting_of(work)}, {system}: peak {runs[-1]['peak'] / parameters():.2f}, "
                f"wire {sent / parameters():.2f}"
            ),
            flush=True,
        )
    return runs


def parameters() -> int:
    """Of the model."""
    layer = 4 * MODEL.hidden**2 + 3 * MODEL.hidden * MODEL.ffn + 2 * MODEL.hidden
    return 2 * MODEL.vocab * MODEL.hidden + MODEL.layers * layer + MODEL.hidden


def verdicts(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """For each setting, row and measure ours against the best peer."""
    found = []
    for setting, measured in settings.items():
        for row in ROWS:
            here = [run for run in measured["runs"] if SYSTEMS[run["system"]] == row]
            ours, peers = (
                [run for run in here if run["system"].startswith("ours") == own]
                for own in (True, False)
            )
            for measure in MEASURES:
                fair = [run for run in peers if run["system"] != NARROW or measure == "wire"]
                if ours and fair and measure in ours[0]:
                    best = min(fair, key=lambda run: run[measure])
                    limit = (
                        1.01 * best[measure] if measure == "wire" else 1.001 * best[measure] + 65536
                    )
                    found.append(
                        {
                            "setting": setting,
                            "row": row,
                            "measure": measure,
                            "ours": ours[0][measure],
                            "best": best[measure],
                            "peer": best["system"],
                            "passed": ours[0][measure] <= limit,
                        }
                    )
    return found


def memory_tables(settings: dict[str, Any]) -> str:
    """Markdown."""
    count, judged = parameters(), verdicts(settings)
    lines = [
        (
            f"Bytes per parameter ({count:,} parameters), of the fullest rank; `wire` per rank "
            "and step."
        ),
        "",
        f"| setting | stage | system | {' | '.join(MEASURES)} | activations | first loss |",
        "|---|---|---|" + "---|" * (len(MEASURES) + 2),
    ]
    for setting, measured in settings.items():
        for run in sorted(
            measured["runs"],
            key=lambda run: (
                ROWS.index(SYSTEMS[run["system"]]),
                not run["system"].startswith("ours"),
            ),
        ):
            values = " | ".join(
                f"{run[name] / count:.2f}" if name in run else "-" for name in MEASURES
            )
            activations = (run["forward"] - max(run["resident"], run.get("between", 0))) / count
            lines.append(
                f"| {setting} | {SYSTEMS[run['system']]} | {run['system']} | {values} | "
                f"{activations:.2f} | {run['losses'][0]:.4f} |"
            )
    lines += [
        "",
        (
            f"{sum(each['passed'] for each in judged)} of {len(judged)} comparisons with the "
            "best peer are won or level. Lost:"
        ),
        "",
        "| setting | stage | measure | ours | best peer | which |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {each['setting']} | {each['row']} | {each['measure']} | "
            f"{each['ours'] / count:.3f} | {each['best'] / count:.3f} | {each['peer']} |"
        )
        for each in judged
        if not each["passed"]
    ]
    return "\n".join(lines)


def measure_time(args: argparse.Namespace, work: Work, folder: Path) -> list[dict[str, Any]]:
    """One run for each system and round."""
    runs = []
    steps = max(1, args.steps // work.accumulation)
    for rows in TOGETHER:
        groups: list[Group] = []
        try:
            for system in (system for system in args.systems if SYSTEMS[system] in rows):
                groups.append(start_group(system, work, args.peers, folder))
                groups[-1].turn(f"time {WARMUP}")
            wait_until_quiet(args.quiet, args.patience)
            for index in range(args.rounds):
                turn = index % max(1, len(groups))
                for group in groups[turn:] + groups[:turn]:
                    begun, busy = time.perf_counter(), busy_seconds()
                    answers = group.turn(f"time {steps}")
                    wall, busy = time.perf_counter() - begun, busy_seconds() - busy
                    cpu = sum(answer["cpu"] for answer in answers)
                    runs.append(
                        {
                            "system": group.system,
                            "round": index,
                            "seconds": wall / steps,
                            "cpu": cpu / steps,
                            "others_cores": round(max(0.0, busy - cpu) / wall, 3),
                        }
                    )
        finally:
            for group in groups:
                group.end()
    return runs


def time_rows(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Our stages against each peer of the row, and our stage 2 against our stage 1 with one
    micro-batch.
    """
    rows = []
    for setting, measured in settings.items():
        here = {(run["system"], run["round"]): run for run in measured["runs"]}
        systems = list(dict.fromkeys(system for system, _ in here))
        pairs = [
            (a, b, False)
            for a in systems
            for b in systems
            if a.startswith("ours") and not b.startswith("ours") and SYSTEMS[a] == SYSTEMS[b]
        ]
        if {"ours-1", "ours-2"} <= set(systems) and setting.endswith("m=1"):
            pairs.append(("ours-2", "ours-1", True))
        for a, b, upper in pairs:
            both = [
                (here[a, index], here[b, index])
                for system, index in here
                if system == a and (b, index) in here
            ]
            quiet = [
                pair
                for pair in both
                if all(run["others_cores"] < measured["quiet"] for run in pair)
            ]
            row = {"setting": setting, "ours": a, "peer": b, "goal": STAGE2_GOAL if upper else 1.0}
            for clock, counted in (("seconds", quiet), ("cpu", both)):
                if counted:
                    ratios = [
                        x[clock] / y[clock] if upper else y[clock] / x[clock] for x, y in counted
                    ]
                    row[clock] = {
                        "ours": statistics.median(x[clock] for x, _ in counted),
                        "peer": statistics.median(y[clock] for _, y in counted),
                        **asdict(ratio_rule.verdict(ratios, row["goal"], upper_limit=upper)),
                    }
            rows.append(row)
    return rows


def time_tables(settings: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        (
            "| setting | ours | against | clock | our step, ms | its step, ms | ratio (95% "
            "interval) | goal | pairs | verdict |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in time_rows(settings):
        for clock, name in (("seconds", "elapsed"), ("cpu", "CPU")):
            if clock not in row:
                lines.append(
                    f"| {row['setting']} | {row['ours']} | {row['peer']} | {name} | - | - | "
                    f"- | {row['goal']} | 0 | no quiet pair |"
                )
                continue
            found = row[clock]
            word = (
                "reached"
                if found["passed"]
                else "lost"
                if found["pairs"] >= ratio_rule.PAIRS
                else "too few quiet pairs"
            )
            lines.append(
                f"| {row['setting']} | {row['ours']} | {row['peer']} | {name} | "
                f"{1e3 * found['ours']:.0f} | {1e3 * found['peer']:.0f} "
                f"| {found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f}) | "
                f"{row['goal']} | {found['pairs']} | {word} |"
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
    parser.add_argument("--memory", action="store_true", help="this part; without either, both")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=ratio_rule.PAIRS + 2)
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="micro-batches in each turn of a round, rounded to whole steps, at least one",
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        help="cores that others may use on average during a counted run",
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for that before each setting"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON of every run; settings that are not measured now stay as they are there",
    )
    args = parser.parse_args(argv)
    if not (args.setup or args.peers):
        parser.error("give --setup DIR, --peers DIR or both")
    if args.setup:
        setup(args.setup, ["deepspeed"])
    if not args.peers:
        return
    document: dict[str, Any] = (
        json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    )
    document |= {"parameters": parameters()}
    both = not (args.memory or args.time)
    if (args.memory or both) and not own_loopback():
        raise RuntimeError(
            "the kernel gives this user no separate network, so bytes on the wire cannot "
            "be counted; run as root"
        )
    parts = {
        "memory": (measure_memory, verdicts, memory_tables),
        "time": (measure_time, time_rows, time_tables),
    }
    with tempfile.TemporaryDirectory() as folder:
        for part, (measure, judge, table) in parts.items():
            if not (getattr(args, part) or both):
                continue
            measured = document.setdefault(part, {"settings": {}, "rows": []})
            for work in works(args.processes, args.micro_batches):
                work = replace(work, micro_batch=TIMED_MICRO_BATCH) if part == "time" else work
                write_start(Path(folder) / "start", work, our_flags(work))
                about = {
                    "started": datetime.now().isoformat(timespec="seconds"),
                    "command": argv,
                    "quiet": args.quiet,
                    "machine": machine(),
                    "work": asdict(work),
                }
                measured["settings"][setting_of(work)] = about | {
                    "runs": measure(args, work, Path(folder) / "start")
                }
                measured["rows"] = judge(measured["settings"])
                if args.out:  # after every setting: an interrupted measurement keeps what it has
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(document, indent=1) + "\n")
            print("\n" + table(measured["settings"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
