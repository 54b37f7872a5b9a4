"""Numbers on their way between the host and the device, for which neither waits.

Called from training/step.py and training/exit.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.distributed.peers import idle


def sent(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Float64 numbers of the host, on the device: from pinned memory, so that nobody waits."""
    here = torch.tensor(numbers, dtype=torch.float64)
    if device.type == "cuda":
        here = torch.empty(here.shape, dtype=here.dtype, pin_memory=True).copy_(here)
    there = torch.empty(here.shape, dtype=here.dtype, device=device)
    return there.copy_(here, non_blocking=True)


class Arriving:
    """Numbers of the device that the host reads when it must."""

    def __init__(self, numbers: Tensor):
        self.event = None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.numbers = numbers
        # reading does not wait: on a CPU; the same on every rank
        self.is_here = self.event is None

    def read(self) -> list[float]:
        """Wait for the numbers (not for work queued after them)."""
        if self.event is not None:
            with idle():
                self.event.synchronize()
        return self.numbers.tolist()
