"""Host time of a training step against megatron-core and torchtitan, per layer and micro-batch.

    python benchmarks/training.py --setup DIR    # once: the peers' environments, pinned
    python benchmarks/host_time.py --peers DIR --out docs/results/host_time.json
    python benchmarks/host_time.py --earlier CHECKOUT --goal 1.25 --out FILE

Tensors are so small (16 tokens of 64 channels) that a step is what Python and torch's dispatcher
take to start its operators, which is what a GPU waits for where its own work is short. Every
program trains the same Llama-style GPT from the same weights on the same tokens in one process of
one thread, without torch.compile, and lives through all rounds: in each it takes some steps of each
size in turn, in changing order. Counted is CPU time of the whole process, not elapsed time, because
others use the machine as well.

The time of a step is a + b layers + c micro-batches + d layers x micro-batches; four sizes give the
four numbers of a round. Judged by ratio_rule.py, as the peer's time by ours, are d and the largest
size's whole step. The programs' sides are benchmarks/peers/host_*.py. `--earlier` measures against
another commit of this project instead of peers; it runs in this interpreter's environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "peers"
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.peers.common import Work
from megatron.benchmarks.peers.start import write_start
from megatron.benchmarks.training import ENVIRONMENTS, TORCH, our_flags
from megatron.benchmarks.turn_group import Group


class Peer(NamedTuple):
    """A script with its first arguments, and the environment that runs it."""

    environment: str
    script: str
    words: tuple[str, ...] = ()


OURS, EARLIER = "ours", "earlier commit"
PEERS = {
    "megatron-core": Peer("megatron-core", "host_megatron_core.py"),
    "torchtitan": Peer("torchtitan", "host_torchtitan.py", ("fsdp",)),
    "torchtitan without FSDP": Peer("torchtitan", "host_torchtitan.py", ("bare",)),
}
LAYERS, MICRO_BATCHES = (2, 12), (1, 5)
SIZES = [(layers, count) for layers in LAYERS for count in MICRO_BATCHES]
LARGEST = SIZES[-1]
WARMUP, TURN, ROUNDS = 10, 20, 11  # steps, steps, turns of each program and size
GOAL = 1.0
# of losses: a few hundred roundings of a loss near 5.5 in fp32, and torchtitan's learning rate,
# which decays a step later
CLOSE = 1e-3


class StepTime(NamedTuple):
    """The four numbers of one program in one round, in seconds of CPU time."""

    step: float
    layer: float
    micro_batch: float
    layer_and_micro_batch: float


def work_of(layers: int, micro_batches: int, rounds: int) -> Work:
    """The work of one size; our console prints nothing before its last step."""
    steps = WARMUP + rounds * TURN + 1
    return Work(
        layers=layers,
        hidden=64,
        heads=4,
        query_groups=2,
        ffn=160,
        seq=16,
        vocab=256,
        micro_batch=1,
        accumulation=micro_batches,
        steps=steps,
        warmup=steps,
        threads=1,
    )


def command_of(who: str, work: Work, folder: Path, start: Path) -> list[str]:
    """One program as a command line; `folder` holds the peers' environments or the earlier
    commit's checkout.
    """
    if who in (OURS, EARLIER):
        scripts = SCRIPTS if who == OURS else folder / "benchmarks" / "peers"
        return [sys.executable, str(scripts / "host_ours.py"), *our_flags(work)]
    peer = PEERS[who]
    python = folder / peer.environment / "bin" / "python"
    return [
        str(python),
        str(SCRIPTS / peer.script),
        *peer.words,
        str(start),
        *work.arguments(),
    ]


def fit(seconds: dict[tuple[int, int], float]) -> StepTime:
    """The four numbers of a step's seconds by size."""
    (few, many), (one, several) = LAYERS, MICRO_BATCHES
    per_layer = {
        count: (seconds[many, count] - seconds[few, count]) / (many - few)
        for count in MICRO_BATCHES
    }
    both = (per_layer[several] - per_layer[one]) / (several - one)
    layer = per_layer[one] - both * one
    more = (seconds[few, several] - seconds[few, one]) / (several - one)
    micro_batch = more - both * few
    step = seconds[few, one] - layer * few - micro_batch * one - both * few * one
    return StepTime(step, layer, micro_batch, both)


