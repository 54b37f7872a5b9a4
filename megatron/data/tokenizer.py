"""Tokenizers, each from local files: SentencePiece, Hugging Face tokenizer.json, GPT-2 BPE,
tiktoken, and whitespace-separated integers.

A special token spelled out in a text is encoded as ordinary characters (except SentencePiece's
user-defined symbols). No ids are added around a text unless preprocessing asks for them; only
preprocessing adds the end-of-document id.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.errors import UserError
from megatron.config.groups import DataConfig
from megatron.config.input_files import InputError, open_regular, read_json
from megatron.config.metadata import flag_name
from megatron.config.validate import ABSENT_TOKENIZER

# The end of document is the first of these that the vocabulary has, where the tokenizer's own files
# do not name one.
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<EOD>", "</s>", "<eos>", "<|eos|>")
# How the published vocabularies cut text before merging, and their `<|endoftext|>`; a .tiktoken
# file holds neither.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_FILES = {
    "r50k_base": (GPT2_PATTERN, 50256),
    "p50k_base": (GPT2_PATTERN, 50256),
    "cl100k_base": (CL100K_PATTERN, 100257),
}
# Special tokens after the vocabulary of Llama 3's tokenizer.model, which cuts text as cl100k_base.
_RESERVED = [f"<|reserved_special_token_{k}|>" for k in range(251)]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:4]]
LLAMA3_SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", _RESERVED[4], "<|eot_id|>"]
LLAMA3_SPECIAL += _RESERVED[5:]
# Megatron's tiktoken JSON: its default pattern (v2), 1,000 special tokens before the vocabulary,
# `</s>` the third of them.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MEGATRON_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MEGATRON_SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"] + [
    f"<SPECIAL_{k}>" for k in range(7, 1000)
]
MEGATRON_VOCAB = 131072
INTEGERS = re.compile(r"[\d\s]*", re.ASCII)  # of the NullTokenizer
Encoded = tuple[np.ndarray, np.ndarray]  # all ids, and the number of ids of each text


@dataclass(frozen=True)
class Tokenizer:
    """encode_many: a list of texts -> all ids in one array, and the number of ids of each text.
    fingerprint: digest of its files.
    """

    vocab_size: int
    eod: int
    encode_many: Callable[[list[str]], Encoded]
    decode: Callable[[list[int]], str]
    name: str = ""
    fingerprint: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_many([text])[0].tolist()


def build_tokenizer(config: DataConfig, include_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer of --tokenizer-type. `include_special_tokens`: add to each text what the
    post-processor of a tokenizer.json adds, such as a beginning-of-sequence token; an empty text
    stays empty. Raises UserError naming the flag or file at fault.
    """
    kind, vocab_size = config.tokenizer_type, config.vocab_size
    if kind is None and config.vocab_file and config.merge_file:
        kind = "GPT2BPETokenizer"
    if kind is None and config.mock_data and vocab_size:
        kind = "NullTokenizer"
    if kind is None:
        raise UserError(
            "--tokenizer-type is missing: give one (with --mock-data, --vocab-size alone is enough)"
        )
    if include_special_tokens and kind != "HuggingFaceTokenizer":
        raise UserError(
            f"--tokenizer-hf-include-special-tokens has no effect with --tokenizer-type {kind}: "
            "remove it, or give --tokenizer-type HuggingFaceTokenizer"
        )
    if kind == "NullTokenizer":
        return _null(vocab_size)
    tokenizer = _read(kind, config, include_special_tokens)
    ids = tokenizer.vocab_size
    if vocab_size is None or vocab_size == ids:
        return tokenizer
    if vocab_size < ids:
        raise UserError(
            f"--vocab-size {vocab_size}: {tokenizer.name} has {ids} ids; remove the flag or give "
            "another tokenizer"
        )
    # The embedding has more rows than there are ids, as in many published models. An id without a
    # token is no text.
    return dataclasses.replace(
        tokenizer,
        name=f"{tokenizer.name} of {ids} ids",
        vocab_size=vocab_size,
        decode=lambda given: tokenizer.decode([each for each in given if each < ids]),
    )


def _read(kind: str, config: DataConfig, include_special_tokens: bool) -> Tokenizer:
    """The tokenizer in the files of the flags."""
    fields = ("vocab_file", "merge_file") if kind == "GPT2BPETokenizer" else ("tokenizer_model",)
    paths = [_file(getattr(config, field), flag_name(field), kind) for field in fields]
    parts: list[Path | int] = [*paths]
    try:
        if kind == "SentencePieceTokenizer":
            digest, found = "sentencepiece", _sentencepiece(paths[0])
        elif kind == "HuggingFaceTokenizer":
            digest, found = "huggingface", _huggingface(paths[0], include_special_tokens)
        elif kind == "GPT2BPETokenizer":
            digest, found = "gpt2", _gpt2(*paths)
        else:
            digest, found = "tiktoken", _tiktoken(paths[0], config.vocab_size)
            parts.append(found.vocab_size)  # which --vocab-size may have cut
    except ImportError as error:
        raise UserError(
            f"--tokenizer-type: {kind} needs the package {error.name} ({error}): "
            f"pip install {error.name}"
        ) from None
    except Exception as error:  # the libraries raise plain Exception
        if isinstance(error, UserError) and not isinstance(error, InputError):
            raise
        files = ", ".join(f"{flag_name(field)} {path}" for field, path in zip(fields, paths))
        raise UserError(
            f"{files}: not of --tokenizer-type {kind} ({error}); give its files, or another type"
        ) from None
    fingerprint = _fingerprint(digest, *parts)
    return dataclasses.replace(found, name=f"{kind} {paths[0].name}", fingerprint=fingerprint)


