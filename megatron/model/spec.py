"""What a layer declares of the tensors that it holds, and everything else reads.

A *logical tensor* is what a checkpoint names: q, k and v apart, gate and up apart, the real
vocabulary, no parallelism. Its `TensorSpec` specifies everything that a run needs to know of it:
initial values, weight decay, how ranks cut it, whose gradients are added up. A *parameter* of a
module may fuse several logical tensors, hold padding, or be one rank's share of them; its
`ParameterSpec` specifies which. A `Box` is the part of one logical tensor that a rank's parameter
holds.

No name is matched anywhere: a new layer declares its tensors here and is complete.

A parameter carries these attributes:

    attribute            set by                              read by
    spec                 ParameterSpec.parameter             everything that cuts, sums or saves it
    grad_sum             declare_grad_sum                    spec_of, of modules without a spec
    label                parallel/blocks.py                  messages that name the parameter
    main_grad            parallel/blocks.py, each step       backward functions, the optimizer
    overwrite_main_grad  parallel/blocks.py, each step       the first wgrad, which resets it
    deferred_grads       deferring_weight_grads, for a pass  backward functions of linear layers
    fp8                  mark_fp8                            linear layers
    by_apex              training/pretrain.py                wgrad GEMMs
    tensor_parallel      compile_layers                      operators of compiled linear layers
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.distributed.groups import ALONE, Axis, Groups
from megatron.model.model_parallel import NO_TP, TensorParallel


@dataclass(frozen=True)
class Init:
    """Initial values: normal(0, `std`), or `value` everywhere where `std` is 0."""

    std: float = 0.0
    value: float = 0.0


ZEROS = Init()
ONES = Init(value=1.0)


@dataclass(frozen=True)
class Shard:
    """Equal parts along `dimension`, of which at most `parts` (key/value heads) differ."""

    dimension: int
    parts: int | None = None

    def count(self, ranks: int) -> int:
        """Different parts over that many ranks."""
        return ranks if self.parts is None else min(ranks, self.parts)


class ParamGroup(NamedTuple):
    """Tensors whose updates take the same learning rate and weight decay."""

    decay: bool
    decoupled_lr: bool  # the rate of --decoupled-lr, where that is given


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor, as its layer declares it.

    `copies`: who holds the same part of it, data-parallel ranks left out: all tensor-parallel ranks
    ("tp"), those that share a key/value head ("kv"), both ends of a pipeline ("tied"), or none.
    `grad_sum`: whether their gradients are parts of a sum. None: nothing is known of it, as of an
    ordinary module without a declaration. `stored`: rows with padding, if there is any.
    `group`: whose gradients are added up over data-parallel ranks; "dense" is all of them,
    "expert" those that hold the same experts; a "state" is not trained, but kept with the weights.
    `expert`: the number of the expert that it is a part of, and how many there are.
    """

    name: str  # as in a checkpoint: layers.3.attention.q.weight
    shape: tuple[int, ...]  # global, without padding
    init: Init
    decay: bool = True
    shard: Shard | None = None
    copies: str | None = None
    grad_sum: bool | None = False
    stored: int | None = None
    group: str = "dense"
    decoupled_lr: bool = False
    expert: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.copies or not self.grad_sum, (
            f"{self.name}: grad_sum has no effect without copies; set copies or remove it"
        )

    def is_held(self, rank: int, ranks: int) -> bool:
        """Whether one of that many expert-parallel ranks holds it."""
        if self.expert is None:
            return True
        # Experts are held in blocks: rank r has the r-th share of the numbers.
        number, count = self.expert
        return number * ranks // count == rank

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """What one of that many tensor-parallel ranks stores of it, padding included."""
        # Padding follows the real rows: the last ranks hold it.
        shape = [self.shape[0] if self.stored is None else self.stored, *self.shape[1:]]
        if self.shard is not None:
            shape[self.shard.dimension] //= self.shard.count(ranks)
        return tuple(shape)


