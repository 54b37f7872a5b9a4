"""When and how a run ends before its last iteration: intervals, durations, signals; each saves first."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from megatron.config.groups import TrainingConfig

# 85 tells a launcher "saved, requeue me"; 143 is what a shell reports for SIGTERM.
SIGNAL_CODES = {signal.SIGUSR1: 85, signal.SIGTERM: 143}


@dataclass(frozen=True)
class Exit:
    """Why a run stops, and the exit code of the process."""

    reason: str
    code: int


class ExitConditions:
    """Notices SIGTERM and SIGUSR1 from construction on; a second signal of a kind meets the previous handler."""

    def __init__(self, config: TrainingConfig):
        self.config, self.start = config, time.monotonic()
        self.received: signal.Signals | None = None
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNAL_CODES}

    def _receive(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._previous[number])
        print(f"received {self.received.name}: saving and exiting after this step", flush=True)

    def signalled(self) -> bool:
        """Whether a signal asked for the end: evaluation stops at once then."""
        return self.received is not None

    def check(self, iteration: int) -> Exit | None:
        """The reason to stop after this iteration, if any."""
        if self.received is not None:
            return Exit(f"{self.received.name} received", SIGNAL_CODES[self.received])
        minutes = (time.monotonic() - self.start) / 60
        if self.config.exit_duration_in_mins is not None and minutes > self.config.exit_duration_in_mins:
            return Exit(f"--exit-duration-in-mins {self.config.exit_duration_in_mins:g} is over", 0)
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            return Exit(f"--exit-interval {self.config.exit_interval} reached", 0)
        return None

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
