"""Each tokenizer from files made here, against its own library."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.errors import UserError
from megatron.config.groups import DataConfig
from megatron.data.tokenizer import build_tokenizer, parse_integers

TEXTS = [
    "The king's crown, the queen's gown.",
    "",
    "  Äpfel und 12345 Birnen\n\n",
    "naïve café\tx",
    "the the the <|endoftext|> the",
    "日本語 🎈",
]


def entries(tokens: list[bytes]) -> list[dict]:
    """Tokens and their ranks as Megatron's JSON has them."""
    encoded = [base64.b64encode(token).decode() for token in tokens]
    return [{"rank": k, "token_bytes": token, "token_str": ""} for k, token in enumerate(encoded)]


def published(rows: list[dict]) -> str:
    """The same as lines of a .tiktoken file."""
    return "\n".join(f"{row['token_bytes']} {row['rank']}" for row in rows)


BYTES = [bytes([k]) for k in range(256)]
PAIRS = BYTES + [bytes([a, b]) for a in range(32, 127) for b in range(32, 127)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    sentence = "the quick brown fox jumps over the lazy dog and the crown"
    (folder / "text").write_text("\n".join(TEXTS * 20 + [sentence] * 50))
    import sentencepiece
    import tokenizers

    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spm"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    bpe = tokenizers.ByteLevelBPETokenizer()
    settings = {"vocab_size": 400, "min_frequency": 2, "show_progress": False}
    bpe.train([str(folder / "text")], special_tokens=["<|endoftext|>"], **settings)
    bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))
    rows = entries([*BYTES, b"th", b"the", b" the", b"in"])
    (folder / "r50k_base.tiktoken").write_text(published(rows) + "\n")
    return folder


def build(kind: str, folder: Path, model: str | None = None, **more: object):
    path = str(folder / model) if model else None
    return build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=path, **more))


def check(tokenizer, expected: list[list[int]]) -> None:
    ids, lengths = tokenizer.encode_many(TEXTS)
    assert ids.tolist() == [token for each in expected for token in each]
    assert lengths.tolist() == [*map(len, expected)]
    assert [tokenizer.encode(text) for text in TEXTS] == expected
    assert max(ids) < tokenizer.vocab_size and 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.eod not in ids


def check_cuts(tokenizer, encode) -> None:
    """Where bytes and pairs are the vocabulary, the cuts of a text alone decide its ids."""
    rng = np.random.default_rng(0)
    alphabet = list("ab'sLLdDmM 12345 \n\r\t!?,.éÄ漢 ")
    for text in TEXTS + ["".join(rng.choice(alphabet, 60)) for _ in range(500)]:
        if text:
            assert tokenizer.encode(text) == encode(text), text


def test_sentencepiece(files):
    import sentencepiece

    tokenizer = build("SentencePieceTokenizer", files, "spm.model")
    model = sentencepiece.SentencePieceProcessor(str(files / "spm.model"))
    check(tokenizer, [model.EncodeAsIds(text) for text in TEXTS])
    assert tokenizer.eod == model.eos_id() == 2 and tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    with pytest.raises(ValueError, match="--vocab-size 399: SentencePieceTokenizer spm.model has"):
        build("SentencePieceTokenizer", files, "spm.model", vocab_size=399)


def test_huggingface(files):
    import tokenizers

    tokenizer = build("HuggingFaceTokenizer", files, "tokenizer.json")
    model = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    model.encode_special_tokens = True
    check(tokenizer, [model.encode(text, add_special_tokens=False).ids for text in TEXTS])
    assert tokenizer.eod == model.token_to_id("<|endoftext|>")
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    # a folder, and one that names its end of sequence
    assert build("HuggingFaceTokenizer", files, ".").fingerprint == tokenizer.fingerprint
    (files / "named").mkdir()
    (files / "named/tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (files / "named/tokenizer_config.json").write_text('{"eos_token": {"content": "!"}}')
    assert build("HuggingFaceTokenizer", files, "named").eod == model.token_to_id("!")


def test_gpt2_bpe_equals_its_tokenizer_json(files):
    paths = {"vocab_file": str(files / "vocab.json"), "merge_file": str(files / "merges.txt")}
    tokenizer = build("GPT2BPETokenizer", files, **paths)
    same = build("HuggingFaceTokenizer", files, "tokenizer.json")
    check(tokenizer, [same.encode(text) for text in TEXTS])
    assert tokenizer.eod == same.eod and tokenizer.fingerprint != same.fingerprint
    assert build_tokenizer(DataConfig(**paths)).fingerprint == tokenizer.fingerprint


def test_tiktoken(files):
    tokenizer = build("TikTokenizer", files, "r50k_base.tiktoken")
    assert tokenizer.encode("the in the") == [257, 32, 259, 258]
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)
    assert tokenizer.decode([257, 300, 32]) == "the "  # ids 260 to 50255 have no token here
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    (files / "mine.tiktoken").write_bytes((files / "r50k_base.tiktoken").read_bytes())
    with pytest.raises(ValueError, match="mine.tiktoken: .*keep its published name"):
        build("TikTokenizer", files, "mine.tiktoken")


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base"])
def test_tiktoken_cuts_text_as_the_library_does(name, tmp_path, monkeypatch):
    import tiktoken
    import tiktoken_ext.openai_public as public

    rows = entries([*PAIRS, b"\n\n", b"\r\n", b" \n", b"\n "])
    (tmp_path / f"{name}.tiktoken").write_text(published(rows))
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in rows}
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    theirs = {key: value for key, value in getattr(public, name)().items() if "vocab" not in key}
    tokenizer = build("TikTokenizer", tmp_path, f"{name}.tiktoken")
    assert tokenizer.eod == theirs["special_tokens"]["<|endoftext|>"]
    check_cuts(tokenizer, tiktoken.Encoding(**theirs).encode_ordinary)


