"""What an optimizer keeps of one block, wherever it is: in memory (the device's or the host's) or
in files.

Kinds are "master" (the weights that are updated, in fp32 or fp64) and the names of the update
rule's states. Read by optimizer.py alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron.model.spec import Box
from megatron.optimizer.nvme import FileTensor, StateFiles
from megatron.parallel.blocks import Block

Use = Literal["read", "change", "fill"]  # fill: the old values are of no use
Held = tuple[slice, dict[str, Tensor]]  # a part of what a rank updates, and its tensors


class BlockState:
    """State in the memory of the device, or of the host. `tensors`, by kind: those that are in
    memory all the time.
    """

    def __init__(self, block: Block, tensors: dict[str, Tensor]):
        self.block, self.tensors = block, tensors

    def pieces(self, kinds: Sequence[str], use: Use) -> Iterable[Held]:
        """What is in memory at a time of what this rank updates of the block, with its tensors of
        these kinds: theirs until the next is asked for.
        """
        first, last = self.block.own
        return [(slice(0, last - first), self.tensors)]

    def boxes(self, kind: str) -> Iterator[tuple[Box, Tensor | FileTensor]]:
        """The parts of logical tensors in the tensor of this kind, each with what a checkpoint
        reads it from.
        """
        return self.block.boxes(self.tensors[kind])


class StateInFiles(BlockState):
    """State in files of the host, used piece by piece."""

    def __init__(self, block: Block, files: StateFiles):
        super().__init__(block, {})
        self.files = files

    def pieces(self, kinds: Sequence[str], use: Use) -> Iterator[Held]:
        for part in self.files.parts[self.block]:
            yield part.slice, self.files.use(part, tuple(kinds), read=use != "fill")
            self.files.done(changed=use != "read")

    def boxes(self, kind: str) -> Iterator[tuple[Box, FileTensor]]:
        for part in self.files.parts[self.block]:
            # The views of a part, without its memory: it is read when a checkpoint asks for it.
            like = torch.empty(part.size, dtype=self.files.dtypes[kind], device="meta")
            for box, view in self.block.boxes(like, part.slice):
                yield box, FileTensor(self.files, part, kind, view)
