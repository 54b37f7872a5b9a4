"""Mixed-precision optimizer over flat blocks: fp32 master weights and moments of what this rank
updates, one norm, one fused update for each segment.

Blocks that are stepped on the host (offload.py) are not stepped at once: ZeRO carries out each of
their steps before the block's weights are needed. Update rules act on slices, element by element
(update.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron.config.groups import Config
from megatron.distributed.groups import Groups
from megatron.kernels import apex, grad_norm
from megatron.model.gpt import layer_names
from megatron.model.init import fill_initial
from megatron.model.kernels import choose_kernels
from megatron.model.spec import Box, Holder, ParamGroup, holders
from megatron.optimizer.lr_schedule import StepRates
from megatron.optimizer.nvme import FileTensor, Held, StateFiles, Use
from megatron.optimizer.offload import HostSteps
from megatron.optimizer.update import StepScalars, UpdateRule, rules_of
from megatron.parallel.blocks import UNTRAINED, Block, Segment, accumulation_dtype
from megatron.parallel.zero import Zero

MASTER = "master"  # next to the names of the rule's states: what is kept of a block
PIECE = 1 << 18  # elements widened to float64 at once on a CPU: two megabytes, in cache
PIECE_CUDA = 1 << 20
Fill = Callable[[list[tuple[Box, Tensor]]], None]  # gives the tensors of boxes new values
Scalars = dict[ParamGroup, StepScalars]  # of one step
States = dict[Block, dict[str, Tensor]]  # what is in memory all the time


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step, still on the device."""

    grad_norm: Tensor  # before clipping, float64
    skipped: Tensor  # 1.0 where the step was skipped