@dataclass(frozen=True)
class Box:
    """Part of a logical tensor held by a local parameter: rows [start, start + rows) of each of
    `groups` equal row groups. `spec`: the declaration of the tensor, in a box of a model's.
    """

    name: str
    shape: tuple[int, ...]  # the whole logical tensor
    offset: tuple[int, ...]  # where the part begins
    extent: tuple[int, ...]  # its size
    groups: int = 1
    start: int = 0
    replicated: str | None = None  # who holds this very part: tp, kv, tied; None: this rank
    spec: TensorSpec | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> str:
        """Which data-parallel ranks hold copies of it; "dense" where nothing is declared."""
        return "dense" if self.spec is None else self.spec.group

    def view(self, local: Tensor) -> Tensor:
        """[groups, rows, ...] of the local parameter: strided, C-order equal to `extent`."""
        # The parameter is `groups` blocks of `stride` rows, and the box the same rows of each
        # block.
        rows = self.extent[0] // self.groups
        stride = local.shape[0] // self.groups
        grouped = local[: stride * self.groups].view(self.groups, stride, *local.shape[1:])
        return grouped[:, self.start : self.start + rows]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of a module: one logical tensor, or several fused along their rows.

    A fused parameter consists of `interleave` equal groups of rows, and each group holds a part of
    every tensor in turn: per key/value head [its queries | key | value]. `is_gemm`: the weight of a
    linear layer, whose gradient is one GEMM, which a split backward pass leaves for later.
    """

    tensors: tuple[TensorSpec, ...]
    interleave: int = 1
    is_gemm: bool = False

    @property
    def param_group(self) -> ParamGroup:
        """The group of all its tensors."""
        first = self.tensors[0]
        return ParamGroup(first.decay, first.decoupled_lr)

    @property
    def group(self) -> str:
        """Whose gradients are added up over data-parallel ranks."""
        return self.tensors[0].group

    def local_shape(self, ranks: int, expert_rank: int = 0, experts: int = 1) -> tuple[int, ...]:
        """The shape of the parameter on one of that many tensor-parallel ranks; of experts, on the
        `expert_rank`-th of `experts` ranks that each hold some.
        """
        # Fused tensors lie one behind the other along the rows.
        held = [tensor for tensor in self.tensors if tensor.is_held(expert_rank, experts)]
        shapes = [tensor.local_shape(ranks) for tensor in held]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def parameter(self, tp: TensorParallel = NO_TP) -> nn.Parameter:
        """A parameter of this rank's shape on the meta device, which carries this declaration."""
        shape = self.local_shape(tp.size, tp.experts.rank, tp.experts.size)
        is_trained = self.group != "state"
        made = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=is_trained)
        made.spec = self
        return made

    def boxes(self, tp: TensorParallel = NO_TP) -> tuple[Box, ...]:
        """The parts of logical tensors in this rank's parameter; none where all is padding."""
        # Key/value heads are the groups of a fused QKV matrix; with more ranks than heads each rank
        # has one.
        groups = max(1, self.interleave // tp.size)
        boxes, start = [], 0
        for tensor in self.tensors:
            if not tensor.is_held(tp.experts.rank, tp.experts.size):
                continue
            extent = tensor.local_shape(tp.size)
            offset = [0] * len(extent)
            if tensor.shard is not None:
                dimension = tensor.shard.dimension
                # Neighbouring ranks hold the same part where there are fewer parts than ranks.
                sharing = tp.size // tensor.shard.count(tp.size)  # ranks that hold the same part
                offset[dimension] = tp.axis.rank // sharing * extent[dimension]
            # rows that are no padding; a part may have none
            real = min(tensor.shape[0] - offset[0], extent[0])
            if real > 0 or extent[0] == 0:
                # Copies count as such only where there is more than one rank to hold them.
                shared = {"tp": tp.size > 1, "kv": tp.kv.size > 1, "tied": True}
                copies = tensor.copies if shared.get(tensor.copies) else None
                at, part = tuple(offset), (real, *extent[1:])
                box = Box(tensor.name, tensor.shape, at, part, groups, start, copies, tensor)
                boxes.append(box)
            start += extent[0] // groups
        return tuple(boxes)


def vector(name: str, size: int, init: Init = ZEROS, **declared: Any) -> ParameterSpec:
    """A vector [size] without weight decay: a bias, a norm's scale, a router's state."""
    return ParameterSpec((TensorSpec(name, (size,), init, decay=False, **declared),))


def matrix(
    name: str,
    shape: tuple[int, int],
    init: Init,
    *,
    is_gemm: bool = True,
    **declared: Any,
) -> ParameterSpec:
    """One matrix, by default the weight of a linear layer."""
    return ParameterSpec((TensorSpec(name, shape, init, **declared),), is_gemm=is_gemm)


def fuse(parameters: Iterable[ParameterSpec], interleave: int = 1) -> ParameterSpec:
    """One parameter of the rows of several, see ParameterSpec."""
    parts = list(parameters)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return ParameterSpec(tensors, interleave, parts[0].is_gemm)


def normal(config: ModelConfig, *, residual_output: bool = False) -> Init:
    """--init-method-std, over sqrt(2 x layers) where a residual branch ends (GPT-2)."""
    # Two additions to the stream a layer: its variance stays that of one layer.
    std = config.init_method_std
    return Init(std / (2 * config.num_layers) ** 0.5 if residual_output else std)


def whole_on_every_rank(tp: TensorParallel) -> dict[str, Any]:
    """Keyword arguments of `matrix` and `vector` for a tensor that every tensor-parallel rank holds
    whole and applies to its part of the sequence: under sequence parallelism its gradient is a part
    of the sum, else the whole.
    """
    return {"copies": "tp", "grad_sum": tp.sequence}


def declare_grad_sum(module: nn.Module, grad_sum: bool) -> None:
    """Declare of an ordinary module, which every tensor-parallel rank holds whole, whether the
    ranks' gradients are parts of a sum, as between our layers under sequence parallelism, or whole
    on each of them.
    """
    for parameter in module.parameters():
        parameter.grad_sum = grad_sum


def spec_of(name: str, parameter: nn.Parameter, config: ModelConfig) -> ParameterSpec:
    """The declaration of a parameter called `name` in the model; what is known of one that has
    none: ranks hold it whole, matrices are drawn, vectors begin with ones, biases with zeros.
    """
    # A layer of ours declares its parameters; of an ordinary module the names have to do.
    if (spec := getattr(parameter, "spec", None)) is not None:
        return spec
    shape, is_matrix = tuple(parameter.shape), parameter.dim() > 1
    bias = name.endswith(".bias")
    tensor = TensorSpec(
        name,
        shape,
        init=normal(config) if is_matrix else ZEROS if bias else ONES,
        decay=is_matrix,
        copies="tp",
        grad_sum=getattr(parameter, "grad_sum", None),
    )
    return ParameterSpec((tensor,))


class Holder(NamedTuple):
    """The place of a rank among those that hold the same part of a logical tensor."""

    rank: int
    size: int


def holders(box: Box, groups: Groups) -> Axis:
    """The ranks that hold the same box, data-parallel copies left out."""
    # Ends of a pipeline share a tied matrix; all else is shared by tensor-parallel ranks.
    axes = {None: ALONE, "tp": groups.tp, "kv": groups.kv, "tied": groups.tied}
    return axes[box.replicated]


def whole(tensor: TensorSpec) -> Box:
    """The whole of a tensor as one box."""
    return Box(tensor.name, tensor.shape, (0,) * len(tensor.shape), tensor.shape, spec=tensor)
