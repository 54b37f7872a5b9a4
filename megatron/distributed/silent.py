"""A process group that sends nothing: a plan runs the executor and ZeRO with it, on tensors of the
meta device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class SilentWork:
    """An operation that is over: the handle of one, whichever torch.distributed or
    distributed/collectives.py would give.
    """

    def __init__(self, result: Tensor, held: Any):
        self.result, self.held = result, held

    def wait(self) -> Tensor:
        self.held = None
        return self.result


class SilentGroup:
    """Stands where a process group does (`Axis.group`): its collectives and messages end at once. A
    plan's counts them.

    `gloo`: whether it stands for a group of Gloo, else for one of NCCL.
    """

    def __init__(self, gloo: bool):
        self.gloo = gloo

    def start(self, what: str, result: Tensor, beside: int = 0) -> SilentWork:
        """Begin an all-reduce, an all-gather, a reduce-scatter or a message. It takes `beside`
        bytes more than its input and its result, until it is waited for.
        """
        return SilentWork(result, self.hold(what, result, beside))

    def hold(self, what: str, result: Tensor, beside: int) -> Any:
        """Told of each operation; what this returns is kept until the operation is waited for."""
