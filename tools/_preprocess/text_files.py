"""Input files of preprocessing, cut into chunks of whole records: JSON lines, JSON arrays and
parquet. What a file is, and how it is compressed, is read from its first bytes.

A plain file of JSON lines is cut by position and read by the workers. All else is read once, in
order, and its chunks carry their text, one object a line.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron.data.indexed_dataset import DataError

PIECE = 1 << 20  # bytes of decompressed text
LARGEST_ELEMENT = 1 << 28  # characters of one object of a JSON array
ROWS_AT_ONCE = 64  # of a parquet file: a row may be a book
LARGEST_WINDOW = 1 << 31  # bytes; of `zstd --long=31`, the most that the format allows
BOM = codecs.BOM_UTF8
GZIP, BZIP2, XZ, ZSTD, PARQUET = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PAR1"
STDLIB: dict[bytes, Any] = {GZIP: gzip.open, BZIP2: bz2.open, XZ: lzma.open}
# first bytes -> what it is, and the fix
REFUSED = (
    (codecs.BOM_UTF32_LE, "is UTF-32: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (codecs.BOM_UTF32_BE, "is UTF-32: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (codecs.BOM_UTF16_LE, "is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (codecs.BOM_UTF16_BE, "is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"PK\x03\x04", "is a zip archive: unpack it"),
    (b"\x04\x22\x4d\x18", "is compressed with lz4, which is not read: decompress it (lz4 -d)"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive: unpack it"),
    (b"ARROW1", "is an Arrow file, which is not read: write parquet or JSON lines"),
)
SUFFIXES = (".gz", ".zst", ".bz2", ".xz")


@dataclass(frozen=True)
class TextChunk:
    """Whole records of one file: the bytes [begin, end) of a plain file, or `text`, one object a
    line, where the file must be read in order.
    """

    path: str
    begin: int  # position in the decompressed file
    end: int
    cost: int  # bytes of the file on disk, for the progress line
    text: bytes | None = None
    first: int | None = None  # number of its first element or row, where these are not lines


def chunks_of(path: str, size: int, keys: Sequence[str]) -> Iterator[TextChunk]:
    """Cut a file into chunks of about `size` bytes of text; of a table, the columns `keys`. Raises
    DataError for a file that cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(8)
        file.seek(0)
        if head.startswith(PARQUET):
            yield from _grouped(path, _parquet_lines(file, keys), size)
            return
        if not _compression(head):
            _refuse_encoding(path, head)
            if path.lower().endswith(SUFFIXES):
                _check_name(path, head)
            text = file.read(1 << 16).removeprefix(BOM).lstrip()
            file.seek(0)
            if not text.startswith(b"["):
                yield from _plain_chunks(file, size)
                return
        pieces = text_pieces(file)
        start, pieces = _peek(pieces)
        _refuse_encoding(path, start)
        is_array = start.removeprefix(BOM).lstrip().startswith(b"[")
        if is_array:
            yield from _grouped(path, _array_lines(file, pieces), size)
        else:
            yield from _streamed_chunks(file, pieces, size)


def text_pieces(file: BinaryIO) -> Iterator[bytes]:
    """The text of a plain or compressed file from its beginning, piece by piece. Raises DataError
    for a damaged or cut one.
    """
    head = file.read(8)
    file.seek(0)
    kind = _compression(head)
    if kind == ZSTD:
        return _zstd_pieces(file)
    if kind:
        return _stdlib_pieces(file, STDLIB[kind])
    return iter(functools.partial(file.read, PIECE), b"")


def refuse_record(chunk: TextChunk, number: int, problem: str) -> DataError:
    """The error for a record of a chunk, by its line in the file (counted only now), or its
    element or row. `number`: that of its line in the chunk, from 0.
    """
    if chunk.first is not None:
        return DataError(f"{chunk.path}, record {chunk.first + number + 1}: {problem}")
    left, before = chunk.begin, 0
    with open(chunk.path, "rb") as file:
        for piece in text_pieces(file):
            before += piece[:left].count(b"\n")
            left -= min(left, len(piece))
            if not left:
                break
    return DataError(f"{chunk.path}, line {before + number + 1}: {problem}")


