"""What a checkpoint's bytes mean: file names, safetensors headers, digest tables and the manifest
(docs/checkpoint.md): bytes to values and back, with every bound checked. No torch here: a dtype is
its name in safetensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_hexdigest

from megatron.checkpoint.boxes import Dims, Shapes, shapes_of
from megatron.checkpoint.run_state import check_run_state, count, fits, integer, texts
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject, parse_json

CHUNK = 1 << 20  # bytes of shard data under one digest
ALIGN = 4096  # tensor data starts at a multiple of this
HEADER_LIMIT = 100_000_000  # bytes; also the limit of the safetensors library
MANIFEST_LIMIT = 1 << 28  # bytes
MANIFEST = "MANIFEST.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "sharded-safetensors"
VERSION = 1

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # the dtypes that a checkpoint can hold
# what Python raises for JSON that is not as it should be
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the text names the file, what is wrong with it, and
    what to do.
    """


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def shard_file(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def table_file(index: int) -> str:
    return f"shard-{index:05d}.digests"


def list_iterations(root: Path) -> list[int]:
    """Iterations that have a folder under `root`, whole or damaged, newest first; none when there
    is no `root`. Raises CheckpointError when it cannot be listed.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror}") from error
    found = {int(name[5:]) for name in names if re.fullmatch(r"iter_\d{7,18}", name)}
    return sorted((each for each in found if iteration_folder(each) in names), reverse=True)


# ---- one shard's safetensors header --------------------------------------------------------------


KEY = re.compile(r"([^@]+)@(\d+(?:,\d+)*)")  # box_key's


class Entry(NamedTuple):
    """A box of a logical tensor in a shard. `shape`: of the whole tensor; `start` counts from the
    start of the data.
    """

    name: str
    shape: Dims
    dtype: str
    offset: Dims
    extent: Dims
    start: int


def box_key(name: str, offset: Dims) -> str:
    """`name@o0,o1,...`: the key of a box in its shard."""
    return f"{name}@{','.join(map(str, offset))}"


def encode_header(tensors: list[tuple[str, str, Dims]], metadata: dict[str, str]) -> bytes:
    """The bytes before the data of a safetensors file that holds `tensors` (key, dtype, shape) back
    to back in this order: a length of 8 bytes, JSON, spaces up to a multiple of ALIGN.
    """
    header: JsonObject = {"__metadata__": metadata}
    position = 0
    for key, dtype, shape in tensors:
        assert key not in header, f"two tensors named {key}"
        stop = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(8 + len(body)) % ALIGN)
    return struct.pack("<Q", len(body)) + body


def decode_header(raw: bytes, data_bytes: int, path: Path) -> list[Entry]:
    """What is in a file with the header `raw` (length word included) and `data_bytes` of data after
    it. Raises CheckpointError unless the tensors are sound and fill the data exactly.
    """
    try:
        header = parse_json(raw[8:])
        shapes = shapes_of(parse_json(header.pop("__metadata__")["shapes"].encode()))
        return _entries(header, shapes, data_bytes)
    except MALFORMED as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: the safetensors header is malformed: {why}") from error


def _entries(header: JsonObject, shapes: Shapes, data_bytes: int) -> list[Entry]:
    """Raises one of MALFORMED."""
    entries = []
    position = 0
    for key, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        entry = _entry(key, value, shapes, position)
        entries.append(entry)
        position += math.prod(entry.extent) * ITEM_BYTES[entry.dtype]
    if position != data_bytes:
        raise ValueError(f"the tensors end at byte {position}, the file's data at {data_bytes}")
    return entries


def _entry(key: str, value: JsonObject, shapes: Shapes, start: int) -> Entry:
    """The box `key`, whose data must begin at byte `start`. Raises one of MALFORMED."""
    match = KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not of the form name@offsets")
    name, offset = match[1], tuple(map(int, match[2].split(",")))
    shape, extent, dtype = shapes[name], tuple(value["shape"]), value["dtype"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{key}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    first, last = value["data_offsets"]
    if not fits([*extent, first, last], [count]):
        raise ValueError(f"{key}: a size is not a natural number")
    stop = start + math.prod(extent) * ITEM_BYTES[dtype]
    if (first, last) != (start, stop):
        raise ValueError(f"{key}: lies at bytes {first} to {last}, not at {start} to {stop}")
    if not len(shape) == len(offset) == len(extent):
        found = f"offset {list(offset)}, extent {list(extent)}, shape {list(shape)}"
        raise ValueError(f"{key}: not of the same number of dimensions: {found}")
    if start % ITEM_BYTES[dtype]:
        raise ValueError(f"{key}: byte {start} is not a multiple of {ITEM_BYTES[dtype]}")
    return Entry(name, shape, dtype, offset, extent, start)


# ---- one shard's digest table --------------------------------------------------------------------

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
        fields = _TABLE.pack(_TABLE_MAGIC, self.chunk, self.data_start, self.size)
        return fields + self.header + b"".join(self.chunks)

    @staticmethod
    def decode(raw: bytes, path: Path) -> DigestTable:
        """Raises CheckpointError for anything that `encode` cannot have written."""
        if len(raw) < _TABLE.size + 16 or raw[:8] != _TABLE_MAGIC:
            raise CheckpointError(f"{path}: not a digest table")
        _, chunk, data_start, size = _TABLE.unpack_from(raw)
        digests = tuple(raw[at : at + 16] for at in range(_TABLE.size, len(raw), 16))
        if (
            not (chunk >= 1 and 8 <= data_start <= min(size, HEADER_LIMIT))
            or len(digests) != 1 + -(-(size - data_start) // chunk)
            or len(digests[-1]) != 16
        ):
            raise CheckpointError(f"{path}: the digest table's fields contradict each other")
        return DigestTable(chunk, data_start, size, digests[0], digests[1:])


# ---- the manifest --------------------------------------------------------------------------------


def manifest_of(
    iteration: int, attempt: str, shards: list[JsonObject], state: JsonObject, created: str
) -> JsonObject:
    """The content of a manifest of this version."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "attempt": attempt,
        "created": created,
        "shards": shards,
        "state": state,
    }


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def encode_manifest(content: JsonObject) -> bytes:
    """JSON that carries the digest of its own content: of the bytes between `"manifest": ` and the
    last brace. Raises CheckpointError when `content` is not JSON.
    """
    return _frame(_json(content, indent=1))


