"""What may not change while the inside of the program does.

    python campaigns/golden/golden.py record               # writes campaigns/golden/recorded.json
    python campaigns/golden/golden.py compare              # exit code 1 when a number differs
    python campaigns/golden/golden.py compare --base HEAD~3

Every run of runs.py is made by the real program. Kept are its logged numbers, digests of its final
weights, moments and checkpoint files, the state in its manifest, the most bytes that were alive,
and the bytes that it sent.

Bits depend on the processor and on torch's version, so `compare` first looks whether those of the
file are these. Where they are not, it makes each run again with the commit that it was recorded
at, in a separate work tree, and compares with those. `--only WORD...` takes the runs whose name has
one of these words in it, and `record` then keeps the others of the file; `--tree DIR` runs another
checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import platform
import queue
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded.json"
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "1"}
sys.path.insert(0, str(HERE))

import runs  # noqa: E402
import worker  # noqa: E402

MEASURED = re.compile(  # metrics that depend on the machine
    r"timestamp|throughput|tokens-per-second|mfu|mem-|.*-time$|.*-seconds$|.*-per-second$|"
    r"data-wait-fraction|pipeline-bubble-fraction|slowest-rank|goodput.*"
)
# Fields that may differ, and why. Numbers of the training are never here.
MAY_DIFFER = {
    "state.config": "settings come and go; what they do is seen in the numbers",
    "state.kernels": "kernels are chosen anew; what they do is seen in the numbers",
}
# Bytes alive may fall; they may rise by what a few scalars take.
PEAK_SLACK = 0.005
AT_ONCE = 2  # runs; more hold each other up
PATIENCE = 600.0  # seconds for one launch


def main() -> int:
    """Record, or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR")
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit's runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write what was found")
    options = parser.parse_args()
    options.tree = options.tree.resolve()
    options.out = options.out and options.out.resolve()
    words = options.only or [""]
    chosen = [run for run in runs.golden_runs() if any(word in run.name for word in words)]
    if options.action == "record":
        out, kept = options.out or RECORDED, {}
        if options.only and out.exists():  # the other runs of the file stay
            recorded = json.loads(out.read_text())
            if recorded["machine"] != machine():
                parser.error(f"{out.name} is of another machine: record all its runs")
            kept = recorded["runs"]
        found = record(options.tree, chosen)
        write(out, {**found, "runs": kept | found["runs"]})
        return 0
    if options.base:
        before = record_commit(options.base, words)
    elif not RECORDED.exists():
        parser.error(f"{RECORDED.name} is not there; make it with `record`, or give --base COMMIT")
    else:
        recorded = json.loads(RECORDED.read_text())
        before = recorded["runs"]
        if recorded["machine"] != machine():
            print(f"recorded on {recorded['machine']}; recording on this one")
            names = before.keys() & {run.name for run in chosen}
            before = record_again({name: before[name] for name in sorted(names)})
    after = record(options.tree, chosen)
    if options.out:
        write(options.out, after)
    problems = []
    for run in chosen:
        problems += differences(run.name, before.get(run.name), after["runs"].get(run.name))
    print("\n".join(problems) or f"{len(chosen)} runs are equal")
    return 1 if problems else 0


def machine() -> dict[str, str]:
    """What bits depend on."""
    import torch

    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def record_again(recorded: dict[str, Any]) -> dict[str, Any]:
    """The same runs, made on this machine, each with the commit that it was recorded at."""
    names = defaultdict(list)
    for name, run in recorded.items():
        names[run["commit"]].append(name)
    found = {}
    for commit, chosen in names.items():
        made = record_commit(commit, chosen)
        found |= {name: made[name] for name in chosen if name in made}
    return found


def record_commit(commit: str, words: list[str]) -> dict[str, Any]:
    """The runs of a commit whose names have one of the words. In a separate work tree, by another
    process: this one may have imported the program.
    """
    with tempfile.TemporaryDirectory(prefix="golden_tree_") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True)
        try:
            out = Path(folder, "recorded.json")
            record_it = [sys.executable, __file__, "record", "--only", *words]
            subprocess.run([*record_it, "--tree", str(tree), "--out", str(out)], check=True)
            return json.loads(out.read_text())["runs"]
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def record(tree: Path, chosen: list[runs.GoldenRun]) -> dict[str, Any]:
    """Make the runs with the checkout `tree`."""
    head = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    found, failed = {}, []
    os.chdir(tree)  # where the fork server imports what every rank needs
    os.environ["PYTHONPATH"] = str(HERE)
    with ThreadPoolExecutor(AT_ONCE) as executor:
        made = executor.map(lambda run: make(tree, run), chosen)
        for run, outcome in zip(chosen, made, strict=True):
            if isinstance(outcome, str):
                failed.append(f"{run.name}: {outcome}")
            else:
                found[run.name] = {"commit": commit, **outcome}
            print(f"  {run.name}", flush=True)
    if failed:
        print("\n".join(["runs that failed:", *failed]))
    return {"machine": machine(), "may_differ": MAY_DIFFER, "runs": found}


def make(tree: Path, run: runs.GoldenRun) -> dict[str, Any] | str:
    """All launches of a run in one folder; what they left behind, or why one failed."""
    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        save, state = Path(folder, "save"), Path(folder, "state")
        state.mkdir()
        lines = run.command_lines(str(save), str(state))
        try:
            launches = [
                launch_ranks(tree, line, launch.ranks)
                for line, launch in zip(lines, run.launches, strict=True)
            ]
        except RuntimeError as error:
            return str(error)
        checkpoints = sorted(save.glob("iter_*"))
        return {
            "metrics": read_metrics(save / "metrics.jsonl"),
            "launches": launches,
            "checkpoints": {path.name: describe_files(path) for path in checkpoints},
            "tensors": digest_tensors(checkpoints[-1]),
            "state": read_state(checkpoints[-1]),
        }


