"""What reaches the loop: batches, masks, splits, blends, the history, and faulty input answered by
one error before training.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from unit.data.written_data import write

from megatron.config.data_paths import parse_blend, parse_split
from megatron.config.errors import UserError
from megatron.config.groups import Config, DataConfig, EvaluationConfig, TrainingConfig
from megatron.data.indexed_dataset import DataError, IndexedDataset
from megatron.data.loader import build_data, split_range
from megatron.data.tokenizer import build_tokenizer

VOCAB = 500  # of the NullTokenizer: 501 ids, the last ends a document
EOD = VOCAB
BEYOND = r"\.bin, byte \d+: token id \d+ lies outside"


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
    sizes = rng.integers(5, 41, documents)
    texts = [np.append(rng.integers(0, largest, size), [EOD] * eod).astype("u2") for size in sizes]
    size = 3 * sum(map(len, texts))
    return write(prefix, texts, VOCAB, text_bytes=size, sidecar=sidecar)


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
    of_ids = batch.tokens, batch.labels, batch.position_ids
    for each in (*of_ids, batch.loss_mask):
        assert each.shape == (5, 16) and each.is_contiguous()
    assert {each.dtype for each in (*of_ids, batch.sample_ids)} == {torch.int64}
    assert batch.loss_mask.dtype == torch.float32 and batch.document_starts is None
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1]) and batch.loss_mask.all()
    assert batch.sample_ids.tolist() == [7, 8, 9, 10, 11]
    assert torch.equal(batch.position_ids, torch.arange(16).expand(5, 16))
    for row in range(5):
        again = data.train.batch(7 + row, 1)
        assert torch.equal(again.tokens[0], batch.tokens[row])
        assert torch.equal(again.labels[0], batch.labels[row])
    moved = batch.to("meta")
    assert moved.tokens.device.type == "meta" and moved.document_starts is None


def test_a_reader_of_another_length_is_refused(tmp_path):
    source = train_on(make(tmp_path / "x", 50)).train
    longer = dataclasses.replace(source, config=dataclasses.replace(source.config, seq_length=32))
    with pytest.raises(ValueError, match="could not be broadcast"):
        longer.batch(0, 5)


def test_train_valid_and_test_never_share_a_token(tmp_path):
    data = build_split(make(tmp_path / "x", 400), split="70,20,10")
    last = 0
    for source in (data.train, data.valid["validation"], data.test["test"]):
        (stream,) = source.reader.streams
        assert stream.begin == last
        last += stream.num_tokens
    assert last == stream.dataset.num_tokens


def test_split_arithmetic():
    for split, count, ends in (
        ("969,30,1", 1000, [969, 999, 1000]),
        ("1/1/1", 10, [3, 7, 10]),
        ("0.9,0.1", 30, [27, 30, 30]),
    ):
        shares, first = parse_split(split), 0
        for name, stop in zip(("train", "valid", "test"), ends):
            assert split_range(shares, name, count) == (first, stop)
            first = stop
    for wrong in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0"):
        with pytest.raises(UserError, match="--split"):
            parse_split(wrong)


def test_path_lists():
    for words, expected in (
        ("a b", [(None, "a"), (None, "b")]),
        ("0.3 a 7 b", [(0.3, "a"), (7.0, "b")]),
        ("1 a 0 b", [(1.0, "a"), (0.0, "b")]),
        ("42", [(None, "42")]),
    ):
        assert parse_blend(tuple(words.split()), "--data-path") == expected
    for wrong in ("1 a b", "1 a b 2", "-1 a 2 b", "0 a"):
        with pytest.raises(UserError, match="--data-path"):
            parse_blend(tuple(wrong.split()), "--data-path")


def test_sources_of_validation_are_separate_and_named(tmp_path):
    (tmp_path / "p").mkdir(), (tmp_path / "q").mkdir()
    names = ("p/web_text_document", "q/code", "q/web_text_document", "t")
    a, b, c, train = (make(tmp_path / name, 200, seed) for seed, name in enumerate(names, 1))

    def held_out(*paths: str, **more: object):
        return build(config(train_data_path=(train,), valid_data_path=paths, **more))

    assert list(build_split("0.3", a, "0.7", b, split="80,10,10").valid) == ["web", "code"]
    data = held_out(a, b, test_data_path=(a,))
    assert list(data.valid) == ["web", "code"] and list(data.test) == ["test"]
    tokens = [source.reader.streams[0].num_tokens for source in data.valid.values()]
    shares = [each / sum(tokens) for each in tokens]
    assert [source.weight for source in data.valid.values()] == shares
    assert data.test["test"].weight == 1
    weighted = held_out("1", a, "2", b)
    shares = {name: source.weight for name, source in weighted.valid.items()}
    assert shares == {"web": 1 / 3, "code": 2 / 3}
    assert any("the loss of the blend is their mean by weight" in note for note in weighted.notes)
    assert list(held_out(a, c).valid) == [a, c] and list(held_out(b).valid) == ["validation"]
    ids = set(data.valid["code"].batch(0, 30).tokens.ravel().tolist())
    assert ids <= set(data.valid["code"].reader.streams[0].dataset.tokens.tolist())


def test_blend_shares_and_token_counts_as_weights(tmp_path):
    a, b = make(tmp_path / "a", 100, 1), make(tmp_path / "b", 300, 2)
    data = train_on("1", a, "3", b)
    assert [source["share"] for source in data.history["segments"][0]["sources"]] == [16384, 49152]
    sizes = [stream.num_tokens for stream in data.train.reader.streams]
    share = train_on(a, b).history["segments"][0]["sources"][0]["share"] / 65536
    assert abs(share - sizes[0] / sum(sizes)) < 1 / 65536
    assert any("share 16384/65536 = 0.250000" in note for note in data.notes)


def test_a_changed_blend_continues_each_source(tmp_path):
    a, b, c = (make(tmp_path / name, 200, seed) for seed, name in enumerate("abc"))
    first = train_on("1", a, "1", b)
    history = json.loads(json.dumps(first.history))
    later = train_on("1", c, "3", b, history=history, consumed=101)
    read = [
        data.train.batch(k, 1).tokens[0]
        for data, samples in ((first, range(101)), (later, range(101, 200)))
        for k in samples
        if data.train.reader.blend.locate(np.array([k]))[0][0] == 1
    ]
    alone = train_on(b).train.batch(0, 150).tokens
    assert len(read) > 110 and torch.equal(torch.stack(read), alone[: len(read)])
    assert any("blend changed at sample 101" in note for note in later.notes)
    for kind in ("bin", "idx", "json"):
        Path(f"{b}.{kind}").rename(tmp_path / f"moved.{kind}")
    moved = str(tmp_path / "moved")
    same = train_on("1", c, "3", moved, history=later.history, consumed=150).train.batch(150, 20)
    assert torch.equal(same.tokens, later.train.batch(150, 20).tokens)


@pytest.mark.parametrize("weights", ["1 1 1", "3 7 1"])
def test_sources_named_in_another_order_continue_the_blend(tmp_path, weights):
    files = [make(tmp_path / name, 200, seed) for seed, name in enumerate("abc")]
    pairs = list(zip(weights.split(), files))
    first, later = [word for pair in pairs for word in pair], [*pairs[2], *pairs[0], *pairs[1]]
    whole = train_on(*first)
    resumed = train_on(*later, history=json.loads(json.dumps(whole.history)), consumed=101)
    assert resumed.history == whole.history
    assert torch.equal(resumed.train.batch(101, 50).tokens, whole.train.batch(101, 50).tokens)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A reader of a program: every token is the number of its sample."""

    identity: str

    def windows(self, sample: np.ndarray) -> np.ndarray:
        return np.repeat(sample[:, None], 17, axis=1)


