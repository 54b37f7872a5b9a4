"""How a layer shares its matrices over an axis (TP), and whether activations between matrices are split along the sequence (SP)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dist.groups import ALONE, Axis


@dataclass(frozen=True)
class TensorParallel:
    """What the layers of one rank need to know: the axis, the mode, and the ranks that hold the same key/value head."""

    axis: Axis = ALONE
    kv: Axis = ALONE
    sequence: bool = False
    overlap: bool = True  # collectives run beside the matrix products that do not depend on them

    @property
    def size(self) -> int:
        return self.axis.size


DENSE = TensorParallel()


@dataclass(frozen=True)
class Partial:
    """Parameters whose gradient is on each rank only a part of the sum over an axis, though every rank of it holds them whole."""

    names: tuple[str, ...]  # endings of logical tensor names
    axis: str  # field of TensorParallel: axis, kv
    sequence_only: bool  # partial under sequence parallelism alone: without it every rank sees all tokens


# The one table of gradients that must be summed over tensor-parallel ranks: once a step, before the norm (optimizer/reduction.py).
PARTIAL_GRADIENTS = (
    Partial(("input_norm.weight", "input_norm.bias", "mlp_norm.weight", "mlp_norm.bias"), "axis", sequence_only=True),
    Partial(("final_norm.weight", "final_norm.bias"), "axis", sequence_only=True),
    Partial(("attention.proj.bias", "mlp.down.bias"), "axis", sequence_only=True),
    Partial(("embedding.position.weight",), "axis", sequence_only=True),
    Partial(("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"), "axis", sequence_only=False),
    Partial(("attention.k.weight", "attention.k.bias", "attention.v.weight", "attention.v.bias"), "kv", sequence_only=False),
)

# Endings of the names of other parameters that every tensor-parallel rank holds whole, whose gradient is whole on each of them: every rank computes
# them from equal values, with sequence parallelism too. No layer of ours is so.
WHOLE_GRADIENTS: tuple[str, ...] = ()
