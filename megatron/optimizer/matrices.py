"""Update rules that need whole matrices, such as those that make a momentum orthogonal, in every
layout.

Ranks hold slices of a block that are cut anywhere, and tensor-parallel ranks parts of a matrix. The
momentum is kept and updated on the slices, as any state is. Then each logical matrix is put
together on all ranks that hold a part of it, the rule turns it into a direction, and every rank
takes its own part of that. r rows and c columns of a logical matrix,
whatever is fused with it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.model.spec import Box, ParamGroup, holders
from megatron.optimizer.optimizer import MASTER, Optimizer, Scalars
from megatron.optimizer.update import StepScalars, UpdateRule
from megatron.parallel.blocks import Block, BufferEntry, Segment, padded

MatrixPart = tuple[Box, Tensor, Tensor, Tensor]  # and its momentum, weights and gradients


class MatrixRule(Protocol):
    """How a matrix is updated: weight <- weight - lr (direction + weight decay x weight)."""

    momentum: float  # momentum <- `momentum` x momentum + gradient

    def direction(self, momentum: Tensor) -> Tensor:
        """[r, c] -> [r, c], the same on every rank that is given the same values."""


def of_matrices(entry: BufferEntry) -> bool:
    """Whether all that a parameter holds are matrices of layers: no embedding, head, norm or
    bias.
    """
    return bool(entry.boxes) and all(
        box.spec is not None and not box.spec.is_table and len(box.shape) == 2
        for box in entry.boxes
    )


def _param_group_of(block: Block, entry: BufferEntry) -> ParamGroup:
    return next(each for stop, each in block.layout.ranges if entry.start < stop)


def other_segments(block: Block) -> list[Segment]:
    """The segments of what this rank updates, without the matrices."""
    first, last = block.own
    found = []
    for entry in block.entries:
        # With the padding behind it a segment ends where the update's vectors end.
        start, stop = max(entry.start, first), min(entry.start + padded(entry.numel), last)
        if start < stop and not of_matrices(entry):
            part = slice(start - first, stop - first)
            found.append(Segment(part, _param_group_of(block, entry)))
    return found


class MatrixOptimizer(Optimizer):
    """An optimizer that updates the matrices of layers by `matrix_rule`, and all else by the rule
    of the flags. No flag selects it. Raises ValueError for state on the host.
    """

    skip_decided_on_device = False

    def __init__(self, blocks: list[Block], *args: Any, matrix_rule: MatrixRule):
        if any(block.on_host for block in blocks):
            raise ValueError(
                "an update rule of whole matrices acts on state on the device alone; do "
                "without --optimizer-cpu-offload"
            )
        super().__init__(blocks, *args)
        self.matrix_rule = matrix_rule

    @cached_property
    def segments(self) -> dict[Block, list[Segment]]:
        """What the rule of the flags updates."""
        return {block: other_segments(block) for block in self.trained}

    def _update(self, rule: UpdateRule, block: Block, scalars: Scalars, *buffers: Any) -> None:
        super()._update(rule, block, scalars, *buffers)
        # What this rank updates of each matrix.
        own: dict[str, list[MatrixPart]] = defaultdict(list)
        tensors = self.states[block]
        # the first state is the momentum, of Adam and of SGD
        buffers = tensors[self.state_names[0]], tensors[MASTER], block.grad_shard
        for held in zip(*map(block.boxes, buffers), strict=True):
            part, _ = held[0]
            momentum, weight, gradient = (part.view(view) for _, view in held)
            own[part.name].append((part, momentum, weight, gradient))
        for entry in filter(of_matrices, block.entries):
            at = scalars[_param_group_of(block, entry)]
            for box in entry.boxes:
                self._step_matrix(block, box, own[box.name], at)
        if block.rounded is not None:
            block.rounded.copy_(block.master)

    def _step_matrix(self, block: Block, box: Box, own: list[MatrixPart], at: StepScalars) -> None:
        """One step of a matrix, in place. The collective call of all ranks that hold parts of the
        block.
        """
        # 1. The momentum is updated on the slices. Of ranks that hold the same part one alone adds
        # it to the whole.
        rule = self.matrix_rule
        whole = torch.zeros(box.shape, dtype=block.master.dtype, device=block.master.device)
        for part, momentum, _, gradient in own:
            momentum.mul_(rule.momentum).add_(gradient.to(self.wide) * at.coefficient)
            if holders(box, self.groups).rank == 0:
                whole[_range(part)] = momentum.reshape(part.extent)
        # 2. Over the ranks that share the block, then over those that share the matrix or hold
        # copies of it.
        if block.zero_stage > 0:
            all_reduce(whole, block.groups.shard)
        all_reduce(whole, self.groups.etp if box.group == "expert" else self.groups.tp)

        # 3. Every rank computes the direction of the whole matrix, and takes its parts of it.
        direction = rule.direction(whole)
        for part, _, weight, _ in own:
            change = direction[_range(part)].view(weight.shape) + at.weight_decay * weight
            weight.sub_(change, alpha=at.lr)


def _range(part: Box) -> tuple[slice, ...]:
    """Where a part lies in its logical tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(part.offset, part.extent, strict=True)
    )
