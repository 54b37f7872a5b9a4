"""How a run ends before its last iteration: signals, durations, intervals.

pretrain_gpt.py imports this before torch: a signal that arrives while torch is imported or the
ranks meet ends the process with the exit code that it has later.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.groups import TrainingConfig

if TYPE_CHECKING:
    import torch

    from megatron.distributed.groups import Axis
    from megatron.training.step import AsyncHostCopy

logger = logging.getLogger(__name__)

# 85 means "saved, requeue me" to scripts/train.sbatch; 143 is what a shell reports for SIGTERM.
SIGNAL_CODES = {signal.SIGUSR1: 85, signal.SIGTERM: 143}


class _StartupHandler:
    """Handles a signal until ExitConditions takes over; `before` is the replaced handler."""

    def __init__(self, number: signal.Signals, logs: bool):
        self.logs, self.begun = logs, time.monotonic()
        self.before = signal.signal(number, self)

    def __call__(self, number: int, _frame: object) -> None:
        if self.logs:
            name = signal.Signals(number).name
            text = f"received {name} during startup; exiting without a checkpoint"
            print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        # not sys.exit: threads of torch's rendezvous would abort it
        os._exit(SIGNAL_CODES[signal.Signals(number)])


@contextmanager
def exit_on_signals(logs: bool = True) -> Iterator[None]:
    """End the process on SIGTERM and SIGUSR1 inside the block. A SIGUSR1 that the launcher ignores
    stays ignored: some send it again and again.

    `logs`: this rank logs the signal. One rank of a job is enough.
    """
    # Python handles signals in the main thread only; tests build runs in others.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in SIGNAL_CODES
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    handlers = {number: _StartupHandler(number, logs) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handler.before)


@dataclass(frozen=True)
class Exit:
    """Why a run stops, and the exit code of the process."""

    reason: str
    code: int


class ExitConditions:
    """Receives SIGTERM and SIGUSR1 from construction on; a second signal of a kind goes to the
    handler from before. `on_signal`: what the run does then, for the log.
    """

    def __init__(self, config: TrainingConfig, on_signal: str = "exiting"):
        self.config, self.on_signal = config, on_signal
        self.received: signal.Signals | None = None
        # number of ranks for each of `requests`, at the last exchange
        self.agreed = [0.0] * (len(SIGNAL_CODES) + 1)
        found = {number: signal.signal(number, self._receive) for number in SIGNAL_CODES}
        self._previous = {
            number: handler.before if isinstance(handler, _StartupHandler) else handler
            for number, handler in found.items()
        }
        # --exit-duration-in-mins counts from the start of pretrain_gpt.py, or else from here
        early = (each.begun for each in found.values() if isinstance(each, _StartupHandler))
        self.start = min(early, default=time.monotonic())

    def _receive(self, number: int, _frame: object) -> None:
        # Only noted: the step under way ends first, on all ranks in the same iteration.
        self.received = signal.Signals(number)
        signal.signal(number, self._previous[self.received])
        logger.info(f"received {self.received.name}: {self.on_signal}")

    def requests(self) -> list[float]:
        """This rank's requests to end, 1 or 0 each: the signals of SIGNAL_CODES in order, then
        --exit-duration-in-mins.
        """
        limit = self.config.exit_duration_in_mins
        over = limit is not None and (time.monotonic() - self.start) / 60 > limit
        return [*(float(self.received is number) for number in SIGNAL_CODES), float(over)]

    def exchange(
        self, axis: Axis, device: torch.device, earlier: AsyncHostCopy | None
    ) -> AsyncHostCopy:
        """Sum the requests of all ranks, and read the sums; on a GPU those of the `earlier` call
        are read, so that the host does not wait. What ranks do next must depend on `agreed` alone.
        """
        from megatron.distributed.collectives import all_reduce
        from megatron.training.step import AsyncHostCopy, to_device

        requests = to_device(self.requests(), device)
        sums = AsyncHostCopy({"requests": all_reduce(requests, axis)})
        readable = sums if sums.is_synchronous else earlier
        if readable is not None:
            self.agreed = readable.read()["requests"]
        return sums

    def has_signal(self) -> bool:
        """Whether any rank had received a signal at the last exchange."""
        return any(self.agreed[: len(SIGNAL_CODES)])

    def check(self, iteration: int) -> Exit | None:
        """The reason to stop after this iteration, if any, by the last exchange."""
        # All ranks decide by the same numbers: a rank that left alone would hang the others.
        *signals, over = self.agreed
        for number, ranks in zip(SIGNAL_CODES, signals):
            if ranks:
                return Exit(f"{number.name} received", SIGNAL_CODES[number])
        if over:
            return Exit(f"--exit-duration-in-mins {self.config.exit_duration_in_mins:g} is over", 0)
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            return Exit(f"--exit-interval {self.config.exit_interval} reached", 0)
        return None

    def close(self) -> None:
        """Restore the handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
