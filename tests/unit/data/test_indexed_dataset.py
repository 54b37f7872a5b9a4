"""The file format byte for byte, constant-time opening, and every kind of damage answered by one
readable error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.tools._preprocess.writer import IndexedDatasetWriter, best_dtype
from unit.data.written_data import document_index

from megatron.data.indexed_dataset import HEADER, MAGIC, DataError, IndexedDataset, probes

ROOT = Path(__file__).parents[3]


FACTS = {"max_id": 10, "eod_count": 0, "tokenizer": {"name": "none", "fingerprint": "0", "eod": 99}}


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> str:
    writer = IndexedDatasetWriter(str(prefix), np.dtype(dtype))
    for tokens in documents:
        lengths = np.array([len(tokens)] if tokens else [], int)
        writer.add(np.array(tokens, dtype), lengths, np.array([len(lengths)]))
    writer.complete(FACTS)
    writer.publish()
    return str(prefix)


def test_documented_bytes(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]])
    index = Path(prefix + ".idx").read_bytes()
    begin = (
        "4d4d494449445800 0001000000000000 0008 0300000000000000 0400000000000000 03000000 "
        "02000000 05000000"
    )
    rest = [0, 6, 10, 0, 1, 2, 3]  # byte offsets, then the document index
    assert len(index) == 102
    assert index == bytes.fromhex(begin) + b"".join(value.to_bytes(8, "little") for value in rest)
    ids = Path(prefix + ".bin").read_bytes()
    assert ids == b"".join(value.to_bytes(2, "little") for value in range(1, 11))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.json"]


@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 3001])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_round_trip_with_unaligned_fields(tmp_path, count, dtype):
    rng = np.random.default_rng(count)
    documents = [rng.integers(0, 100, rng.integers(0, 5)).tolist() for _ in range(count - 1)]
    documents.append([7])
    data = IndexedDataset(write(tmp_path / "x", documents, dtype))
    full = [document for document in documents if document]
    assert data.num_sequences == len(full)
    assert data.dtype == np.dtype(dtype)
    assert [data.sequence(k).tolist() for k in range(len(full))] == full
    assert data.tokens.tolist() == [token for document in full for token in document]
    written = np.diff(document_index(data))
    assert written.tolist() == [1 if document else 0 for document in documents]
    data.check(100)


def test_dtype_rule():
    names = [best_dtype(size).name for size in (2, 65499, 65500, 200000)]
    assert names == ["uint16", "uint16", "int32", "int32"]


def test_unfinished_output_never_appears(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2]])
    before = Path(prefix + ".bin").read_bytes()
    writer = IndexedDatasetWriter(prefix, np.dtype("u2"))
    writer.add(np.array([9], "u2"), np.array([1]), np.array([1]))
    assert Path(prefix + ".bin").read_bytes() == before and IndexedDataset(prefix).num_tokens == 2
    writer.discard()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".idx", ".json"]


def sparse(prefix: Path, sequences: int, length: int) -> str:
    """A corpus of holes: only what a constant-time check may look at is really written."""
    base, itemsize = HEADER.size, 2
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(sequences * length * itemsize)
    with open(f"{prefix}.idx", "wb") as file:
        file.truncate(base + 12 * sequences + 8 * (sequences + 1))
        file.write(HEADER.pack(MAGIC, 1, 8, sequences, sequences + 1))
        for k in probes(sequences).tolist():
            for entry in {max(k - 1, 0), k}:
                file.seek(base + 4 * entry)
                file.write(length.to_bytes(4, "little"))
                file.seek(base + 4 * sequences + 8 * entry)
                file.write((entry * length * itemsize).to_bytes(8, "little"))
    return str(prefix)


OPENED = """
import resource, sys, time
import numpy
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.token_stream import TokenStream
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
data = IndexedDataset(sys.argv[1])
stream = TokenStream(data, 0, data.num_sequences, 4096, 1, 50000)
stream.read(numpy.arange(8), numpy.arange(8), numpy.empty((8, 4097), numpy.int64))
seconds = time.process_time() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(data.num_tokens, seconds, (peak - before) / 1024)
"""


@pytest.mark.parametrize("sequences, length", [(1000, 10**9), (10**8, 10**4)])
def test_opening_a_trillion_tokens_is_instant_and_small(tmp_path, sequences, length):
    command = [sys.executable, "-c", OPENED, sparse(tmp_path / "huge", sequences, length)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tokens, seconds, mebibytes = done.stdout.split()
    assert int(tokens) == 10**12 and float(seconds) < 0.5 and float(mebibytes) < 64


def change(prefix: str, kind: str, at: int, raw: bytes) -> None:
    with open(f"{prefix}.{kind}", "r+b") as file:
        file.seek(at)
        file.write(raw)


def cut(prefix: str, kind: str, size: int) -> None:
    os.truncate(f"{prefix}.{kind}", size)


DAMAGE = {
    "bin missing": (lambda p: Path(p + ".bin").unlink(), r"x\.bin: cannot be read: No such file"),
    "bin empty": (lambda p: cut(p, "bin", 0), r"x\.bin: the file is empty: cut off"),
    "idx empty": (lambda p: cut(p, "idx", 0), r"x\.idx: the file is empty: cut off"),
    "bin cut": (
        lambda p: cut(p, "bin", 15),
        r"x\.bin, byte 15: the file has 15 bytes, its index describes 20: cut off",
    ),
    "bin long": (
        lambda p: cut(p, "bin", 40),
        r"x\.bin, byte 20: the file has 40 bytes, .* damaged",
    ),
    "idx cut": (
        lambda p: cut(p, "idx", 101),
        r"x\.idx, byte 18: .* need 102 bytes, the file has 101",
    ),
    "foreign": (lambda p: change(p, "idx", 0, b"TNT"), r"x\.idx, byte 0: .* begins with b'TNT"),
    "version": (lambda p: change(p, "idx", 9, b"\2"), r"x\.idx, byte 0: .*, version 2 and"),
    "no dtype": (lambda p: change(p, "idx", 17, b"\x0b"), "dtype code 11, and an index"),
    "wrong dtype": (
        lambda p: change(p, "idx", 17, b"\4"),
        r"byte 54: sequence 1 begins at byte 6 of \.bin, the one before it ends at 12",
    ),
    "counts": (lambda p: change(p, "idx", 18, b"\xff" * 8), r"x\.idx, byte 18"),
    "length": (lambda p: change(p, "idx", 38, b"\xff" * 4), r"62: sequence 2 begins at byte 10"),
    "negative length": (
        # offsets and the size of .bin agree
        lambda p: [
            change(p, "idx", at, raw)
            for at, raw in ((38, b"\xff" * 4), (42, b"\x08"), (62, b"\x04"))
        ],
        r"byte 38: sequence 1 has -1 tokens",
    ),
    "offset": (lambda p: change(p, "idx", 54, b"\x08"), r"byte 54: sequence 1 begins at byte 8"),
    "other sidecar": (
        lambda p: write(Path(p + "2"), [[1]]) and Path(p + "2.json").rename(p + ".json"),
        r"x\.json: describes",
    ),
    "sidecar not JSON": (lambda p: Path(p + ".json").write_text("{"), r"x\.json: not a sidecar"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path, kind):
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]])
    IndexedDataset(prefix)
    damage, message = DAMAGE[kind]
    damage(prefix)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_a_prefix_with_its_ending_is_explained(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(DataError, match="give the prefix of both files, without .bin or .idx"):
        IndexedDataset(prefix + ".bin")


def test_full_check_finds_what_spaced_entries_miss(tmp_path):
    documents = [[k % 50, 1] for k in range(5000)]
    prefix, probed = write(tmp_path / "x", documents), {*probes(5000).tolist()}
    unseen = next(k for k in range(5000) if not {k, k + 1} & probed)
    change(prefix, "idx", HEADER.size + 4 * 5000 + 8 * unseen, (1).to_bytes(8, "little"))
    data = IndexedDataset(prefix)
    with pytest.raises(DataError, match=f"sequence {unseen} begins at byte 1 of"):
        data.check(50)
    write(tmp_path / "x", documents)
    change(prefix, "bin", 2 * 4321, (1000).to_bytes(2, "little"))
    foreign = r"x\.bin, byte 8642: token id 1000 lies outside the vocabulary of 50"
    for vocab_size, fault in ((50, foreign), (2000, "digest differs")):
        with pytest.raises(DataError, match=fault):
            IndexedDataset(prefix).check(vocab_size)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda sidecar: sidecar.update(max_id="7"), "a value of another type"),
        (lambda sidecar: sidecar.pop("eod_count"), r"KeyError\('eod_count'\)"),
        (lambda sidecar: sidecar.update(files=[1]), "TypeError"),
        (lambda sidecar: sidecar.update(tokens=1), r"describes other files \(\[6, .*, 1\]"),
    ],
)
def test_a_sidecar_with_a_value_of_another_type(tmp_path, change, message):
    write(tmp_path / "x", [[1, 2, 3]])
    sidecar = json.loads((tmp_path / "x.json").read_text())
    change(sidecar)
    (tmp_path / "x.json").write_text(json.dumps(sidecar))
    with pytest.raises(DataError, match=rf"x\.json: .*{message}"):
        IndexedDataset(str(tmp_path / "x"))


def test_a_sidecar_with_bytes_of_text_alone(tmp_path):
    """The number of tokens is that of the files."""
    write(tmp_path / "x", [[1, 2, 3]])
    sidecar = json.loads((tmp_path / "x.json").read_text())
    del sidecar["tokens"]
    sidecar["text_bytes"] = 12
    (tmp_path / "x.json").write_text(json.dumps(sidecar))
    assert IndexedDataset(str(tmp_path / "x")).bytes_per_token == 4


@pytest.mark.parametrize("ending", ["bin", "idx", "json"])
@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file(tmp_path, ending, kind):
    write(tmp_path / "x", [[1, 2, 3]])
    (tmp_path / f"x.{ending}").unlink()
    kind(tmp_path / f"x.{ending}")
    with pytest.raises(DataError, match=rf"x\.{ending}: .*is not a regular file"):
        IndexedDataset(str(tmp_path / "x"))
