"""Folders that torch.distributed.checkpoint has written (Megatron-LM's torch_dist among them):
which tensors they hold, mapped, not loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.models import MappedFile, Part, Whole
from megatron.tools._convert.pickles import Record, map_tensor, read_metadata
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.manifest import CheckpointError
from megatron.config.errors import UserError


def dcp_tensors(folder: Path) -> list[Whole]:
    """The tensors that a folder's metadata describes. Raises CheckpointError, also for one whose
    elements, when they are mapped, are not what the metadata specifies.
    """
    path = folder / ".metadata"
    metadata = read_metadata(path)
    try:
        return _described(folder, metadata)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: is not the metadata of a distributed checkpoint: "
            f"{type(error).__name__} {error}"
        ) from error


def _described(folder: Path, metadata: Record) -> list[Whole]:
    indices = (
        (key["fqn"], key.state.get("offset"), info)
        for key, info in metadata["storage_data"].items()
    )
    places = {(name, _size(offset)): info for name, offset, info in indices if offset is not None}
    open_file = cache(lambda name: MappedFile(folder / name))
    tensors = []
    for name, stored in metadata["state_dict_metadata"].items():
        if not stored.kind.endswith(".TensorStorageMetadata"):
            continue
        parts: list[Part] = []
        for chunk in stored["chunks"]:
            offset, extent = _size(chunk["offsets"]), _size(chunk["sizes"])
            info = places[name, offset]
            if info.state.get("transform_descriptors"):
                raise UserError(f"{name} is compressed")
            file, start, length = (info[key] for key in ("relative_path", "offset", "length"))
            if Path(file).name != file:
                raise UserError(f"{file!r} is not a plain file name")
            elements = partial(_elements, open_file, file, int(start), int(length), extent)
            parts.append((offset, extent, elements))
        tensors.append((name, _size(stored["size"]), parts))
    return tensors


def _elements(
    open_file: Callable[[str], MappedFile], name: str, start: int, length: int, extent: Dims
) -> Tensor:
    """A chunk's elements, which torch.save has written."""
    file = open_file(name)
    value = map_tensor(file, start, length)
    if value.numel() != math.prod(extent):
        raise CheckpointError(
            f"{file.path}: byte {start}: a tensor of shape {list(extent)} is expected"
        )
    return value.reshape(extent)


def _size(value: Any) -> Dims:
    """A torch.Size."""
    if not isinstance(value, torch.Size):
        raise UserError(f"a size is {value!r}")
    return tuple(value)
