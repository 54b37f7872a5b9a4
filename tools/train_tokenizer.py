r"""Train a SentencePiece tokenizer on the JSON lines that preprocess_data.py will encode.

    python tools/train_tokenizer.py --input books.jsonl --vocab-size 32000 \
        --output-prefix data/books

Writes <output-prefix>.model for `--tokenizer-type SentencePieceTokenizer --tokenizer-model
<output-prefix>.model`. The tokenizer is lossless: no normalisation, spaces and line ends kept,
unknown characters as bytes. Its end-of-document id is that of `</s>`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._preprocess.text_files import chunks_of  # noqa: E402
from megatron.tools.preprocess_data import (  # noqa: E402
    LARGEST_CHUNK,
    input_files,
    read_records,
    settle_invalid_texts,
    texts_of,
)

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.input_files import path_fault  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402

LOUD = 50 << 20  # bytes of input from which SentencePiece reports its own progress


def lines(files: list[str], key: str, policy: str) -> Iterator[str]:
    """Every line of every text that is not empty: SentencePiece learns within lines. `policy` as in
    settle_invalid_texts. Raises DataError for a record without the key.
    """
    for path in files:
        for chunk in chunks_of(path, LARGEST_CHUNK, [key]):
            records = read_records(chunk, policy)
            columns = [texts_of(chunk, records, key)]
            _, [(texts, _)], _ = settle_invalid_texts(chunk, records, columns, policy)
            for text in texts:
                yield from filter(None, text.split("\n"))


def train(
    files: list[str],
    *,
    key: str,
    policy: str,
    vocab_size: int,
    model_type: str,
    prefix: str,
    max_lines: int,
) -> None:
    """Train and write the model, under its name only once complete. Raises UserError for input that
    gives no such tokenizer.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(files, key, policy),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            input_sentence_size=max_lines,
            max_sentence_length=1 << 16,
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            minloglevel=0 if sum(map(os.path.getsize, files)) > LOUD else 2,
        )
    except RuntimeError as error:
        raise UserError(f"--vocab-size {vocab_size}: SentencePiece refuses ({error})") from None
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    Path(prefix + ".model.partial").write_bytes(model.getvalue())
    os.replace(prefix + ".model.partial", prefix + ".model")


def main() -> None:
    escape_unencodable()
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or patterns: JSON lines or a JSON array, also compressed; parquet",
    )
    flags.add_argument(
        "--json-key", "--json-keys", default="text", help="key of the text (default: text)"
    )
    flags.add_argument(
        "--invalid-text",
        choices=["error", "replace", "skip"],
        default="error",
        help="lines with characters that UTF-8 cannot hold, as in preprocess_data.py",
    )
    flags.add_argument(
        "--vocab-size", type=int, required=True, help="ids in all, special and byte pieces included"
    )
    flags.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe")
    flags.add_argument("--output-prefix", required=True, help="writes <this>.model")
    flags.add_argument(
        "--max-lines",
        type=int,
        default=5_000_000,
        help="learn from a random sample of this size (default: 5,000,000)",
    )
    given = flags.parse_args()
    try:
        if fault := path_fault(f"{given.output_prefix}.model.partial"):
            raise UserError(f"--output-prefix {given.output_prefix[:60]}: {fault}")
        train(
            input_files(given.input),
            key=given.json_key,
            policy=given.invalid_text,
            vocab_size=given.vocab_size,
            model_type=given.model_type,
            prefix=given.output_prefix,
            max_lines=given.max_lines,
        )
    except (UserError, OSError) as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{given.output_prefix}.model: {given.vocab_size} ids, {given.model_type}")


if __name__ == "__main__":
    main()
