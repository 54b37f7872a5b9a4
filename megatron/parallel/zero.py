"""ZeRO 0 to 3 (Rajbhandari et al. 2020): gathers weights, waits for them and frees them, and
reduces gradients, around passes of layers. When it does so follows from the schedule
(zero_plan.py).

Stages 0 and 1 reduce once a step (with --overlap-grad-reduce after a block's last backward pass),
stages 2 and 3 after each micro-batch; stage 0 gathers the sums back. parallel/blocks.py has a table
of what a rank holds when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.groups import DistributedConfig
from megatron.distributed.collectives import (
    Handle,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
)
from megatron.distributed.groups import Groups
from megatron.model.gpt import GPTModel
from megatron.model.linear import SCRATCH_BYTES
from megatron.parallel.blocks import Block, device_streams
from megatron.parallel.zero_plan import Blocks, ZeroPlanner


class Zero:
    """The weights and gradients of a step. Where one rank alone holds a block, nothing is sent.

    All ranks that share a block start the same collectives in the same order: they run the same
    schedule, so they have the same plan. At most one reduction is pending at a time.
    """

    # What is done with a block's complete gradients. None: they wait for the end of the step.
    when_complete: Callable[[Block], None] | None

    def __init__(
        self, model: GPTModel, blocks: list[Block], groups: Groups, config: DistributedConfig
    ):
        self.blocks, self.groups, self.zero_stage = blocks, groups, blocks[0].zero_stage
        self.trained = [block for block in blocks if block.trained]
        self.planner = ZeroPlanner(self, model, config)
        self.overlap_reduce = config.overlap_grad_reduce
        self.overlap_gather = config.overlap_param_gather
        self.reduce_dtype = torch.bfloat16 if config.grad_reduce_in_bf16 else None
        self.workspace = self._reduction_workspace()
        self._make_streams(blocks[0].weight.device)
        # whether updated weights are sent round: stage 3 gathers before each use
        self.gathers_updates = self.zero_stage in (1, 2)
        # whether several ranks hold the same slice of a block, or parts of a tensor's gradient
        self.has_copies = any(block.groups.same_shard.size > 1 for block in blocks)
        self.has_parts = max(groups.tp.size, groups.kv.size, groups.tied.size) > 1

        # What passes change. Between two steps all of it is empty but `gathering` and `host_steps`.
        self.gathering: dict[Block, Handle] = {}
        # the optimizer's steps of blocks on the host that are not made yet
        self.host_steps: dict[Block, Callable[[], None]] = {}
        self.reducing: tuple[Block, Tensor, Handle] | None = None
        # gradient buffers that a side stream may still read, and the event after which none does
        self.spent: list[tuple[Tensor, Any]] = []
        # stage 0: sums on their way back to all ranks
        self.returning: list[tuple[Block, Handle]] = []
        reduces_early = self.planner.reduces and (self.zero_stage >= 2 or self.overlap_reduce)
        self.when_complete = self._reduce_complete if reduces_early else None

    def _reduction_workspace(self) -> int:
        """Bytes that a reduction may take: half a layer's gradient, for larger blocks too."""
        dtypes = [self.reduce_dtype or block.grad_dtype for block in self.trained]
        largest = max((block.size for block in self.planner.transformer_blocks), default=0)
        return largest * max((dtype.itemsize for dtype in dtypes), default=0) // 2

    def _make_streams(self, device: torch.device) -> None:
        """Side streams for gathers and reductions, so that no wait holds up the passes."""
        self.streams = device_streams(device)
        self.gather_stream, self.reduce_stream = self.streams.Stream(), self.streams.Stream()

    # ---- around passes

    def open(self, block: Block) -> None:
        """Give a block a gradient buffer, when others have been reduced and freed."""
        # Never two gradients of the vocabulary's size: this one waits for the other's reduction.
        layers = self.planner.transformer_blocks
        if self.reducing is not None and layers.isdisjoint((block, self.reducing[0])):
            self.free_reduced()
        else:
            self._free_spent()
        block.open()

    def gather(self, blocks: Blocks) -> None:
        """Stage 3: make weights whole, which the next pass reads."""
        self.start_gathers(blocks)
        for block in blocks:
            self.wait_for_block(block)

    def prefetch(self, blocks: Blocks) -> None:
        """Start to gather what the pass after the next one reads, unless a step on the host would
        hold up the next one.
        """
        if not any(block in self.host_steps for block in blocks):
            self.start_gathers(blocks)

    def update_on_host(self, block: Block) -> None:
        """Make the deferred step of a block, if there is one."""
        if block in self.host_steps:
            self.host_steps.pop(block)()
            if self.gathers_updates:
                self.all_gather_weights(block)

    def complete(self, block: Block) -> None:
        """A block's gradients are complete: reduce them, now or at the end of the step."""
        block.complete()
        if self.when_complete is not None:
            self.when_complete(block)

    def finish_gradients(self) -> None:
        """After all passes of a step: finish the reductions, and sum over the other axes."""
        if self.planner.reduces:
            with self.on_stream(self.reduce_stream):
                if self.zero_stage < 2 and not self.overlap_reduce:
                    for block in self.trained:
                        self._start_reduction(block)
                self._finish_reduction()
                # Stage 0: every rank updates all of a block, so the sums come back whole.
                for block, pending in self.returning:
                    whole = pending.wait()
                    if whole.dtype != block.grad.dtype:
                        block.grad.copy_(whole)
                self.returning = []
            self.streams.current_stream().wait_stream(self.reduce_stream)
            self.spent = []
        if self.has_copies:
            sum_copies(self.trained)
        if self.has_parts:
            sum_partial_gradients(self.trained, self.groups)

    @contextlib.contextmanager
    def completing(self, use: Callable[[Block], None]) -> Iterator[None]:
        """While open nothing is reduced: `use` gets each block whose gradients are complete."""
        usual, self.when_complete = self.when_complete, use
        try:
            yield
        finally:
            self.when_complete = usual

    # ---- weights

    def all_gather_weights(self, block: Block) -> None:
        """Start to send the weights that this rank has updated to the other ranks. The next pass
        that needs them waits for them. Only where `gathers_updates`.
        """
        assert block not in self.gathering
        with self.on_stream(self.gather_stream):
            self.gathering[block] = start_all_gather(
                block.weight[block.own_slice], block.groups.shard_gather, out=block.weight
            )
        if not self.overlap_gather:
            self.wait_for_block(block)

    def defer(self, block: Block, step: Callable[[], None]) -> None:
        """Make the step of a block on the host when the next pass comes near the block, or in
        `wait_for_weights`.
        """
        self.host_steps[block] = step

    def wait_for_weights(self) -> None:
        """Wait for all weights that are on their way or to be changed."""
        for block in self.blocks:
            self.wait_for_block(block)

    def wait_for_block(self, block: Block) -> None:
        """Wait until a block's weights are those of this step, and whole."""
        self.update_on_host(block)
        if block in self.gathering:
            self.gathering.pop(block).wait()
            # nothing was sent: it is the copy from the host that is awaited
            if block.groups.shard.size == 1:
                self.streams.current_stream().wait_stream(self.gather_stream)

    def start_gathers(self, blocks: Sequence[Block]) -> None:
        """Start to make weights whole, if they are not."""
        for block in blocks:
            self.update_on_host(block)
            if block.is_released:
                block.allocate()
                with self.on_stream(self.gather_stream):
                    own = block.untracked[block.own_slice]
                    # of an offloaded block from the host, never run on a GPU
                    own.copy_(block.gathered_from, non_blocking=True)
                    self.gathering[block] = start_all_gather(
                        own, block.groups.shard_gather, out=block.untracked
                    )

    # ---- gradients

    def free_reduced(self) -> None:
        """Wait for the reduction that is on its way, and free gradient buffers."""
        if self.reducing is not None:
            with self.on_stream(self.reduce_stream):
                self._finish_reduction()
        self._free_spent()

    def _free_spent(self) -> None:
        """Free the gradient buffers that have been reduced."""
        for _, event in self.spent:
            self.streams.current_stream().wait_event(event)
        self.spent = []

    def _reduce_complete(self, block: Block) -> None:
        """Reduce a block's complete gradients; with --overlap-grad-reduce only start to."""
        with self.on_stream(self.reduce_stream):
            self._start_reduction(block)
            if not self.overlap_reduce:
                self._finish_reduction()

    def _start_reduction(self, block: Block) -> None:
        """Start to sum this block's gradients, when the block before has been reduced."""
        self._finish_reduction()
        # its next backward pass, which may come at once, gets another buffer
        grad = block.close() if self.zero_stage >= 2 else block.grad
        own = grad[slice(*block.shard_range)]
        shard, out = block.groups.shard, own
        if self.zero_stage >= 2 and block.summed is None and shard.size > 1:
            out = torch.empty_like(own)  # the step's first sum, to which others are added
        pending = start_reduce_scatter(grad, shard, out, self.reduce_dtype, self.workspace)
        self.reducing = block, grad, pending

    def _finish_reduction(self) -> None:
        """Wait for the reduction that is on its way, and store the sum."""
        if self.reducing is None:
            return
        (block, grad, pending), self.reducing = self.reducing, None
        slice_ = pending.wait()
        # Stage 1 is done: the sum is in this rank's slice of `block.grad` (`out` of its start).
        if self.zero_stage == 0 and block.groups.shard.size > 1:
            sent = slice_ if self.reduce_dtype is None else slice_.to(self.reduce_dtype)
            out = block.grad if sent.dtype == block.grad.dtype else None
            self.returning.append(
                (block, start_all_gather(sent, block.groups.shard_gather, out=out))
            )
        elif self.zero_stage >= 2:
            block.summed = slice_ if block.summed is None else block.summed.add_(slice_)
            event = self.reduce_stream.record_event()
            if event is not None:  # on a CPU the reduction is over
                self.spent.append((grad, event))

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """In the order of a side stream, after all that is queued now."""
        stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(stream):
            yield


