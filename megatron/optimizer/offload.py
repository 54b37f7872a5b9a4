"""Stepping blocks on the host: their master weights and moments live in its memory, and cost the
GPU nothing (ZeRO-Offload, Ren et al. 2021).

Gradients are accumulated on the device and cross to the host once a step; the norm is taken on the
device before, so clipping is exact. A block is stepped when the next forward pass comes near it:
while the GPU computes one block the host steps the next, the gradient of the one after that on its
way. Weights of offloaded blocks stay on the host: the next gather takes them there. Where the
device is the CPU nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.parallel.blocks import Block, host_memory


class HostSteps:
    """The way of gradients to the host and of weights back: two pinned buffers each, used in turn.
    Never run on a GPU.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.order = [block for block in blocks if block.on_host]
        self.device = blocks[0].weight.device
        self.fetched: dict[Block, tuple[Tensor, torch.cuda.Event]] = {}
        if self.device.type == "cuda" and self.order:
            self.stream = torch.cuda.Stream(self.device)
            self.ring = [_Pinned(self.order) for _ in range(2)]

    def begin(self) -> None:
        """All gradients are complete where the current stream is now; no transfer need wait for the
        passes that are queued on it later.
        """
        if self.device.type == "cuda":
            self.complete = torch.cuda.current_stream().record_event()

    def step(self, block: Block, update: Callable[[Tensor, Tensor | None], None]) -> None:
        """Call update(gradient, rounded weights to fill in), both on the host, and let the device
        have the result.

        On a GPU the current stream waits for the result; the gradient has been read when this
        returns.
        """
        target = block.rounded
        if self.device.type != "cuda":
            update(block.grad_shard, target)
            return
        # The gradient came after all passes, so after the gathers that read what is now
        # overwritten.
        # The gradient of the block after this one crosses while the host updates this one.
        place = self.order.index(block)
        for coming in self.order[place : place + 2]:
            self._fetch(coming)
        grad, arrived = self.fetched.pop(block)
        arrived.synchronize()
        if block.offloaded:
            update(grad, target)
            return
        # The device reads the result from pinned memory; the buffer is free when that copy is over.
        pinned = self.ring[place % 2]
        if pinned.free is not None:  # the weights of two blocks before must have left
            pinned.free.synchronize()
        out = pinned.weight[: target.numel()]
        update(grad, out)
        with torch.cuda.stream(self.stream):
            target.copy_(out, non_blocking=True)
            pinned.free = self.stream.record_event()
        torch.cuda.current_stream().wait_event(pinned.free)

    def _fetch(self, block: Block) -> None:
        if block in self.fetched:
            return
        pinned = self.ring[self.order.index(block) % 2]
        grad = pinned.grad[: block.grad_shard.numel()]
        self.stream.wait_event(self.complete)
        with torch.cuda.stream(self.stream):
            grad.copy_(block.grad_shard, non_blocking=True)
            self.fetched[block] = grad, self.stream.record_event()


class _Pinned:
    """Room for a gradient and, unless they stay here, for the weights of a block, which a GPU reads
    and writes by itself.
    """

    def __init__(self, blocks: Sequence[Block]):
        size, first = max(block.own[1] - block.own[0] for block in blocks), blocks[0]
        device = first.weight.device
        self.grad = host_memory(size, first.grad_dtype, device)
        self.weight = host_memory(0 if first.offloaded else size, first.weight.dtype, device)
        self.free: torch.cuda.Event | None = None  # once the weights have left
