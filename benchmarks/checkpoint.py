"""Saving a checkpoint: ours against raw pwrite, safetensors, torch.save, torch's distributed
checkpoints and DeepSpeed, in 1 and 2 processes.

    python benchmarks/checkpoint.py --setup DIR    # once: DeepSpeed's environment, pinned
    python benchmarks/checkpoint.py --peers DIR --out FILE.json --table docs/performance.md

Every rank holds an equal share of a GPT's fp32 weights and Adam moments
(peers/checkpoint_rank.py), and every system saves the same bytes into a new folder, on
tmpfs and on disk; DeepSpeed, whose format holds bf16 weights too, is shown without a goal. All
systems are alive together and take turns, in turning order; each sleeps in between. One turn of
each is not counted (buffers, processes and plans are made then; its stall is the column `first
stall`), and in one more the memory is sampled instead. Every rank may use its share of the cores.

total   from the first rank's begin to the last rank's end, everything fsynced: by the system itself
(ours, DCP), else by each rank afterwards
stall   from the begin until the state may change again, of the slowest rank
memory  the most that the processes of a rank, writer processes too, held during a save more than
before their first one, of the fullest rank (Pss)
kept    what they keep of it between saves

A ratio is of two turns in the same round; it counts when other processes used less than --quiet
cores in both; it passes by ratio_rule.py. The machine should be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
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
from megatron.benchmarks.turn_group import Group

OURS, ASYNC, RAW, COPY = "ours", "ours, async", "raw pwrite", "memcpy"
# equal terms: ours takes a thread for each core of a rank, raw pwrite one
OURS_1, RAW_2 = "ours, 1 thread", "raw pwrite, 2 threads"
DCP = ("DCP", "DCP, 2 threads")
DCP_ASYNC = ("DCP, async thread", "DCP, async process")
DEEPSPEED = "DeepSpeed ZeRO-1"
SYSTEMS = (
    COPY,
    RAW,
    RAW_2,
    OURS,
    OURS_1,
    ASYNC,
    "safetensors",
    "torch.save",
    *DCP,
    *DCP_ASYNC,
    DEEPSPEED,
)
MIB = 1 << 20
BEGIN = "<!-- checkpoint: begin -->"
END = "<!-- checkpoint: end -->"
Row = dict[str, Any]


def start(system: str, ranks: int, hidden: int, peers: Path) -> Group:
    python = str(peers / "deepspeed" / "bin" / "python") if system == DEEPSPEED else sys.executable
    return Group(system, [python, str(SCRIPTS / "checkpoint_rank.py"), system, str(hidden)], ranks)


# ---- memory and CPU time of process trees --------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
        except OSError:  # it has ended
            continue
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu_seconds(group: Group) -> float:
    """That the group's processes and their dead children have used."""
    total = 0
    for pid in (pid for rank in group.ranks for pid in tree(rank.pid)):
        try:
            total += sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
            )
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def memory(pids: list[int]) -> int:
    """Bytes of these processes; what n of them share counts once (Pss)."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue
    return total


def held(group: Group) -> list[int]:
    """The memory of each rank."""
    return [memory(tree(rank.pid)) for rank in group.ranks]


class Sampled:
    """The most memory of each rank's processes while the block runs."""

    def __init__(self, group: Group):
        self.group, self.done = group, threading.Event()
        self.thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampled:
        self.most = held(self.group)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(0.005):
            self.most = list(map(max, self.most, held(self.group)))

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


# ---- measure -------------------------------------------------------------------------------------


def turn(group: Group, folder: Path) -> Row:
    """One save into a new folder, which is deleted afterwards."""
    folder.mkdir()
    if group.system != COPY:
        # no system pays for what another has not written yet
        subprocess.run(["sync", "-f", str(folder)], check=True)
    try:
        busy, cpu, wall = busy_seconds(), cpu_seconds(group), time.perf_counter()
        answers = group.turn(json.dumps({"folder": str(folder)}))
        busy, cpu, wall = (
            busy_seconds() - busy,
            cpu_seconds(group) - cpu,
            time.perf_counter() - wall,
        )
    finally:
        shutil.rmtree(folder)
    return {
        "system": group.system,
        "total": max(each["end"] for each in answers) - min(each["begin"] for each in answers),
        "stall": max(each["free"] - each["begin"] for each in answers),
        "bytes": [each["bytes"] for each in answers],
        "state": max(each["state"] for each in answers),
        "cpu": round(cpu, 3),
        "others_cores": round(max(0.0, busy - cpu) / wall, 3),
    }


def memory_turn(group: Group, folder: Path, before: list[int]) -> Row:
    """A turn, with the bytes that a rank has more than at the start: at most during the turn, and
    already before it.
    """
    held_before = held(group)
    with Sampled(group) as sampled:
        run = turn(group, folder)
    most, kept = (max(map(int.__sub__, now, before)) for now in (sampled.most, held_before))
    return run | {"memory": most, "kept": kept}


