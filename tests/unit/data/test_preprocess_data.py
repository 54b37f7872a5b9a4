"""The preprocessing tool, run as a command: bytes, order over workers and compression, bounded
memory, atomic output, errors by file and line.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.tools import preprocess_data as tool
from megatron.tools._preprocess import text_files
from unit.data.written_data import document_index

from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config, DataConfig, EvaluationConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"


def run(inputs: object, prefix: object, *flags: object, vocab_size: int = 1000) -> list[dict]:
    """Preprocess one input or a list of them; the sidecars."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    given = ["--input", *map(str, inputs), "--output-prefix", str(prefix), *map(str, flags)]
    if "--tokenizer-type" not in given:
        given += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    if "--workers" not in given:
        given += ["--workers", "1"]
    return tool.preprocess(tool.parser().parse_args(given))


def made(prefix: Path, key: str = "text") -> tuple[IndexedDataset, list[list[int]]]:
    """The output for a prefix, and the ids of its sequences."""
    data = IndexedDataset(f"{prefix}_{key}_document")
    return data, [data.sequence(k).tolist() for k in range(data.num_sequences)]


def lines(path: Path, texts: list) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def integers(documents: int, largest: int = 1000) -> list[str]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 60, documents)
    return [" ".join(map(str, rng.integers(0, largest, size))) for size in sizes]


def raw(prefix: Path) -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}_text_document.{end}").read_bytes() for end in ("bin", "idx"))


