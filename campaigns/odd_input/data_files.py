"""Campaigns on data: JSON lines, tokenizer files, and indexed datasets."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
from megatron.tools import preprocess_data

from campaigns.odd_input.cases import Verdicts, Wrong, damage
from campaigns.odd_input.settings_files import clear, not_a_file
from megatron.config.errors import UserError
from megatron.config.groups import DataConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.token_stream import TokenStream
from megatron.data.tokenizer import build_tokenizer

VOCAB = 1000
TEXTS = ["The king's crown", "", " \n\tx", "日本語 🎈 é", "<|endoftext|>", "aaaa" * 50]


def preprocess(path: Path, prefix: Path, *flags: str) -> None:
    given = [
        "--input",
        str(path),
        "--output-prefix",
        str(prefix),
        "--workers",
        "1",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(VOCAB),
        *flags,
    ]
    with redirect_stdout(StringIO()):
        preprocess_data.preprocess(preprocess_data.parser().parse_args(given))


def tokens_of(raw: bytes) -> list[int]:
    """What an independent reader makes of JSON lines of integers; lines whose text UTF-8 cannot
    hold are left out.
    """
    found: list[int] = []
    for line in raw.decode(errors="surrogateescape").split("\n"):
        if not line.strip():
            continue
        value = json.loads(line)["text"]
        parts = value if isinstance(value, list) else [value]
        try:
            "".join(parts).encode()
        except UnicodeEncodeError:
            continue
        for part in parts:
            found += [int(word) for word in part.split()]
    return found


def jsonl(count: int, seed: int, folder: Path) -> Verdicts:
    """Damaged lines, surrogates, deep nesting: refused with nothing left behind, or the tokens that
    the text has.
    """
    rng, verdicts = random.Random(seed), Verdicts()
    path, out = folder / "a.jsonl", folder / "out"
    for number in range(count):
        clear(path)
        lines = [
            json.dumps(
                {"text": " ".join(str(rng.randrange(VOCAB)) for _ in range(rng.randrange(1, 9)))}
            )
            for _ in range(rng.randrange(1, 30))
        ]
        at, policy = rng.randrange(len(lines)), rng.choice(["error", "skip"])
        kind = rng.choice(
            ["bytes"] * 6
            + ["surrogate", "surrogate", "deep", "list", "bytes of another encoding", "no file"]
        )
        refuse, what = False, ""
        if kind == "surrogate":
            lines[at], refuse = (
                '{"text": "1 \\ud8' + f"{rng.randrange(256):02x}" + ' 2"}',
                policy == "error",
            )
        elif kind == "deep":
            lines[at], refuse = '{"text": "1", "x": ' + "[" * rng.choice([2000, 20_000]), True
        elif kind == "list":
            lines[at] = '{"text": ["1 2", "3", ""]}'
        raw = "\n".join(lines).encode()
        if kind == "bytes of another encoding":
            raw += b'\n{"text": "7 \xe9 8"}\n'
            refuse = policy == "error"
        elif kind == "bytes":
            what, raw = damage(rng, raw)
        if kind == "no file":
            what, refuse = not_a_file(path, rng), True
        else:
            path.write_bytes(raw)

        def read(raw: bytes = raw, policy: str = policy) -> str:
            try:
                preprocess(path, out / "x", "--invalid-text", policy)
            except UserError:
                if out.exists() and any(out.iterdir()):
                    raise Wrong(f"left {sorted(each.name for each in out.iterdir())}") from None
                raise
            made = IndexedDataset(str(out / "x_text_document")).tokens.tolist()
            if made != tokens_of(raw):
                raise Wrong("other tokens than those of the text")
            return "accepted"

        verdicts.case(f"{number} {kind} {what} {policy}", read, must_refuse=refuse)
        shutil.rmtree(out, ignore_errors=True)
    clear(path)
    return verdicts


def make_tokenizers(folder: Path) -> None:
    """One of each kind: Hugging Face, GPT-2, SentencePiece, tiktoken as published and as Megatron's
    JSON.
    """
    import sentencepiece
    import tokenizers

    text = folder / "text"
    text.write_text(
        "\n".join([*TEXTS * 5, *["the quick brown fox jumps over the lazy dog and the crown"] * 40])
    )
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(
        [str(text)],
        vocab_size=300,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spm"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokens = [bytes([k]) for k in range(256)] + [b"th", b"the", b" the", b"in"]
    (folder / "r50k_base.tiktoken").write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    )
    (folder / "mega.json").write_text(json.dumps(megatron_entries(tokens)))


def megatron_entries(tokens: list[bytes]) -> list[dict]:
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]


def use(config: DataConfig) -> str:
    """Build a tokenizer and use it. Raises Wrong for ids that its vocabulary does not have."""
    tokenizer = build_tokenizer(config)
    ids, lengths = tokenizer.encode_many(TEXTS)
    if (
        len(ids)
        and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size
        or not 0 <= tokenizer.eod < tokenizer.vocab_size
    ):
        raise Wrong("an id outside the vocabulary")
    if len(lengths) != len(TEXTS) or int(lengths.sum()) != len(ids):
        raise Wrong("lengths that are not those of the texts")
    tokenizer.decode(ids.tolist())
    return "accepted"


def tokenizer_files(count: int, seed: int, folder: Path) -> Verdicts:
    """Damaged files of every kind, and vocabularies whose meaning is damaged. Each case has a
    separate process: libraries may abort.
    """
    rng, verdicts, base, work = random.Random(seed), Verdicts(), folder / "base", folder / "work"
    base.mkdir()
    make_tokenizers(base)
    kinds = {
        "tokenizer.json": ("HuggingFaceTokenizer", "tokenizer.json"),
        "tokenizer_config.json": ("HuggingFaceTokenizer", "tokenizer.json"),
        "spm.model": ("SentencePieceTokenizer", "spm.model"),
        "r50k_base.tiktoken": ("TikTokenizer", "r50k_base.tiktoken"),
        "mega.json": ("TikTokenizer", "mega.json"),
        "vocab.json": ("GPT2BPETokenizer", ""),
        "merges.txt": ("GPT2BPETokenizer", ""),
    }
    for number in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        name = rng.choice(list(kinds))
        kind, model = kinds[name]
        raw, how, refuse = (
            (work / name).read_bytes(),
            rng.choice(["bytes", "bytes", "meaning", "deep", "no file"]),
            True,
        )
        if how == "meaning" and name == "r50k_base.tiktoken":
            lines = raw.splitlines()
            at = rng.randrange(len(lines))
            lines[at : at + 1] = rng.choice(
                [
                    [],
                    [lines[at]] * 2,
                    [lines[at].split()[0] + b" -1"],
                    [lines[at].split()[0] + b" 9999"],
                ]
            )
            raw = b"\n".join(lines)
            refuse = (
                at != 259 or len(lines) != 259
            )  # without its last token it is a smaller vocabulary
        elif how == "meaning" and name == "mega.json":
            entries = json.loads(raw)
            at = rng.randrange(256)
            rng.choice(
                [
                    lambda: entries.pop(at),
                    lambda: entries.append(entries[at]),
                    lambda: entries[at].update(rank=-1),
                    lambda: entries[at].update(rank="1"),
                    lambda: entries[at].update(rank=True),
                    lambda: entries.insert(at, None),
                ]
            )()
            raw = json.dumps(entries).encode()
        elif how == "meaning" and name == "tokenizer_config.json":
            odd = rng.choice(
                [
                    [],
                    None,
                    3,
                    {"eos_token": 3},
                    {"eos_token": [1]},
                    {"eos_token": {"content": 1}},
                    {"eos_token": "<nowhere>"},
                ]
            )
            raw = json.dumps(odd).encode()
        elif how == "deep":
            raw = b"[" * 20_000
        elif how != "no file":
            how, raw = damage(rng, raw)
            refuse = False
        if how == "no file":
            how = not_a_file(work / name, rng)
            refuse = not (how == "nothing" and name == "tokenizer_config.json")
        else:
            (work / name).write_bytes(raw)
        files = (
            {"vocab_file": str(work / "vocab.json"), "merge_file": str(work / "merges.txt")}
            if not model
            else {"tokenizer_model": str(work / model)}
        )
        config = DataConfig(tokenizer_type=kind, **files)
        verdicts.case(
            f"{number} {name} {how}", lambda config=config: in_child(config), must_refuse=refuse
        )
    return verdicts


def in_child(config: DataConfig) -> str:
    """`use` in a separate process, whose abort is a finding and not the end of the campaign."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            answer = use(config)
        except UserError as error:
            answer = f"refused {error}"
        except BaseException as error:
            answer = f"wrong {type(error).__name__}: {error}"
        os.write(into, answer.encode(errors="replace")[:8000])
        os._exit(0)
    os.close(into)
    with open(out, "rb") as output:
        answer = output.read().decode(errors="replace")
    os.waitpid(child, 0)
    if answer.startswith("refused "):
        raise UserError(answer)
    if answer != "accepted":
        raise Wrong(answer or "the process was aborted")
    return answer


