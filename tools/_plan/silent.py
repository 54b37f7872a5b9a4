"""A process group that sends nothing: a plan runs the executor and ZeRO with it, on tensors of the
meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.distributed.collectives import Backend, Handle, round_elements
from megatron.distributed.groups import Axis


class SilentGroup(Backend):
    """Represents a process group (`Axis.group`) of Gloo, or else of NCCL. Its collectives and
    messages have results of the right shape and end at once.
    """

    def __init__(self, gloo: bool):
        self.gloo = gloo

    def hold(self, what: str, axis: Axis, size: int, result: Tensor, extra: int) -> Any:
        """Called for each operation on a tensor of `size` bytes in all, which takes `extra` bytes
        in addition to its input and result; the return value is kept until the operation is waited
        for.
        """

    def _start(self, what: str, axis: Axis, size: int, result: Tensor, extra: int = 0) -> Handle:
        return Handle([], result, held=self.hold(what, axis, size, result, extra))

    def all_reduce(self, x: Tensor, axis: Axis, op: Any) -> Handle:
        return self._start("all-reduce", axis, x.nbytes, x)

    def exchange(
        self, x: Tensor, out: Tensor, axis: Axis, operation: str, *splits: list[int]
    ) -> Handle:
        size = axis.size * x.nbytes if operation == "all-gather" else x.nbytes
        return self._start(operation, axis, size, out)

    def ring_hop(self, x: Tensor, out: Tensor, axis: Axis) -> Handle:
        return self._start("message", axis, x.nbytes, out)

    def reduce_scatter(
        self, x: Tensor, out: Tensor, axis: Axis, reduce_dtype: torch.dtype, workspace: int
    ) -> Handle:
        elements = x.numel() // axis.size
        extra = self._bytes_in_flight(elements, axis.size, x.dtype, reduce_dtype, workspace)
        return self._start("reduce-scatter", axis, x.numel() * reduce_dtype.itemsize, out, extra)

    def isend(self, x: Tensor, to: int, axis: Axis, tag: int) -> Handle:
        return self._start("message", axis, x.nbytes, x)

    def irecv(self, x: Tensor, source: int, axis: Axis, tag: int) -> Handle:
        return self._start("message", axis, x.nbytes, x)

    def _bytes_in_flight(
        self,
        elements: int,
        ranks: int,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        workspace: int,
    ) -> int:
        """Bytes of a reduce-scatter in flight in addition to its input and output, when a rank's
        part has `elements`.
        """
        casts = reduce_dtype != dtype
        if not self.gloo:
            return elements * reduce_dtype.itemsize * (ranks + 1) * casts
        step = round_elements(elements, ranks, dtype, reduce_dtype, workspace)
        # received, and cast to be sent, in two rounds
        in_rounds = min(elements, 2 * step) * reduce_dtype.itemsize * (ranks - 1)
        return in_rounds * (2 if casts else 1)
