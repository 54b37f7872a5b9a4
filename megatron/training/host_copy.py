"""Copies of a few numbers between the host and the device that neither waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.distributed.peers import idle


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Float64 numbers of the host, on the device: from pinned memory, so that nothing waits."""
    # A copy from pageable memory would make the host wait until the GPU has caught up.
    host = torch.tensor(numbers, dtype=torch.float64)
    if device.type == "cuda":
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    return target.copy_(host, non_blocking=True)


class AsyncHostCopy:
    """A device tensor copied to pinned host memory."""

    def __init__(self, numbers: Tensor):
        self.event = None
        self.numbers = numbers
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        # reading does not wait: on a CPU; the same on every rank
        self.is_here = self.event is None

    def read(self) -> list[float]:
        """Wait for the numbers (not for work queued after them)."""
        if self.event is not None:
            with idle():
                self.event.synchronize()
        return self.numbers.tolist()
