"""Atomic writer of Megatron's indexed dataset (format: megatron/data/indexed_dataset.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from megatron.config.input_files import JsonObject
from megatron.data.indexed_dataset import (
    CHUNK,
    DTYPES,
    HEADER,
    MAGIC,
    file_digest,
    table_offsets,
)

CODES = {dtype: code for code, dtype in DTYPES.items()}


def best_dtype(vocab_size: int) -> np.dtype:
    """Megatron's rule: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


class IndexedDatasetWriter:
    """Writes one prefix. Nothing appears under the final names before `publish`; the index is
    spooled, so memory stays bounded.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._parts = {
            kind: Path(f"{prefix}.{kind}.part") for kind in ("bin", "idx", "json", "documents")
        }
        self._bin, self._idx, self._documents = (
            open(self._parts[kind], "w+b") for kind in ("bin", "idx", "documents")
        )
        self._idx.write(bytes(HEADER.size))  # the real header once S and D are known
        self._digest = xxhash.xxh3_128()
        self.num_sequences = self.num_documents = self.num_tokens = self.empty_documents = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray) -> None:
        """Append documents: all their token ids, the length of each sequence [S'], each document's
        number of sequences [D'].
        """
        assert (
            tokens.dtype == self.dtype
            and len(tokens) == lengths.sum()
            and len(lengths) == sequences.sum()
        )
        self._digest.update(np.ascontiguousarray(tokens))
        self._bin.write(tokens.data)
        self._idx.write(lengths.astype("<i4").data)
        self._documents.write((self.num_sequences + np.cumsum(sequences)).astype("<i8").data)
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences)
        self.num_tokens += len(tokens)
        self.empty_documents += int((np.asarray(sequences) == 0).sum())

    def complete(self, sidecar: JsonObject) -> JsonObject:
        """Complete the index and write the sidecar (given facts + counts, sizes, digests), durably
        and still unpublished; returns it.
        """
        self._complete_index()
        for file in (self._bin, self._idx):
            _sync(file)
        complete = {
            "format": 1,
            "dtype": self.dtype.name,
            "sequences": self.num_sequences,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "empty_documents": self.empty_documents,
            "files": {
                "bin": self._size_and_digest("bin", self._digest.hexdigest()),
                "idx": self._size_and_digest("idx", file_digest(self._parts["idx"])),
            },
            **sidecar,
        }
        with open(self._parts["json"], "w") as described:
            json.dump(complete, described, indent=1)
            _sync(described)
        return complete

    def _complete_index(self) -> None:
        """Write what follows the lengths in the index (offsets, documents), then the header."""
        self._write_offsets()
        self._idx.seek(table_offsets(self.num_sequences)[2])
        self._idx.write(bytes(8))  # the document index begins with a 0
        self._documents.seek(0)
        while piece := self._documents.read(1 << 22):
            self._idx.write(piece)
        self._idx.seek(0)
        self._idx.write(
            HEADER.pack(MAGIC, 1, CODES[self.dtype], self.num_sequences, self.num_documents + 1)
        )

    def _write_offsets(self) -> None:
        """Write where in .bin each sequence begins: the sum of the lengths before it, in bytes."""
        lengths_at, offsets_at, _ = table_offsets(self.num_sequences)
        offset = 0
        for begin in range(0, self.num_sequences, CHUNK):
            count = min(CHUNK, self.num_sequences - begin)
            self._idx.seek(lengths_at + 4 * begin)
            lengths = np.frombuffer(self._idx.read(4 * count), "<i4").astype(np.int64)
            ends = np.cumsum(lengths * self.dtype.itemsize)
            self._idx.seek(offsets_at + 8 * begin)
            self._idx.write((offset + np.concatenate([[0], ends[:-1]])).astype("<i8").data)
            offset += int(ends[-1])

    def _size_and_digest(self, kind: str, digest: str) -> JsonObject:
        return {"bytes": self._parts[kind].stat().st_size, "xxh3_128": digest}

    def publish(self) -> None:
        """Move all three files into place."""
        # an old index must never meet the new .bin
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for kind in ("bin", "json", "idx"):
            os.replace(self._parts[kind], f"{self.prefix}.{kind}")
        self.discard()

    def discard(self) -> None:
        """Close and delete the unfinished files."""
        for file in (self._bin, self._idx, self._documents):
            file.close()
        for path in self._parts.values():
            path.unlink(missing_ok=True)
