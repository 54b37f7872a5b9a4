"""Datasets that tests of data write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.tools._preprocess.writer import IndexedDatasetWriter

from megatron.config.groups import DataConfig
from megatron.data.indexed_dataset import IndexedDataset, table_offsets
from megatron.data.tokenizer import build_tokenizer


def document_index(data: IndexedDataset) -> np.ndarray:
    """0, and the number of sequences at each document's end."""
    begin = table_offsets(data.num_sequences)[2]
    return np.frombuffer(data.idx_path.read_bytes()[begin:], "<i8")


def write(
    prefix: Path | str,
    texts: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    dtype: str = "u2",
    text_bytes: int | None = None,
    sidecar: bool = True,
) -> str:
    """A dataset of a NullTokenizer whose last id, `vocab_size`, ends a document."""
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size))
    made = {
        "name": "NullTokenizer",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": vocab_size + 1,
        "eod": vocab_size,
    }
    writer, ids = IndexedDatasetWriter(str(prefix), np.dtype(dtype)), np.concatenate(texts)
    writer.add(ids.astype(dtype), np.array([*map(len, texts)]), np.ones(len(texts), int))
    facts = {"max_id": int(ids.max()), "eod_count": int((ids == vocab_size).sum())}
    writer.complete({**facts, "tokenizer": made, "text_bytes": text_bytes or len(ids)})
    writer.publish()
    if not sidecar:
        Path(f"{prefix}.json").unlink()
    return str(prefix)
