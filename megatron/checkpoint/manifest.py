"""What a checkpoint's bytes mean: file names, safetensors headers, digest tables and the manifest
(docs/checkpoint.md): bytes to values and back. The manifest carries its own digest and those of the
digest tables, which carry the headers': what is decoded is what was encoded. No torch here: a dtype
is its name in safetensors.
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

from megatron.checkpoint.boxes import Dims
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject

CHUNK = 1 << 20  # bytes of shard data under one digest
ALIGN = 4096  # tensor data starts at a multiple of this
HEADER_LIMIT = 100_000_000  # bytes; also the limit of the safetensors library
MANIFEST_LIMIT = 1 << 28  # bytes
MANIFEST = "MANIFEST.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "sharded-safetensors"
VERSION = 1

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # the dtypes that a checkpoint can hold


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


def decode_header(raw: bytes, path: Path) -> list[Entry]:
    """The boxes in a file with the header `raw` (length word included). Raises CheckpointError for
    a dtype that only another version knows.
    """
    header = json.loads(raw[8:])
    shapes = json.loads(header.pop("__metadata__")["shapes"])
    entries = []
    for key, value in header.items():
        name, _, offset = key.rpartition("@")
        dtype, extent = value["dtype"], tuple(value["shape"])
        if dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise CheckpointError(f"{path}: {key}: dtype {dtype!r} is not one of {known}")
        place = tuple(map(int, offset.split(",")))
        start = value["data_offsets"][0]
        entries.append(Entry(name, tuple(shapes[name]), dtype, place, extent, start))
    return entries


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
        """Raises CheckpointError for a table of another format."""
        if raw[:8] != _TABLE_MAGIC:
            raise CheckpointError(f"{path}: not a digest table")
        _, chunk, data_start, size = _TABLE.unpack_from(raw)
        digests = tuple(raw[at : at + 16] for at in range(_TABLE.size, len(raw), 16))
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
    """The content of a manifest. Raises CheckpointError unless every byte is as written and the
    format is this one.
    """
    body = raw[MANIFEST_HEAD:-2]
    if raw != _frame(body):
        raise CheckpointError(
            f"{path}: damaged: its content does not match the digest that it carries"
        )
    content = json.loads(body)
    found, version = content["format"], content["version"]
    if (found, version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: has format {found!r} version {version!r}; this program reads {FORMAT!r} "
            f"version {VERSION}"
        )
    return content


def table_digest(raw: bytes) -> str:
    return xxh3_128_hexdigest(raw)


def chunk_digest(data: Any) -> bytes:
    return xxh3_128(data).digest()
