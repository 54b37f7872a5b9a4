"""The time of one call on a device whose caches hold nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # twice and more of any L2 cache
SLEEP_CYCLES = (2_000_000, 20_000_000)  # of the device's clock: about 1 ms and 10 ms


class OneCall:
    """Between calls a buffer of FLUSH_BYTES is written (of `tiny`, a small one); on a GPU events
    around the call are read.
    """

    def __init__(self, device: torch.device, tiny: bool):
        self.device = device
        self.flush = torch.empty(1024 if tiny else FLUSH_BYTES, dtype=torch.int8, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Time of the call's kernels on a GPU, of the whole call on a CPU. A call that waits for
        the device contains that wait and the host's work after it.
        """
        if self.device.type != "cuda":
            self.flush.zero_()
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)
        # An idle device reaches the first event at once and then waits for the host's launches. It
        # sleeps until all of them are queued; where it woke before (many launches, a compilation,
        # or a call that waits for it), it sleeps longer the second time.
        for cycles in SLEEP_CYCLES:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            call()
            stop.record()
            if not start.query():
                break
        stop.synchronize()
        return start.elapsed_time(stop)
