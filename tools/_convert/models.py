"""Tensors in files of other programs, taken over without loading them: mapped, cut into equal
shares, and checked against the model.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from megatron.tools._convert.huggingface import some_names
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.writer import BoxTensor
from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.input_files import InputError, open_regular
from megatron.model.build import logical_tensors

# what reading a damaged file raises
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OverflowError,
    struct.error,
)
Pair = BoxTensor  # part of a logical tensor, and the tensor that holds it
# offset, extent, and the elements of a box of one of their tensors
Part = tuple[Dims, Dims, Callable[[], Tensor]]
# one of their tensors: name, shape, and the parts that make it up
Whole = tuple[str, Dims, list[Part]]
Held = dict[str, tuple[Dims, list[Part]]]  # the same of several by name


def whole_part(value: Tensor) -> Part:
    """A tensor that lies in one piece."""
    return box_part((0,) * value.ndim, tuple(value.shape), value)


def box_part(offset: Dims, extent: Dims, value: Tensor) -> Part:
    """A box whose elements are there."""
    return offset, extent, lambda: value


class MappedFile:
    """A file's bytes as tensors that the kernel reads when they are used, and may forget again: no
    memory of this process.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when it cannot be read."""
        self.path = path
        try:
            with open_regular(path) as file:
                self.size = file.seek(0, 2)
                self.bytes = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
                )
        except (OSError, InputError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error

    def tensor(self, dtype: torch.dtype, shape: Dims, start: int) -> Tensor:
        """The elements in C order from byte `start` on. They must not be written to. Raises
        CheckpointError when the file ends before.
        """
        count = math.prod(shape)
        if start < 0 or start + count * dtype.itemsize > self.size:
            raise CheckpointError(
                f"{self.path}: has {self.size} bytes, a tensor of it would end at "
                f"{start + count * dtype.itemsize}: truncated"
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the bytes are not writable
            return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=start).view(shape)


def own_rows(sizes: Iterable[tuple[int, int]], rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """For each (rows, bytes of a row) in turn the rows [first, last) of this rank: the ranks'
    shares of all bytes differ by a row at most.
    """
    sizes = list(sizes)
    total = sum(rows * size for rows, size in sizes)
    low, high = (total * n // ranks for n in (rank, rank + 1))
    at = 0
    for rows, size in sizes:
        first, last = (min(max(-(-(edge - at) // max(size, 1)), 0), rows) for edge in (low, high))
        yield first, last
        at += rows * size


def first_rows(pairs: list[Pair], vocab_size: int | None) -> list[Pair]:
    """The pairs with the first `vocab_size` rows of the embedding and the head alone. Raises
    UserError where there are fewer.
    """
    if vocab_size is None:
        return pairs
    found = []
    for box, tensor in pairs:
        if box.name in ("embedding.word.weight", "head.weight"):
            if not 0 < vocab_size <= box.shape[0]:
                raise UserError(f"--vocab-size {vocab_size}: {box.name} has {box.shape[0]} rows")
            tensor = tensor[: max(0, vocab_size - box.offset[0])]
            shape, extent = (vocab_size, *box.shape[1:]), (len(tensor), *box.extent[1:])
            box = dataclasses.replace(box, shape=shape, extent=extent)
        found.append((box, tensor))
    return [(box, tensor) for box, tensor in found if box.extent[0]]


def check_shapes(pairs: list[Pair], model: ModelConfig, vocab_size: int) -> None:
    """Raises UserError unless the boxes are of exactly the model's tensors, in its shapes; whether
    they cover them shows when they are saved.
    """
    tensors = logical_tensors(model, vocab_size).values()
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    given = {box.name: box.shape for box, _ in pairs}
    faults = [
        f"{name} has shape {list(given[name])}, the model's flags need {list(wanted[name])}"
        for name in given.keys() & wanted.keys()
        if given[name] != wanted[name]
    ]
    faults += some_names("tensors missing", sorted(wanted.keys() - given.keys()))
    faults += some_names(
        "tensors that the model does not have", sorted(given.keys() - wanted.keys())
    )
    if faults:
        raise UserError(
            "the tensors are not those of a model with these flags:\n"
            + "\n".join(f"  {fault}" for fault in sorted(faults)[:10])
        )
