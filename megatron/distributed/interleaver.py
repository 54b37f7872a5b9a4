"""Two computations of a rank of which one runs at a time: one that has started an exchange with
other ranks yields to the other, so that the exchange overlaps its computation.

Each has its own thread, since both are in the midst of passes of autograd when they give way.
They give way at the same places on all ranks and nowhere else, so that all ranks start their
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Semaphore
from typing import Any, ClassVar, TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


class AbandonedError(RuntimeError):
    """The other of two computations has failed, so that this one is not carried on."""


class Interleaver:
    """Runs two computations at a time, the second in a thread that is kept."""

    current: ClassVar[Interleaver | None] = None  # of the two that run now

    def __init__(self) -> None:
        # a thread begins on the first device; -1 changes nothing
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self.thread = ThreadPoolExecutor(1, "second", torch.cuda.set_device, (device,))

    def run_overlapped(
        self, first: Callable[[], First], second: Callable[[], Second]
    ) -> tuple[First, Second]:
        """The results of both, which begin with `first`. Raises what one of them raises."""
        assert Interleaver.current is None and torch.is_grad_enabled()
        self.turn = Semaphore(1), Semaphore(0)
        self.running = 0
        self.alone = False  # one of the two is over
        self.failed = False
        Interleaver.current = self
        coming = self.thread.submit(self._run, 1, second)
        try:
            with suppress(AbandonedError):  # the second raises its error
                found = self._run(0, first)
        finally:
            wait([coming])
            Interleaver.current = None
        other = coming.result()
        return found, other

    def _run(self, index: int, work: Callable[[], Any]) -> Any:
        try:
            self._wait_for_turn(index)
            return work()
        except BaseException:
            self.failed = True
            raise
        finally:
            self.alone = True
            self._give_turn(1 - index)

    def _wait_for_turn(self, index: int) -> None:
        self.turn[index].acquire()
        if self.failed:
            raise AbandonedError("the other of two passes has failed")

    def _give_turn(self, index: int) -> None:
        self.running = index
        self.turn[index].release()

    def yield_turn(self) -> None:
        """Let the other one run until it yields itself, or is over."""
        this = self.running
        if not self.alone:
            self._give_turn(1 - this)
            self._wait_for_turn(this)


def yield_turn() -> None:
    """An exchange has been started: where two computations run, the other one's turn."""
    if Interleaver.current is not None:
        Interleaver.current.yield_turn()