def _compression(head: bytes) -> bytes:
    """The magic number of the compression, or nothing."""
    # a zstd file may start with a skippable frame
    if head.startswith(ZSTD) or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return ZSTD
    return next((magic for magic in STDLIB if head.startswith(magic)), b"")


def _check_name(path: str, head: bytes) -> None:
    """Refuse a file that is named as compressed and holds something else than plain text."""
    if head and head.removeprefix(BOM).lstrip()[:1] not in (b"{", b"[", b""):
        raise DataError(
            f"{path}, byte 0: its content is neither compressed, as its name suggests, nor JSON: "
            "download or compress it again"
        )


def _refuse_encoding(path: str, head: bytes) -> None:
    for magic, problem in REFUSED:
        if head.startswith(magic):
            raise DataError(f"{path} {problem}")


def _peek(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The text up to the first piece that is not blank, and all pieces."""
    start = b""
    for piece in pieces:
        start += piece
        if start.removeprefix(BOM).strip():
            break
    return start, itertools.chain([start], pieces)


def _damaged(file: BinaryIO, error: Exception) -> DataError:
    return DataError(
        f"{file.name}, byte {file.tell()}: cannot be decompressed ({error}): download or "
        "compress it again"
    )


def _stdlib_pieces(file: BinaryIO, opened: Any) -> Iterator[bytes]:
    try:
        with opened(file) as stream:
            while piece := stream.read(PIECE):
                yield piece
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(file, error) from None


def _zstd_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Of any number of frames."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{file.name}: needs the package zstandard ({error}): pip install zstandard"
        ) from None
    frame, rest = None, b""
    try:
        while piece := rest or file.read(1 << 17):
            if frame is None:
                reader = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
                frame = reader.decompressobj()
            yield frame.decompress(piece)
            rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise _damaged(file, error) from None
    if frame:
        raise DataError(
            f"{file.name}, byte {file.tell()}: the file is cut off: download or compress it again"
        )


def _plain_chunks(file: BinaryIO, size: int) -> Iterator[TextChunk]:
    """Cut a plain file at line ends, without reading it."""
    total, begin = os.fstat(file.fileno()).st_size, 0
    while begin < total:
        file.seek(min(begin + size, total))
        file.readline()
        end = file.tell()
        yield TextChunk(file.name, begin, end, end - begin)
        begin = end


def _streamed_chunks(file: BinaryIO, pieces: Iterator[bytes], size: int) -> Iterator[TextChunk]:
    """Cut the text of a compressed file at line ends."""
    held, begin, counted = bytearray(), 0, 0
    for piece in pieces:
        held += piece
        cut = held.rfind(b"\n") + 1 if len(held) >= size else 0
        if cut:
            yield TextChunk(file.name, begin, begin + cut, file.tell() - counted, bytes(held[:cut]))
            begin, counted = begin + cut, file.tell()
            del held[:cut]
    if held:
        yield TextChunk(file.name, begin, begin + len(held), file.tell() - counted, bytes(held))


def _grouped(path: str, lines: Iterator[tuple[bytes, int]], size: int) -> Iterator[TextChunk]:
    """Chunks of lines that hold a record each and come with the bytes of the file read so far."""
    held: list[bytes] = []
    begin = length = first = number = counted = read = 0
    for number, (line, read) in enumerate(lines, 1):
        held.append(line)
        length += len(line)
        if length >= size:
            yield TextChunk(path, begin, begin + length, read - counted, b"".join(held), first)
            begin, first, counted = begin + length, number, read
            held, length = [], 0
    if held:
        yield TextChunk(path, begin, begin + length, read - counted, b"".join(held), first)


def _array_lines(file: BinaryIO, pieces: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
    """The elements of a JSON array, one a line."""
    for element in _ArrayReader(file.name, pieces):
        # outside of strings, where JSON has none, a line end is white space
        line = element.replace("\n", " ").replace("\r", " ") + "\n"
        yield line.encode(errors="surrogateescape"), file.tell()


class _ArrayReader:
    """The elements of a JSON array, as text; the array's text comes in pieces."""

    def __init__(self, path: str, pieces: Iterator[bytes]):
        self.path, self.pieces = path, pieces
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        self.scan = json.JSONDecoder().raw_decode
        self.text, self.at = "", 0  # what is held of the text, and the position in it
        self.count = 0  # elements before this position
        self.over = False  # no more text comes

    def __iter__(self) -> Iterator[str]:
        """Raises DataError for text that is not one array of values."""
        self._read()
        self.text = self.text.removeprefix("\ufeff")
        self._skip_to("[")
        self.at += 1
        is_open = self._skip_to("") != "]"
        while is_open:
            self._skip_to("")
            end = self._end_of_element()
            yield self.text[self.at : end]
            self.at, self.count = end, self.count + 1
            is_open = self._skip_to(",]") == ","
            self.at += is_open
        self.at += 1
        if self._skip_blanks():
            raise self._error("something follows the array: write each array to a separate file")

    def _read(self) -> None:
        """Append as much text as is held, so that no element is parsed often."""
        self.text, self.at = self.text[self.at :], 0
        found, wanted = [self.text], max(PIECE, len(self.text))
        while wanted > 0 and not self.over:
            piece = next(self.pieces, None)
            self.over = piece is None
            found.append(self.decode(piece or b"", self.over))
            wanted -= len(found[-1])
        self.text = "".join(found)

    def _skip_blanks(self) -> str:
        """Skip white space; the next character, or nothing at the end of the file."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text) or self.over:
                return self.text[self.at : self.at + 1]
            self._read()

    def _skip_to(self, expected: str) -> str:
        """Skip white space; the next character, one of those expected. Raises DataError."""
        found = self._skip_blanks()
        if found and (not expected or found in expected):
            return found
        names = " or ".join(map(repr, expected)) or "an element"
        raise self._error(
            f"not a JSON array (found {repr(found) if found else 'the end of the file'}, "
            f"expected {names}): repair the file"
        )

    def _end_of_element(self) -> int:
        """Where the element at this position ends. Raises DataError."""
        while True:
            problem, end = self._parse()
            # more text may complete an element, and a number; what is wrong further ahead is wrong
            cut = problem.startswith("Unterminated") or end > len(self.text) - 16
            incomplete = cut if problem else end == len(self.text)
            if self.over or not incomplete or len(self.text) - self.at > LARGEST_ELEMENT:
                break
            self._read()
        if problem:
            raise self._error(f"not JSON ({problem}): repair or remove it")
        return end

    def _parse(self) -> tuple[str, int]:
        """(what is wrong, where), or nothing and where the element ends."""
        try:
            return "", self.scan(self.text, self.at)[1]
        except RecursionError:
            raise self._error("nested too deep for the parser: repair or remove it") from None
        except json.JSONDecodeError as error:
            return error.msg, error.pos

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self.path}, record {self.count + 1}: {problem}")


def _parquet_lines(file: BinaryIO, keys: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """The rows of a parquet file, each an object of the columns `keys`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{file.name}: is a parquet file and needs the package pyarrow ({error}): pip install "
            "pyarrow, or write the file as JSON lines"
        ) from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        for key in keys:
            if key not in names:
                raise DataError(
                    f"{file.name}: has no column {key!r}, but {', '.join(map(repr, names))}: name "
                    "the right one with --json-keys"
                )
        total, rows = os.fstat(file.fileno()).st_size, table.metadata.num_rows
        batches = table.iter_batches(ROWS_AT_ONCE, columns=list(dict.fromkeys(keys)))
        decoded = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(decoded, 1):
            yield (json.dumps(row, default=_text) + "\n").encode(), total * number // rows
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{file.name}: cannot be read as parquet ({str(error).splitlines()[0]}): download or "
            "write it again"
        ) from None


def _text(value: Any) -> str | None:
    """The text of a value that JSON lacks: bytes are UTF-8; of any other type there is none."""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else None
