"""When and how a run ends before its last iteration: intervals, durations, signals; each saves
first.

Called from training/loop.py, once a step.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass

import torch

from megatron.config.groups import TrainingConfig
from megatron.distributed.collectives import all_reduce
from megatron.distributed.groups import Axis
from megatron.training.early import SIGNAL_CODES, Early
from megatron.training.host_copy import AsyncHostCopy, to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exit:
    """Why a run stops, and the exit code of the process."""

    reason: str
    code: int


class ExitConditions:
    """Notices SIGTERM and SIGUSR1 from construction on; a second signal of a kind meets the
    previous handler. `on_signal`: what the run does then, for the log.
    """

    def __init__(self, config: TrainingConfig, on_signal: str = "exiting"):
        self.config, self.start = config, time.monotonic()
        self.on_signal = on_signal
        self.received: signal.Signals | None = None
        # ranks for each of `requests`, when they last exchanged them
        self.agreed = [0.0] * (len(SIGNAL_CODES) + 1)
        found = {number: signal.signal(number, self._receive) for number in SIGNAL_CODES}
        self._previous = {
            number: handler.before if isinstance(handler, Early) else handler
            for number, handler in found.items()
        }

    def _receive(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._previous[self.received])
        logger.info(f"received {self.received.name}: {self.on_signal}")

    def requests(self) -> list[float]:
        """What asks this rank for the end, 1 or 0 each: the signals of SIGNAL_CODES in order, then
        --exit-duration-in-mins.
        """
        limit = self.config.exit_duration_in_mins
        over = limit is not None and (time.monotonic() - self.start) / 60 > limit
        return [*(float(self.received is number) for number in SIGNAL_CODES), float(over)]

    def ask(self, axis: Axis, device: torch.device) -> AsyncHostCopy:
        """Begin to exchange requests between all ranks."""
        return AsyncHostCopy(all_reduce(to_device(self.requests(), device), axis))

    def take(self, asked: AsyncHostCopy) -> bool:
        """Read what all ranks have asked for; whether a signal is among it. What ranks do next must
        depend on `agreed` alone.
        """
        self.agreed = asked.read()
        return any(self.agreed[: len(SIGNAL_CODES)])

    def agree(self, axis: Axis, device: torch.device) -> bool:
        """Exchange requests now; whether a signal is among them."""
        return self.take(self.ask(axis, device))

    def check(self, iteration: int) -> Exit | None:
        """The reason to stop after this iteration, if any: as the ranks agreed last."""
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
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