def test_samples_of_a_program_continue_and_are_checked():
    """As those of files: another reader begins at its first sample, and one that is taken up again
    at its next.
    """
    settings, history = config(mock_data=True, eval_iters=0), None
    tokenizer = build_tokenizer(settings.data)
    for name, consumed, first in (
        ("first", 0, 0),
        ("first", 20, 20),
        ("other", 40, 0),
        ("first", 60, 40),
    ):
        data = build_data(settings, tokenizer, history, consumed, Numbers(name))
        assert data.train.batch(consumed, 3).tokens[:, 0].tolist() == [first, first + 1, first + 2]
        history = json.loads(json.dumps(data.history))
    assert "blend changed at sample 60: Numbers continues at its sample 40" in data.notes
    with pytest.raises(DataError, match="Numbers: token id 501 lies outside the vocabulary of 501"):
        data.train.batch(60 + VOCAB - 40, 2)


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
            assert batch.document_starts[row, at] == start
            assert batch.position_ids[row, at] == at - start
            assert batch.loss_mask[row, at] == float(batch.tokens[row, at] != EOD)
    alone = train_on(prefix, seq_length=64, reset_position_ids=True).train.batch(0, 20)
    assert torch.equal(alone.position_ids, batch.position_ids)
    assert alone.document_starts is None and alone.loss_mask.all()
    alone = train_on(prefix, seq_length=64, reset_attention_mask=True).train.batch(0, 20)
    assert torch.equal(alone.document_starts, batch.document_starts)
    assert torch.equal(alone.position_ids[3], torch.arange(64))


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_eod_flags_need_eod(tmp_path, flag, sidecar):
    train_on(make(tmp_path / "good", 50, sidecar=sidecar), **{flag: True})
    bad = make(tmp_path / "bad", 50, eod=False, sidecar=sidecar)
    fault = rf"holds no end-of-document id \(500\), so --{flag.replace('_', '-')} cannot act"
    with pytest.raises(DataError, match=rf"bad\.bin: {fault}"):
        train_on(bad, **{flag: True})