def measure(folder: Path, names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Every turn of every program, round by round; the first of each is its warm-up, round -1.
    Raises RuntimeError when a program ends or computes other losses than ours.
    """
    groups: dict[tuple[str, tuple[int, int]], Group] = {}
    with tempfile.TemporaryDirectory(prefix="host_time_") as starts:
        try:
            for size in SIZES:
                work, start = work_of(*size, rounds), Path(starts, "_".join(map(str, size)))
                write_start(start, work, our_flags(work))
                for who in names:
                    command = command_of(who, work, folder, start)
                    groups[who, size] = group = Group(who, command, 1)
                    yield turn(group, size, -1, WARMUP)
            for index in range(rounds):
                order = names[index % len(names) :] + names[: index % len(names)]
                for size in SIZES:
                    for who in order:
                        yield turn(groups[who, size], size, index, TURN)
        finally:
            for group in groups.values():
                group.end()


def turn(group: Group, size: tuple[int, int], index: int, steps: int) -> dict[str, Any]:
    """Some steps of a program: CPU seconds a step, and of its parts."""
    (answer,) = group.turn(f"time {steps}")
    return {
        "round": index,
        "who": group.system,
        "layers": size[0],
        "micro_batches": size[1],
        "seconds": answer["cpu"] / steps,
        "parts": {name: seconds / steps for name, seconds in answer["parts"].items()},
        "losses": answer["losses"],
    }


def check_losses(runs: list[dict[str, Any]]) -> float:
    """The largest difference of a loss of the warm-up from ours. Raises RuntimeError where it is
    too large for equal work.
    """
    warm = {
        (run["who"], run["layers"], run["micro_batches"]): run["losses"]
        for run in runs
        if run["round"] < 0
    }
    off = max(
        abs(loss - ours)
        for (_, *size), losses in warm.items()
        for loss, ours in zip(losses, warm[OURS, *size])
    )
    if off > CLOSE:
        raise RuntimeError(f"losses differ from ours by {off}: the programs do not do equal work")
    return off


def summary(runs: list[dict[str, Any]], goal: float = GOAL) -> dict[str, Any]:
    """Medians of every program, and the verdicts against each peer."""
    times: dict[str, dict[int, dict[tuple[int, int], float]]] = {}
    for run in runs:
        if run["round"] >= 0:
            size = run["layers"], run["micro_batches"]
            times.setdefault(run["who"], {}).setdefault(run["round"], {})[size] = run["seconds"]
    whole = {who: [of[LARGEST] for of in rounds.values()] for who, rounds in times.items()}
    fitted = {who: [fit(of) for of in rounds.values()] for who, rounds in times.items()}
    slopes = {who: [each.layer_and_micro_batch for each in fitted[who]] for who in fitted}
    found: dict[str, Any] = {"programs": {}, "rows": []}
    for who, each in fitted.items():
        parts = [
            run["parts"]
            for run in runs
            if run["who"] == who
            and run["round"] >= 0
            and (run["layers"], run["micro_batches"]) == LARGEST
        ]
        found["programs"][who] = {
            name: statistics.median(getattr(one, name) for one in each) for name in StepTime._fields
        } | {
            "whole": statistics.median(whole[who]),
            "parts": {name: statistics.median(one[name] for one in parts) for name in parts[0]},
        }
    for who in fitted:
        if who != OURS:
            for what, values in (("layer and micro-batch", slopes), ("whole step", whole)):
                ratios = [theirs / ours for theirs, ours in zip(values[who], values[OURS])]
                judged = ratio_rule.verdict(ratios, goal)
                found["rows"].append({"peer": who, "what": what, **dataclasses.asdict(judged)})
    return found


def machine() -> dict[str, str]:
    """Processor and versions."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "processor": f"{model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main(words: list[str] | None = None) -> int:
    """Measure and judge; the exit code is 1 when a row is lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    against = parser.add_mutually_exclusive_group(required=True)
    against.add_argument("--peers", type=Path, metavar="DIR")
    against.add_argument("--earlier", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--goal", type=float, default=GOAL, help="the least ratio of theirs to ours"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(words)
    if options.earlier:
        folder, others = options.earlier.resolve(), [EARLIER]
        head = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        versions = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    else:
        folder, others = options.peers.resolve(), options.only
        versions = ", ".join([TORCH, *ENVIRONMENTS["megatron-core"], *ENVIRONMENTS["torchtitan"]])
    runs: list[dict[str, Any]] = []
    for run in measure(folder, [OURS, *others], options.rounds):
        runs.append(run)
        print(
            f"round {run['round']}, {run['layers']} layers, {run['micro_batches']} micro-batches, "
            f"{run['who']}: {1e3 * run['seconds']:.2f} ms of CPU time a step",
            flush=True,
        )
    off = check_losses(runs)
    found = summary(runs, options.goal)
    header = {
        "machine": machine() | {"earlier" if options.earlier else "peers": versions},
        "work": dataclasses.asdict(work_of(*LARGEST, options.rounds)),
        "turn": TURN,
        "losses_differ_by": off,
    }
    for run in runs:
        del run["losses"]
    options.out.write_text(json.dumps({**header, **found, "runs": runs}, indent=1) + "\n")
    for row in found["rows"]:
        print(
            f"{row['peer']}, {row['what']}: {row['median']:.2f} ({row['low']:.2f} to "
            f"{row['high']:.2f}) of {row['goal']}: {'reached' if row['passed'] else 'lost'}"
        )
    return int(not all(row["passed"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
