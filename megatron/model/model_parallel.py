"""How ranks share the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.config.groups import DistributedConfig
from megatron.distributed.groups import ALONE, Axis, Groups


@dataclass(frozen=True)
class TensorParallel:
    """How a layer shares its matrices (TP), and whether activations are split in sequence (SP)."""

    # the ranks that share each matrix: columns (qkv, fc1) or rows (proj, fc2) of it
    axis: Axis = ALONE
    # of these, the ranks that hold the same key/value head, where there are fewer heads than ranks
    kv: Axis = ALONE
    # between matrices each rank has an equal part of the sequence (SP)
    sequence: bool = False
    experts: Axis = ALONE  # of expert-tensor-parallel ranks: those that hold other experts

    @cached_property
    def size(self) -> int:
        return self.axis.size


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share the positions of a sample, and how attention communicates."""

    axis: Axis = ALONE
    gathers: bool = False  # allgather
    heads: Axis = ALONE  # those of the ranks that exchange heads for positions
    ring: Axis = ALONE  # those that keys and values go round

    @cached_property
    def size(self) -> int:
        return self.axis.size


NO_TP = TensorParallel()
NO_CP = ContextParallel()


@dataclass(frozen=True)
class ModelParallel:
    """The ranks that share the layers of a model, by what they share; by default one has all."""

    tp: TensorParallel = NO_TP
    cp: ContextParallel = NO_CP
    experts: TensorParallel = NO_TP  # those that share experts' matrices, and hold other experts
    samples: Axis = ALONE  # those that hold the other tokens of the same samples

    @classmethod
    def of(cls, groups: Groups, distributed: DistributedConfig) -> ModelParallel:
        """Of a rank with these groups."""
        tp = TensorParallel(groups.tp, groups.kv, sequence=distributed.sequence_parallel)
        gathers = distributed.cp_comm_type == "allgather"
        cp = ContextParallel(groups.cp, gathers, groups.cp_heads, groups.cp_ring)
        experts = TensorParallel(groups.etp, experts=groups.ep)
        return cls(tp, cp, experts, groups.tp_cp)


ONE_RANK = ModelParallel()
