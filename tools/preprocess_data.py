r"""Turn text into token files: `<prefix>_<key>_document.{bin,idx}` in Megatron's format, and a
.json file next to them that records the tokenizer.

    python tools/preprocess_data.py --input books.jsonl --output-prefix data/books --workers 8 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --append-eod

Each line is an object; the text under each of --json-keys becomes a document (a list of texts: a
document of several sequences). The input may also be a JSON array of objects or a parquet file
(needs pyarrow). Files compressed with gzip, zstd, bzip2 or xz are recognised by their content.
Worker processes encode chunks of the input; memory is bounded by a few chunks per worker. Nothing
appears under the final names before everything is written.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import multiprocessing
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._preprocess.text_files import TextChunk, chunks_of, refuse_record  # noqa: E402
from megatron.tools._preprocess.writer import IndexedDatasetWriter, best_dtype  # noqa: E402

from megatron.config import compatibility  # noqa: E402
from megatron.config.compatibility import translate_value  # noqa: E402
from megatron.config.errors import ArgumentErrors, UserError, did_you_mean  # noqa: E402
from megatron.config.groups import DataConfig  # noqa: E402
from megatron.config.input_files import is_text, path_fault  # noqa: E402
from megatron.config.options import options_by_flag  # noqa: E402
from megatron.config.reading import Occurrence, split_words  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.data.indexed_dataset import DataError  # noqa: E402
from megatron.data.tokenizer import Tokenizer, build_tokenizer  # noqa: E402

LARGEST_CHUNK = 4 << 20  # bytes of text that one task encodes
SMALLEST_CHUNK = 1 << 16
SURROGATE = re.compile("[\ud800-\udfff]")
POLICIES = "--invalid-text replace (by U+FFFD) or --invalid-text skip"
ENDINGS = ("bin", "idx", "json")


@dataclass(frozen=True)
class Encoded:
    """The documents of one chunk under one key."""

    tokens: np.ndarray  # in the dtype of the file
    lengths: np.ndarray  # of each sequence
    sequences: np.ndarray  # in each document
    text_bytes: int
    max_id: int
    eod_count: int
    invalid: int  # lines whose text UTF-8 cannot hold, replaced or left out


@functools.cache
def tokenizer_of(config: DataConfig, include_special_tokens: bool) -> Tokenizer:
    """The tokenizer, built once in each process."""
    return build_tokenizer(config, include_special_tokens)


def read_records(chunk: TextChunk, policy: str = "error") -> list[tuple[int, dict]]:
    """(line within the chunk, object) of every line that is not blank; `policy` as in
    settle_invalid_texts.
    """
    raw = chunk.text
    if raw is None:
        with open(chunk.path, "rb") as file:
            file.seek(chunk.begin)
            raw = file.read(chunk.end - chunk.begin)
    # decode() without its search for surrounding whitespace
    records, scan = [], json.JSONDecoder().scan_once
    try:
        lines = raw.decode().split("\n")  # not splitlines: JSON strings may hold other line ends
    except UnicodeDecodeError as error:
        if policy == "error":
            problem = f"not UTF-8 ({error.reason}): convert the file, or give {POLICIES}"
            raise refuse_record(chunk, raw[: error.start].count(b"\n"), problem) from None
        # What is not UTF-8 becomes lone surrogates, as they come in JSON's own escapes.
        lines = raw.decode(errors="surrogateescape").split("\n")
    for number, line in enumerate(lines):
        line = line.strip()
        if line.startswith("\ufeff"):  # of the file, or of one that was appended to it
            line = line.lstrip("\ufeff").lstrip()
        if not line:
            continue
        try:
            record, end = scan(line, 0)
            if end < len(line):
                raise UserError(f"something follows the object at character {end}")
        except RecursionError:
            raise refuse_record(
                chunk, number, "nested too deep for the parser: repair or remove the line"
            ) from None
        except (ValueError, StopIteration) as error:
            raise refuse_record(
                chunk,
                number,
                f"not JSON ({error}): write each object on one line (jq -c . does), or repair or "
                "remove the line",
            ) from None
        records.append((number, record))
    return records


def settle_invalid_texts(
    chunk: TextChunk,
    records: list[tuple[int, dict]],
    columns: list[tuple[list[str], np.ndarray]],
    policy: str,
) -> tuple[list[tuple[int, dict]], list[tuple[list[str], np.ndarray]], int]:
    """Records and columns (texts, owner) without characters that UTF-8 cannot hold, and how many
    records had some.

    JSON can write half of a surrogate pair (\\ud800), which is no character. `policy`: "error"
    raises DataError with file and line, "replace" puts U+FFFD in its place, "skip" leaves the
    record out under every key.
    """
    if all(is_text("".join(texts)) for texts, _ in columns):
        return records, columns, 0
    bad = {
        int(document)
        for texts, owner in columns
        for text, document in zip(texts, owner)
        if not is_text(text)
    }
    if policy == "error":
        problem = (
            "a text holds half of a surrogate pair, which is no character: repair it, or "
            f"give {POLICIES}"
        )
        raise refuse_record(chunk, records[min(bad)][0], problem)
    if policy == "replace":
        return (
            records,
            [
                ([SURROGATE.sub("\ufffd", text) for text in texts], owner)
                for texts, owner in columns
            ],
            len(bad),
        )
    kept = np.array([document not in bad for document in range(len(records))], bool)
    place = np.cumsum(kept) - 1
    left = [
        (
            [text for text, document in zip(texts, owner) if kept[document]],
            place[owner[kept[owner]]],
        )
        for texts, owner in columns
    ]
    return [record for record, keep in zip(records, kept) if keep], left, len(bad)


def texts_of(
    chunk: TextChunk, records: list[tuple[int, dict]], key: str
) -> tuple[list[str], np.ndarray]:
    """Every text under a key, and the document each belongs to. Raises DataError naming the line
    that has none.
    """
    values = [record.get(key) if isinstance(record, dict) else None for _, record in records]
    if set(map(type, values)) <= {str}:
        return values, np.arange(len(values))
    texts: list[str] = []
    owner: list[int] = []
    for document, value in enumerate(values):
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise refuse_record(
                chunk,
                records[document][0],
                f"no text under the key {key!r}: name the right one with --json-keys",
            )
        texts += parts
        owner += [document] * len(parts)
    return texts, np.array(owner, np.int64)


def encode_chunk(
    chunk: TextChunk,
    config: DataConfig,
    include_special_tokens: bool,
    keys: tuple[str, ...],
    append_eod: bool,
    policy: str,
) -> list[Encoded]:
    """All documents of a chunk, one result per key. Raises DataError naming file and line."""
    tokenizer = tokenizer_of(config, include_special_tokens)
    records = read_records(chunk, policy)
    columns = [texts_of(chunk, records, key) for key in keys]
    records, columns, invalid = settle_invalid_texts(chunk, records, columns, policy)
    results = []
    for texts, owner in columns:
        try:
            tokens, lengths = tokenizer.encode_many(texts)
            if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
                raise UserError("a token id lies outside the vocabulary")
        except UserError:
            for document, text in zip(owner.tolist(), texts):
                refuse_text(tokenizer, chunk, records[document][0], text)
            raise
        text_bytes = len("".join(texts).encode())
        results.append(
            pack(tokenizer, tokens, lengths, owner, len(records), append_eod, text_bytes, invalid)
        )
    return results


def refuse_text(tokenizer: Tokenizer, chunk: TextChunk, line: int, text: str) -> None:
    """Raise the error for a text that cannot be encoded; return if it can."""
    try:
        ids, _ = tokenizer.encode_many([text])
    except UserError as error:
        raise refuse_record(chunk, line, str(error)) from None
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise refuse_record(
            chunk,
            line,
            (
                f"token id {int(ids.max())} lies outside the vocabulary of "
                f"{tokenizer.vocab_size}: give a larger --vocab-size"
            ),
        )


def pack(
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    lengths: np.ndarray,
    owner: np.ndarray,
    documents: int,
    append_eod: bool,
    text_bytes: int,
    invalid: int = 0,
) -> Encoded:
    """Drop empty texts and put an end-of-document id after each document that is not empty, counted
    in its last sequence.
    """
    owner, lengths = owner[lengths > 0], lengths[lengths > 0]
    if append_eod and len(owner):
        last = np.append(owner[1:] != owner[:-1], True)  # the last sequence of its document
        tokens = np.insert(tokens, np.cumsum(lengths)[last], tokenizer.eod)
        lengths = lengths + last
    return Encoded(
        tokens=tokens.astype(best_dtype(tokenizer.vocab_size)),
        lengths=lengths.astype(np.int32),
        sequences=np.bincount(owner, minlength=documents),
        text_bytes=text_bytes,
        max_id=int(tokens.max()) if len(tokens) else -1,
        eod_count=int((tokens == tokenizer.eod).sum()),
        invalid=invalid,
    )


def encode_all(
    chunks: Iterator[TextChunk], workers: int, *rest: object
) -> Iterator[tuple[TextChunk, list[Encoded]]]:
    """encode_chunk over all chunks, in order, at most three tasks a worker in flight."""
    if workers == 1:
        yield from ((chunk, encode_chunk(chunk, *rest)) for chunk in chunks)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), initializer=_one_thread
    ) as pool:
        waiting: deque = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(encode_chunk, chunk, *rest)))
                if len(waiting) >= 3 * workers:
                    chunk, future = waiting.popleft()
                    yield chunk, future.result()
            while waiting:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process was killed, most likely for memory: give fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    """Workers are the parallelism: Hugging Face's library would add its own threads in each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Progress:
    """A line with rate and time left, after every `interval` documents but at most once a
    second.
    """

    def __init__(self, total: int, interval: int):
        self.total, self.interval, self.begun = total, interval, time.monotonic()
        self.cost = self.text = self.documents = self.shown = 0
        self.last = self.begun

    def rate(self) -> str:
        """Documents and megabytes of input so far, and the rate."""
        megabytes, took = self.text / 1e6, max(time.monotonic() - self.begun, 1e-9)
        return f"{self.documents:,} documents, {megabytes:,.1f} MB, {megabytes / took:.1f} MB/s"

    def add(self, chunk: TextChunk, documents: int) -> None:
        self.cost, self.text, self.documents = (
            self.cost + chunk.cost,
            self.text + chunk.end - chunk.begin,
            self.documents + documents,
        )
        now = time.monotonic()
        if now - self.last >= 1 and self.documents - self.shown >= self.interval:
            left = (now - self.begun) * (self.total - self.cost) / max(self.cost, 1)
            print(
                f"{self.rate()}, {100 * self.cost / max(self.total, 1):.0f}%, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
            self.last, self.shown = now, self.documents


def input_files(patterns: list[str]) -> list[str]:
    """Every file that the names and patterns give, in order. Raises DataError where one gives
    none.
    """
    files = []
    for pattern in patterns:
        found = (
            sorted(glob.glob(pattern))
            if glob.has_magic(pattern) and not os.path.exists(pattern)
            else [pattern]
        )
        if not found or not all(os.path.isfile(path) for path in found):
            raise DataError(f"--input {pattern}: no such file")
        files += found
    return files


def output_prefixes(prefix: str, keys: tuple[str, ...]) -> list[str]:
    """The prefix of each key's files. Raises DataError for one that cannot be written, before any
    work is done.
    """
    if len(set(keys)) < len(keys):
        raise DataError(f"--json-keys {' '.join(keys)}: a key is given twice; name each once")
    found = []
    for key in keys:
        name = f"{prefix}_{key}_document"
        if "/" in key or not key:
            raise DataError(
                f"--json-keys {key!r}: a key becomes part of a file's name, so it must not "
                "be empty or hold a slash"
            )
        if fault := path_fault(f"{name}.documents.part"):
            raise DataError(f"--output-prefix {prefix[:60]}, --json-keys {key[:60]}: {fault}")
        for path in (f"{name}.{ending}" for ending in ENDINGS):
            if os.path.lexists(path) and not os.path.isfile(path):
                raise DataError(
                    f"{path}: is a folder or no regular file; move it away, or give another "
                    "--output-prefix"
                )
        found.append(name)
    return found


def preprocess(arguments: argparse.Namespace) -> list[dict]:
    """Carry out the flags; returns the sidecar of each key. Raises UserError."""
    begun = time.monotonic()
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
    config = DataConfig(**{name: getattr(arguments, name) for name in names})
    keys, policy = tuple(arguments.json_keys), arguments.invalid_text
    prefixes = output_prefixes(arguments.output_prefix, keys)
    special = arguments.tokenizer_hf_include_special_tokens
    tokenizer, files = tokenizer_of(config, special), input_files(arguments.input)
    total = sum(os.path.getsize(path) for path in files)
    size = min(max(total // (32 * arguments.workers), SMALLEST_CHUNK), LARGEST_CHUNK)
    chunks = (chunk for path in files for chunk in chunks_of(path, size, keys))
    progress = Progress(total, arguments.log_interval)
    writers = [
        IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size)) for prefix in prefixes
    ]
    facts = [{"text_bytes": 0, "max_id": -1, "eod_count": 0, "invalid_texts": 0} for _ in keys]
    try:
        for chunk, results in encode_all(
            chunks, arguments.workers, config, special, keys, arguments.append_eod, policy
        ):
            for writer, fact, result in zip(writers, facts, results):
                write_chunk(writer, fact, result)
            progress.add(chunk, len(results[0].sequences))
        for key, writer in zip(keys, writers):
            if not writer.num_tokens:
                raise DataError(
                    f"{', '.join(files)}: not one token under the key {key!r}: the input is empty"
                )
        of_all = facts_of_run(arguments, tokenizer)
        sidecars = [writer.complete(of_all | fact) for writer, fact in zip(writers, facts)]
        for writer in writers:  # when all are whole
            writer.publish()
    finally:
        for writer in writers:
            writer.discard()
    print_summary(writers, sidecars, policy)
    print(f"{progress.rate()}, {time.monotonic() - begun:.1f} s")
    return sidecars


def write_chunk(writer: IndexedDatasetWriter, fact: dict[str, int], result: Encoded) -> None:
    """The documents of a chunk to the files of a key, and into what its sidecar counts."""
    writer.add(result.tokens, result.lengths, result.sequences)
    fact["text_bytes"] += result.text_bytes
    fact["max_id"] = max(fact["max_id"], result.max_id)
    fact["eod_count"] += result.eod_count
    fact["invalid_texts"] += result.invalid


def facts_of_run(arguments: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the sidecars of all keys have in common."""
    return {
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        },
        "append_eod": arguments.append_eod,
        "include_special_tokens": arguments.tokenizer_hf_include_special_tokens,
        "invalid_text": arguments.invalid_text,
    }


def print_summary(writers: list[IndexedDatasetWriter], sidecars: list[dict], policy: str) -> None:
    """A line for each key, and what became of texts that UTF-8 cannot hold."""
    for writer, sidecar in zip(writers, sidecars):
        empty = sidecar["empty_documents"]
        print(
            f"{writer.prefix}.bin: {sidecar['documents']:,} documents"
            f"{f' ({empty:,} of them empty)' if empty else ''}, {sidecar['tokens']:,} tokens, "
            f"{sidecar['text_bytes'] / sidecar['tokens']:.2f} bytes of text a token, largest "
            f"id {sidecar['max_id']}"
        )
    if invalid := sidecars[0]["invalid_texts"]:
        what = "replaced by U+FFFD" if policy == "replace" else "left out"
        print(
            f"{invalid:,} lines with characters that UTF-8 cannot hold: "
            f"{what} (--invalid-text {policy})"
        )


def _tokenizer_type(kind: str) -> str:
    """The trainer's name of a kind of tokenizer. Raises ArgumentTypeError."""
    try:
        return translate_value("--tokenizer-type", [kind])[0][0]
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


# Flags of other preprocessing programs: what becomes of each.
NOTES = {
    "--partitions": "--workers processes share the input",
    "--keep-sequential-samples": "documents always keep their order",
    "--chunk-size": "the size of chunks is chosen here",
    "--keep-newlines": "has no effect without --split-sentences, which is refused",
    "--lang": "has no effect without --split-sentences, which is refused",
    "--dataset-type": "the one format there is",
    "--num-docs": "progress is measured in bytes of the input",
}
RENAMED = {"--jsonl-keys": "--json-keys", "--dataset-format": "--dataset-impl"}
REFUSED = {
    "--split-sentences": "documents are encoded whole; remove it",
    "--ftfy": "text is encoded as it is; repair it before, and remove the flag",
}


def read_flags(argv: list[str]) -> argparse.Namespace:
    """The flags of a command line; flags of other programs are answered by the trainer's table.

    Prints a note for each that changes nothing here. Raises one ArgumentErrors with all faults.
    """
    flags = parser()
    if any(word in ("-h", "--help") for word in argv):
        flags.parse_args(argv)
    occurrences, faults = split_words(argv)
    kept: list[str] = []
    for flag, words in occurrences:
        try:
            for ours, values in _as_ours(flag, words, flags):
                kept += [ours, *values]
        except UserError as problem:
            faults.append(f"{' '.join([flag, *words])[:80]}: {problem}")
    try:
        read = flags.parse_args(kept)
    except UserError as problem:
        faults.append(str(problem))
    if faults:
        raise ArgumentErrors(faults)
    return read


def _as_ours(flag: str, words: list[str], flags: argparse.ArgumentParser) -> list[Occurrence]:
    """A flag and its words as flags of this tool: none where it changes nothing. Raises
    UserError.
    """
    known = {
        compatibility.key(name): name for action in flags._actions for name in action.option_strings
    }
    name = RENAMED.get(compatibility.key(flag), compatibility.key(flag))
    if name in known:
        return [(known[name], words)]
    if name in REFUSED:
        raise UserError(REFUSED[name])
    row = compatibility.rows().get(name)
    if row is not None and row.verdict in ("equals", "choice"):
        found = row.rewrite(words)
        return [pair for ours, values in found for pair in _as_ours(ours, values, flags)]
    note = NOTES.get(name, "has an effect only in training")
    if name not in NOTES and name not in options_by_flag():
        if row is None:
            raise UserError(f"unknown flag{did_you_mean(name, known)}")
        if row.verdict == "refused" and "tokenizer" in name:
            raise UserError(row.text)
        if row.verdict == "note":
            note = row.text
    print(f"{flag}: {note}")
    return []


KINDS = [
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


def parser() -> argparse.ArgumentParser:
    """Megatron's flags for this tool."""
    flags = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_file_flags(flags)
    _add_tokenizer_flags(flags)
    flags.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="worker processes (default: one a core)",
    )
    flags.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines (at most one a second)",
    )
    return flags


def _add_file_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or patterns: JSON lines or a JSON array, also compressed; parquet",
    )
    flags.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys whose text is encoded, each to its own files",
    )
    flags.add_argument(
        "--output-prefix",
        required=True,
        help="files are named <this>_<key>_document.{bin,idx,json}",
    )
    flags.add_argument(
        "--dataset-impl", "--data-impl", choices=["mmap"], help="the one format there is"
    )