@pytest.mark.parametrize("change", [{"eod": 7}, {"fingerprint": "0" * 32}, {}])
def test_data_of_another_tokenizer_are_noted(tmp_path, change):
    prefix = make(tmp_path / "x", 50)
    path = Path(f"{prefix}.json")
    sidecar = json.loads(path.read_text())
    sidecar["tokenizer"].update(change)
    path.write_text(json.dumps(sidecar))
    notes = train_on(prefix).notes
    assert any("made with another tokenizer" in note for note in notes) == bool(change)


def test_ids_beyond_the_vocabulary(tmp_path):
    known = make(tmp_path / "known", 100, largest=900)
    unknown = make(tmp_path / "unknown", 100, largest=900, sidecar=False)
    with pytest.raises(DataError, match="unknown" + BEYOND):
        train_on(unknown)
    ids = np.memmap(f"{unknown}.bin", "u2", "r+")  # sound at both ends, wrong in between
    ids[:50] = ids[-50:] = 1
    ids.flush()
    largest = r"\.bin: its largest token id, \d+, lies outside the vocabulary of"
    with pytest.raises(DataError, match=f"known{largest} 501"):
        train_on(known)
    with pytest.raises(DataError, match=f"edge{largest} 500"):
        train_on(make(tmp_path / "edge", 100), vocab_size=VOCAB - 1)
    data = train_on(unknown)
    assert any("unknown: has no sidecar" in note and "--check-data" in note for note in data.notes)
    with pytest.raises(DataError, match="unknown" + BEYOND):
        data.train.batch(0, 50)
    with pytest.raises(DataError, match="unknown" + BEYOND):
        train_on(unknown, check_data=True)
    notes = train_on(make(tmp_path / "sound", 100, sidecar=False), check_data=True).notes
    assert any("scanned in full" in note for note in notes)
    assert not any("no sidecar" in note for note in notes)


