"""One timed run of benchmarks/data.py, by our side or by a peer in its own environment.

    python data_side.py SIDE/WHAT FOLDER SCRATCH

FOLDER is what `benchmarks/data.py --setup` made; SCRATCH takes what the run writes. Prints one JSON
object. What a side needs it imports before its clock begins.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

VOCAB, SEQ, MICRO_BATCH, BATCHES = 4000, 1024, 8, 250
SAMPLES = 40_000  # of the training run whose start is timed


def ours_preprocess(folder: Path, source: Path, prefix: Path, null: bool, workers: int) -> dict:
    from megatron.tools import preprocess_data as tool

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


def main() -> None:
    name, folder, scratch = sys.argv[1:]
    if name.startswith("ours/") and not __package__:  # a peer may have its own `megatron`
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    print(json.dumps(child(name, Path(folder), Path(scratch))))


if __name__ == "__main__":
    main()
