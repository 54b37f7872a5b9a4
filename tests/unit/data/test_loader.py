"""What reaches the loop: batches, masks, splits, blends, the history, and faulty input answered by
one error before training.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.tools._preprocess.writer import IndexedDatasetWriter

from megatron.config.data_paths import parse_blend, parse_split
from megatron.config.errors import UserError
from megatron.config.groups import Config, DataConfig, EvaluationConfig, TrainingConfig
from megatron.data.indexed_dataset import DataError, IndexedDataset
from megatron.data.loader import Batch, build_data, split_range
from megatron.data.tokenizer import build_tokenizer

VOCAB = 500  # of the NullTokenizer: 501 ids, the last ends a document
EOD = VOCAB


def make(
    prefix: Path,
    documents: int,
    seed: int = 0,
    eod: bool = True,
    largest: int = VOCAB,
    sidecar: bool = True,
) -> str:
    """Documents of 5 to 40 random ids below `largest`, each ended by EOD."""
    rng = np.random.default_rng(seed)
    writer = IndexedDatasetWriter(str(prefix), np.dtype("u2"))
    texts = [
        np.append(rng.integers(0, largest, size), [EOD] * eod).astype("u2")
        for size in rng.integers(5, 41, documents)
    ]
    writer.add(
        np.concatenate(texts), np.array([len(text) for text in texts]), np.ones(documents, int)
    )
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    made = {
        "name": "NullTokenizer",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": VOCAB + 1,
        "eod": EOD,
    }
    largest_id = max(int(text.max()) for text in texts)
    writer.finish(
        {
            "max_id": largest_id,
            "eod_count": documents * eod,
            "tokenizer": made,
            "text_bytes": 3 * sum(map(len, texts)),
        }
    )
    if not sidecar:
        Path(f"{prefix}.json").unlink()
    return str(prefix)


def config(
    eval_iters: int = 2, seed: int = 1234, skip_train: bool = False, **data: object
) -> Config:
    settings = {"seq_length": 16, "tokenizer_type": "NullTokenizer", "vocab_size": VOCAB, **data}
    return Config(
        data=DataConfig(**settings),
        training=TrainingConfig(seed=seed),
        evaluation=EvaluationConfig(eval_iters=eval_iters, skip_train=skip_train),
    )


def build(settings: Config, history: dict | None = None, consumed: int = 0):
    return build_data(settings, build_tokenizer(settings.data), history, consumed)


def train_on(*paths: str, history: dict | None = None, consumed: int = 0, **settings: object):
    """The data of a run with training files alone."""
    return build(config(train_data_path=paths, eval_iters=0, **settings), history, consumed)


def build_split(*paths: str, **settings: object):
    """The data of files that --split divides."""
    return build(config(data_path=paths, **settings))


def test_a_batch_is_a_pure_function(tmp_path):
    data = build_split(make(tmp_path / "x", 300), split="80,10,10")
    batch = data.train.batch(7, 5)
    assert (
        batch.tokens.shape
        == batch.labels.shape
        == batch.position_ids.shape
        == batch.loss_mask.shape
        == (5, 16)
    )
    assert [
        value.dtype for value in (batch.tokens, batch.labels, batch.position_ids, batch.sample_ids)
    ] == [torch.int64] * 4
    assert batch.loss_mask.dtype == torch.float32 and batch.document_starts is None
    assert (
        batch.tokens.is_contiguous()
        and batch.labels.is_contiguous()
        and batch.position_ids.is_contiguous()
    )
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1]) and batch.loss_mask.all()
    assert batch.sample_ids.tolist() == [7, 8, 9, 10, 11]
    assert torch.equal(batch.position_ids, torch.arange(16).expand(5, 16))
    for row in range(5):
        again = data.train.batch(7 + row, 1)
        assert torch.equal(again.tokens[0], batch.tokens[row]) and torch.equal(
            again.labels[0], batch.labels[row]
        )
    assert (
        isinstance(batch.to("cpu"), Batch)
        and batch.to("meta").tokens.device.type == "meta"
        and batch.to("meta").document_starts is None
    )


def test_train_valid_and_test_never_share_a_token(tmp_path):
    prefix = make(tmp_path / "x", 400)
    data = build_split(prefix, split="70,20,10")
    seen = {}
    for name, source in (
        ("train", data.train),
        ("valid", data.valid["validation"]),
        ("test", data.test["test"]),
    ):
        stream = source.reader.streams[0]
        seen[name] = (stream.begin, stream.begin + stream.num_tokens)
        assert source.epoch_samples == stream.samples
    assert (
        seen["train"][1] == seen["valid"][0]
        and seen["valid"][1] == seen["test"][0]
        and seen["train"][0] == 0
    )
    assert seen["test"][1] == data.train.reader.streams[0].dataset.num_tokens


def test_split_arithmetic():
    assert [
        split_range(parse_split("969,30,1"), name, 1000) for name in ("train", "valid", "test")
    ] == [(0, 969), (969, 999), (999, 1000)]
    assert [split_range(parse_split("1/1/1"), name, 10) for name in ("train", "valid", "test")] == [
        (0, 3),
        (3, 7),
        (7, 10),
    ]
    assert [
        split_range(parse_split("0.9,0.1"), name, 30) for name in ("train", "valid", "test")
    ] == [(0, 27), (27, 30), (30, 30)]
    for wrong in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0"):
        with pytest.raises(UserError, match="--split"):
            parse_split(wrong)


def test_path_lists():
    assert parse_blend(("a", "b"), "--data-path") == [(None, "a"), (None, "b")]
    assert parse_blend(("0.3", "a", "7", "b"), "--data-path") == [(0.3, "a"), (7.0, "b")]
    assert parse_blend(("1", "a", "0", "b"), "--data-path") == [(1.0, "a"), (0.0, "b")]
    assert parse_blend(("42",), "--data-path") == [(None, "42")]
    for wrong in (
        ("1", "a", "b"),
        ("1", "a", "b", "2"),
        ("-1", "a", "2", "b"),
        ("0", "a"),
    ):
        with pytest.raises(UserError, match="--data-path"):
            parse_blend(wrong, "--data-path")


def test_sources_of_validation_are_separate_and_named(tmp_path):
    (tmp_path / "p").mkdir(), (tmp_path / "q").mkdir()
    a, b, c = (
        make(tmp_path / "p" / "web_text_document", 200, 1),
        make(tmp_path / "q" / "code", 200, 2),
        make(tmp_path / "q" / "web_text_document", 200, 3),
    )
    train = make(tmp_path / "t", 200, 4)
    assert list(build_split("0.3", a, "0.7", b, split="80,10,10").valid) == ["web", "code"]
    data = build(config(train_data_path=(train,), valid_data_path=(a, b), test_data_path=(a,)))
    assert list(data.valid) == ["web", "code"] and list(data.test) == ["test"]
    tokens = [source.reader.streams[0].num_tokens for source in data.valid.values()]
    assert [source.weight for source in data.valid.values()] == [
        each / sum(tokens) for each in tokens
    ] and data.test["test"].weight == 1
    weighted = build(config(train_data_path=(train,), valid_data_path=("1", a, "2", b)))
    assert [(name, source.weight) for name, source in weighted.valid.items()] == [
        ("web", 1 / 3),
        ("code", 2 / 3),
    ]
    assert any("the loss of the blend is their mean by weight" in note for note in weighted.notes)
    assert list(build(config(train_data_path=(train,), valid_data_path=(a, c))).valid) == [a, c]
    assert list(build(config(train_data_path=(train,), valid_data_path=(b,))).valid) == [
        "validation"
    ]
    ids = set(data.valid["code"].batch(0, 30).tokens.ravel().tolist())
    assert ids <= set(data.valid["code"].reader.streams[0].dataset.tokens.tolist())


def test_blend_shares_and_token_counts_as_weights(tmp_path):
    a, b = make(tmp_path / "a", 100, 1), make(tmp_path / "b", 300, 2)
    data = train_on("1", a, "3", b)
    assert [source["share"] for source in data.history["segments"][0]["sources"]] == [16384, 49152]
    sizes = [stream.num_tokens for stream in data.train.reader.streams]
    bare = train_on(a, b)
    share = bare.history["segments"][0]["sources"][0]["share"] / 65536
    assert abs(share - sizes[0] / sum(sizes)) < 1 / 65536
    assert any("share 16384/65536 = 0.250000" in note for note in data.notes)


def test_blend_change_mid_run_goes_on_in_each_source(tmp_path):
    a, b, c = (make(tmp_path / name, 200, seed) for seed, name in enumerate("abc"))
    first = train_on("1", a, "1", b)
    history = json.loads(json.dumps(first.history))
    later = train_on("1", c, "3", b, history=history, consumed=101)
    alone = train_on(b).train.batch(0, 150).tokens
    read = [
        first.train.batch(k, 1).tokens[0]
        for k in range(101)
        if first.train.reader.blend.locate(np.array([k]))[0][0] == 1
    ]
    read += [
        later.train.batch(k, 1).tokens[0]
        for k in range(101, 200)
        if later.train.reader.blend.locate(np.array([k]))[0][0] == 1
    ]
    assert len(read) > 110 and torch.equal(torch.stack(read), alone[: len(read)])
    assert any("blend changed at sample 101" in note for note in later.notes)
    moved = {
        path: Path(f"{b}.{path}").rename(tmp_path / f"moved.{path}")
        for path in ("bin", "idx", "json")
    }
    same = train_on("1", c, "3", str(moved["bin"])[:-4], history=later.history, consumed=150)
    assert same.history == later.history and torch.equal(
        same.train.batch(150, 20).tokens, later.train.batch(150, 20).tokens
    )


def test_eod_masks_and_resets(tmp_path):
    prefix = make(tmp_path / "x", 300)
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    source = train_on(prefix, seq_length=64, **flags).train
    batch = source.batch(0, 20)
    assert source.valid_tokens(3, 17) == batch.loss_mask[3:].sum()  # not that of the labels
    assert (batch.labels[3:] == EOD).sum() != (batch.tokens[3:] == EOD).sum()
    assert batch.document_starts.dtype == torch.int32
    assert (batch.tokens == EOD).sum() > 20
    for row in range(20):
        start = 0
        for at in range(64):  # the definition, position by position
            if at and batch.tokens[row, at - 1] == EOD:
                start = at
            assert (
                batch.document_starts[row, at] == start
                and batch.position_ids[row, at] == at - start
            )
            assert batch.loss_mask[row, at] == float(batch.tokens[row, at] != EOD)
    positions_only = train_on(prefix, seq_length=64, reset_position_ids=True).train.batch(0, 20)
    assert torch.equal(positions_only.position_ids, batch.position_ids)
    assert positions_only.document_starts is None and positions_only.loss_mask.all()
    mask_only = train_on(prefix, seq_length=64, reset_attention_mask=True).train.batch(0, 20)
    assert torch.equal(mask_only.document_starts, batch.document_starts) and torch.equal(
        mask_only.position_ids[3], torch.arange(64)
    )


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_eod_flags_need_eod(tmp_path, flag, sidecar):
    good, bad = (
        make(tmp_path / "good", 50, sidecar=sidecar),
        make(tmp_path / "bad", 50, eod=False, sidecar=sidecar),
    )
    train_on(good, **{flag: True})
    with pytest.raises(
        DataError,
        match=(
            rf"bad\.bin: holds no end-of-document id \(500\), so --{flag.replace('_', '-')} "
            r"cannot act"
        ),
    ):
        train_on(bad, **{flag: True})


def test_ids_beyond_the_vocabulary(tmp_path):
    known, unknown = (
        make(tmp_path / "known", 100, largest=900),
        make(tmp_path / "unknown", 100, largest=900, sidecar=False),
    )
    with pytest.raises(DataError, match=r"unknown\.bin, byte \d+: token id \d+ lies outside"):
        train_on(unknown)
    ids = np.memmap(f"{unknown}.bin", "u2", "r+")  # sound at both ends, wrong in between
    ids[:50] = ids[-50:] = 1
    ids.flush()
    with pytest.raises(
        DataError,
        match=r"known\.bin: its largest token id, \d+, lies outside the vocabulary of 501",
    ):
        train_on(known)
    with pytest.raises(DataError, match="token id, 500, lies outside the vocabulary of 500"):
        edge = make(tmp_path / "edge", 100)
        train_on(edge, vocab_size=VOCAB - 1)
    data = train_on(unknown)
    assert any("unknown: has no sidecar" in note and "--check-data" in note for note in data.notes)
    with pytest.raises(DataError, match=r"unknown\.bin, byte \d+: token id \d+ lies outside"):
        data.train.batch(0, 50)
    with pytest.raises(DataError, match=r"unknown\.bin, byte \d+: token id \d+ lies outside"):
        train_on(unknown, check_data=True)
    sound = train_on(make(tmp_path / "sound", 100, sidecar=False), check_data=True)
    assert any("scanned in full" in note for note in sound.notes) and not any(
        "no sidecar" in note for note in sound.notes
    )


@pytest.mark.parametrize("place", [0, -1])
def test_an_end_of_document_beyond_the_vocabulary_is_found_before_training(tmp_path, place):
    """As old SentencePiece data have it: in the first or the last document, without a sidecar. The
    remedy of the message works.
    """
    prefix = make(tmp_path / "old", 100, sidecar=False)
    ids = np.memmap(f"{prefix}.bin", "u2", "r+")
    data = IndexedDataset(prefix)
    ids[data.first_token(1) - 1 if place == 0 else -1] = 777
    ids.flush()
    with pytest.raises(DataError, match="token id 777 lies outside the vocabulary of 501") as error:
        build_split(prefix, split="80,10,10", eval_iters=0)
    kind, size = re.search(r"--tokenizer-type (\w+) --vocab-size (\d+)", str(error.value)).groups()
    flags = {"tokenizer_type": kind, "vocab_size": int(size)}
    data = build_split(prefix, split="80,10,10", eval_iters=0, **flags)
    assert data.eod == 777
    data.train.batch(0, 100)


@pytest.mark.parametrize("documents", [20, 60])  # no document, and less than a sample
def test_a_source_too_small_for_a_split_is_left_out_and_named(tmp_path, documents):
    """Of several sources; alone it is an error, and so it is in the training split."""
    large = make(tmp_path / "large", 2000)
    small = make(tmp_path / "small", documents, seed=1)
    settings = {"split": "960,20,20", "seq_length": 64}
    data = build_split(large, small, **settings)
    assert list(data.test) == ["test"] and list(data.valid) == ["validation"]
    for split in ("valid", "test"):
        assert any(note.startswith(f"{split}: left out: {small}: ") for note in data.notes)
    with pytest.raises(DataError, match="small: .*(leaves no document|one sample needs)"):
        build_split(small, **settings)
    with pytest.raises(DataError, match="small: .*(leaves no document|one sample needs)"):
        build_split(large, small, split="1,500,500", seq_length=64)


def test_all_faults_are_reported_together(tmp_path):
    good, short = make(tmp_path / "good", 50), make(tmp_path / "short", 50)
    with open(short + ".bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError) as error:
        build(
            config(
                train_data_path=(good, short, str(tmp_path / "absent")),
                valid_data_path=(str(tmp_path / "other"),),
            )
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert (
        "short.bin, byte 100" in lines[0]
        and "absent.idx: no such file" in lines[1]
        and "other.idx: no such file" in lines[2]
    )


def test_a_split_without_documents_is_an_error_and_without_share_is_not(tmp_path):
    prefix = make(tmp_path / "x", 42)
    with pytest.raises(DataError, match="--split 969,30,1 leaves no document of its 42 for test"):
        build_split(prefix)
    data = build_split(prefix, split="90,10,0")
    assert data.valid and not data.test
    assert not build_split(prefix, eval_iters=0).valid
    with pytest.raises(DataError, match="no training data"):
        build_split(prefix, split="0,100,0")
    assert build_split(prefix, split="0,100,0", skip_train=True).train is None
    with pytest.raises(DataError, match="no training data"):
        build(config())


def test_mock_data_is_learnable_pure_and_uses_the_real_vocabulary():
    data = build(config(mock_data=True, seq_length=128, reset_attention_mask=True))
    batch = data.train.batch(0, 400)
    assert torch.equal(batch.tokens[3:5], data.train.batch(3, 2).tokens) and torch.equal(
        batch.tokens[0, 1:], batch.labels[0, :-1]
    )
    assert batch.tokens.min() == 0 and batch.tokens.max() == EOD
    assert len(batch.tokens.unique()) == VOCAB + 1
    step = (batch.labels - batch.tokens) % VOCAB
    # the next token follows from the last two
    assert ((step >= 1) & (step <= 3)).float().mean() > 0.85
    assert 0 < batch.document_starts.max() < 128 and (
        batch.tokens == EOD
    ).float().mean() == pytest.approx(0.01, abs=0.001)
    assert torch.equal(batch.labels[0, -1], batch.tokens[1, 0])  # one stream, cut into samples
    assert not torch.equal(data.valid["validation"].batch(0, 1).tokens, batch.tokens[:1])
    assert set(data.test) == {"test"} and any("mock" in note for note in data.notes)
    assert not torch.equal(
        build(config(mock_data=True, seq_length=128, seed=2)).train.batch(0, 1).tokens,
        batch.tokens[:1],
    )