def _file(value: str | None, flag: str, kind: str) -> Path:
    """The path that a flag gives, or the tokenizer.json in it."""
    if value is None:
        raise UserError(f"{flag} is missing: --tokenizer-type {kind} needs it")
    path = Path(value)
    if kind == "HuggingFaceTokenizer" and path.is_dir():
        path = path / "tokenizer.json"
        if not os.path.lexists(path):
            raise UserError(f"{flag} {value}: the folder holds no {path.name}")
    if not os.path.lexists(path):
        raise UserError(f"{flag} {value}: {ABSENT_TOKENIZER}")
    try:
        open_regular(path).close()
    except InputError as error:
        raise UserError(f"{flag} {value}: cannot be read: {error}") from None
    return path


def _fingerprint(kind: str, *parts: Path | int) -> str:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
    return digest.hexdigest()


def _joined(lists: list[list[int]]) -> Encoded:
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    ids = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(lengths.sum()))
    return ids, lengths


def _eod(path: Path, find: Callable[[str], int | None]) -> int:
    for token in EOD_TOKENS:
        if (found := find(token)) is not None:
            return found
    raise UserError(
        f"{path}: has none of the end-of-document tokens {', '.join(EOD_TOKENS)}: add one to "
        "the tokenizer"
    )


# ---- one function for each library; what it raises is reported with the flags (`_read`)


def _sentencepiece(path: Path) -> Tokenizer:
    """End of document: the model's own eos id, else by EOD_TOKENS."""
    model = importlib.import_module("sentencepiece").SentencePieceProcessor()
    model.LoadFromSerializedProto(path.read_bytes())

    def find(token: str) -> int | None:
        found = model.PieceToId(token)
        return found if model.IdToPiece(found) == token else None

    def encode(texts: list[str]) -> Encoded:
        return _joined(model.Encode(texts, out_type=int, num_threads=1))

    eod = model.eos_id() if model.eos_id() >= 0 else _eod(path, find)
    return Tokenizer(model.GetPieceSize(), eod, encode, model.Decode)


def _huggingface(path: Path, include_special_tokens: bool) -> Tokenizer:
    """End of document: eos_token of tokenizer_config.json, else by EOD_TOKENS."""
    model = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    settings = path.with_name("tokenizer_config.json")
    named = None
    if os.path.lexists(settings):
        try:
            named = read_json(settings).get("eos_token")
        except InputError as error:
            raise UserError(
                f"{settings}: cannot be used: {error}; correct the file, or remove it to go by "
                "tokenizer.json alone"
            ) from None
    if isinstance(named, dict):
        named = named.get("content")
    if named is None:
        eod = _eod(path, model.token_to_id)
    else:
        eod = model.token_to_id(named) if isinstance(named, str) else None
    if eod is None:
        raise UserError(
            f"{settings}: its eos_token {named!r} is not in {path.name}: correct one of them"
        )
    return _from_tokenizers(path, model, eod, include_special_tokens)


def _gpt2(vocab: Path, merges: Path) -> Tokenizer:
    """End of document: `<|endoftext|>`."""
    library = importlib.import_module("tokenizers")
    model = library.ByteLevelBPETokenizer.from_file(str(vocab), str(merges))._tokenizer
    return _from_tokenizers(vocab, model, _eod(vocab, model.token_to_id))


def _from_tokenizers(
    path: Path, model: Any, eod: int, include_special_tokens: bool = False
) -> Tokenizer:
    model.encode_special_tokens = True  # a special token spelled out in a text is text
    model.no_truncation()
    model.no_padding()
    ids = list(model.get_vocab(with_added_tokens=True).values())
    if not ids or len(set(ids)) < len(ids) or max(ids) >= 2**31:
        raise UserError(
            f"{path}: its vocabulary is empty, gives an id to two tokens, or has one above "
            "2**31: make the file again"
        )

    def encode(texts: list[str]) -> Encoded:
        found = model.encode_batch_fast(texts, add_special_tokens=include_special_tokens)
        return _joined([encoding.ids if text else [] for encoding, text in zip(found, texts)])

    return Tokenizer(max(ids) + 1, eod, encode, partial(model.decode, skip_special_tokens=False))