class Optimizer:
    """Owns what a step needs in addition to blocks: moments, the step count."""

    def __init__(self, blocks: list[Block], config: Config, groups: Groups, zero: Zero):
        """`zero` sends weights that have changed to the ranks that hold them, and makes the steps
        of blocks on the host before their weights are read.
        """
        device = blocks[0].weight.device
        self.config, _ = choose_kernels(config, device)
        self.blocks, self.groups, self.zero = blocks, groups, zero
        # Filled block by block: if memory runs out here, the report names those that are done.
        self.states: States = {}
        self.trained = [block for block in blocks if block.trained]
        self.on_device = [block for block in self.trained if not block.on_host]
        self.wide = accumulation_dtype(blocks[0].weight.dtype)
        self.rule, self.host_rule = rules_of(self.config.optimizer)
        self.host = HostSteps(blocks)
        # blocks that wait for their step on the host: whether nothing else needs the gradient
        self.waiting: dict[Block, bool] = {}
        # until the next step: they are counted when it is logged
        self.keeps_gradients = config.logging.log_num_zeros_in_grad
        dtypes = {name: self.rule.state_dtype(name, self.wide) for name in self.rule.state_names}
        self.state_names = tuple(dtypes)
        # One set of files for all blocks: their reads follow each other in the order of the steps.
        self.files: StateFiles | None = None
        if in_files := [block for block in blocks if block.in_files]:
            folder = config.optimizer.optimizer_nvme_offload
            self.files = StateFiles(folder, in_files, {MASTER: self.wide, **dtypes})
        for block in blocks:
            self.states[block] = state_in_memory(block, dtypes)
        self.steps = torch.zeros((), dtype=torch.float32, device=device)

    def initialise(self) -> None:
        """Fill the master weights from the seed; `copy_masters_to_weights` comes next."""

        def fill(pairs: list[tuple[Box, Tensor]]) -> None:
            for box, master in pairs:
                fill_initial(box, master, self.config.training.seed)

        self.fill_weights(fill)

    def fill_weights(self, fill: Fill) -> None:
        """Give the master weights new values, as many boxes of `weight_boxes` at a time as are in
        memory together; `copy_masters_to_weights` comes next.
        """
        self._fill((MASTER,), self.blocks, fill)

    def copy_masters_to_weights(self) -> None:
        """Round the master weights that are in memory into the weights the model computes with, on
        every rank that does. All ranks call it together.
        """
        for block in self.blocks:
            if block.rounded is not None and not block.in_files:
                block.rounded.copy_(block.master)
            if self.zero.gathers_updates:
                self.zero.all_gather_weights(block)

    def fill_states(self, fill: Fill) -> None:
        """Give the optimizer's tensors new values, as many boxes of `state_boxes` at a time as are
        in memory together.
        """
        self._fill(self.state_names, self.trained, fill)

    def _fill(self, kinds: Sequence[str], blocks: Sequence[Block], fill: Fill) -> None:
        in_memory = [block for block in blocks if not block.in_files]
        fill(list(self._boxes(kinds, in_memory)))  # type: ignore[arg-type]  # these are tensors
        for kind, block in product(kinds, blocks):
            if not block.in_files:
                continue
            for piece, held in self.pieces(block, (kind,), "fill"):
                fill([(_named(box, kind), x) for box, x in block.boxes(held[kind], piece)])
                if kind == MASTER:
                    block.rounded[piece].copy_(held[kind])

    def pieces(self, block: Block, kinds: Sequence[str], use: Use) -> Iterable[Held]:
        """(slice of `own`, its tensors of `kinds`: MASTER or names of states): all at once, or with
        --optimizer-nvme-offload piece by piece, each the caller's until it asks for the next.
        """
        if block.in_files:
            return self.files.pieces(block, kinds, use)
        first, last = block.own
        return [(slice(0, last - first), self.states[block])]

    def _boxes(
        self, kinds: Sequence[str], blocks: Sequence[Block]
    ) -> Iterator[tuple[Box, Tensor | FileTensor]]:
        for kind, block in product(kinds, blocks):
            found: Iterator[tuple[Box, Tensor | FileTensor]]
            if block.in_files:
                found = self.files.boxes(block, kind)
            else:
                found = block.boxes(self.states[block][kind])
            for box, view in found:
                yield _named(box, kind), view

    def drop_gradients(self) -> None:
        """Drop the gradients that the last step kept: those of a skipped step, or all under
        --log-num-zeros-in-grad. Those of pending steps on the host are dropped after their use.
        """
        for block in self.trained:
            if block in self.waiting:
                self.waiting[block] = True
            elif block.grad is not None or block.summed is not None:
                block.drop()

    @cached_property
    def param_groups(self) -> set[ParamGroup]:
        """The parameter groups of trained tensors."""
        return {each for block in self.trained for _, each in block.layout.ranges}

    @cached_property
    def segments(self) -> dict[Block, list[Segment]]:
        """The ranges of each block that are updated alike, where all of it is in memory."""
        return {block: block.segments() for block in self.trained if not block.in_files}

    @cached_property
    def counted(self) -> dict[Block, list[slice]]:
        """The parts of each gradient that this rank counts."""
        return {block: block.counted(self.groups) for block in self.trained}

    def grad_sq_sum(self) -> Tensor:
        """This rank's share of the gradient's sum of squares (float64)."""
        parts: list[Tensor] = []
        for block in self.trained:
            shard = block.grad_shard
            parts += [shard[part] for part in self.counted[block]]
        return sum_of_squares(parts, self.steps.device, self.config.optimizer.grad_norm_backend)

    def layer_grad_sq_sums(self) -> Tensor:
        """The same of each layer by itself, in the order of `layer_names` [layers]."""
        parts = (
            (block, block.grad_shard[part])
            for block in self.trained
            for part in self.counted[block]
        )
        return self._sums_by_layer(parts, self.config.optimizer.grad_norm_backend)

    def _sums_by_layer(self, parts: Iterable[tuple[Block, Tensor]], backend: str) -> Tensor:
        """Sums of squares (float64) of parts of blocks, [layers] in the order of `layer_names`."""
        # A layer may have several blocks, and a rank has a part of each: the caller sums over
        # ranks.
        place = {name: index for index, name in enumerate(layer_names(self.config.model))}
        sums = torch.zeros(len(place), dtype=torch.float64, device=self.steps.device)
        for block, part in parts:
            sums[place[block.layout.unit]] += sum_of_squares([part], self.steps.device, backend)
        return sums

    @torch.no_grad()
    def step(
        self, *, rates: StepRates, grad_sq_sum: Tensor, grad_scale: Tensor | float
    ) -> StepOutcome:
        """Update the weights from the gradients, whose sum of squares over all ranks is
        `grad_sq_sum`, and all-gather them block by block. Of `rates` each tensor takes the one that
        it declares.

        `grad_scale` (float64 scalar or number) turns the accumulated gradient into that of the
        mean loss per valid token: nominal tokens / (valid tokens x loss scale). A non-finite
        gradient or factor leaves weights, moments and step count as they are. The steps of blocks
        on the host are not carried out, but handed to `Zero.defer`.
        """
        # 1. One factor unscales, normalizes and clips; a NaN or Inf anywhere is in the norm.
        norm = grad_sq_sum.sqrt() * grad_scale
        found_inf = (~torch.isfinite(norm)).to(torch.float32)
        flags = self.config.optimizer
        limit = flags.clip_grad
        clip = (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else norm.new_ones(())
        coefficient = (clip * grad_scale).to(self.wide)
        # The host waits for the norm unless the kernel itself reads found_inf.
        kernel_skips = self.rule.implementation.skips_on_device and self.steps.is_cuda
        if not kernel_skips and found_inf.item():
            return StepOutcome(norm, found_inf)

        # 2. What a segment's update takes follows from what its tensors declare. Kernels that
        # divide the gradient take an fp32 scalar.
        divisor = 1 / coefficient if self.wide == torch.float32 else None
        step = self.steps + 1
        scalars = {
            each: StepScalars(
                lr=rates.decoupled if each.decoupled_lr else rates.base,
                weight_decay=rates.weight_decay if each.decay else 0.0,
                eps=flags.adam_eps,
                steps_before=self.steps,
                step=step,
                coefficient=coefficient,
                divisor=divisor,
                found_inf=found_inf,
            )
            for each in self.param_groups
        }

        # 3. Steps on the host are handed over: each is made when the next forward pass needs it.
        if self.host.order:
            self._defer_host_steps(scalars)

        # 4. Steps on the device. Weights leave for other ranks while the next block is updated.
        for block in self.on_device:
            self._update(self.rule, block, scalars, block.grad_shard, block.rounded)
            if not self.keeps_gradients:
                block.drop()
            if self.zero.gathers_updates:
                self.zero.all_gather_weights(block)
        self.steps += 1 - found_inf
        return StepOutcome(norm, found_inf)

    def _defer_host_steps(self, scalars: Scalars) -> None:
        """Hand over the steps of blocks on the host."""
        assert not self.waiting, "a step on the host that no forward pass has asked for"
        # Kept for the count of zeros in a console line, unless the next step has begun.
        self.waiting = dict.fromkeys(self.host.order, not self.keeps_gradients)
        if self.files is not None:
            self.files.expect(tuple(self.files.dtypes))
        # Copies: the step count moves on before the last block is stepped.
        any_scalars = next(iter(scalars.values()))._asdict()
        copies: dict[str, Any] = {
            name: value.to("cpu", copy=True, non_blocking=True)
            for name, value in any_scalars.items()
            if isinstance(value, Tensor)
        }
        scalars = {each: at._replace(**copies) for each, at in scalars.items()}
        # Gradients may cross to the host from here on. A step waits for its gradient, and the
        # scalars arrive before it.
        self.host.begin()
        for block in self.host.order:
            update = partial(self._update, self.host_rule, block, scalars)
            self.zero.defer(block, partial(self._step_on_host, block, update))

    def _update(
        self, rule: UpdateRule, block: Block, scalars: Scalars, grad: Tensor, out: Tensor | None
    ) -> None:
        """Step a block: piece by piece of what is in memory, segment by segment of what is updated
        alike.
        """
        for piece, held in self.pieces(block, (MASTER, *self.state_names), "change"):
            piece_grad, rounded = grad[piece], None if out is None else out[piece]
            segments = block.segments(piece) if block.in_files else self.segments[block]
            for part, param_group in segments:
                states = {name: held[name][part] for name in self.state_names}
                out_part = None if rounded is None else rounded[part]
                at = scalars[param_group]
                rule.apply(held[MASTER][part], piece_grad[part], states, at, out_part)

    @torch.no_grad()
    def _step_on_host(self, block: Block, update: Callable[[Tensor, Tensor | None], None]) -> None:
        # Called by ZeRO when a forward pass comes near the block.
        self.host.step(block, update)
        if self.waiting.pop(block):
            block.drop()

    def weight_boxes(self) -> Iterator[tuple[Box, Tensor | FileTensor]]:
        """The parts of logical weights in this rank's master weights, each with the view that holds
        it.
        """
        return self._boxes((MASTER,), self.blocks)

    def state_boxes(self) -> Iterator[tuple[Box, Tensor | FileTensor]]:
        """The same of the optimizer's tensors, named `optimizer.<state>.<weight>`."""
        return self._boxes(self.state_names, self.trained)

    def holder(self, box: Box) -> Holder | None:
        """The place of this rank among those that hold one of its boxes and may write it. None for
        the last stage of a tied matrix: the first stage's is the one that counts.
        """
        # Ranks that hold the same box: copies of the slice under hybrid sharding, and tensor-
        # parallel ranks with a replicated tensor.
        groups = self.groups.buffers[box.group]
        # of a state, same_shard is replicas
        copies = groups.same_shard if self.blocks[0].zero_stage > 0 else groups.replicas
        same = holders(box, self.groups)
        if box.replicated == "tied":
            return Holder(copies.rank, copies.size) if same.rank == 0 else None
        return Holder(same.rank * copies.size + copies.rank, same.size * copies.size)

    def owns(self, box: Box) -> bool:
        """Whether this rank counts one of its boxes: of all ranks that hold it the first does."""
        place = self.holder(box)
        return place is not None and place.rank == 0

    def squared_weight_norm(self) -> Tensor:
        """This rank's share of the sum of squares of the master weights (padding is zero)."""
        return sum_of_squares((part for _, part in self._counted_weights()), self.steps.device)

    def layer_weight_sq_sums(self) -> Tensor:
        """The same of each layer by itself, in the order of `layer_names` [layers]."""
        return self._sums_by_layer(self._counted_weights(), "torch")

    def _counted_weights(self) -> Iterator[tuple[Block, Tensor]]:
        for block in self.blocks:
            if block.layout.group == UNTRAINED:
                continue
            # Frozen weights are counted too; what is kept with the weights and not trained is not.
            for piece, held in self.pieces(block, (MASTER,), "read"):
                for part in block.counted(self.groups, piece):
                    yield block, held[MASTER][part]

    def count_zero_gradients(self) -> Tensor:
        """How many of this rank's real gradient elements are exactly zero, padding left out; every
        element counts on one rank.
        """
        count = torch.zeros((), dtype=torch.float64, device=self.steps.device)
        for block in self.trained:
            # Boxes leave the padding out, whose gradient is always zero.
            for box, view in block.boxes(block.grad_shard):
                if self.owns(box):
                    count += (box.view(view) == 0).sum()
        return count


def state_in_memory(block: Block, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """The master weights and states of a block, zeros of `dtypes`, that are in memory all the
    time; nothing where files have them. A frozen block has weights and no states.
    """
    if block.in_files:
        return {}
    states = dtypes if block.trained else {}
    found = {name: torch.zeros_like(block.master, dtype=dtype) for name, dtype in states.items()}
    return {MASTER: block.master, **found}


def _named(box: Box, kind: str) -> Box:
    """A box of a weight as a checkpoint names that of a state."""
    return box if kind == MASTER else replace(box, name=f"optimizer.{kind}.{box.name}")


def sum_of_squares(
    buffers: Iterable[Tensor],
    device: torch.device = torch.device("cpu"),
    implementation: str = "torch",
) -> Tensor:
    """Sum of squares of flat buffers in float64 (an fp32 sum over 60M elements is off by thousands
    of ulp), finite exactly when all elements are:
    torch, triton for buffers up to fp32, or apex, which adds up in fp32 and makes the host wait for
    one word (never run).
    """
    if implementation != "torch" and (buffers := list(buffers)):
        if implementation == "triton":
            return grad_norm.sum_of_squares(buffers)
        squares = apex.l2_norm(buffers).squeeze().double().square()
        # Where they are not finite, an element is not, or the fp32 sum overflowed: torch decides.
        if squares.isfinite():
            return squares
    # In one order on every rank and in every layout of the same slices: the norm's bits decide the
    # clipping of all ranks.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for buffer in buffers:
        for piece in buffer.split(PIECE_CUDA if buffer.is_cuda else PIECE):
            wide = piece.double()
            total = total + torch.dot(wide, wide)
    return total
