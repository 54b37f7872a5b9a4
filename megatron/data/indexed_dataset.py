"""Checked memory-mapped reader of Megatron's indexed dataset, `<prefix>.bin` + `<prefix>.idx`.

`.bin` holds token ids back to back. `.idx` is little-endian and packed: 9 magic bytes, uint64
version, uint8 dtype code, uint64 S, uint64 D, int32[S] lengths in tokens, int64[S] byte offsets in
.bin, int64[D] document index (0, then the sequences so far at each document's end), not read here.
`<prefix>.json`, the sidecar, is ours: what preprocessing knew (tokenizer, largest id,
end-of-document count, digests).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron.config.errors import UserError
from megatron.config.input_files import (
    SETTINGS_LIMIT,
    InputError,
    JsonObject,
    open_regular,
    read_json,
)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D: 34 bytes
DTYPES = dict(enumerate(map(np.dtype, "u1 i1 <i2 <i4 <i8 <f8 <f4 <u2".split()), 1))  # by code
PROBES = 1024
CHUNK = 1 << 22  # entries or tokens handled at once by full passes
REMAKE = "copy both files again or run tools/preprocess_data.py again"


class DataError(UserError):
    """Faulty data: names the file, the byte if there is one, the fault and the fix."""


def probes(count: int) -> np.ndarray:
    """At most 1,024 evenly spaced positions in [0, count), first and last included, ascending."""
    if count <= PROBES:
        return np.arange(count)
    return np.linspace(0, count - 1, PROBES).astype(np.int64)


def table_offsets(sequences: int) -> tuple[int, int, int]:
    """Bytes of .idx at which its lengths, its offsets and its document index begin."""
    return HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > 0:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (InputError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}; give the prefix of both files, without .bin or "
            ".idx, or make them with tools/preprocess_data.py"
        ) from None
    raise DataError(f"{path}: the file is empty: cut off, or made from an empty input; {REMAKE}")


def _prefetch(mapped: mmap.mmap, begins: np.ndarray, length: int) -> None:
    """Ask the disk for `length` bytes at all positions: one latency instead of thousands."""
    ends = np.minimum(begins + length, len(mapped)) - 1
    pages = np.concatenate([begins, ends]) // mmap.PAGESIZE
    for page in set(pages.tolist()):
        mapped.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)


def _header(path: Path, index: mmap.mmap) -> tuple[np.dtype, int]:
    """Type of the ids and number of sequences."""
    header = index[: HEADER.size].ljust(HEADER.size, b"\0")
    magic, version, code, sequences, entries = HEADER.unpack(header)
    dtype = DTYPES.get(code)
    if (magic, version) != (MAGIC, 1) or dtype is None or dtype.kind == "f":
        raise DataError(
            f"{path}, byte 0: not an index of Megatron's format: it begins with {magic!r}, "
            f"version {version} and dtype code {code}, and an index with {MAGIC!r}, version 1 "
            f"and the code of an integer type; {REMAKE}"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    if len(index) != expected or entries < 1:
        raise DataError(
            f"{path}, byte 18: {sequences} sequences and {entries} document entries need "
            f"{expected} bytes, the file has {len(index)}: cut off or damaged; {REMAKE}"
        )
    return dtype, sequences


class IndexedDataset:
    """An opened prefix. Opening takes the same time for any corpus size: it reads the header and
    evenly spaced entries.

    tokens [num_tokens]: all token ids, memory-mapped. lengths and offsets [S]: the index,
    memory-mapped. sidecar: `<prefix>.json`, or None. fingerprint: hex digest of sizes,
    header, spaced index entries and spaced pieces of .bin, independent of the path. Raises
    DataError.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.bin_path, self.idx_path, self.sidecar_path = (
            Path(f"{prefix}.{end}") for end in ("bin", "idx", "json")
        )
        index, content = _map(self.idx_path), _map(self.bin_path)
        self.dtype, self.num_sequences = _header(self.idx_path, index)
        lengths_at, offsets_at, _ = table_offsets(self.num_sequences)
        self.lengths = np.frombuffer(index, "<i4", self.num_sequences, lengths_at)
        self.offsets = np.frombuffer(index, "<i8", self.num_sequences, offsets_at)
        index.madvise(mmap.MADV_RANDOM)  # spaced reads: no read-ahead
        self._check_spaced_entries(index)
        self._check_total(len(content))
        self.tokens = np.frombuffer(content, self.dtype)
        self.num_tokens = len(self.tokens)
        self.sidecar = self._read_sidecar([len(content), len(index), self.num_tokens])
        self.fingerprint = self._fingerprint(index, content)

    def _check_spaced_entries(self, index: mmap.mmap) -> None:
        """Check at most 1,024 sequences, whose entries are asked of the disk together."""
        at = probes(self.num_sequences)
        for begin, width in zip(table_offsets(self.num_sequences), (4, 8)):
            # each is compared with the one before it
            _prefetch(index, begin + width * np.maximum(at - 1, 0), 2 * width)
        self._check_sequences(at)

    def _ends(self, at: Any) -> Any:
        """Byte of .bin at which each of the sequences `at` ends."""
        return self.offsets[at] + self.lengths[at].astype(np.int64) * self.dtype.itemsize

    def _check_sequences(self, at: np.ndarray) -> None:
        """Check that the sequences `at` lie back to back from 0 on, and have no negative length."""
        ends = np.where(at == 0, 0, self._ends(np.maximum(at - 1, 0)))
        begins = self.offsets[at]
        for k in np.flatnonzero(begins != ends)[:1]:
            byte = table_offsets(self.num_sequences)[1] + 8 * at[k]
            raise DataError(
                f"{self.idx_path}, byte {byte}: sequence {at[k]} "
                f"begins at byte {begins[k]} of .bin, the one before it ends at {ends[k]}: "
                f"sequences must lie back to back; {REMAKE}"
            )
        lengths = self.lengths[at]
        for k in np.flatnonzero(lengths < 0)[:1]:
            where = f"{self.idx_path}, byte {HEADER.size + 4 * at[k]}"
            raise DataError(f"{where}: sequence {at[k]} has {lengths[k]} tokens; {REMAKE}")

    def _check_total(self, size: int) -> None:
        total = int(self._ends([-1])[0]) if self.num_sequences else 0
        if size != total:
            raise DataError(
                f"{self.bin_path}, byte {min(size, total)}: the file has {size} bytes, its "
                f"index describes {total}: cut off or damaged; {REMAKE}"
            )

    def _read_sidecar(self, sizes: list[int]) -> JsonObject | None:
        if not os.path.lexists(self.sidecar_path):
            return None
        try:
            sidecar = read_json(self.sidecar_path, dict, SETTINGS_LIMIT)
            files, tokenizer = sidecar["files"], sidecar["tokenizer"]
            numbers = [sidecar["max_id"], sidecar["eod_count"], tokenizer["eod"]]
            texts = [files[kind]["xxh3_128"] for kind in ("bin", "idx")]
            texts.append(tokenizer["fingerprint"])
            described = [files[kind]["bytes"] for kind in ("bin", "idx")]
            described.append(sidecar.get("tokens", self.num_tokens))
            if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
                raise TypeError("a value of another type")
        except (InputError, KeyError, TypeError) as error:
            reason = error if isinstance(error, InputError) else repr(error)
            raise DataError(
                f"{self.sidecar_path}: not a sidecar of tools/preprocess_data.py ({reason}); "
                "delete it or make the data again"
            ) from None
        if described != sizes:
            raise DataError(
                f"{self.sidecar_path}: describes other files ({described}: bytes of .bin, bytes "
                f"of .idx, tokens) than these ({sizes}); copy all three files again, or delete it"
            )
        return sidecar

    def _fingerprint(self, index: mmap.mmap, content: mmap.mmap) -> str:
        sizes = struct.pack("<QQ", len(index), len(content))
        digest = hashlib.blake2b(index[: HEADER.size] + sizes, digest_size=16)
        at = probes(self.num_sequences)
        digest.update(self.lengths[at].tobytes() + self.offsets[at].tobytes())
        pieces = np.linspace(0, max(self.num_tokens - 512, 0), 64).astype(np.int64)
        _prefetch(content, pieces * self.dtype.itemsize, 512 * self.dtype.itemsize)
        for begin in pieces:
            digest.update(self.tokens[begin : begin + 512].tobytes())
        return digest.hexdigest()

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text for each token, where the sidecar knows them."""
        text_bytes = (self.sidecar or {}).get("text_bytes")
        return text_bytes / self.num_tokens if text_bytes else None

    def first_token(self, sequence: int) -> int:
        """Position in `tokens` at which sequence 0..S begins (S: the end of the data)."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.offsets[sequence]) // self.dtype.itemsize

    def sequence(self, index: int) -> np.ndarray:
        """Token ids of one sequence, [length]."""
        begin = self.first_token(index)
        return self.tokens[begin : begin + int(self.lengths[index])]

    def contains(self, token: int) -> bool:
        """Whether a token id occurs anywhere: reads from the front until it is found."""
        chunks = (self.tokens[k : k + CHUNK] for k in range(0, self.num_tokens, CHUNK))
        return any(token in chunk for chunk in chunks)

    def check(self, vocab_size: int) -> None:
        """Read every index entry and every id, compare digests with the sidecar. Raises DataError
        at the first fault.
        """
        for begin in range(0, self.num_sequences, CHUNK):
            stop = min(begin + CHUNK, self.num_sequences)
            self._check_sequences(np.arange(begin, stop))
        digest = xxhash.xxh3_128()
        for begin in range(0, self.num_tokens, CHUNK):
            piece = self.tokens[begin : begin + CHUNK]
            self.refuse_foreign_ids(piece, begin, vocab_size)
            digest.update(piece)
        if not self.sidecar:
            return
        found = {"bin": digest.hexdigest(), "idx": file_digest(self.idx_path)}
        for kind, value in found.items():
            if self.sidecar["files"][kind]["xxh3_128"] != value:
                raise DataError(
                    f"{self.prefix}.{kind}: its digest differs from the one in "
                    f"{self.sidecar_path}: changed since it was made; {REMAKE}"
                )

    def refuse_foreign_ids(self, ids: np.ndarray, position: int, vocab_size: int) -> None:
        """Raise DataError if one of `ids` (which begin at token `position`) lies outside [0,
        vocab_size).
        """
        if int(ids.max()) < vocab_size and int(ids.min()) >= 0:
            return
        k = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise DataError(
            f"{self.bin_path}, byte {(position + k) * self.dtype.itemsize}: token id "
            f"{int(ids[k])} lies outside the vocabulary of {vocab_size}: "
            "give the tokenizer the data was made with, preprocess the text again with this one, "
            "or train on the ids alone with "
            f"--tokenizer-type NullTokenizer --vocab-size {ids.max()}, which takes that "
            "id as the end of document"
        )

    def check_ends(self, vocab_size: int) -> None:
        """Check the ids of the first and the last sequence, where an end-of-document id outside of
        the vocabulary shows. Raises DataError.
        """
        for index in {0, self.num_sequences - 1}:
            ids = self.sequence(index)
            if len(ids):
                self.refuse_foreign_ids(ids, self.first_token(index), vocab_size)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