def measure(
    args: argparse.Namespace, ranks: int, places: dict[str, Path]
) -> Iterator[tuple[str, str, Row]]:
    """(place, what, run) of one number of processes: "first", "memory" and "runs"."""
    groups: list[Group] = []
    try:
        for system in args.systems:
            groups.append(start(system, ranks, args.hidden, args.peers))
            groups[-1].turn(json.dumps({"folder": None}))
        before = {group.system: held(group) for group in groups}
        for place, folder in places.items():
            for group in groups:
                yield place, "first", turn(group, folder / "first")
        for place, folder in places.items():
            for group in groups:
                yield place, "memory", memory_turn(group, folder / "memory", before[group.system])
        for index in range(args.rounds):
            for place, folder in places.items():
                wait_until_quiet(args.quiet, args.patience)
                first = index % len(groups)
                for group in groups[first:] + groups[:first]:
                    yield place, "runs", turn(group, folder / f"round-{index}") | {"round": index}
    finally:
        for group in groups:
            group.end()


def prepared(args: argparse.Namespace) -> dict[str, Path]:
    """A new folder in each place, named after it."""
    found = {}
    for place in args.places:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=getattr(args, place)))
        kind = disk_kind(str(folder))
        if (kind == "tmpfs") != (place == "tmpfs"):
            folder.rmdir()
            raise SystemExit(
                f"error: --{place} {getattr(args, place)} is on {kind}; give a folder on "
                f"{'a tmpfs' if place == 'tmpfs' else 'a disk'}"
            )
        found[place] = folder
    return found


# ---- judge ---------------------------------------------------------------------------------------


def goals(place: str) -> list[tuple[str, str, str, str, float, bool]]:
    """(what, numerator, denominator, clock, goal, whether the goal is an upper limit)."""
    least = 1.4 if place == "tmpfs" else 1.2
    found = [("time by raw pwrite's", OURS, RAW, "total", 1.25, True)] if place == "tmpfs" else []
    found += (
        [("time by raw pwrite's with 2 threads", OURS, RAW_2, "total", 1.25, True)]
        if place == "tmpfs"
        else []
    )
    found += [("torch.save's time by ours", "torch.save", OURS, "total", 1.4, False)]
    found += [
        (f"{system}'s time by ours with 1 thread", system, OURS_1, "total", goal, False)
        for system, goal in (("torch.save", 1.4), (DCP[0], least))
    ]
    found += [(f"{system}'s time by ours", system, OURS, "total", least, False) for system in DCP]
    return found + [("stall by memcpy of the shard", ASYNC, COPY, "stall", 1.5, True)]


def verdicts(settings: dict[str, Row]) -> list[Row]:
    """A row for each setting and goal whose systems were measured."""
    rows = []
    for name, measured in settings.items():
        taken = {(run["system"], run["round"]): run for run in measured["runs"]}
        for what, above, below, clock, goal, upper in goals(measured["place"]):
            pairs = [
                (taken[above, index], run)
                for (system, index), run in taken.items()
                if system == below and (above, index) in taken
            ]
            quiet = [
                pair
                for pair in pairs
                if all(run["others_cores"] < measured["quiet"] for run in pair)
            ]
            if pairs:
                row = {
                    "setting": name,
                    "what": what,
                    "goal": goal,
                    "upper": upper,
                    "pairs": len(quiet),
                }
                if quiet:
                    row |= asdict(
                        ratio_rule.verdict(
                            [a[clock] / b[clock] for a, b in quiet], goal, upper_limit=upper
                        )
                    )
                rows.append(row)
    return rows


def tables(document: Row) -> str:
    """Markdown: what each system took, then the goals."""
    return "\n".join([*table_of_systems(document), "", *table_of_goals(document)])


