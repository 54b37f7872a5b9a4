"""ZeRO 0 to 3 (Rajbhandari et al. 2020) as two verbs around each pass of a layer, acquire and
release: when weights are gathered and freed, when gradients are reduced.

One code path, four lifetimes (parallel/blocks.py). A layer has one flat buffer (block) for each
group of ranks that hold its parameters, and each block its own groups. A block's gradients are
reduce-scattered over the ranks that share it as soon as its last backward pass is over: of the step
at stages 0 and 1, of each micro-batch at stages 2 and 3, where no more than two blocks have a
gradient buffer at a time: the one that is computed and the one that is on its way. Stage 3 gathers
a block before a pass needs it, overlapped with the computation of the block before, in the order
that the schedule fixes, and frees it afterwards. There are no hooks, buckets or thresholds: a
PassPlan specifies what happens around each pass. What an offloaded block gathers comes from the
host's memory, overlapped in the same way.

Under a split backward pass the gradients of norms, biases and positions exist before those of the
matrices: a small buffer keeps them from one half to the other. Called from parallel/pipeline.py
around each pass of a layer, and from training/step.py at the end of a step.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.groups import DistributedConfig
from megatron.distributed.collectives import Handle, start_all_gather, start_reduce_scatter
from megatron.distributed.groups import Groups
from megatron.model.block import Layer
from megatron.model.gpt import GPTModel
from megatron.parallel.blocks import Block
from megatron.parallel.grad_norm import sum_of_squares
from megatron.parallel.layer_passes import Call
from megatron.parallel.reduction import sum_copies, sum_partial_gradients
from megatron.parallel.schedule import COMPUTATIONS, Kind

Buffers = tuple[Block, ...]  # of one layer


# after these passes the gradients of a micro-batch are complete
COMPLETING = Kind.BACKWARD, Kind.BACKWARD_WEIGHT


def _buffers_of_layers(model: GPTModel, blocks: list[Block]) -> dict[Layer, Buffers]:
    """The buffers in which each layer has parameters."""
    owner = {parameter: block for block in blocks for parameter in block.parameters}
    return {
        layer: tuple(dict.fromkeys(owner[parameter] for parameter in layer.parameters()))
        for _, layer in model.units()
    }


def _of_layers(buffers_of: dict[Layer, Buffers]) -> set[Block]:
    """The buffers of transformer layers, not those of the vocabulary."""
    return {
        block
        for layer, buffers in buffers_of.items()
        if not layer.of_vocabulary
        for block in buffers
    }


class PassPlan(NamedTuple):
    """What ZeRO does around a pass of one kind of a layer."""

    opens: Buffers = ()  # give these a gradient buffer
    opens_early: Buffers = ()  # or one for what a split backward pass completes in its first half
    adds_early: Buffers = ()  # which its second half adds
    waits_for: Buffers = ()  # stages 0 to 2: the weights of this step have arrived
    gathers: Buffers = ()  # stage 3: gather the weights before the pass, and free them afterwards
    updates_next: Block | None = None  # of which the deferred update runs behind the pass
    completes: Buffers = ()  # these have one more pass of their period
    frees_reduced: bool = False  # activations are most after it: free what has been reduced


class Zero:
    """What the executor calls before and after each pass. Where one rank alone holds a block,
    nothing is sent.
    """

    def __init__(
        self, model: GPTModel, blocks: list[Block], groups: Groups, config: DistributedConfig
    ):
        self.model, self.blocks, self.groups = model, blocks, groups
        self.stage, self.keep = blocks[0].stage, config.zero3_keep_gathered
        self.overlap_reduce = config.overlap_grad_reduce
        self.overlap_gather = config.overlap_param_gather
        self.reduce_dtype = torch.bfloat16 if config.grad_reduce_in_bf16 else None
        self.buffers_of = _buffers_of_layers(model, blocks)
        self.last = {chunk[-1][1] for chunk in model.chunks}
        self.layers = _of_layers(self.buffers_of)
        self.trained = [block for block in blocks if block.trained]
        self.workspace = self._reduction_workspace()
        device = blocks[0].weight.device
        self.gather_stream, self.reduce_stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        following = dict(pairwise(blocks))
        self.users = Counter(block for buffers in self.buffers_of.values() for block in buffers)
        self.plans = {
            (layer, kind): self._plan(layer, kind, following.get(buffers[-1]))
            for layer, buffers in self.buffers_of.items()
            for kind in (*COMPUTATIONS, Kind.REBUILD)
        }
        self._begin_with_nothing()

    def _plan(self, layer: Layer, kind: Kind, following: Block | None) -> PassPlan:
        """What this stage does around a pass."""
        buffers = self.buffers_of[layer]
        trained = tuple(block for block in buffers if block.trained)
        backward = kind in (*COMPLETING, Kind.BACKWARD_INPUT)
        splits = kind is Kind.BACKWARD_INPUT and self.stage >= 2
        reads = self.stage == 3 and _reads_weight(layer, kind)
        resident = self.stage < 3 and kind is not Kind.BACKWARD_WEIGHT
        return PassPlan(
            opens=trained if backward and not splits else (),
            opens_early=trained if splits else (),
            adds_early=trained if kind is Kind.BACKWARD_WEIGHT and self.stage >= 2 else (),
            waits_for=buffers if resident else (),
            gathers=buffers if reads else (),
            updates_next=following if resident else None,
            completes=buffers if kind in COMPLETING else (),
            frees_reduced=kind is Kind.FORWARD and layer in self.last,
        )

    def _begin_with_nothing(self) -> None:
        """What passes change; between two steps all of it is empty but `deferred`, `gathering` and
        the counts.
        """
        # stages 2 and 3, by layer and micro-batch: of a split backward pass, what its first half
        # completes
        self.early: dict[tuple[Layer, int], list[Tensor]] = {}
        self.needs: deque[Buffers] = deque()  # stage 3: what the passes to come read, in order
        self.remaining: Counter[Buffers] = Counter()
        self.gathering: dict[Block, Handle] = {}
        self.deferred: dict[Block, Callable[[], None]] = {}
        # passes of a block's layers from one reduction to the next
        self.period: dict[Block, int] = {}
        self.due: dict[Block, int] = {}
        self.reducing: tuple[Block, Tensor, Handle] | None = None
        # gradient buffers that a side stream may still read, and the event after which none
        # does
        self.spent: list[tuple[Tensor, Any]] = []
        # stage 0: sums on their way back to all ranks
        self.returning: list[tuple[Block, Handle]] = []
        self.watched: Tensor | None = None

    def _reduction_workspace(self) -> int:
        """Bytes that a reduction may take: half a layer's gradient, for larger blocks too."""
        item = max(
            ((self.reduce_dtype or block.grad_dtype).itemsize for block in self.trained), default=0
        )
        return max((block.size for block in self.layers), default=0) * item // 2

    # ---- passes

    def begin_step(self, calls: Sequence[Call]) -> None:
        """These passes will come now, in this order."""
        assert not self.needs and self.reducing is None
        passes: Counter[Block] = Counter()
        for layer, kind in calls:
            plan = self.plans[layer, kind]
            passes.update(plan.completes)
            if plan.gathers:
                self.needs.append(plan.gathers)
        self.remaining = Counter(self.needs)
        for block, count in passes.items():
            # Of a matrix that is both embedding and head the two ends of other micro-batches may
            # come between those of one: one sum a step.
            often = self.stage >= 2 and (self.users[block] == 1 or self.groups.pp.size == 1)
            self.period[block] = self.users[block] if often else count
        self.due = dict(self.period)
        if self.needs and self.overlap_gather:
            self._gather_all(self.needs[0])

    def acquire(self, layer: Layer, kind: Kind, micro: int) -> None:
        """Before a pass of a layer on a micro-batch: make its weights whole, and give its gradients
        buffers, as far as the pass needs them.
        """
        plan = self.plans[layer, kind]
        if plan.frees_reduced:
            # A gradient of the micro-batch before has had this stage's pass to be reduced.
            self._free_reduced()
        for block in plan.opens:
            if block.grad is None:
                self._open(block)
        if plan.opens_early:
            self.early[layer, micro] = [block.open_early() for block in plan.opens_early]
        if plan.adds_early:
            # what the first half has completed
            for block, early in zip(plan.adds_early, self.early.pop((layer, micro), ())):
                block.grad[block.plan.late :].copy_(early)
        for block in plan.waits_for:
            if block in self.deferred or block in self.gathering:
                self._arrive(block)
        if plan.gathers:
            self._acquire_gathered(plan.gathers)

    def release(self, layer: Layer, kind: Kind, micro: int) -> None:
        """After the pass: free the weights, reduce the gradients that are complete."""
        plan = self.plans[layer, kind]
        if plan.gathers:
            self._release_gathered(plan.gathers, read_again=kind is Kind.REBUILD)
        if plan.updates_next in self.deferred:
            # The pass is queued. The host updates what comes next while the GPU computes.
            self._carry_out(plan.updates_next)
        for block in plan.opens_early:
            block.close_early()
        for block in plan.completes:
            self.due[block] -= 1
            if self.due[block] == 0 and block.trained:
                self.due[block] = self.period[block]
                self._complete(block)

    def end_step(self) -> None:
        """All passes that began with `begin_step` are over; when it returns the gradients are
        complete.
        """
        with self._on_stream(self.reduce_stream):
            if self.stage < 2 and not self.overlap_reduce:
                for block in self.trained:
                    self._reduce(block)
            self._finish()
            for block, pending in self.returning:
                whole = pending.wait()
                if whole.dtype != block.grad.dtype:
                    block.grad.copy_(whole)
            self.returning = []
        if self.reduce_stream is not None:
            torch.cuda.current_stream().wait_stream(self.reduce_stream)
        self.spent = []
        if self.watched is None:
            sum_copies(self.trained)
            sum_partial_gradients(self.trained, self.groups)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Tensor]:
        """While open no gradient leaves its rank or is kept: what it yields is the sum of squares
        (float64) of those that were complete.
        """
        self.watched = torch.zeros((), dtype=torch.float64, device=self.blocks[0].weight.device)
        try:
            yield self.watched
        finally:
            self.watched = None

    # ---- weights

    def all_gather_weights(self, block: Block) -> None:
        """The weights that this rank updates have changed. Stages 1 and 2 send them round, and wait
        where the next pass needs them.
        """
        if self.stage in (1, 2):
            assert block not in self.gathering
            with self._on_stream(self.gather_stream):
                self.gathering[block] = start_all_gather(
                    block.part(block.weight), block.groups.shard_gather, out=block.weight
                )
            if not self.overlap_gather:
                self._arrive(block)

    def defer(self, block: Block, step: Callable[[], None]) -> None:
        """`step` will change the weights that this rank updates. It is called when the next pass
        comes near the block, or by `wait_for_weights`.
        """
        self.deferred[block] = step

    def wait_for_weights(self) -> None:
        """Wait for all weights that are on their way or to be changed."""
        for block in self.blocks:
            self._arrive(block)

    def _carry_out(self, block: Block) -> None:
        """Make the deferred step of a block."""
        self.deferred.pop(block)()
        self.all_gather_weights(block)

    def _arrive(self, block: Block) -> None:
        """Wait until a block's weights are those of this step, and whole."""
        if block in self.deferred:
            self._carry_out(block)
        if block in self.gathering:
            self.gathering.pop(block).wait()
            # nothing was sent: it is the copy from the host that is awaited
            if self.gather_stream is not None and block.shard.size == 1:
                torch.cuda.current_stream().wait_stream(self.gather_stream)

    def _acquire_gathered(self, buffers: Buffers) -> None:
        """Stage 3: make the weights of a layer whole for a pass that reads them."""
        assert self.needs.popleft() == buffers, "a pass out of the order of begin_step"
        self.remaining[buffers] -= 1
        self._gather_all(buffers)
        for block in buffers:
            self._arrive(block)
        coming = self._next_to(buffers) if self.overlap_gather else ()
        if not any(block in self.deferred for block in coming):
            self._gather_all(coming)

    def _release_gathered(self, buffers: Buffers, read_again: bool) -> None:
        """Stage 3: the pass is queued. Start what is read next, and free what is not, nor is
        `read_again` soon: a layer that has been rebuilt keeps its weights for its backward pass.
        """
        if self.overlap_gather:
            self._gather_all(self._next_to(buffers))
        if not read_again and not self._needed(buffers):
            for block in buffers:
                if block.stage == 3:
                    block.release()

    def _gather_all(self, buffers: Buffers) -> None:
        """Start to make the weights of a layer whole."""
        for block in buffers:
            self._gather(block)

    def _gather(self, block: Block) -> None:
        """Start to make a block's weights whole, if they are not."""
        if block in self.deferred:
            self._carry_out(block)
        if block.is_released:
            block.allocate()
            with self._on_stream(self.gather_stream):
                own = block.part(block.untracked)
                # of an offloaded block from the host, never run on a GPU
                own.copy_(block.kept, non_blocking=True)
                self.gathering[block] = start_all_gather(
                    own, block.groups.shard_gather, out=block.untracked
                )

    def _needed(self, buffers: Buffers) -> bool:
        """Whether a layer stays gathered: it is one of the two that are read next, or with
        --zero3-keep-gathered read again in this step.
        """
        if self.keep:
            return self.remaining[buffers] > 0
        first = self.needs[0] if self.needs else ()
        return buffers == first or bool(first) and buffers == self._next_to(first)

    def _next_to(self, buffers: Buffers) -> Buffers:
        """The next other layer that is read, if it may be gathered while this one is: never two of
        the vocabulary's size; () for none.
        """
        other = next((other for other in self.needs if other != buffers), ())
        return () if self.layers.isdisjoint((*buffers, *other)) else other

    # ---- gradients

    def _open(self, block: Block) -> None:
        """Give a block a gradient buffer."""
        # never two gradients of the vocabulary's size
        if self.reducing is not None and self.layers.isdisjoint((block, self.reducing[0])):
            with self._on_stream(self.reduce_stream):
                self._finish()
        self._free_spent()
        block.open()

    def _free_reduced(self) -> None:
        """Wait for the reduction that is on its way, and free gradient buffers."""
        if self.reducing is not None:
            with self._on_stream(self.reduce_stream):
                self._finish()
        self._free_spent()

    def _free_spent(self) -> None:
        """Free the gradient buffers that have been reduced."""
        for _, event in self.spent:
            torch.cuda.current_stream().wait_event(event)
        self.spent = []

    def _complete(self, block: Block) -> None:
        """A block's gradients have had all passes of a period: reduce them, or count them."""
        block.complete()
        if self.watched is not None:
            self.watched += sum_of_squares([block.close()], block.weight.device)
        elif self.stage >= 2 or self.overlap_reduce:
            with self._on_stream(self.reduce_stream):
                self._reduce(block)
                if not self.overlap_reduce:
                    self._finish()

    def _reduce(self, block: Block) -> None:
        """Start to sum this block's gradients; those of the one before have been summed by now."""
        self._finish()
        # its next backward pass, which may come at once, gets another buffer
        grad = block.close() if self.stage >= 2 else block.grad
        own = block.slice(grad)
        first = self.stage >= 2 and block.summed is None and block.shard.size > 1
        # the step's first sum is where others are added
        out = torch.empty_like(own) if first else own
        self.reducing = (
            block,
            grad,
            start_reduce_scatter(grad, block.shard, out, self.reduce_dtype, self.workspace),
        )

    def _finish(self) -> None:
        if self.reducing is None:
            return
        (block, grad, pending), self.reducing = self.reducing, None
        slice_ = pending.wait()
        if self.stage == 0 and block.shard.size > 1:
            sent = slice_ if self.reduce_dtype is None else slice_.to(self.reduce_dtype)
            out = block.grad if self.reduce_dtype is None else None
            self.returning.append(
                (block, start_all_gather(sent, block.groups.shard_gather, out=out))
            )
        elif self.stage >= 2:
            block.summed = slice_ if block.summed is None else block.summed.add_(slice_)
            if self.reduce_stream is not None:
                self.spent.append((grad, self.reduce_stream.record_event()))

    @contextlib.contextmanager
    def _on_stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """On a GPU: in the order of a side stream, after all that is queued now, so that no
        wait holds up the passes.
        """
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield


def _reads_weight(layer: Layer, kind: Kind) -> bool:
    """Whether a pass reads the layer's weights: a weight gradient does not, nor does the
    embedding's backward pass.
    """
    return kind is Kind.FORWARD or kind is not Kind.BACKWARD_WEIGHT and layer.reads_weight_backward
