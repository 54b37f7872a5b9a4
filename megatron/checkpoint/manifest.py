"""What a checkpoint's bytes mean: file names, safetensors headers, digest tables, the manifest, and boxes (docs/checkpoint.md).

Everything here is pure: bytes to values and back, with every bound checked. writer.py and reader.py do the file work.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

CHUNK = 1 << 20  # bytes of shard data under one digest
ALIGN = 4096  # tensor data starts at a multiple of this
HEADER_LIMIT = 100_000_000  # bytes; also the limit of the safetensors library
MANIFEST_LIMIT = 1 << 28  # bytes
MANIFEST = "MANIFEST.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "sharded-safetensors"
VERSION = 1

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the text names the file, what is wrong with it, and what to do."""


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def shard_file(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def table_file(index: int) -> str:
    return f"shard-{index:05d}.digests"


def list_iterations(root: Path) -> list[int]:
    """Iterations that have a folder under `root`, newest first (none when there is no `root`); each may be whole or damaged.

    Raises CheckpointError when `root` cannot be listed.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror}") from error
    matches = (re.fullmatch(r"iter_(\d{7,18})", name) for name in names)
    found = {int(match[1]) for match in matches if match and match[0] == iteration_folder(int(match[1]))}
    return sorted(found, reverse=True)


# ---- one shard's safetensors header -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor inside a safetensors file: its bytes are [start, stop) counted from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_header(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The bytes before the data of a safetensors file that holds `tensors` (key, dtype, shape) back to back in this order.

    8 bytes little-endian length, JSON, spaces up to a multiple of ALIGN.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for key, dtype, shape in tensors:
        assert key not in header, f"two tensors named {key}"
        stop = position + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(8 + len(body)) % ALIGN)
    return struct.pack("<Q", len(body)) + body


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def decode_header(raw: bytes, data_bytes: int, path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries by key, and the metadata, of the header `raw` (length word included) of a file with `data_bytes` of data after it.

    Raises CheckpointError unless the tensors fill the data exactly, without holes or overlaps.
    """
    try:
        header = json.loads(raw[8:], object_pairs_hook=_unique_keys)
        metadata = header.pop("__metadata__", {})
        entries = {}
        for key, value in header.items():
            dtype, shape, (start, stop) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
                raise ValueError(f"{key}: a size is not a natural number")
            if stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{key}: {stop - start} bytes for shape {shape}")
            entries[key] = Entry(dtype, shape, start, stop)
        position = 0
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != position:
                raise ValueError(f"{key}: begins at byte {entry.start}, the tensor before it ends at {position}")
            position = entry.stop
        if position != data_bytes:
            raise ValueError(f"the tensors end at byte {position}, the file's data at {data_bytes}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        unknown = f"unknown dtype or missing field {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: the safetensors header is malformed: {unknown}") from error
    return entries, metadata


# ---- one shard's digest table -----------------------------------------------------------------------------------------

_TABLE = struct.Struct("<8sQQQ")
_TABLE_MAGIC = b"XXH3TBL1"


@dataclass(frozen=True)
class DigestTable:
    """xxh3-128 of a shard's header with its padding, and of every `chunk` bytes of its data."""

    chunk: int
    data_start: int
    size: int  # of the whole shard file
    header: bytes  # 16 bytes
    chunks: tuple[bytes, ...]  # 16 bytes each

    def encode(self) -> bytes:
        return _TABLE.pack(_TABLE_MAGIC, self.chunk, self.data_start, self.size) + self.header + b"".join(self.chunks)

    @staticmethod
    def decode(raw: bytes, path: Path) -> DigestTable:
        """Raises CheckpointError for anything that `encode` cannot have written."""
        if len(raw) < _TABLE.size + 16 or raw[:8] != _TABLE_MAGIC:
            raise CheckpointError(f"{path}: not a digest table")
        _, chunk, data_start, size = _TABLE.unpack_from(raw)
        digests = tuple(raw[at : at + 16] for at in range(_TABLE.size, len(raw), 16))
        sound = chunk >= 1 and 8 <= data_start <= min(size, HEADER_LIMIT)
        if not sound or len(digests) != 1 + -(-(size - data_start) // chunk) or len(digests[-1]) != 16:
            raise CheckpointError(f"{path}: the digest table's fields contradict each other")
        return DigestTable(chunk, data_start, size, digests[0], digests[1:])


# ---- the manifest -----------------------------------------------------------------------------------------------------


def encode_manifest(content: dict[str, Any]) -> bytes:
    """JSON that carries the digest of its own content: the digest is of the exact bytes between `"manifest": ` and the last brace.

    Raises CheckpointError when `content` is not JSON.
    """
    return _frame(_json(content, indent=1))


def state_digests(state: dict[str, Any]) -> dict[str, str]:
    """A short digest of each value of `state`, by which ranks compare theirs; raises CheckpointError when it is not JSON."""
    return {key: xxh3_128_hexdigest(_json(value))[:8] for key, value in state.items()}


def _json(content: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(content, indent=indent).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's state must be JSON (numbers, strings, lists, dictionaries): {error}") from error


def _frame(body: bytes) -> bytes:
    return b'{"digest": "' + xxh3_128_hexdigest(body).encode() + b'",\n"manifest": ' + body + b"}\n"


_FRAME_HEAD = len(_frame(b"")) - 2


def decode_manifest(raw: bytes, path: Path) -> dict[str, Any]:
    """The content of a manifest; raises CheckpointError unless every byte is as written and every field sound."""
    body = raw[_FRAME_HEAD:-2]
    if raw != _frame(body):
        raise CheckpointError(f"{path}: damaged: its content does not match the digest that it carries")
    try:
        content = json.loads(body)
        if content["format"] != FORMAT or content["version"] != VERSION:
            known = f"this program reads {FORMAT!r} version {VERSION}"
            raise ValueError(f"format {content['format']!r} version {content['version']!r}; {known}")
        if type(content["iteration"]) is not int or not isinstance(content["state"], dict) or not content["shards"]:
            raise ValueError("iteration, state or shards are not what they should be")
        if not isinstance(content["attempt"], str) or not isinstance(content["created"], str):
            raise ValueError("attempt or created is not text")
        for index, shard in enumerate(content["shards"]):
            # Names are derived, never followed: a manifest cannot point outside its folder.
            if shard["file"] != shard_file(index):
                raise ValueError(f"shard {index} is named {shard['file']!r}, not {shard_file(index)!r}")
            if type(shard["bytes"]) is not int or not re.fullmatch("[0-9a-f]{32}", shard["table_digest"]):
                raise ValueError(f"shard {index}: size or digest malformed")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest of this format: {error}") from error
    return content


def table_digest(raw: bytes) -> str:
    return xxh3_128_hexdigest(raw)


def chunk_digest(data: Any) -> bytes:
    return xxh3_128(data).digest()


def chunk_hasher() -> Any:
    """The same of a chunk given in parts: update(part), digest(), reset()."""
    return xxh3_128()


# ---- boxes ------------------------------------------------------------------------------------------------------------


def box_key(name: str, offset: tuple[int, ...]) -> str:
    """`name@o0,o1,...`: the key of a box in its shard."""
    return f"{name}@{','.join(map(str, offset))}"


def parse_key(key: str, path: Path) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"([^@]+)@(\d+(?:,\d+)*|)", key)
    if not match:
        raise CheckpointError(f"{path}: tensor key {key!r} is not of the form name@offsets")
    return match[1], tuple(int(n) for n in match[2].split(",")) if match[2] else ()


def intersect(offset_a: tuple, extent_a: tuple, offset_b: tuple, extent_b: tuple) -> tuple[tuple, tuple] | None:
    """(low, high) of the common part of two boxes, or None."""
    low = tuple(map(max, offset_a, offset_b))
    high = tuple(min(oa + ea, ob + eb) for oa, ea, ob, eb in zip(offset_a, extent_a, offset_b, extent_b))
    return (low, high) if all(l < h for l, h in zip(low, high)) else None


def tiles(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (offset, extent) cover `shape` exactly once: counted on the grid of their own edges."""
    edges = [sorted({0, n, *(o[d] for o, _ in boxes), *(o[d] + e[d] for o, e in boxes)}) for d, n in enumerate(shape)]
    if any(line[0] < 0 or line[-1] > n for line, n in zip(edges, shape)):
        return False
    count = torch.zeros([len(line) - 1 for line in edges], dtype=torch.int32)
    position = [{edge: i for i, edge in enumerate(line)} for line in edges]
    for offset, extent in boxes:
        count[tuple(slice(at[o], at[o + e]) for at, o, e in zip(position, offset, extent))] += 1
    return bool((count == 1).all())


def row_blocks(view: Tensor, dims: int, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """Rows [start, stop) of a box held by `view`, as (first, last + 1, tensor [rows, ...]) blocks that alias `view`.

    A view has the box's `dims` dimensions, or leading group dimensions before them whose rows follow one another (Box.view).
    """
    groups = view.shape[: view.ndim - dims]
    if not groups:
        yield start, stop, view[start:stop]
        return
    rows = view.shape[len(groups)]
    for group in range(start // rows, -(-stop // rows)):
        index, rest = [], group
        for size in reversed(groups):
            rest, at = divmod(rest, size)
            index.insert(0, at)
        low, high = max(start, group * rows), min(stop, (group + 1) * rows)
        yield low, high, view[tuple(index)][low - group * rows : high - group * rows]