def test_llama_3s_tokenizer_model(tmp_path):
    """Text is cut as transformers cuts it; 256 special tokens follow the vocabulary."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path, tokens = tmp_path / "tokenizer.model", [*PAIRS, b"\n\n", b" \n"]
    path.write_text(published(entries(tokens)))
    tokenizer = build("TikTokenizer", tmp_path, "tokenizer.model")
    first = len(tokens)
    assert (tokenizer.eod, tokenizer.vocab_size) == (first + 1, first + 256)
    # of the published vocabulary of 128,000: 128000, 128006, 128007, 128009 and 128255
    assert tokenizer.decode([first, first + 6, first + 7, first + 9, first + 255]) == (
        "<|begin_of_text|><|start_header_id|><|end_header_id|><|eot_id|>"
        "<|reserved_special_token_250|>"
    )
    theirs = TikTokenConverter(str(path)).converted()
    check_cuts(tokenizer, lambda text: theirs.encode(text, add_special_tokens=False).ids)


SPACES = st.sampled_from([" ", "\n", "\t ", "  ", "\r\n"])
NUMBERS = st.lists(st.tuples(st.integers(0, 10**18 - 1), SPACES), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, max_size=12), st.sampled_from(["", "  "]))
def test_integers_are_parsed_like_python_does(texts, lead):
    strings = [lead + "".join(f"{value}{space}" for value, space in text) for text in texts]
    values, lengths = parse_integers(strings)
    assert values.tolist() == [int(word) for string in strings for word in string.split()]
    assert lengths.tolist() == [len(string.split()) for string in strings]


def test_null_tokenizer():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("1 007\n99") == [1, 7, 99] and tokenizer.encode("") == []
    assert tokenizer.decode([1, 7, 99]) == "1 7 99"
    for wrong in ("1 x", "-1", "1.5", "é", "\ud800"):
        with pytest.raises(ValueError, match="NullTokenizer takes"):
            tokenizer.encode(wrong)
    of_mock_data = build_tokenizer(DataConfig(mock_data=True, vocab_size=100))
    assert of_mock_data.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    "kind, files, message",
    [
        (None, {}, "--tokenizer-type is missing"),
        ("SentencePieceTokenizer", {}, "--tokenizer-model is missing"),
        (
            "HuggingFaceTokenizer",
            {"tokenizer_model": "gpt2"},
            "--tokenizer-model gpt2: no such file or folder; tokenizers are read from local",
        ),
        (
            "HuggingFaceTokenizer",
            {"tokenizer_model": "tests"},
            "--tokenizer-model tests: the folder holds no tokenizer.json",
        ),
        ("GPT2BPETokenizer", {"vocab_file": __file__}, "--merge-file is missing"),
        (
            "GPT2BPETokenizer",
            {"vocab_file": __file__, "merge_file": __file__},
            "not of --tokenizer-type GPT2",
        ),
        ("SentencePieceTokenizer", {"tokenizer_model": __file__}, "not of --tokenizer-type Sent"),
        ("TikTokenizer", {"tokenizer_model": __file__}, "not of --tokenizer-type Tik"),
    ],
)
def test_faults_are_named(kind, files, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(DataConfig(tokenizer_type=kind, **files))


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "expected an object, found a list"),
        ('{"eos_token": 3}', "its eos_token 3 is not in tokenizer.json"),
        ('{"eos_token": "<nowhere>"}', "its eos_token '<nowhere>' is not in tokenizer.json"),
        ("[" * 20_000, "nested deeper than 64 levels"),
        ("{", "not JSON"),
    ],
)
def test_a_tokenizer_config_that_cannot_be_used(files, tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=f"tokenizer_config.json: .*{message}"):
        build("HuggingFaceTokenizer", tmp_path, "tokenizer.json")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.pop(70), "rank 70 is missing, or"),
        (lambda rows: rows.append(rows[3]), "entry 257 is not a new token in base64"),
        (lambda rows: rows.append({"rank": 256, "token_bytes": "?"}), "257 is not a new token"),
        (lambda rows: rows[65].update(token_bytes="YWI="), "the single byte 65 has no token"),
    ],
)
def test_tiktoken_vocabularies_that_cannot_be_used(tmp_path, change, message):
    rows = entries(BYTES)
    change(rows)
    (tmp_path / "r50k_base.tiktoken").write_text(published(rows))
    (tmp_path / "mega.json").write_text(json.dumps(rows))
    for name in ("r50k_base.tiktoken", "mega.json"):
        fault = f"--tokenizer-model .*{name}: not of --tokenizer-type TikTokenizer .*"
        with pytest.raises(UserError, match=fault + message):
            build("TikTokenizer", tmp_path, name)


@pytest.mark.parametrize("entry", [{"rank": 11}, {"token_bytes": "Cw=="}, "Cw== 11"])
def test_a_malformed_entry_of_a_vocabulary_is_named(tmp_path, entry):
    rows = entries(BYTES)
    rows[11] = entry
    (tmp_path / "mega.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="entry 12 is not a new token in base64 and its rank"):
        build("TikTokenizer", tmp_path, "mega.json")