def state_digests(state: JsonObject) -> dict[str, str]:
    """A short digest of each value of `state`, by which ranks compare theirs. Raises
    CheckpointError when it is not JSON.
    """
    return {key: xxh3_128_hexdigest(_json(value))[:8] for key, value in state.items()}


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """The keys that have not the same digest in both."""
    return [key for key in {**a, **b} if a.get(key) != b.get(key)]


def _json(content: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(content, indent=indent).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's state must be JSON (numbers, strings, lists, dictionaries): {error}"
        ) from error


def _frame(body: bytes) -> bytes:
    return b'{"digest": "' + xxh3_128_hexdigest(body).encode() + b'",\n"manifest": ' + body + b"}\n"


# bytes before the content, with its digest: another manifest has others
MANIFEST_HEAD = len(_frame(b"")) - 2


def decode_manifest(raw: bytes, path: Path) -> JsonObject:
    """The content of a manifest. Raises CheckpointError unless every byte is as written and every
    field sound.
    """
    body = raw[MANIFEST_HEAD:-2]
    if raw != _frame(body):
        raise CheckpointError(
            f"{path}: damaged: its content does not match the digest that it carries"
        )
    try:
        content = parse_json(body)
        _check_content(content)
        check_run_state(content["state"])
        shapes_of(content["state"].get("tensors", {}))
    except MALFORMED as error:
        raise CheckpointError(f"{path}: not a manifest of this format: {error}") from error
    return content


def _check_content(content: JsonObject) -> None:
    """Raise one of MALFORMED unless every field but the state's is sound."""
    found, version = content["format"], content["version"]
    if (found, version) != (FORMAT, VERSION):
        known = f"this program reads {FORMAT!r} version {VERSION}"
        raise ValueError(f"format {found!r} version {version!r}; {known}")
    superseded = content.get("left", {})
    if not fits(content, CONTENT) or not content["shards"] or not texts(superseded):
        raise ValueError("iteration, attempt, shards, state or left are not what they should be")
    if any(int(later) <= content["iteration"] for later in superseded):
        raise ValueError("left is not of later iterations")
    # Names are derived, never followed: a manifest cannot point outside its folder.
    for index, shard in enumerate(content["shards"]):
        if not fits(shard, SHARD) or shard["file"] != shard_file(index):
            raise ValueError(f"the name, size or digest of shard {index} is malformed")


SHARD = {
    "file": str,
    "bytes": integer,
    "table_digest": lambda value: type(value) is str and re.fullmatch("[0-9a-f]{32}", value),
}
CONTENT = {"iteration": integer, "attempt": str, "created": str, "shards": list, "state": dict}


def table_digest(raw: bytes) -> str:
    return xxh3_128_hexdigest(raw)


def chunk_digest(data: Any) -> bytes:
    return xxh3_128(data).digest()
