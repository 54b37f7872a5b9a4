"""The time of one call on a device whose caches hold nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # twice and more of any L2 cache


class OneCall:
    """Between calls a buffer of FLUSH_BYTES is written (of `tiny`, a small one); on a GPU events
    around the call are read.
    """

    def __init__(self, device: torch.device, tiny: bool):
        self.device = device
        self.flush = torch.empty(1024 if tiny else FLUSH_BYTES, dtype=torch.int8, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        self.flush.zero_()
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)
