"""How a layer shares its matrices over an axis (TP), and whether activations between matrices are
split along the sequence (SP).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.distributed.groups import ALONE, Axis


@dataclass(frozen=True)
class TensorParallel:
    """What the layers of one rank need to know: the axis, the mode, and the ranks that hold the
    same key/value head, or other experts.
    """

    # the ranks that share each matrix: columns (qkv, fc1) or rows (proj, fc2) of it
    axis: Axis = ALONE
    # of these, the ranks that hold the same key/value head, where there are fewer heads than ranks
    kv: Axis = ALONE
    # between matrices each rank has an equal part of the sequence (SP)
    sequence: bool = False
    overlap: bool = True  # collectives run alongside the GEMMs that do not depend on them
    experts: Axis = ALONE  # of expert-tensor-parallel ranks: those that hold other experts

    @cached_property
    def size(self) -> int:
        return self.axis.size


NO_TP = TensorParallel()
