"""Folders that torch.distributed.checkpoint has written (Megatron-LM's torch_dist among them):
which tensors they hold, mapped, not loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.models import MappedFile
from megatron.tools._convert.pickles import Record, map_tensor, read_metadata
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.manifest import CheckpointError
from megatron.config.errors import UserError


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where torch.save has written it."""

    offset: Dims
    extent: Dims
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Described:
    """A tensor of the folder."""

    shape: Dims
    chunks: tuple[Chunk, ...]


class DcpFolder:
    """`.tensors`: what the folder's metadata describes, by name; `.others`: names of what is no
    tensor. Raises CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, MappedFile] = {}
        path = folder / ".metadata"
        metadata = read_metadata(path)
        try:
            self.tensors, self.others = _described(metadata)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path}: is not the metadata of a distributed checkpoint: "
                f"{type(error).__name__} {error}"
            ) from error

    def map(self, chunk: Chunk) -> Tensor:
        """The chunk's elements. Raises CheckpointError when they are not what the metadata
        specifies.
        """
        if chunk.file not in self._files:
            self._files[chunk.file] = MappedFile(self.folder / chunk.file)
        file = self._files[chunk.file]
        value = map_tensor(file, chunk.start, chunk.length)
        if value.numel() != math.prod(chunk.extent):
            raise CheckpointError(
                f"{file.path}: byte {chunk.start}: a tensor of shape {list(chunk.extent)} is "
                "expected"
            )
        return value.reshape(chunk.extent)


def _described(metadata: Record) -> tuple[dict[str, Described], list[str]]:
    indices = (
        (key["fqn"], key.state.get("offset"), info)
        for key, info in metadata["storage_data"].items()
    )
    places = {(name, _size(offset)): info for name, offset, info in indices if offset is not None}
    tensors: dict[str, Described] = {}
    others: list[str] = []
    for name, stored in metadata["state_dict_metadata"].items():
        if not stored.kind.endswith(".TensorStorageMetadata"):
            others.append(name)
            continue
        chunks = []
        for chunk in stored["chunks"]:
            offset = _size(chunk["offsets"])
            info = places[name, offset]
            if info.state.get("transform_descriptors"):
                raise UserError(f"{name} is compressed")
            if Path(info["relative_path"]).name != info["relative_path"]:
                raise UserError(f"{info['relative_path']!r} is not a plain file name")
            chunks.append(
                Chunk(
                    offset,
                    _size(chunk["sizes"]),
                    info["relative_path"],
                    int(info["offset"]),
                    int(info["length"]),
                )
            )
        tensors[name] = Described(_size(stored["size"]), tuple(chunks))
    return tensors, others


def _size(value: Any) -> Dims:
    """A torch.Size."""
    if not isinstance(value, torch.Size):
        raise UserError(f"a size is {value!r}")
    return tuple(value)
