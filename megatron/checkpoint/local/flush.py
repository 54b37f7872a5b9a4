"""From a node's local folder to --save at a limited rate: what the writer process does. Nothing
here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest as m
from megatron.checkpoint.files import write_shard_file
from megatron.checkpoint.manifest import HEADER_LIMIT, CheckpointError, shard_file
from megatron.config.input_files import JsonObject

MB = 1e6
BURST = 0.1  # seconds of the rate that may go at once


def limited(
    data: Iterable[memoryview],
    rate: float | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[memoryview]:
    """The same bytes, at most `rate` MB/s of them (None: as fast as they are taken): a token bucket
    of BURST seconds.
    """
    if rate is None:
        yield from data
        return
    most = max(1, int(rate * MB * BURST))
    tokens = float(most)
    last = clock()
    for part in data:
        while len(part):
            piece = part[:most]
            part = part[most:]
            now = clock()
            tokens = min(most, tokens + (now - last) * rate * MB)
            last = now
            if tokens < len(piece):
                sleep((len(piece) - tokens) / (rate * MB))
            # below 0 when it had to sleep: what has come meanwhile is added the next time
            tokens -= len(piece)
            yield piece


def copy_shard(
    source: Path,
    folder: Path,
    index: int,
    record: JsonObject,
    rate: float | None,
    **options: Any,
) -> JsonObject:
    """Write the shard file `source` into `folder` anew; `options` and result as write_shard_file's.

    Raises CheckpointError when it is not what `record`, its entry in a manifest, says.
    """
    with open(source, "rb", buffering=0) as file:
        head = file.read(8)
        header = head + _read(file, int.from_bytes(head, "little"))
        written = write_shard_file(folder, index, header, limited(_data(file), rate), **options)
    if any(record[key] != value for key, value in written.items()):
        raise CheckpointError(
            f"the local copy of {shard_file(index)} is damaged: its bytes are not those "
            "that were written"
        )
    return written


def _read(file: Any, size: int) -> bytes:
    if size > HEADER_LIMIT:
        raise CheckpointError("the local copy of a shard is damaged: its header is too long")
    raw = bytearray()
    while len(raw) < size and (part := file.read(size - len(raw))):
        raw += part
    return bytes(raw)


def _data(file: Any) -> Iterator[memoryview]:
    """The rest of the file, in one buffer of a chunk: one that is taken has been written when the
    next is asked for.
    """
    buffer = memoryview(bytearray(m.CHUNK))
    held = 0
    while True:
        got = file.readinto(buffer[held:])
        held += got
        if held == len(buffer) or (not got and held):
            yield buffer[:held]
            held = 0
        if not got:
            return
