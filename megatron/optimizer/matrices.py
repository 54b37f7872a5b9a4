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
from megatron.distributed.groups import Groups
from megatron.model.spec import Box, holders
from megatron.optimizer.optimizer import Optimizer, StepNumbers
from megatron.optimizer.update import UpdateRule
from megatron.parallel.blocks import Block, BufferEntry, Segment

MOMENTUM = "exp_avg"  # the state that holds it
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
        box.spec is not None and box.spec.kind == "matrix" and len(box.shape) == 2
        for box in entry.boxes
    )


def other_segments(block: Block) -> list[Segment]:
    """The segments of what this rank updates, without the matrices."""
    # Matrices as ranges of what this rank updates; a cut matrix has a part of its range here.
    first, last = block.own
    matrices = [
        (max(entry.start, first) - first, min(entry.stop, last) - first)
        for entry in block.entries
        if of_matrices(entry)
    ]
    found = []
    for part, multipliers in block.segments():
        start = part.start
        for begin, end in matrices:
            # What lies before the matrix is a segment; the next one begins after it.
            if begin < end and part.start <= begin < part.stop:
                if start < begin:
                    found.append(Segment(slice(start, begin), multipliers))
                start = end
        if start < part.stop:
            found.append(Segment(slice(start, part.stop), multipliers))
    return found


def _own_parts(
    block: Block, momentum: Tensor, master: Tensor, grad: Tensor
) -> dict[str, list[MatrixPart]]:
    """What this rank updates of each matrix: parts, and their momentum, weights and gradients."""
    own: dict[str, list[MatrixPart]] = defaultdict(list)
    for (part, kept), (_, weight), (_, gradient) in zip(
        block.boxes(momentum), block.boxes(master), block.boxes(grad), strict=True
    ):
        own[part.name].append((part, part.view(kept), part.view(weight), part.view(gradient)))
    return own


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

    def _update(self, rule: UpdateRule, block: Block, numbers: StepNumbers, *buffers: Any) -> None:
        super()._update(rule, block, numbers, *buffers)
        tensors = self.states[block].tensors
        step_matrices(self.matrix_rule, block, self.groups, tensors, numbers)
        if block.rounded is not None:
            block.rounded.copy_(block.master)


@torch.no_grad()
def step_matrices(
    rule: MatrixRule,
    block: Block,
    groups: Groups,
    tensors: dict[str, Tensor],
    numbers: StepNumbers,
) -> None:
    """One step of every matrix of a block, in place: `tensors` are master weights and states of
    what this rank updates. The collective call of all ranks that hold parts of the block.
    """
    master = tensors["master"]
    own = _own_parts(block, tensors[MOMENTUM], master, block.grad_shard)
    rates = numbers.rates
    for entry in block.entries:
        if not of_matrices(entry):
            continue
        ranges = block.layout.ranges
        multipliers = next(each for stop, each in ranges if entry.start < stop)
        lr = rates.decoupled if multipliers.decoupled_lr else rates.base
        for box in entry.boxes:
            whole = torch.zeros(box.shape, dtype=master.dtype, device=master.device)
            _sum_momentum(rule, block, groups, box, own[box.name], numbers.coefficient, whole)
            # Every rank computes the direction of the whole matrix, and takes its parts of it.
            direction = rule.direction(whole)
            for part, _, weight, _ in own[box.name]:
                change = (
                    direction[_range(part)].view(weight.shape)
                    + rates.weight_decay * multipliers.weight_decay * weight
                )
                weight.sub_(change, alpha=lr * multipliers.lr)


def _sum_momentum(
    rule: MatrixRule,
    block: Block,
    groups: Groups,
    box: Box,
    own: list[MatrixPart],
    coefficient: Tensor,
    whole: Tensor,
) -> None:
    """Update the momentum of a matrix on the slices, and sum it into `whole`, zeros."""
    for part, kept, _, gradient in own:
        kept.mul_(rule.momentum).add_(gradient.to(coefficient.dtype) * coefficient)
        # Of ranks that hold the same part one alone adds it.
        if holders(box, groups).rank == 0:
            whole[_range(part)] = kept.reshape(part.extent)
    # Over the ranks that share the block, then over tensor-parallel ranks, unless each has all.
    if block.zero_stage > 0:
        all_reduce(whole, block.groups.shard)
    if box.replicated != "tp":
        all_reduce(whole, groups.tp)


def _range(part: Box) -> tuple[slice, ...]:
    """Where a part lies in its logical tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(part.offset, part.extent, strict=True)
    )
