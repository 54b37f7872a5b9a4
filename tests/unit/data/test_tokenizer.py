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


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    text = "\n".join(
        TEXTS * 20 + ["the quick brown fox jumps over the lazy dog and the crown"] * 50
    )
    (folder / "text").write_text(text)
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
    bpe.train(
        [str(folder / "text")],
        vocab_size=400,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))
    tokens = [bytes([k]) for k in range(256)] + [b"th", b"the", b" the", b"in"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "r50k_base.tiktoken").write_text("\n".join(lines) + "\n")
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    (folder / "mega.json").write_text(json.dumps(entries))
    return folder


def build(kind: str, folder: Path, model: str | None = None, **more: object):
    config = {
        "tokenizer_type": kind,
        "tokenizer_model": str(folder / model) if model else None,
        **more,
    }
    return build_tokenizer(DataConfig(**config))


def flat(lists: list[list[int]]) -> tuple[list[int], list[int]]:
    return [token for ids in lists for token in ids], [len(ids) for ids in lists]


def check(tokenizer, expected: list[list[int]]) -> None:
    ids, lengths = tokenizer.encode_many(TEXTS)
    assert (ids.tolist(), lengths.tolist()) == flat(expected)
    assert [tokenizer.encode(text) for text in TEXTS] == expected
    assert (
        max(ids) < tokenizer.vocab_size
        and 0 <= tokenizer.eod < tokenizer.vocab_size
        and tokenizer.eod not in ids
    )


def test_sentencepiece(files):
    import sentencepiece

    tokenizer, model = (
        build("SentencePieceTokenizer", files, "spm.model"),
        sentencepiece.SentencePieceProcessor(str(files / "spm.model")),
    )
    check(tokenizer, [model.EncodeAsIds(text) for text in TEXTS])
    assert tokenizer.eod == model.eos_id() == 2 and tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_huggingface(files):
    import tokenizers

    tokenizer, model = (
        build("HuggingFaceTokenizer", files, "tokenizer.json"),
        tokenizers.Tokenizer.from_file(str(files / "tokenizer.json")),
    )
    model.encode_special_tokens = True
    check(tokenizer, [model.encode(text, add_special_tokens=False).ids for text in TEXTS])
    assert tokenizer.eod == model.token_to_id("<|endoftext|>")
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    # a folder
    assert build("HuggingFaceTokenizer", files, ".").fingerprint == tokenizer.fingerprint
    (files / "named").mkdir()
    (files / "named" / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (files / "named" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "!"}})
    )
    assert build("HuggingFaceTokenizer", files, "named").eod == model.token_to_id("!")


def test_gpt2_bpe_equals_its_tokenizer_json(files):
    paths = {"vocab_file": str(files / "vocab.json"), "merge_file": str(files / "merges.txt")}
    tokenizer, same = (
        build("GPT2BPETokenizer", files, **paths),
        build("HuggingFaceTokenizer", files, "tokenizer.json"),
    )
    check(tokenizer, [same.encode(text) for text in TEXTS])
    assert tokenizer.eod == same.eod and tokenizer.fingerprint != same.fingerprint
    assert build_tokenizer(DataConfig(**paths)).fingerprint == tokenizer.fingerprint


