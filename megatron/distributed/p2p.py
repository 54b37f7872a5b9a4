"""Messages between two ranks of an axis, of shapes that both know: started now, awaited later.

Messages from one rank to another arrive in the order in which they are sent; the tag is only a
second lock (Gloo heeds it, NCCL does not).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.collectives import is_gloo
from megatron.distributed.groups import Axis
from megatron.distributed.ranges import named
from megatron.distributed.silent import SilentGroup


class Sending:
    """A message on its way out; it keeps its tensor alive."""

    def __init__(self, x: Tensor, to: int, axis: Axis, tag: int):
        self.x = x.cpu() if x.is_cuda and is_gloo(axis) else x.contiguous()
        if isinstance(axis.group, SilentGroup):
            self.work: Any = axis.group.start("message", self.x)
            return
        with named("send", "pp"):
            self.work = dist.isend(self.x, dst=axis.ranks[to], group=axis.group, tag=tag)

    def wait(self) -> None:
        """On a GPU the current stream waits, not the host."""
        with named("send", "pp"):
            self.work.wait()


class Receiving:
    """A message on its way in."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        source: int,
        axis: Axis,
        tag: int,
    ):
        self.device = device
        self.x = torch.empty(shape, dtype=dtype, device="cpu" if is_gloo(axis) else device)
        if isinstance(axis.group, SilentGroup):
            self.work: Any = axis.group.start("message", self.x)
            return
        with named("receive", "pp"):
            self.work = dist.irecv(self.x, src=axis.ranks[source], group=axis.group, tag=tag)

    def wait(self) -> Tensor:
        """The tensor. On a GPU the current stream waits, not the host (but for Gloo, which moves
        CPU memory).
        """
        with named("receive", "pp"):
            self.work.wait()
        return self.x.to(self.device)