def launch_ranks(tree: Path, argv: list[str], size: int) -> list[dict[str, Any]]:
    """One process for each rank; what each has counted. Raises RuntimeError with their output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "worker", "pretrain_gpt", "megatron.training.pretrain"]
    )
    answers = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=worker.run_rank, args=(str(tree), argv, rank, size, port, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        given = sorted(collect(processes, answers), key=lambda each: each[0])
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    if any(measured is None for _, measured, _ in given):
        outputs = "\n".join(f"rank {rank}: {text[-3000:]}" for rank, _, text in given)
        raise RuntimeError(f"{' '.join(argv)}\n{outputs}")
    return [measured for _, measured, _ in given]


def collect(processes: list[Any], answers: Any) -> list[tuple[int, dict[str, Any] | None, str]]:
    """Every rank's answer. Raises RuntimeError where one ends without it, or takes too long."""
    given: list[tuple[int, dict[str, Any] | None, str]] = []
    end = time.monotonic() + PATIENCE
    while len(given) < len(processes):
        ended = all(process.exitcode is not None for process in processes)
        try:
            given.append(answers.get(timeout=1.0))
            continue
        except queue.Empty:
            pass
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        if ended or any(codes.values()):  # looked at before the wait: what they gave has arrived
            raise RuntimeError(f"a rank ended without an answer; exit codes: {codes}")
        if time.monotonic() > end:
            raise RuntimeError(f"no answer within {PATIENCE:g} s; exit codes: {codes}")
    return given


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what depends on the machine."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not MEASURED.match(key)} for row in rows]


def describe_files(checkpoint: Path) -> dict[str, str]:
    """Digest of every file but the manifest, which holds times and names of attempts."""
    files = sorted(path for path in checkpoint.iterdir() if path.name != "MANIFEST.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:32] for path in files}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The run's state in the manifest, without the fields that may differ."""
    state = json.loads((checkpoint / "MANIFEST.json").read_text())["manifest"]["state"]
    state["tensors"] = hashlib.sha256(json.dumps(state["tensors"]).encode()).hexdigest()[:32]
    return {key: value for key, value in state.items() if f"state.{key}" not in MAY_DIFFER}


def digest_tensors(checkpoint: Path) -> dict[str, str]:
    """One digest each for the weights and every kind of optimizer state, however they are cut."""
    tensors: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for path in checkpoint.glob("shard-*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        shapes = json.loads(header.pop("__metadata__")["shapes"])
        for key, entry in header.items():
            name, offsets = key.rsplit("@", 1)
            start, stop = entry["data_offsets"]
            item = (stop - start) // max(1, math.prod(entry["shape"]))
            box = np.frombuffer(data[8 + length :][start:stop], f"u{item}").reshape(entry["shape"])
            corner = [int(offset) for offset in offsets.split(",")] if offsets else []
            place = tuple(
                slice(first, first + size)
                for first, size in zip(corner, entry["shape"], strict=True)
            )
            whole = tensors.setdefault(name, np.zeros(shapes[name], f"u{item}"))
            whole[place] = box
            dtypes[name] = entry["dtype"]
    digests = defaultdict(hashlib.sha256)
    for name in sorted(tensors):
        kind = name.split(".")[1] if name.startswith("optimizer.") else "weights"
        digests[kind].update(f"{name} {dtypes[name]}".encode() + tensors[name].tobytes())
    return {kind: digest.hexdigest()[:32] for kind, digest in digests.items()}


def differences(name: str, before: dict | None, after: dict | None) -> list[str]:
    """Where two recordings of a run differ; one line each."""
    if before is None or after is None:
        return [f"{name}: {'was not recorded' if before is None else 'failed'}"]
    found = []
    for field in ("metrics", "checkpoints", "tensors", "state"):
        found += compare_values(f"{name}: {field}", before[field], after[field])
    pairs = zip(before["launches"], after["launches"], strict=True)
    for number, (old_ranks, new_ranks) in enumerate(pairs):
        for rank, (old, new) in enumerate(zip(old_ranks, new_ranks, strict=True)):
            where = f"{name}: launch {number}, rank {rank}"
            found += compare_values(f"{where}: sent", old["sent"], new["sent"])
            for peak in ("peak", "step_peak"):
                if not new[peak] or new[peak] > old[peak] * (1 + PEAK_SLACK):
                    found.append(f"{where}: {peak}: {old[peak]:,} -> {new[peak]:,} bytes")
    return found


def compare_values(where: str, before: Any, after: Any) -> list[str]:
    """Unequal leaves of two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted(before.keys() | after.keys()):
            found += compare_values(f"{where}.{key}", before.get(key), after.get(key))
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        found = []
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            found += compare_values(f"{where}[{number}]", old, new)
        return found
    return [] if before == after else [f"{where}: {before} -> {after}"]


def write(path: Path, found: dict[str, Any]) -> None:
    """One line a run, so that a difference is read in the file's history."""
    head = json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1)
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(run)}" for name, run in found["runs"].items()
    )
    path.write_text(f'{head[:-2]},\n "runs": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    sys.exit(main())
