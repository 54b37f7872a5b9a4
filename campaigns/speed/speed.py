"""Whether steps are as fast as at another commit, by the ratio rule (benchmarks/ratio_rule.py).

    python campaigns/speed/speed.py --base COMMIT --out docs/results/speed.json
    python campaigns/speed/speed.py --base HEAD --with=--torch-compile --out FILE

Every case is the real program on CPU processes of this machine. The two commits take turns, and the
one that begins changes from pair to pair. A run's time is the median of its iterations after the
first few; a ratio is the base's time over this checkout's, so that more is better. The case `host`
has a model so small that a step is the host's own work; its ratio must be 1 / 0.9. `--with` gives
further flags to this checkout's runs alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.benchmarks.ratio_rule import PAIRS, verdict  # noqa: E402

BASE = """
    --tokenizer-type NullTokenizer --vocab-size 2047 --mock-data --lr 1e-3 --log-interval 1
    --eval-iters 0 --micro-batch-size 1 --global-batch-size 4
"""
STEP = f"""{BASE} --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256
    --train-iters 16
"""
TINY = f"""{BASE} --num-layers 8 --hidden-size 16 --num-attention-heads 2 --seq-length 8
    --vocab-size 63 --train-iters 60
"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0
"""
CASES = {  # name -> ranks, flags, the least ratio
    "one process": (1, STEP, 1.0),
    "Llama": (1, f"{STEP} {LLAMA}", 1.0),
    "Llama bf16": (1, f"{STEP} {LLAMA} --bf16", 1.0),
    "dp2": (2, STEP, 1.0),
    "tp2": (2, f"{STEP} --tensor-model-parallel-size 2", 1.0),
    "pp2": (2, f"{STEP} --pipeline-model-parallel-size 2", 1.0),
    "dp2 ZeRO-2": (2, f"{STEP} --zero-stage 2", 1.0),
    "host": (1, TINY, 1 / 0.9),
}
WARMUP = 5  # iterations that are not counted
PATIENCE = 300  # seconds for one run


def main() -> int:
    """Run and judge every case; the exit code is 1 when one is lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their name")
    parser.add_argument(
        "--with", default="", dest="more", metavar="FLAGS", help="of this checkout's runs alone"
    )
    options = parser.parse_args()
    chosen = [name for name in CASES if options.only in name]
    found: dict[str, Any] = {"base": commit_of(options.base), "machine": machine()}
    found |= {"with": options.more, "cases": {}}
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), found["base"]], check=True)
        try:
            for name in chosen:
                found["cases"][name] = compare(name, tree, options.pairs, options.more)
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return int(not all(case["verdict"]["passed"] for case in found["cases"].values()))


def compare(name: str, tree: Path, pairs: int, more: str) -> dict[str, Any]:
    """All runs of a case, and what they come to."""
    ranks, flags, goal = CASES[name]
    seconds: dict[str, list[float]] = {"base": [], "this": []}
    sides = {"base": (tree, flags), "this": (ROOT, f"{flags} {more}")}
    for pair in range(pairs):
        for side in ("base", "this") if pair % 2 == 0 else ("this", "base"):
            where, given = sides[side]
            seconds[side].append(run(where, ranks, given))
    ratios = [a / b for a, b in zip(seconds["base"], seconds["this"], strict=True)]
    judged = verdict(ratios, goal)
    print(
        f"{name}: {judged.median:.3f} ({judged.low:.3f} to {judged.high:.3f}) of {goal:.3f}: "
        f"{'reached' if judged.passed else 'lost'}",
        flush=True,
    )
    return {"flags": " ".join(flags.split()), "ranks": ranks, "seconds": seconds} | {
        "goal": goal,
        "verdict": dataclasses.asdict(judged),
    }


def run(tree: Path, ranks: int, flags: str) -> float:
    """Median seconds of an iteration of one run."""
    with tempfile.TemporaryDirectory(prefix="speed_run_") as folder:
        rows = Path(folder, "metrics.jsonl")
        words = [*shlex.split(flags), "--metrics-file", str(rows)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [start(tree, rank, ranks, port, words) for rank in range(ranks)]
        for process in started:
            _, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, errors[-2000:]
        times = [
            row["iteration-time"]
            for row in map(json.loads, rows.read_text().splitlines())
            if "iteration-time" in row
        ]
        return statistics.median(times[WARMUP:])


def start(tree: Path, rank: int, ranks: int, port: int, words: list[str]) -> subprocess.Popen:
    """One rank, with one thread."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def commit_of(name: str) -> str:
    """Its full number."""
    command = ["git", "-C", str(ROOT), "rev-parse", f"{name}^{{commit}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """Processor, cores, versions."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {os.cpu_count()} cores, {versions}"


if __name__ == "__main__":
    sys.exit(main())
