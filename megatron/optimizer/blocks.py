"""Flat storage: all parameters of a block are views into one buffer, and so are their gradients.

A block is what lives and dies together: the word embedding, one layer, an untied head. Every tensor starts at a multiple of ALIGNMENT
elements, so a buffer can be cut anywhere on that grid and torch's fused AdamW still gives the same bits (its vector and scalar code
differ in rounding). Decayed tensors come first: a block is one decayed and one undecayed segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.dist.groups import Axis, Groups
from megatron.model.gpt import GPTModel
from megatron.model.layout import Box, boxes, decays, holders

ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One parameter in its block's flat buffers."""

    name: str
    start: int
    shape: torch.Size
    boxes: tuple[Box, ...]

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Block:
    """The flat buffers of one block; `weight` is in the compute precision, `grad` None when the model is not trained."""

    name: str
    entries: tuple[Entry, ...]
    decayed: int  # elements of the first segment
    weight: Tensor
    grad: Tensor | None

    def part(self, buffer: Tensor, axis: Axis) -> Tensor:
        """The slice of one of the block's buffers that this rank of an axis owns."""
        return buffer.chunk(axis.size)[axis.rank]

    def counted(self, groups: Groups) -> Iterator[tuple[int, int]]:
        """Ranges [start, stop) without what another tensor-parallel rank counts."""
        start = 0
        for entry in self.entries:
            for box in entry.boxes:
                if holders(box, groups).rank > 0:
                    assert box.groups == 1
                    row = math.prod(entry.shape[1:])
                    first = entry.start + box.start * row
                    yield start, first
                    start = first + box.extent[0] * row
        yield start, self.weight.numel()

    def segments(self, buffer: Tensor) -> list[tuple[Tensor, bool]]:
        """The buffer as (flat piece, takes weight decay)."""
        return [(piece, decay) for piece, decay in ((buffer[: self.decayed], True), (buffer[self.decayed :], False)) if piece.numel()]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of gradients, master weights and moments: fp32, fp64 in a float64 run."""
    return torch.promote_types(dtype, torch.float32)


def _entries(model: GPTModel, unit: str, parameters: list[tuple[str, nn.Parameter]]) -> tuple[tuple[Entry, ...], int, int]:
    """(entries, elements in the decayed segment, elements in all)."""
    entries, end, decayed = [], 0, 0
    for name, parameter in sorted(parameters, key=lambda item: not decays(item[1])):
        name = f"{unit}.{name}"
        entries.append(Entry(name, end, parameter.shape, boxes(model.config, model.vocab_size, name, parameter, model.tp)))
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        decayed = end if decays(parameter) else decayed
    return tuple(entries), decayed, end


def build_blocks(model: GPTModel, device: torch.device, *, training: bool = True, parts: int = 1) -> list[Block]:
    """Give every parameter of a model born on the meta device its storage (zeros), and a `main_grad` when it is trained.

    Buffers are padded so that they can be cut into `parts` equal slices.
    """
    blocks, placed = [], set()
    for unit_name, unit in model.units():
        parameters = [(name, p) for name, p in unit.named_parameters() if p not in placed]  # a tied head adds none
        if not parameters:
            continue
        entries, decayed, size = _entries(model, unit_name, parameters)
        size = -(-size // (ALIGNMENT * parts)) * ALIGNMENT * parts
        weight = torch.zeros(size, dtype=model.dtype, device=device)
        grad = torch.zeros(size, dtype=accumulation_dtype(model.dtype), device=device) if training else None
        blocks.append(Block(unit_name, entries, decayed, weight, grad))
        by_name = dict(parameters)
        for entry in entries:
            parameter = by_name[entry.name.removeprefix(f"{unit_name}.")]
            torch.utils.swap_tensors(parameter, nn.Parameter(entry.view(weight), requires_grad=training))
            parameter.main_grad = entry.view(grad) if training else None
            placed.add(parameter)
    return blocks
