"""Full recomputation: keep each layer's input alone and run the layer again in the backward pass.

Dropout masks and everything else in a layer are functions of the micro-batch, so the second run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.block import BlockWrapper, Call, LayerBlock, MicroBatch


class Recompute:
    """Wraps another wrapper; embedding and head pass through, since nothing is saved by recomputing them."""

    def __init__(self, inner: BlockWrapper):
        self.inner = inner

    def forward(self, unit: nn.Module, x: Tensor | None, micro: MicroBatch) -> tuple[Tensor, Any]:
        if not isinstance(unit, LayerBlock) or not torch.is_grad_enabled():
            return self.inner.forward(unit, x, micro)
        with torch.no_grad():
            y, _ = self.inner.forward(unit, x, micro)
        return y, (x, micro)

    def backward(self, unit: nn.Module, saved: Any, dy: Tensor) -> Tensor | None:
        return self.inner.backward(unit, self._again(unit, saved), dy)

    def backward_input(self, unit: nn.Module, saved: Any, dy: Tensor) -> tuple[Tensor | None, Any]:
        return self.inner.backward_input(unit, self._again(unit, saved), dy)

    def backward_weight(self, unit: nn.Module, kept: Any) -> None:
        self.inner.backward_weight(unit, kept)  # what it needs of the second run was kept

    def _again(self, unit: nn.Module, saved: Any) -> Any:
        """What the inner wrapper saves in the second run."""
        return self.inner.forward(unit, *saved)[1] if isinstance(unit, LayerBlock) else saved

    def begin_step(self, calls: Sequence[Call]) -> None:
        self.inner.begin_step(calls)