def index_damages(count: int, seed: int, folder: Path) -> Verdicts:
    """Damaged .idx and .bin. With the sidecar, --check-data refuses every change of any byte;
    without it, what cannot be known (token values, ends of documents) is counted as such, and all
    else is refused or equal.
    """
    rng, verdicts, prefix = random.Random(seed), Verdicts(), folder / "x_text_document"
    source = folder / "a.jsonl"
    texts = [
        " ".join(str(rng.randrange(VOCAB)) for _ in range(rng.randrange(1, 40))) for _ in range(40)
    ]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    preprocess(source, folder / "x", "--append-eod")
    kept = {ending: Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx", "json")}
    whole = IndexedDataset(str(prefix))
    right = [np.array(each) for each in (whole.lengths, whole.offsets, whole.tokens)]

    def read(sidecar: bool, scan: bool) -> str:
        dataset = IndexedDataset(str(prefix))
        if scan:
            dataset.check(VOCAB + 1)
        stream = TokenStream(dataset, 0, dataset.num_sequences, 16, 1, VOCAB + 1)
        out = np.empty((stream.samples, 17), np.int64)
        stream.read(np.arange(stream.samples), np.arange(stream.samples), out)
        if out.min() < 0 or out.max() > VOCAB:
            raise Wrong("an id outside the vocabulary was read")
        found = (dataset.lengths, dataset.offsets, dataset.tokens)
        if all(
            len(a) == len(b) and bool((a.astype(np.int64) == b.astype(np.int64)).all())
            for a, b in zip(found, right)
        ):
            return "same tokens"
        if sidecar and scan:
            raise Wrong("another content passed --check-data")
        return "not to be known without a digest"

    for number in range(count):
        for ending, raw in kept.items():
            clear(Path(f"{prefix}.{ending}"))
            Path(f"{prefix}.{ending}").write_bytes(raw)
        ending, sidecar, scan = (
            rng.choice(["idx", "idx", "bin"]),
            rng.random() < 0.6,
            rng.random() < 0.7,
        )
        path = Path(f"{prefix}.{ending}")
        if not sidecar:
            Path(f"{prefix}.json").unlink()
        if rng.random() < 0.06:
            what, refuse = not_a_file(path, rng), True
        else:
            what, raw = damage(rng, kept[ending])
            path.write_bytes(raw)
            refuse = sidecar and scan
        label = f"{number} {ending} {what}{' sidecar' * sidecar}{' --check-data' * scan}"
        verdicts.case(
            label, lambda sidecar=sidecar, scan=scan: read(sidecar, scan), must_refuse=refuse
        )
    return verdicts