def _add_tokenizer_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--tokenizer-type", required=True, choices=KINDS, type=_tokenizer_type)
    flags.add_argument(
        "--tokenizer-model", help="SentencePiece model, tokenizer.json or .tiktoken file"
    )
    flags.add_argument("--vocab-file", help="GPT-2 BPE vocabulary")
    flags.add_argument("--merge-file", help="GPT-2 BPE merges")
    flags.add_argument(
        "--vocab-size",
        type=int,
        help="vocabulary of the NullTokenizer, without its end-of-document id",
    )
    flags.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help=(
            "add to each text what the post-processor of a tokenizer.json adds, such as a "
            "beginning-of-sequence token (default: no; Megatron-LM: yes)"
        ),
    )
    flags.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        dest="tokenizer_hf_include_special_tokens",
        action="store_false",
        help="Megatron-LM's spelling of the default",
    )
    flags.add_argument(
        "--append-eod", action="store_true", help="put the end-of-document id after each document"
    )
    flags.add_argument(
        "--invalid-text",
        choices=["error", "replace", "skip"],
        default="error",
        help=(
            "lines with bytes that are not UTF-8 or with half of a surrogate pair: stop, "
            "put U+FFFD there, or leave the line out"
        ),
    )


def main() -> None:
    escape_unencodable()
    try:
        arguments = read_flags(sys.argv[1:])
        if arguments.workers < 1:
            raise UserError("--workers must be at least 1")
        preprocess(arguments)
    except (UserError, OSError) as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
