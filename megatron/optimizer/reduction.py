"""All gradient communication that is not inside a layer's backward: over data-parallel ranks, block by block, then over tensor-parallel ranks.

Sums, never means: the loss is divided by the global token count once, when the optimizer steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.groups import DistributedConfig
from megatron.dist.collectives import Pending, all_reduce, start_all_gather, start_reduce_scatter
from megatron.dist.groups import Groups
from megatron.layers.linear import SCRATCH_BYTES
from megatron.layers.tensor_parallel import TensorParallel
from megatron.model.block import BlockWrapper, MicroBatch
from megatron.model.gpt import GPTModel
from megatron.optimizer.blocks import Block


class GradientReduction:
    """Wraps another wrapper. When a block's last backward of the step is over, its gradients are reduce-scattered over the ranks that hold
    the same parameters, then all-gathered: beside the backward of the blocks before it, unless --no-overlap-grad-reduce."""

    def __init__(self, inner: BlockWrapper, model: GPTModel, blocks: list[Block], groups: Groups, config: DistributedConfig):
        self.inner, self.model, self.blocks, self.groups = inner, model, blocks, groups
        self.overlap = config.overlap_grad_reduce
        self.wire = torch.bfloat16 if config.grad_reduce_in_bf16 else None
        by_name = {block.name: block for block in blocks}
        self.block_of = {unit: by_name[name] for name, unit in model.units() if name in by_name}  # a tied head has no block of its own
        self.stream = torch.cuda.Stream(blocks[0].weight.device) if blocks[0].weight.is_cuda else None
        self.left: dict[nn.Module, int] = {}
        self.summing: tuple[Block, Pending] | None = None
        self.gathering: list[tuple[Block, Pending]] = []

    def forward(self, unit: nn.Module, x: Tensor | None, micro: MicroBatch) -> tuple[Tensor, Any]:
        return self.inner.forward(unit, x, micro)

    def backward(self, unit: nn.Module, saved: Any, dy: Tensor) -> Tensor | None:
        dx = self.inner.backward(unit, saved, dy)
        self._count(unit)
        return dx

    def backward_input(self, unit: nn.Module, saved: Any, dy: Tensor) -> tuple[Tensor | None, Any]:
        return self.inner.backward_input(unit, saved, dy)

    def backward_weight(self, unit: nn.Module, kept: Any) -> None:
        self.inner.backward_weight(unit, kept)
        self._count(unit)

    def _count(self, unit: nn.Module) -> None:
        """One more micro-batch's gradients of this unit are complete."""
        if unit in self.block_of and self.groups.replicas.size > 1:
            self.left[unit] -= 1
            if self.left[unit] == 0 and self.overlap:
                with self._beside():
                    self._reduce(self.block_of[unit])

    def begin_step(self, micro_batches: int) -> None:
        self.inner.begin_step(micro_batches)
        self.left = dict.fromkeys(self.block_of, micro_batches)

    def end_step(self) -> None:
        self.inner.end_step()
        if self.groups.replicas.size > 1:
            with self._beside():
                for block in () if self.overlap else self.blocks:
                    self._reduce(block)
                self._gather()
                for block, pending in self.gathering:
                    whole = pending.wait()
                    if whole.dtype != block.grad.dtype:
                        block.grad.copy_(whole)
                self.gathering = []
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
        sum_partial_gradients(self.blocks, self.model.tp, self.groups)

    def _reduce(self, block: Block) -> None:
        """Start to sum this block; the one before it has been summed by now and goes round."""
        self._gather()
        replicas = self.groups.replicas
        self.summing = block, start_reduce_scatter(block.grad, replicas, out=block.part(block.grad, replicas), wire=self.wire)

    def _gather(self) -> None:
        if self.summing is not None:
            (block, pending), self.summing = self.summing, None
            shard = pending.wait()
            if self.wire is None:
                self.gathering.append((block, start_all_gather(shard, self.groups.replicas_gather, out=block.grad)))
            else:
                self.gathering.append((block, start_all_gather(shard.to(self.wire), self.groups.replicas_gather)))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU: in the order of a stream of its own, after all that is queued now, so that no wait holds up the backward pass."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield


def sum_partial_gradients(blocks: list[Block], tp: TensorParallel, groups: Groups) -> None:
    """Sum what PARTIAL_GRADIENTS lists over its tensor-parallel ranks, packed, and a tied matrix over the two stages that hold it."""
    for name, axis in (("axis", groups.tp), ("kv", groups.kv), ("tied", groups.tied)):
        views = [box.view(entry.view(block.grad)) for block in blocks for entry in block.entries for box in entry.boxes
                 if axis.size > 1 and box.replicated == name and box.partial(tp)]
        pack: list[Tensor] = []
        size = 0  # bytes
        for index, view in enumerate(views):
            pack.append(view)
            size += view.numel() * view.element_size()
            if index == len(views) - 1 or size >= SCRATCH_BYTES:
                if len(pack) == 1 and view.is_contiguous():  # a tied matrix: no copy of it
                    all_reduce(view, axis)
                else:
                    packed = all_reduce(torch.cat([x.flatten() for x in pack]), axis)
                    for x, summed in zip(pack, packed.split([x.numel() for x in pack])):
                        x.copy_(summed.view(x.shape))
                pack, size = [], 0
