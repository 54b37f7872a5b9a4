"""What is summed once a step, after the backward passes: over the copies of a shard, over
tensor-parallel ranks, over a tied matrix's ends.

Sums, never means: the loss is divided by the global token count once, when the optimizer steps. All
of them act on the gradients of what this rank updates, which under ZeRO are slices. Called from
parallel/zero.py at the end of a step's backward passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.workspace import SCRATCH_BYTES
from megatron.distributed.collectives import all_reduce
from megatron.distributed.groups import Groups
from megatron.parallel.blocks import Block


def sum_copies(blocks: list[Block]) -> None:
    """Hybrid sharding: sum each slice over the ranks that hold the same one."""
    for block in blocks:
        if block.groups.replicate.size > 1:
            all_reduce(block.grad_shard, block.groups.replicate)


def sum_partial_gradients(blocks: list[Block], groups: Groups) -> None:
    """Sum what tensors declare in `grad_sum`: over tensor-parallel ranks, packed, and a tied matrix
    over the two stages that hold it.
    """
    for name, axis in (("tp", groups.tp), ("kv", groups.kv), ("tied", groups.tied)):
        if axis.size == 1:
            continue
        views = [
            view
            for block in blocks
            for entry in block.entries
            for box in entry.boxes
            if name in (box.spec.grad_sum or ())
            for view in block.runs(entry, box, block.grad_shard)
        ]
        pack: list[Tensor] = []
        size = 0  # bytes
        for index, view in enumerate(views):
            pack.append(view)
            size += view.numel() * view.element_size()
            if index == len(views) - 1 or size >= SCRATCH_BYTES:
                if len(pack) == 1:  # a tied matrix: no copy of it
                    all_reduce(view, axis)
                else:
                    packed = all_reduce(torch.cat(pack), axis)
                    for x, summed in zip(pack, packed.split([x.numel() for x in pack])):
                        x.copy_(summed)
                pack, size = [], 0