def zstd(raw: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(raw)


PACK = {"gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("append", [False, True])
def test_documents_sentences_and_empty_texts(tmp_path, append):
    texts = ["1 2", "", ["3", "", "4 5"], ["", ""], [], "6"]
    (sidecar,) = run(lines(tmp_path / "a.jsonl", texts), tmp_path / "x", *["--append-eod"] * append)
    (data, sequences), end = made(tmp_path / "x"), [1000] * append
    assert sequences == [[1, 2, *end], [3], [4, 5, *end], [6, *end]]
    assert document_index(data).tolist() == [0, 1, 1, 3, 3, 3, 4]
    assert (sidecar["empty_documents"], sidecar["documents"]) == (3, 6)
    assert sidecar["eod_count"] == 3 * append and sidecar["max_id"] == (1000 if append else 6)
    files = [f"x_text_document.{kind}" for kind in ("bin", "idx", "json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", *files]


def test_workers_compression_and_several_files_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "SMALLEST_CHUNK", 500)
    texts = integers(900)
    run(lines(tmp_path / "all.jsonl", texts), tmp_path / "one", "--append-eod")
    first = lines(tmp_path / "half0.jsonl", texts[:400]).read_bytes()
    second = lines(tmp_path / "half1.jsonl", texts[400:]).read_bytes()
    # two members, two frames
    pack = gzip.compress
    (tmp_path / "part0.jsonl.gz").write_bytes(pack(first[:5000]) + pack(first[5000:]))
    (tmp_path / "part1.jsonl.zst").write_bytes(zstd(second[:7000]) + zstd(second[7000:]))
    for name, inputs, workers in (
        ("two", "all.jsonl", 2),
        ("files", "half0.jsonl half1.jsonl", 3),
        ("glob", "half*.jsonl", 1),
        ("packed", "part0.jsonl.gz part1.jsonl.zst", 2),
        ("packed1", "part*", 1),
    ):
        paths = [tmp_path / path for path in inputs.split()]
        run(paths, tmp_path / name, "--append-eod", "--workers", workers)
        assert raw(tmp_path / name) == raw(tmp_path / "one"), name


def test_line_ends_blank_lines_and_unicode(tmp_path):
    import tokenizers

    path = tmp_path / "a.jsonl"
    # U+2028 ends no line; no newline at the end
    path.write_bytes('{"text": "1 2"}\r\n\n  \n{"text": "3\u20284"}\n{"text": "5"}'.encode())
    words = {word: k for k, word in enumerate(["1", "2", "3", "4", "5", "<|endoftext|>", "?"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    run(path, tmp_path / "x", *HUGGING_FACE, tmp_path)
    assert made(tmp_path / "x")[1] == [[0, 1], [2, 3], [4]]


HUGGING_FACE = "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"


def test_several_keys_and_int32(tmp_path):
    records = [{"title": "7", "body": "70000 2"}, {"title": "", "body": "3"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    keys = "--json-keys", "title", "body"
    run(tmp_path / "a.jsonl", tmp_path / "x", *keys, vocab_size=80000)
    title, sequences = made(tmp_path / "x", "title")
    assert sequences == [[7]] and len(document_index(title)) == 3
    body, sequences = made(tmp_path / "x", "body")
    assert sequences == [[70000, 2], [3]] and body.dtype == np.int32


def test_the_sidecar_tells_the_loader(tmp_path):
    run(lines(tmp_path / "a.jsonl", integers(300)), tmp_path / "x", "--append-eod")
    prefix = str(tmp_path / "x_text_document")
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000}
    config = DataConfig(train_data_path=(prefix,), seq_length=32, check_data=True, **null)
    tokenizer = build_tokenizer(config)
    data = build_data(Config(data=config, evaluation=EvaluationConfig(eval_iters=0)), tokenizer)
    assert not any("another tokenizer" in note or "no sidecar" in note for note in data.notes)
    assert data.train.reader.streams[0].dataset.bytes_per_token > 2
    sidecar = json.loads(Path(prefix + ".json").read_text())
    assert sidecar["text_bytes"] == sum(map(len, integers(300)))
    assert sidecar["tokenizer"]["fingerprint"] == tokenizer.fingerprint


FAULTS = [
    ('{"text": \n{"text": "2"}\n', 2, "not JSON"),
    ('{"a":' * 20_000 + "\n", 2, "nested too deep for the parser"),
    ("[1, 2]\n", 2, "no text under the key 'text'"),
    ('\n{"txt": "2"}\n', 3, "no text under the key 'text': name the right one with --json-keys"),
    ('{"text": "x"}\n', 2, "NullTokenizer takes"),
    ('{"text": "4 1001"}\n', 2, "token id 1001 lies outside the vocabulary of 1001"),
]


@pytest.mark.parametrize("content, line, message", FAULTS)
@pytest.mark.parametrize("padding, packed", [(0, False), (500, True)])
def test_faults_name_file_and_line_and_leave_nothing(
    tmp_path, monkeypatch, content, line, message, padding, packed
):
    monkeypatch.setattr(tool, "SMALLEST_CHUNK", 300)
    text = ('{"text": "17"}\n' * (padding + 1) + content).encode()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(ValueError, match=f"{path}, line {padding + line}: {message}"):
        run(path, tmp_path / "out" / "x", "--workers", 2 if padding else 1)
    assert not list((tmp_path / "out").iterdir())


def test_lone_surrogates_name_a_line_or_are_replaced_or_left_out(tmp_path, capsys):
    import tokenizers

    bpe, path = tokenizers.ByteLevelBPETokenizer(), tmp_path / "a.jsonl"
    settings = {"vocab_size": 300, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    bpe.train_from_iterator(["a b"], **settings)
    bpe.save(str(tmp_path / "tokenizer.json"))
    texts = ['"1"', '"2\\ud800 3"', '["4", "\\udfff"]', '"5"']
    path.write_text("".join(f'{{"text": {text}}}\n' for text in texts))
    fault = "a text holds half of a surrogate pair.*--invalid-text replace"
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: {fault}"):
        run(path, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))
    for policy, done, documents, kept in (
        ("replace", "replaced", 4, ["1", "2\ufffd 3", "4", "\ufffd", "5"]),
        ("skip", "left out", 2, ["1", "5"]),
    ):
        flags = "--invalid-text", policy, *HUGGING_FACE, tmp_path
        (sidecar,) = run(path, tmp_path / policy, *flags)
        data, sequences = made(tmp_path / policy)
        assert (
            list(map(bpe.decode, sequences)) == kept and len(document_index(data)) == documents + 1
        )
        assert sidecar["invalid_texts"] == 2 and sidecar["invalid_text"] == policy
        shown = f"2 lines with characters that UTF-8 cannot hold: {done}"
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys, message",
    [
        (["text", "text"], "--json-keys text text: a key is given twice"),
        (["a/b"], "--json-keys 'a/b': a key becomes part of a file's name"),
        ([""], "must not be empty or hold a slash"),
        (["k" * 300], "is too long: Linux takes 3,900 bytes, 255 for each name"),
        (["here"], "x_here_document.bin: is a folder or no regular file"),
    ],
)
def test_keys_that_cannot_name_files_are_refused_before_work(tmp_path, monkeypatch, keys, message):
    (tmp_path / "x_here_document.bin").mkdir()
    monkeypatch.setattr(tool, "tokenizer_of", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(UserError, match=message):
        run(lines(tmp_path / "a.jsonl", ["1"]), tmp_path / "x", "--json-keys", *keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "x_here_document.bin"]


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}\n'])
def test_input_without_a_token(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    fault = "a.jsonl: not one token under the key 'text': the input is empty"
    with pytest.raises(ValueError, match=fault):
        run(tmp_path / "a.jsonl", tmp_path / "x", "--append-eod")
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("kind", PACK)
def test_cut_and_foreign_compressed_files(tmp_path, kind):
    whole = PACK[kind](lines(tmp_path / "a.jsonl", integers(2000)).read_bytes())
    path = tmp_path / f"b.jsonl.{kind}"
    for damaged in (whole[: len(whole) // 2], whole[:-3], b"no archive at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"b\.jsonl\.{kind}, byte \d+: "):
            run(path, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


def bytes_of(tmp_path: Path, path: Path, *flags: object) -> tuple[bytes, bytes]:
    run(path, tmp_path / "x", *flags)
    return raw(tmp_path / "x")


RECORDS = [{"text": text, "id": number} for number, text in enumerate(integers(400, largest=900))]
JSON_LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
FIRST, REST = JSON_LINES.split(b"\n", 1)
BOM = b"\xef\xbb\xbf"
SHAPES = {
    "lines": JSON_LINES,
    "byte order mark": BOM + JSON_LINES,
    "byte order marks of parts": BOM + FIRST + b"\n" + BOM + BOM + REST,
    "array over many lines": json.dumps(RECORDS, indent=1).encode(),
    "array with a mark": BOM + json.dumps(RECORDS, indent="\t").replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize(
    "shape, packed", [*((shape, "") for shape in SHAPES), *(("lines", each) for each in PACK)]
)
def test_every_shape_of_input_gives_the_same_bytes(tmp_path, monkeypatch, shape, packed):
    """Under a name that has nothing to do with the content, in chunks and pieces much smaller than
    it.
    """
    monkeypatch.setattr(tool, "SMALLEST_CHUNK", 700)
    monkeypatch.setattr(text_files, "PIECE", 300)
    (tmp_path / "plain").write_bytes(JSON_LINES)
    expected = bytes_of(tmp_path, tmp_path / "plain")
    path = tmp_path / "INPUT.TXT"
    path.write_bytes(PACK[packed](SHAPES[shape]) if packed else SHAPES[shape])
    assert bytes_of(tmp_path, path) == expected


def test_a_window_of_two_gigabytes(tmp_path):
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.jsonl.zst"
    # published dumps may begin with a skippable frame
    path.write_bytes(
        b"\x50\x2a\x4d\x18\x02\0\0\0ab" + frame.compress(b'{"text": "1 2 3"}\n') + frame.flush()
    )
    (sidecar,) = run(path, tmp_path / "x")
    assert sidecar["tokens"] == 3


@pytest.mark.parametrize(
    "content, message",
    [
        (b'[{"text": "1"}, {"text": }]', r"record 2: not JSON \(Expecting value\)"),
        (b'[{"text": "1"} {"text": "2"}]', r"record 2: not a JSON array \(found '{', expected ','"),
        (b'[{"text": "1"},', r"record 2: not a JSON array \(found the end of the file"),
        (b'[{"text": "1"}]\n[{"text": "2"}]', r"record 2: something follows the array"),
        (b'[ ] {"text": "2"}', r"record 1: something follows the array"),
        (b'[{"text": "1"}, 7]', r"record 2: no text under the key 'text'"),
        (b'[{"text": "1"}, {"text": "\xff"}]', r"record 2: not UTF-8|record 1: not UTF-8"),
        (b'{\n "text": "1"\n}\n', r"line 1: not JSON .*write each object on one line \(jq -c"),
        ('{"text": "1"}\n'.encode("utf-16"), r"is UTF-16: convert it to UTF-8"),
        (b"\x04\x22\x4d\x18" + bytes(40), r"is compressed with lz4"),
        (gzip.compress(b"PK\x03\x04" + bytes(40), mtime=0), r"is a zip archive: unpack it"),
    ],
)
def test_input_of_another_kind_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.jsonl,? ({message})"):
        run(path, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


def test_what_the_post_processor_adds_is_added_when_asked(tmp_path):
    """A beginning and an end of sequence around each text, as transformers adds them; by default
    and with Megatron-LM's negation nothing. Empty texts stay empty.
    """
    transformers = pytest.importorskip("transformers")
    import tokenizers

    bpe, special = tokenizers.ByteLevelBPETokenizer(), ["<|endoftext|>", "<s>", "</s>"]
    bpe.train_from_iterator(["a b"], vocab_size=300, special_tokens=special, show_progress=False)
    bpe._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    bpe.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    path = lines(tmp_path / "a.jsonl", ["a b", "", ["b", "a a"], "b"])
    flags = *HUGGING_FACE, tmp_path, "--append-eod", "--workers", 2
    for given, added in (
        ([], False),
        (["--tokenizer-hf-no-include-special-tokens"], False),
        (["--tokenizer-hf-include-special-tokens"], True),
    ):
        (sidecar,) = run(path, tmp_path / "x", *flags, *given)
        ab, b, aa = (theirs.encode(text, add_special_tokens=added) for text in ("a b", "b", "a a"))
        assert made(tmp_path / "x")[1] == [[*ab, 0], b, [*aa, 0], [*b, 0]]
        assert sidecar["include_special_tokens"] is added and sidecar["empty_documents"] == 1
    with pytest.raises(UserError, match="no effect with --tokenizer-type NullTokenizer: remove"):
        run(path, tmp_path / "y", "--tokenizer-hf-include-special-tokens")


def test_parquet(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist
    monkeypatch.setattr(tool, "SMALLEST_CHUNK", 700)
    (tmp_path / "plain").write_bytes(JSON_LINES)
    expected = bytes_of(tmp_path, tmp_path / "plain")
    path = tmp_path / "a"
    parquet.write_table(table(RECORDS), path, row_group_size=70)
    assert bytes_of(tmp_path, path, "--workers", 2) == expected
    # a column of bytes, as of programs that do not mark text
    raw = [record | {"text": record["text"].encode()} for record in RECORDS]
    parquet.write_table(table(raw), path)
    assert bytes_of(tmp_path, path) == expected
    sizes = [len(chunk.text) for chunk in text_files.chunks_of(str(path), 5000, ["text"])]
    assert len(sizes) > 5 and max(sizes) < 6000  # whatever the length of rows
    with pytest.raises(UserError, match="has no column 'body', but 'text', 'id': name the right"):
        run(path, tmp_path / "y", "--json-keys", "body")
    parquet.write_table(table([*RECORDS, {"text": None}]), path)
    with pytest.raises(UserError, match="record 401: no text under the key 'text'"):
        run(path, tmp_path / "y")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="cannot be read as parquet"):
        run(path, tmp_path / "y")


def test_command_line(tmp_path):
    lines(tmp_path / "a.jsonl", ["1 2", "", "3"])
    given = "--input a.jsonl --output-prefix x --tokenizer-type NullTokenizer"

    def command(flags: str) -> subprocess.CompletedProcess:
        words = [sys.executable, str(TOOL), *f"{given} {flags}".split()]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    done = command("--vocab-size 9 --append-eod")
    assert done.returncode == 0 and "MB/s" in done.stdout
    assert "3 documents (1 of them empty), 5 tokens" in done.stdout
    for extra, message in (
        ("", "--vocab-size is missing"),
        ("--vocab-size 2", "a.jsonl, line 3: token id 3"),
        ("--workers 0", "--workers"),
        ("--vocab-size 9 --input b*.jsonl", "--input b*.jsonl: no such file"),
    ):
        failed = command(extra)
        assert failed.returncode == 2 and message in failed.stderr
        assert failed.stderr.startswith("preprocess_data.py: ") and "Trace" not in failed.stderr


def test_a_killed_worker_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    # as the kernel does when memory runs out
    monkeypatch.setattr(tool, "read_records", lambda *_: os._exit(9))
    with pytest.raises(ValueError, match="a worker process was killed, .* give fewer --workers"):
        run(lines(tmp_path / "a.jsonl", integers(10)), tmp_path / "x", "--workers", 2)
    assert not list(tmp_path.glob("x*"))


MEASURED = """
import resource, sys
import numpy, zstandard
from megatron.tools.preprocess_data import main
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main()
print("PEAK", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) / 1024)
print("TORCH", "torch" in sys.modules)
"""


def test_memory_is_bounded_and_torch_is_not_imported(tmp_path):
    """48 MB of text through chunks of 4 MiB: the peak stays far below what holding the tokens and
    texts would take.
    """
    line = json.dumps({"text": " ".join(map(str, range(100, 1100)))}) + "\n"
    path = tmp_path / "a.jsonl"
    path.write_text(line * (48_000_000 // len(line)))
    flags = f"--input {path} --output-prefix {tmp_path / 'x'} --workers 1"
    flags += " --tokenizer-type NullTokenizer --vocab-size 2000"
    command = [sys.executable, "-c", MEASURED, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("PEAK")[1].split()[0]) < 120 and "TORCH False" in done.stdout


LINE = "--input x --output-prefix y --tokenizer-type NullTokenizer --vocab-size 9"


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("--jsonl_keys a b", {"json_keys": ["a", "b"]}),
        ("--tokenizer-name-or-path t", {"tokenizer_model": "t"}),
        ("--tokenizer-type PretrainedFromHF", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--patch-tokenizer-type Qwen2Tokenizer", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--partitions 4 --keep-sequential-samples", {}),
        ("--seq-length 4096 --padded-vocab-size 128 --num-workers 2 --trust-remote-code", {}),
        ("--append_eod --workers=3", {"append_eod": True, "workers": 3}),
    ],
)
def test_flags_of_other_programs_are_read_as_the_trainer_reads_them(theirs, ours, capsys):
    read = tool.read_flags(f"{LINE} {theirs}".split())
    plain = tool.read_flags(LINE.split())
    assert vars(read) == vars(plain) | ours
    if not ours:
        assert theirs.split()[0] in capsys.readouterr().out


def test_all_faults_are_one_error():
    line = "--input x --outptu-prefix y --split-sentences --tokenizer-type NullTokenizer --vocb 1"
    with pytest.raises(ArgumentErrors) as caught:
        tool.read_flags(line.split())
    shown = str(caught.value)
    for fault in (
        "--outptu-prefix y: unknown flag; did you mean --output-prefix?",
        "--split-sentences: documents are encoded whole",
        "--vocb 1: unknown flag",
        "the following arguments are required: --output-prefix",
    ):
        assert fault in shown, shown