# ---- what is summed once a step, after the backward passes
#
# Sums, never means: backward passes divide by the tokens of the whole step, and the optimizer's
# `grad_scale` corrects that to its valid tokens. All of them act on the gradients of what this rank
# updates, which under ZeRO are slices.


def sum_copies(blocks: list[Block]) -> None:
    """Hybrid sharding: sum each slice over the ranks that hold the same one."""
    for block in blocks:
        if block.groups.same_shard.size > 1:
            all_reduce(block.grad_shard, block.groups.same_shard)


def sum_partial_gradients(blocks: list[Block], groups: Groups) -> None:
    """Sum what tensors declare in `grad_sum`: over tensor-parallel ranks, packed, and a tied matrix
    over the two stages that hold it.
    """
    for name, axis in (("tp", groups.tp), ("kv", groups.kv), ("tied", groups.tied)):
        if axis.size == 1:
            continue
        for pack in _packs(_partial_views(blocks, name)):
            if len(pack) == 1:  # a tied matrix: no copy of it
                all_reduce(pack[0], axis)
                continue
            packed = all_reduce(torch.cat(pack), axis)
            for x, summed in zip(pack, packed.split([x.numel() for x in pack])):
                x.copy_(summed)


def _partial_views(blocks: list[Block], name: str) -> Iterator[Tensor]:
    """The flat pieces, in `grad_shard`, of tensors whose gradients are summed over these ranks."""
    for block in blocks:
        for entry in block.entries:
            for box in entry.boxes:
                if box.spec.grad_sum and box.spec.copies == name:
                    # Both ends of a pipeline cut a tied matrix into the same slices: it is all of
                    # its block.
                    is_all = len(block.entries) == 1
                    assert name != "tied" or block.zero_stage == 0 or is_all
                    yield from block.runs(entry, box, block.grad_shard)


def _packs(views: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """The views in packs, each of as few as have SCRATCH_BYTES together."""
    pack: list[Tensor] = []
    size = 0  # bytes
    for view in views:
        pack.append(view)
        size += view.nbytes
        if size >= SCRATCH_BYTES:
            yield pack
            pack, size = [], 0
    if pack:
        yield pack