def table_of_systems(document: Row) -> list[str]:
    lines = [
        (
            "| setting | system | total, s | by raw | stall, s | first stall, s | memory, MiB | "
            "kept, MiB | a rank's bytes, MiB | most by mean |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, measured in document["settings"].items():
        raw = [run["total"] for run in measured["runs"] if run["system"] == RAW]
        for system in dict.fromkeys(run["system"] for run in measured["runs"]):
            runs, [first], [sampled] = (
                [run for run in measured[kind] if run["system"] == system]
                for kind in ("runs", "first", "memory")
            )
            total, stall = (
                statistics.median(run[clock] for run in runs) for clock in ("total", "stall")
            )
            by_raw = f"{total / statistics.median(raw):.2f}" if raw and system != COPY else "-"
            written = runs[-1]["bytes"]
            spread = (
                f"{max(written) / MIB:.0f} | {max(written) / statistics.mean(written):.3f}"
                if any(written)
                else "- | -"
            )
            sizes = f"{sampled['memory'] / MIB:.0f} | {sampled['kept'] / MIB:.0f}"
            lines.append(
                f"| {name} | {system} | {total:.3f} | {by_raw} | {stall:.3f} | "
                f"{first['stall']:.3f} | {sizes} | {spread} |"
            )
    return lines


def table_of_goals(document: Row) -> list[str]:
    lines = [
        "| setting | ratio | measured (95% interval) | asked | pairs | |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        sign = "<=" if row["upper"] else ">="
        word = (
            "reached"
            if row.get("passed")
            else "LOST"
            if row["pairs"] >= ratio_rule.PAIRS
            else "too few quiet pairs"
        )
        ratio = (
            f"{row['median']:.2f} ({row['low']:.2f}-{row['high']:.2f})" if "median" in row else "-"
        )
        lines.append(
            f"| {row['setting']} | {row['what']} | {ratio} | {sign} {row['goal']:g} | "
            f"{row['pairs']} | {word} |"
        )
    return lines


def section(document: Row) -> str:
    """What --table writes: where, when and with what the figures were taken, and the tables."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    made_by = textwrap.fill(
        f"{document['started'][:10]}, {about['cores']} cores ({about['cpu']}), Python "
        f"{about['python']}, {versions}; {document['rounds']} rounds; disk: "
        f"{document['disk']}. Every run in `{document['out']}`.",
        100,
        break_long_words=False,
        break_on_hyphens=False,
    )
    command = f"    python benchmarks/checkpoint.py {' '.join(document['command'])}"
    return f"{made_by}\n\n{command}\n\n{tables(document)}"


def put_section(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what lies between two marks in a Markdown file. Raises ValueError when it has
    none.
    """
    before, first, rest = path.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(
            f"--table {path}: holds no lines {begin} and {end} to write between; add them"
        )
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def versions(peers: Path) -> dict[str, str]:
    """Of the packages compared."""
    found = {name: metadata.version(name) for name in ("torch", "safetensors", "xxhash")}
    python = peers / "deepspeed" / "bin" / "python"
    if python.exists():
        ask = "from importlib import metadata; print(metadata.version('deepspeed'))"
        found["deepspeed"] = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    return found


def disk_kind(path: str) -> str:
    """File system of a folder."""
    return subprocess.run(
        ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
    ).stdout.strip()


def read_arguments(argv: list[str]) -> argparse.Namespace:
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
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--places", nargs="+", choices=["tmpfs", "disk"], default=["tmpfs", "disk"])
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder there")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder there")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--hidden",
        type=int,
        default=1024,
        help="size of the model: a rank holds 384 bytes x hidden^2",
    )
    parser.add_argument("--rounds", type=int, default=ratio_rule.PAIRS + 2)
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
    parser.add_argument(
        "--table",
        type=Path,
        help=f"Markdown file that the tables are written to, between {BEGIN} and {END}",
    )
    args = parser.parse_args(argv)
    if not (args.setup or args.peers):
        parser.error("give --setup DIR, --peers DIR or both")
    return args


def without_machine_folder(word: str) -> str:
    """An argument as documents show it: paths in the repository are relative, others are DIR."""
    if not word.startswith("/"):
        return word
    path, root = Path(word), Path(__file__).resolve().parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else "DIR"


def measured(argv: list[str], args: argparse.Namespace) -> Row:
    """The document of --out, which is also written there after each number of processes: an
    interrupted measurement keeps what it has.
    """
    places = prepared(args)
    document: Row = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": [without_machine_folder(word) for word in argv],
        "machine": machine(),
        "versions": versions(args.peers),
        "rounds": args.rounds,
        "disk": disk_kind(args.disk),
        "out": str(args.out),
        "settings": {},
        "rows": [],
    }
    try:
        for ranks in args.processes:
            for place, what, run in measure(args, ranks, places):
                name = f"{place}, {ranks} process{'es' * (ranks > 1)}"
                fresh = {"place": place, "quiet": args.quiet, "first": [], "memory": [], "runs": []}
                document["settings"].setdefault(name, fresh)[what].append(run)
                print(
                    f"{name}, {run.get('round', what)}, {run['system']}: total "
                    f"{run['total']:.3f} s, stall {run['stall']:.3f} s; others used "
                    f"{run['others_cores']} cores",
                    flush=True,
                )
            document["rows"] = verdicts(document["settings"])
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        for folder in places.values():
            shutil.rmtree(folder)
    return document


def main(argv: list[str]) -> None:
    args = read_arguments(argv)
    if args.setup:
        setup(args.setup, ["deepspeed"])
    if not args.peers:
        return
    if DEEPSPEED in args.systems and not (args.peers / "deepspeed").is_dir():
        raise SystemExit(
            f"error: --peers {args.peers}: no environment deepspeed there; make it with --setup "
            f"{args.peers}"
        )
    document = measured(argv, args)
    print("\n" + tables(document), flush=True)
    if args.table:
        put_section(args.table, section(document))


if __name__ == "__main__":
    main(sys.argv[1:])