def test_tiktoken(files):
    tokenizer = build("TikTokenizer", files, "r50k_base.tiktoken")
    assert (
        tokenizer.encode("the in the") == [257, 32, 259, 258]
        and tokenizer.eod == 50256
        and tokenizer.vocab_size == 50257
    )
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    (files / "mine.tiktoken").write_bytes((files / "r50k_base.tiktoken").read_bytes())
    with pytest.raises(ValueError, match="mine.tiktoken: .*keep its published name"):
        build("TikTokenizer", files, "mine.tiktoken")


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base"])
def test_tiktoken_cuts_text_as_the_library_does(name, tmp_path, monkeypatch):
    """The vocabulary files are not here; with bytes and all pairs as vocabulary the cuts alone
    decide the ids.
    """
    import tiktoken_ext.openai_public as public

    tokens = (
        [bytes([k]) for k in range(256)]
        + [bytes([a, b]) for a in range(32, 127) for b in range(32, 127)]
        + [b"\n\n", b"\r\n", b" \n", b"\n "]
    )
    ranks = {token: rank for rank, token in enumerate(tokens)}
    (tmp_path / f"{name}.tiktoken").write_text(
        "\n".join(f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    )
    tokenizer = build("TikTokenizer", tmp_path, f"{name}.tiktoken")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    published = getattr(public, name)()
    import tiktoken

    model = tiktoken.Encoding(
        name,
        pat_str=published["pat_str"],
        mergeable_ranks=ranks,
        special_tokens=published["special_tokens"],
    )
    assert tokenizer.eod == published["special_tokens"]["<|endoftext|>"]
    rng = np.random.default_rng(0)
    alphabet = list("ab'sLLdDmM 12345 \n\r\t!?,.éÄ漢 ")
    for text in TEXTS + ["".join(rng.choice(alphabet, 60)) for _ in range(500)]:
        assert tokenizer.encode(text) == model.encode_ordinary(text), text


def test_llama_3s_tokenizer_model(tmp_path):
    """Text is cut as transformers cuts it; 256 special tokens follow the vocabulary."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokens = [bytes([k]) for k in range(256)]
    tokens += [bytes([a, b]) for a in range(32, 127) for b in range(32, 127)] + [b"\n\n", b" \n"]
    path = tmp_path / "tokenizer.model"
    path.write_text(
        "\n".join(f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    )
    tokenizer = build("TikTokenizer", tmp_path, "tokenizer.model")
    first = len(tokens)
    assert (tokenizer.eod, tokenizer.vocab_size) == (first + 1, first + 256)
    # of the published vocabulary of 128,000: 128000, 128006, 128007, 128009 and 128255
    assert tokenizer.decode([first, first + 6, first + 7, first + 9, first + 255]) == (
        "<|begin_of_text|><|start_header_id|><|end_header_id|><|eot_id|>"
        "<|reserved_special_token_250|>"
    )
    theirs = TikTokenConverter(str(path)).converted()
    rng = np.random.default_rng(0)
    alphabet = list("ab'sLLdDmM 12345 \n\r\t!?,.éÄ漢 ")
    for text in TEXTS + ["".join(rng.choice(alphabet, 60)) for _ in range(200)]:
        if text:
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text) == ids, text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 10**18 - 1), st.sampled_from([" ", "\n", "\t ", "  ", "\r\n"])
            ),
            max_size=20,
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_integers_are_parsed_like_python_does(texts, lead):
    strings = [
        ("  " if lead else "") + "".join(f"{value}{space}" for value, space in text)
        for text in texts
    ]
    values, lengths = parse_integers(strings)
    assert values.tolist() == [int(word) for string in strings for word in string.split()]
    assert lengths.tolist() == [len(string.split()) for string in strings]


def test_null_tokenizer():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert (
        tokenizer.encode("1 007\n99") == [1, 7, 99]
        and tokenizer.decode([1, 7, 99]) == "1 7 99"
        and tokenizer.encode("") == []
    )
    for wrong in ("1 x", "-1", "1.5", "é", "\ud800"):
        with pytest.raises(ValueError, match="NullTokenizer takes"):
            tokenizer.encode(wrong)
    assert (
        build_tokenizer(DataConfig(mock_data=True, vocab_size=100)).fingerprint
        == tokenizer.fingerprint
    )


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "--tokenizer-type is missing"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "--tokenizer-model is missing"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gpt2"},
            "--tokenizer-model gpt2: no such file or folder; tokenizers are read from local",
        ),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tests"},
            "--tokenizer-model tests: the folder holds no tokenizer.json",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, "--merge-file is missing"),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__},
            "not a GPT-2 BPE",
        ),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": __file__},
            "not a SentencePiece model",
        ),
        (
            {"tokenizer_type": "TikTokenizer", "tokenizer_model": __file__},
            "not a tiktoken vocabulary",
        ),
    ],
)
def test_faults_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(DataConfig(**config))


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "expected an object, found a list"),
        ('{"eos_token": 3}', "eos_token is not text"),
        ('{"eos_token": "<nowhere>"}', "its eos_token '<nowhere>' is not in tokenizer.json"),
        ("[" * 20_000, "nested deeper than 64 levels"),
        ("{", "not JSON"),
    ],
)
def test_a_tokenizer_config_that_cannot_be_used(files, tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(UserError, match=f"tokenizer_config.json: .*{message}"):
        build("HuggingFaceTokenizer", tmp_path, "tokenizer.json")


def _entry(token: bytes, rank: object) -> dict:
    return {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}


BYTES = [bytes([k]) for k in range(256)]


@pytest.mark.parametrize(
    "change, published, megatron",
    [
        (
            lambda rows: rows.pop(70),
            "rank 70 is missing or given twice",
            "rank 1070 is missing or given twice",
        ),
        (
            lambda rows: rows.append(rows[3]),
            "line 257 is not a new token",
            "entry 256 is not a new token",
        ),
        (lambda rows: rows.append({"rank": 256, "token_bytes": "?"}), "ase64", "ase64"),
        (
            lambda rows: rows.__setitem__(65, _entry(b"ab", 65)),
            "the single byte 65 has no token",
            "the single byte 65 has no token",
        ),
    ],
)
def test_tiktoken_vocabularies_that_cannot_be_used(tmp_path, change, published, megatron):
    rows = [_entry(token, rank) for rank, token in enumerate(BYTES)]
    change(rows)
    text = [
        f"{row['token_bytes']} {row['rank']}" if isinstance(row, dict) else str(row) for row in rows
    ]
    (tmp_path / "r50k_base.tiktoken").write_text("\n".join(text))
    (tmp_path / "mega.json").write_text(json.dumps(rows))
    for name, message in (("r50k_base.tiktoken", published), ("mega.json", megatron)):
        with pytest.raises(
            UserError,
            match=(
                f"--tokenizer-model .*{name}: not a tiktoken vocabulary that can be used "
                f".*{message}"
            ),
        ):
            build("TikTokenizer", tmp_path, name)


def test_vocab_size_is_checked(files):
    with pytest.raises(
        ValueError, match="--vocab-size 399: SentencePieceTokenizer spm.model has 400 ids"
    ):
        build("SentencePieceTokenizer", files, "spm.model", vocab_size=399)
    build("SentencePieceTokenizer", files, "spm.model", vocab_size=400)