def _tiktoken(path: Path, vocab_size: int | None) -> Tokenizer:
    """A .tiktoken file under its published name (end of document: `<|endoftext|>`), Llama 3's
    tokenizer.model (`<|end_of_text|>`), or Megatron's JSON (`</s>`; cut to --vocab-size).
    """
    if path.suffix == ".json":
        ranks = _megatron_ranks(read_json(path, list), vocab_size or MEGATRON_VOCAB)
        pattern, eod = MEGATRON_PATTERN, 2
        special = {token: k for k, token in enumerate(MEGATRON_SPECIAL)}
    elif path.suffix == ".model":
        ranks, pattern = _published_ranks(path), CL100K_PATTERN
        special = {token: len(ranks) + k for k, token in enumerate(LLAMA3_SPECIAL)}
        eod = special["<|end_of_text|>"]
    elif path.stem in TIKTOKEN_FILES:
        pattern, eod = TIKTOKEN_FILES[path.stem]
        ranks, special = _published_ranks(path, eod), {"<|endoftext|>": eod}
    else:
        raise InputError(
            "does not define how text is split; keep its published name: "
            f"{', '.join(TIKTOKEN_FILES)}, or tokenizer.model (Llama 3)"
        )
    model = importlib.import_module("tiktoken").Encoding(
        path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    # ids without a token decode to nothing; cl100k_base has one before its end of document
    known = {*ranks.values(), *special.values()}

    def encode(texts: list[str]) -> Encoded:
        return _joined(model.encode_ordinary_batch(texts, num_threads=1))

    return Tokenizer(
        model.n_vocab, eod, encode, lambda ids: model.decode([k for k in ids if k in known])
    )


def _published_ranks(path: Path, eod: int | None = None) -> dict[bytes, int]:
    """Token -> rank of a .tiktoken file, a token and its rank in each line. An end of document
    `eod` among the ranks is left out.
    """
    lines = path.read_bytes().splitlines()
    return _checked_ranks([line.split() for line in lines if line], eod)


def _megatron_ranks(entries: list[Any], vocab_size: int) -> dict[bytes, int]:
    """Token -> id of the entries of Megatron's JSON, cut to a vocabulary."""
    first = len(MEGATRON_SPECIAL)
    size = vocab_size - first
    if size < 256:
        raise InputError(
            f"a vocabulary of {vocab_size} is too small for {first} special tokens and 256 bytes"
        )
    rows = [
        (entry.get("token_bytes"), entry.get("rank")) if isinstance(entry, dict) else ()
        for entry in entries[:size]
    ]
    return {token: first + rank for token, rank in _checked_ranks(rows).items()}


def _checked_ranks(rows: Sequence[Sequence[Any]], eod: int | None = None) -> dict[bytes, int]:
    """Token -> rank of rows, each of a token in base64 and its rank. Raises InputError unless the
    ranks count up from 0 without `eod`, each once, and every single byte is a token.
    """
    ranks: dict[bytes, int] = {}
    for number, row in enumerate(rows, 1):
        try:
            text, rank = row
            token = base64.b64decode(text, validate=True)
            if not token or token in ranks:
                raise ValueError
            ranks[token] = int(rank)
        except (TypeError, ValueError):
            raise InputError(f"entry {number} is not a new token in base64 and its rank") from None
    expected = [rank for rank in range(len(ranks) + 1) if rank != eod][: len(ranks)]
    missing = set(expected) - set(ranks.values())
    if missing:
        raise InputError(f"rank {min(missing)} is missing, or another one is given twice")
    unknown = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if unknown:
        raise InputError(
            f"the single byte {unknown[0]} has no token, so that some texts could not be encoded"
        )
    return ranks


def _null(vocab_size: int | None) -> Tokenizer:
    """Whitespace-separated integers in [0, vocab_size]; the last is the end of document."""
    if vocab_size is None or vocab_size < 1:
        raise UserError("--vocab-size is missing: --tokenizer-type NullTokenizer needs it")

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    digest = _fingerprint("null", vocab_size)
    return Tokenizer(vocab_size + 1, vocab_size, parse_integers, decode, "NullTokenizer", digest)


def parse_integers(texts: list[str]) -> Encoded:
    """Whitespace-separated non-negative integers: all values [n] int64 (2^63 - 1 where one is
    larger) and how many each text holds. Raises UserError.
    """
    for text in texts:
        if not INTEGERS.fullmatch(text):
            raise UserError(
                "NullTokenizer takes non-negative integers separated by whitespace, got "
                f"{text[:60]!r}"
            )
    nothing = np.empty(0, np.int64)  # numpy reads one 0 from blank text
    parts = [np.fromstring(text, np.int64, sep=" ") if text.strip() else nothing for text in texts]
    return np.concatenate(parts or [nothing]), np.fromiter(map(len, parts), np.int64, len(parts))