@pytest.mark.parametrize("place", [0, -1])
def test_an_end_of_document_beyond_the_vocabulary_is_found_before_training(tmp_path, place):
    """As old SentencePiece data have it: in the first or the last document, without a sidecar. The
    remedy of the message works.
    """
    prefix = make(tmp_path / "old", 100, sidecar=False)
    ids = np.memmap(f"{prefix}.bin", "u2", "r+")
    ids[IndexedDataset(prefix).first_token(1) - 1 if place == 0 else -1] = 777
    ids.flush()
    settings = {"split": "80,10,10", "eval_iters": 0}
    with pytest.raises(DataError, match="token id 777 lies outside the vocabulary of 501") as error:
        build_split(prefix, **settings)
    kind, size = re.search(r"--tokenizer-type (\w+) --vocab-size (\d+)", str(error.value)).groups()
    data = build_split(prefix, **settings, tokenizer_type=kind, vocab_size=int(size))
    assert data.train.eod == 777
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
    for paths, split in (((small,), "960,20,20"), ((large, small), "1,500,500")):
        with pytest.raises(DataError, match="small: .*(leaves no document|one sample needs)"):
            build_split(*paths, split=split, seq_length=64)


def test_all_faults_are_reported_together(tmp_path):
    good, short = make(tmp_path / "good", 50), make(tmp_path / "short", 50)
    with open(short + ".bin", "r+b") as file:
        file.truncate(100)
    paths = {"train_data_path": (good, short, str(tmp_path / "absent"))}
    with pytest.raises(DataError) as error:
        build(config(**paths, valid_data_path=(str(tmp_path / "other"),)))
    lines = str(error.value).splitlines()
    faults = "short.bin, byte 100", "absent.idx: cannot be read", "other.idx: cannot be read"
    assert all(fault in line for fault, line in zip(faults, lines, strict=True))


def test_a_split_without_documents_is_an_error_and_without_share_is_not(tmp_path):
    prefix = make(tmp_path / "x", 42)
    with pytest.raises(DataError, match="--split 969,30,1 leaves no document of its 42 for test"):
        build_split(prefix, split="969,30,1")
    data = build_split(prefix, split="90,10,0")
    assert data.valid and not data.test
    assert not build_split(prefix, split="90,10,0", eval_iters=0).valid
    with pytest.raises(DataError, match="no training data"):
        build_split(prefix, split="0,100,0")
    assert build_split(prefix, split="0,100,0", skip_train=True).train is None
    with pytest.raises(DataError, match="no training data"):
        build(config())


def test_mock_data_is_learnable_pure_and_uses_the_real_vocabulary():
    flags = {"mock_data": True, "seq_length": 128}
    data = build(config(**flags, reset_attention_mask=True))
    batch = data.train.batch(0, 400)
    tokens, labels = batch.tokens, batch.labels
    assert torch.equal(tokens[3:5], data.train.batch(3, 2).tokens)
    assert torch.equal(tokens[0, 1:], labels[0, :-1])
    assert torch.equal(tokens.unique(), torch.arange(VOCAB + 1))
    step = (labels - tokens) % VOCAB
    # the next token follows from the last two
    assert ((step >= 1) & (step <= 3)).float().mean() > 0.85
    assert 0 < batch.document_starts.max() < 128
    assert (tokens == EOD).float().mean() == pytest.approx(0.01, abs=0.001)
    assert torch.equal(labels[0, -1], tokens[1, 0])  # one stream, cut into samples
    assert not torch.equal(data.valid["validation"].batch(0, 1).tokens, tokens[:1])
    assert set(data.test) == {"test"} and any("mock" in note for note in data.notes)
    other = build(config(**flags, seed=2)).train.batch(0, 1).tokens
    assert not torch.equal(other, tokens[:1])
