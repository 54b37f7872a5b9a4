"""Flat storage: all parameters of a block are views into one buffer, and so are their gradients.

A block holds the parameters of the word embedding, of one layer (its experts' are a block apart,
since other ranks hold copies of them), or of an untied head. Every tensor starts at a multiple of
ALIGNMENT elements, so a buffer can be cut anywhere on that grid and torch's fused AdamW still gives
the same bits (its vector and scalar code differ in rounding). Decayed tensors come first, so that
few segments arise.

What a rank holds of a block follows from the ZeRO stage (Rajbhandari et al. 2020), N ranks sharing
it:

    stage   weight                   grad                     grad_shard      master, moments
    0       whole                    whole                    grad            whole
    1       whole                    whole                    its slice       a slice
    2       whole                    while a backward runs    a slice         a slice
    3       while it is needed       while a backward runs    a slice         a slice

Gradients exist from the first backward pass of a step to the update. A frozen block has the weight
alone, its slice at stage 3. Of an offloaded block (stage 3) what a gather reads is in the host's
memory: the device has the whole weight while it is needed, and nothing else of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import Config, DistributedConfig, OptimizerConfig
from megatron.config.stages import frozen_units
from megatron.distributed.groups import Axis, BufferGroups, Groups, one_process
from megatron.model.additions import check_additions
from megatron.model.gpt import GPTModel
from megatron.model.spec import Box, ParameterSpec, ParamGroup, holders

ALIGNMENT = 64
UNTRAINED = "state"  # the group of what is kept with the weights and not trained


@dataclass(frozen=True, eq=False)
class BufferEntry:
    """One parameter in its block's flat buffers."""

    parameter: nn.Parameter
    name: str
    start: int
    shape: torch.Size
    boxes: tuple[Box, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def view(self, buffer: Tensor, first: int = 0) -> Tensor:
        """The parameter's part of a buffer that begins with element `first` of the block."""
        return buffer.narrow(0, self.start - first, self.numel).view(self.shape)

    def runs(self, box: Box) -> Iterator[tuple[int, int, int]]:
        """A box's contiguous ranges in the flat buffer: (start, stop, its first row in the box)."""
        width = math.prod(self.shape[1:])
        rows, stride = box.extent[0] // box.groups, self.shape[0] // box.groups
        for group in range(box.groups):
            start = self.start + (group * stride + box.start) * width
            yield start, start + rows * width, group * rows

    def parts(self, box: Box, first: int, last: int) -> Iterator[tuple[int, Box]]:
        """What elements [first, last) of the block have of a box, as boxes without gaps: (where it
        begins, box).
        """
        width = math.prod(self.shape[1:])
        for start, stop, row in self.runs(box):
            low, high = max(start, first) - start, min(stop, last) - start
            for at, part in _rectangles(box, row, width, low, high):
                yield start + at, part


@dataclass(frozen=True)
class BufferLayout:
    """Where the parameters of a unit that the same ranks hold lie in their flat buffer."""

    name: str
    unit: str  # whose parameters they are
    group: str  # which of Groups.buffers hold copies of it
    entries: tuple[BufferEntry, ...]
    # elements at its beginning: weights whose gradient is one GEMM. Their first wgrad overwrites
    # main_grad, which is not cleared, and a split backward pass defers them.
    gemm_numel: int
    # (where it ends, whose tensors lie there), one after the other
    ranges: tuple[tuple[int, ParamGroup], ...]
    size: int  # with padding
    is_copied: bool  # a tied matrix, which the other end of the pipeline holds too

    @cached_property
    def cleared(self) -> list[tuple[int, int]]:
        """The ranges of a new gradient that no wgrad GEMM overwrites."""
        overwritten = [entry for entry in self.entries if entry.start < self.gemm_numel]
        starts = [0, *(entry.stop for entry in overwritten)]
        stops = [*(entry.start for entry in overwritten), self.size]
        # a tensor without an element may end where the next one starts
        return [(start, stop) for start, stop in zip(starts, stops) if start < stop]


class Segment(NamedTuple):
    """A range of what a rank updates, and the group of its parameters."""

    part: slice
    param_group: ParamGroup


class Block:
    """The flat buffers of one block on this rank.

        weight     the whole block, in the model's precision; at stage 3 its storage is freed
                   between uses
        untracked  the same storage, whose writes autograd does not count
        own        the elements [first, last) that this rank updates
        share      those of them that it counts in norms, where several ranks update the same
        master     `own`, as the optimizer updates it, in fp32; a view of `weight` where that has
                   the same precision
        rounded    where a step rounds the master to: `own` of `weight`, or at stage 3 a separate
                   buffer if the master is in the host's memory or in files; None where a gather
                   or the weight takes the master itself
        gathered_from  what a gather of stage 3 reads: `rounded`, else `master`
        grad       the whole block's gradient, from a backward pass to its reduction or the update
        summed     stages 2 and 3: `own` of the reduced gradient
        early      stages 2 and 3: what first halves of split backward passes have completed

    `zero_stage` is 0 for what is kept with the weights and not trained. Master weights and moments
    are in the host's memory where the block is `on_host`, `in_files` in its files (nvme.py).
    Where a method takes a `piece`, a part of `own`, its buffer holds that part alone.

    The life of a gradient:

        open        before the first backward pass of a step (stages 2 and 3: of a micro-batch)
        open_early, close_early, add_early     around the halves of a split backward pass
        complete    after the last of these passes
        close       stages 2 and 3: its reduction begins, and ends in `summed`
        drop        the update has used it, or the next step begins
    """

    grad_place: Tensor | None = None  # of every gradient buffer, where CUDA graphs write to it

    def __init__(
        self,
        layout: BufferLayout,
        dtype: torch.dtype,
        device: torch.device,
        groups: BufferGroups,
        zero_stage: int,
        grad_dtype: torch.dtype | None,
        on_host: bool = False,
        in_files: bool = False,
        offloaded: bool = False,
    ):
        self.layout, self.groups = layout, groups
        self.parameters = [entry.parameter for entry in layout.entries]
        self.name, self.entries, self.size = layout.name, layout.entries, layout.size
        self.zero_stage, self.grad_dtype = zero_stage, grad_dtype
        self.trained = grad_dtype is not None
        self.on_host, self.in_files, self.offloaded = on_host, in_files, offloaded
        # this rank's slice of the reduced gradient, at every stage
        self.shard_range = _equal_part((0, self.size), groups.shard)
        self.own = self.shard_range if zero_stage > 0 else (0, self.size)
        self.own_slice = slice(*self.own)
        # what this rank counts, where all count once
        self.share = _equal_part(self.shard_range, groups.same_shard)
        self._make_weight(dtype, device)
        if zero_stage == 3:
            self.release()
        self.grad: Tensor | None = None
        self.summed: Tensor | None = None
        self.early: dict[Any, Tensor] = {}
        self._build_masters(dtype, device)

    def _make_weight(self, dtype: torch.dtype, device: torch.device) -> None:
        """The weight, zeros, with the parameters as views into it."""
        self.weight = torch.zeros(self.size, dtype=dtype, device=device)
        # autograd counts no writes to it
        empty = torch.empty(0, dtype=dtype, device=device)
        self.untracked = empty.set_(self.weight.untyped_storage(), 0, (self.size,), (1,))
        for entry in self.entries:
            # Swapped in place: modules and optimizers that hold the parameter keep the same object.
            stored = nn.Parameter(entry.view(self.weight), requires_grad=self.trained)
            # what it declares stays
            vars(stored).update(vars(entry.parameter), main_grad=None, label=entry.name)
            torch.utils.swap_tensors(entry.parameter, stored)

    def _build_masters(self, dtype: torch.dtype, device: torch.device) -> None:
        """The master weights, unless files have them, and what a step rounds them to."""
        wide = accumulation_dtype(dtype) if self.trained else dtype
        length = self.own[1] - self.own[0]
        self.master: Tensor | None = None
        self.rounded: Tensor | None = None
        # The weight itself, but where it is narrower, on another device or, at stage 3, freed
        # between uses.
        if self.zero_stage < 3 and dtype == wide and not self.on_host:
            self.master = self.weight[self.own_slice]
            return
        # A gather reads the master, if that is in the memory and the precision for it.
        gathers_master = self.offloaded and dtype == wide and not self.in_files
        if gathers_master:
            self.master = host_memory(length, wide, device)
        elif not self.in_files:
            self.master = torch.zeros(length, dtype=wide, device="cpu" if self.on_host else device)
        if self.zero_stage < 3:
            self.rounded = self.weight[self.own_slice]
        elif self.offloaded and not gathers_master:
            self.rounded = host_memory(length, dtype, device)
        elif self.on_host and not self.offloaded:
            self.rounded = torch.zeros(length, dtype=dtype, device=device)

    # ---- weights at stage 3

    @property
    def gathered_from(self) -> Tensor:
        """What this rank keeps of the weight between its uses."""
        return self.master if self.rounded is None else self.rounded

    @property
    def is_released(self) -> bool:
        return self.weight.untyped_storage().nbytes() == 0

    def release(self) -> None:
        """Free the whole weight. Views stay, and autograd keeps them: hence the storage goes, not
        the tensor.
        """
        self.weight.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Room for the whole weight, its content undefined."""
        self.weight.untyped_storage().resize_(self.size * self.weight.element_size())

    # ---- gradients

    @property
    def grad_shard(self) -> Tensor | None:
        """The gradient of what this rank updates."""
        if self.zero_stage >= 2:
            return self.summed
        return None if self.grad is None else self.grad[self.own_slice]

    def keep_grad_place(self) -> None:
        """Have every gradient buffer to come at the same address: CUDA graphs write there."""
        assert self.zero_stage < 2
        self.grad_place = torch.empty(self.size, dtype=self.grad_dtype, device=self.weight.device)

    def open(self) -> None:
        """Give the parameters a `main_grad`: the block's gradient buffer. Weights of linear layers
        are overwritten by their first wgrad: only what lies between and after them is cleared.
        """
        assert self.grad is None
        self.grad = self.grad_place
        if self.grad is None:
            self.grad = torch.empty(self.size, dtype=self.grad_dtype, device=self.weight.device)
        for first, last in self.layout.cleared:
            self.grad[first:last].zero_()
        for entry in self.entries:
            view = self.grad.narrow(0, entry.start, entry.numel)
            entry.parameter.main_grad = view.view(entry.shape)
            if entry.start < self.layout.gemm_numel:
                entry.parameter.overwrite_main_grad = True

    def complete(self) -> None:
        """All passes are over: the gradient of a linear layer's weight that has had no wgrad is
        zero.
        """
        for parameter in self.parameters:
            if getattr(parameter, "overwrite_main_grad", False):
                parameter.main_grad.zero_()
                parameter.overwrite_main_grad = False

    def drop(self) -> None:
        """The gradient has been used."""
        self.grad = self.summed = None
        for parameter in self.parameters:
            parameter.main_grad = None

    def close(self) -> Tensor:
        """Take the gradient buffer away; it lives as long as the caller keeps it."""
        grad, self.grad = self.grad, None
        self.close_early()
        return grad

    def open_early(self, key: Any) -> None:
        """A `main_grad` of zeros for what a split backward pass completes with the input gradient:
        buffer [size - gemm_numel], the rest has none. `key`: which pass it is.
        """
        # Small: norms, biases and positions. The matrices' part of the block has no buffer yet.
        early = torch.zeros(
            self.size - self.layout.gemm_numel, dtype=self.grad_dtype, device=self.weight.device
        )
        for entry in self.entries:
            if entry.start >= self.layout.gemm_numel:
                entry.parameter.main_grad = entry.view(early, self.layout.gemm_numel)
        self.early[key] = early

    def close_early(self) -> None:
        """After a pass: the parameters have no `main_grad`."""
        for parameter in self.parameters:
            parameter.main_grad = None

    def add_early(self, key: Any) -> None:
        """Before the second half: what the first has completed, in a buffer just opened."""
        self.grad[self.layout.gemm_numel :].copy_(self.early.pop(key))

    # ---- what this rank updates

    def boxes(self, buffer: Tensor, piece: slice | None = None) -> Iterator[tuple[Box, Tensor]]:
        """The parts of logical tensors in a buffer as long as `own`, or in one of a piece, each
        with the view that holds it: whole parameters where they are not cut, else runs of whole
        rows and parts of rows.
        """
        first, last = self._range(piece)
        for entry in self.entries:
            is_whole = first <= entry.start and entry.stop <= last
            for box in entry.boxes:
                if is_whole:
                    yield box, entry.view(buffer, first)
                    continue
                # The rank's slice may begin and end inside of a row: parts are named so that a
                # checkpoint can be read in any other layout.
                for start, part in entry.parts(box, first, last):
                    flat = buffer.narrow(0, start - first, math.prod(part.extent))
                    yield part, flat.view(part.extent)

    def runs(self, entry: BufferEntry, box: Box, buffer: Tensor) -> Iterator[Tensor]:
        """The flat pieces of a box in a buffer as long as `own`."""
        for start, stop, _ in entry.runs(box):
            low, high = max(start, self.own[0]), min(stop, self.own[1])
            if low < high:
                yield buffer[low - self.own[0] : high - self.own[0]]

    def counted(self, groups: Groups, piece: slice | None = None) -> list[slice]:
        """The parts of a buffer as in `boxes` that this rank counts, such that over all ranks each
        element of the model comes once: of those that hold the same parameters each counts a slice;
        what tensor-parallel ranks share, the first counts.
        """
        lowest, highest = self._range(piece)
        # Subtract what another rank counts, then cut the rest to this rank's share.
        start, ranges = 0, []
        for entry in self.entries:
            for box in entry.boxes:
                if holders(box, groups).rank > 0:
                    for first, stop, _ in entry.runs(box):
                        ranges.append((start, first))
                        start = stop
        ranges.append((start, self.size))
        found = []
        for first, stop in ranges:
            low, high = max(first, self.share[0], lowest), min(stop, self.share[1], highest)
            if low < high:
                found.append(slice(low - lowest, high - lowest))
        return found

    def segments(self, piece: slice | None = None) -> list[Segment]:
        """The ranges of a buffer as in `boxes` that are updated alike."""
        first, last = self._range(piece)
        # Groups change at the ends of the layout's ranges alone: two or three a block.
        start, found = first, []
        for stop, param_group in self.layout.ranges:
            end = min(stop, last)
            if start < end:
                found.append(Segment(slice(start - first, end - first), param_group))
                start = end
        return found

    def _range(self, piece: slice | None) -> tuple[int, int]:
        """The block's elements [first, last) in a piece, or in all of `own`."""
        return self.own if piece is None else (self.own[0] + piece.start, self.own[0] + piece.stop)


def _equal_part(whole: tuple[int, int], axis: Axis) -> tuple[int, int]:
    """This rank's part of the elements [first, last)."""
    first, last = whole
    size = (last - first) // axis.size
    return first + axis.rank * size, first + (axis.rank + 1) * size


def _rectangles(box: Box, row: int, width: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements [start, stop) of a run of a box, rows of `width` from the box's `row` on, as (where
    each begins, box).
    """
    while start < stop:
        # A part of a row up to its end, or as many whole rows as there are.
        first, column = divmod(start, width)
        extent: tuple[int, ...]
        if column > 0 or stop - start < width:
            extent = 1, min(width - column, stop - start)
        else:
            extent = (stop - start) // width, *box.extent[1:]
        offset = box.offset[0] + row + first, *(o + column for o in box.offset[1:])
        yield start, replace(box, offset=offset, extent=extent, groups=1, start=0)
        start += math.prod(extent)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of gradients, master weights and moments: fp32, fp64 in a float64 run."""
    return torch.promote_types(dtype, torch.float32)


def host_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the host's memory that a GPU reads by itself: in pinned pages, of which torch takes
    a power of two. Never run on a GPU.
    """
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


def device_streams(device: torch.device) -> Any:
    """The module of torch that has the device's streams and events; those of a CPU, where work is
    over when its call returns, do nothing.
    """
    return torch.cuda if device.type == "cuda" else torch.cpu


def padded(elements: int, parts: int = 1) -> int:
    """Elements of a tensor, or of a block of `parts` equal slices, on the grid."""
    return -(-elements // (ALIGNMENT * parts)) * ALIGNMENT * parts


class _Declared(NamedTuple):
    """A parameter, and what the model declares of it. `is_gemm`: its gradient is one GEMM."""

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    is_gemm: bool


def lay_out_blocks(model: GPTModel, groups: Groups) -> list[BufferLayout]:
    """Where every parameter of a model lies, buffer by buffer in the order of the forward pass. A
    unit has a buffer for each group of ranks that hold its parameters.
    """
    layouts, placed = [], set()
    # a tied head's gradient precedes the embedding's
    head = None if model.head is None else model.head.weight
    declared = {
        parameter: _Declared(name, parameter, spec, spec.is_gemm or parameter is head)
        for name, parameter, spec in model.declared()
    }
    for unit_name, unit in model.named_layers():
        # a tied head adds none
        own = [parameter for parameter in unit.parameters() if parameter not in placed]
        placed.update(own)
        ordered = _in_buffer_order([declared[parameter] for parameter in own])
        for group in dict.fromkeys(each.spec.group for each in ordered):
            members = [each for each in ordered if each.spec.group == group]
            # every rank keeps all of what is not trained
            parts = 1 if group == UNTRAINED else groups.buffers[group].replicas.size
            copied = unit.of_vocabulary and groups.tied.size > 1
            layouts.append(_lay_out(model, unit_name, group, members, parts, copied))
    return layouts


def _in_buffer_order(own: list[_Declared]) -> list[_Declared]:
    """Decayed parameters first, of them those whose gradient is one GEMM, and those together that
    an update rule treats alike.
    """

    # The order decides how few ranges there are: one run of decayed tensors, and in it one run of
    # those whose gradient is one GEMM.
    def place(each: _Declared) -> tuple[bool, bool, bool]:
        decay, decoupled_lr = each.spec.param_group
        return not decay, not each.is_gemm, decoupled_lr

    return sorted(own, key=place)


def _lay_out(
    model: GPTModel, unit: str, group: str, members: list[_Declared], parts: int, copied: bool
) -> BufferLayout:
    """The buffer of a unit's parameters that one group holds, in `parts` equal slices."""
    entries, end, gemm_numel = [], 0, 0
    ranges: list[tuple[int, ParamGroup]] = []
    for name, parameter, spec, is_gemm in members:
        # Each tensor starts on the grid, so that every cut of the buffer into slices lies on it.
        boxes = spec.boxes(model.parallel.experts if group == "expert" else model.tp)
        entries.append(BufferEntry(parameter, name, end, parameter.shape, boxes))
        end += padded(parameter.numel())
        if ranges and ranges[-1][1] == spec.param_group:
            ranges.pop()  # one range of both
        ranges.append((end, spec.param_group))
        if is_gemm:
            gemm_numel = end
    size = padded(end, parts)
    ranges[-1] = size, ranges[-1][1]  # padding is zero, and stays it
    name = unit if group == "dense" else f"{unit} ({group})"
    return BufferLayout(name, unit, group, tuple(entries), gemm_numel, tuple(ranges), size, copied)


def build_blocks(
    model: GPTModel,
    device: torch.device,
    groups: Groups = one_process(),
    distributed: DistributedConfig = DistributedConfig(),
    optimizer: OptimizerConfig = OptimizerConfig(),
    *,
    training: bool = True,
    frozen: Container[str] = (),
    make: Callable[..., Block] = Block,
) -> list[Block]:
    """Give every parameter of a model born on the meta device its storage (zeros). Its `main_grad`
    comes with each step (Block.open).

    Buffers can be cut into as many equal slices as ranks hold the same parameters. The units named
    in `frozen` are not trained; `make` is Block, or takes what it takes. Raises ValueError for a
    module that cannot train here (megatron/model/additions.py).
    """
    check_additions(model)
    # 1. Where everything lies, what is trained, and which blocks are stepped on the host.
    layouts = lay_out_blocks(model, groups)
    trained = [
        training and layout.unit not in frozen and layout.group != UNTRAINED for layout in layouts
    ]
    on_host = on_host_of(layouts, trained, optimizer)

    # 2. The buffers.
    wide = accumulation_dtype(model.dtype)
    grad_dtype = model.dtype if optimizer.main_grads_dtype == "bf16" else wide
    has_files = optimizer.optimizer_nvme_offload is not None
    blocks = []
    for layout, train, host in zip(layouts, trained, on_host):
        dtype, stage = model.dtype, distributed.zero_stage
        if layout.group == UNTRAINED:
            dtype, stage = wide, 0
        offloaded = optimizer.param_cpu_offload and stage == 3 and (host or not train)
        block = make(
            layout,
            dtype,
            device,
            groups.buffers[layout.group],
            stage,
            grad_dtype if train else None,
            host,
            host and has_files,
            offloaded,
        )
        blocks.append(block)
    return blocks


def build_run_blocks(
    config: Config,
    model: GPTModel,
    device: torch.device,
    groups: Groups,
    make: Callable[..., Block] = Block,
) -> list[Block]:
    """The blocks that the flags of a resolved configuration ask for, made by `make`."""
    frozen, distributed, optimizer = frozen_units(config), config.distributed, config.optimizer
    return build_blocks(model, device, groups, distributed, optimizer, frozen=frozen, make=make)


def on_host_of(
    layouts: Sequence[BufferLayout], trained: Sequence[bool], optimizer: OptimizerConfig
) -> list[bool]:
    """Which blocks, in the order of the forward pass, are stepped on the host: the last ones, which
    have the most time until they are needed, with about --optimizer-offload-fraction of elements.
    """
    fraction = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    # The host rounds in another way: of copies, which must stay equal, neither goes there alone.
    sizes = [
        layout.size * (train and not (layout.is_copied and fraction < 1))
        for layout, train in zip(layouts, trained)
    ]
    found, left = [], fraction * sum(sizes)
    for size in reversed(sizes):
        found.append(left > size / 2 and size > 0)
        left -= size if found[-1] else 0
    return found[::-1]
