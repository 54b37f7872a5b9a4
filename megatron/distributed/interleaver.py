"""Two computations of a rank of which one runs at a time: one that has started an exchange with
other ranks yields to the other, so that the exchange overlaps its computation.

Each has its own thread, since both are in the midst of passes of autograd when they give way.
They give way at the same places on all ranks and nowhere else, so that all ranks start their
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Semaphore
from typing import ClassVar, TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


class AbandonedError(RuntimeError):
    """The other of two computations has failed, so that this one is not carried on."""


class Interleaver:
    """Runs two computations at a time, the second in a thread that is kept."""

    current: ClassVar[Interleaver | None] = None  # of the two that run now

    def __init__(self) -> None:
        cuda = torch.cuda.is_initialized()  # a thread begins on the first device
        device = torch.cuda.current_device() if cuda else None
        self.thread = ThreadPoolExecutor(1, "second", _begin_on, (device,))
        self._begin()

    def _begin(self) -> None:
        self.turn = Semaphore(0), Semaphore(0)
        self.running = 0
        self.over = [False, False]
        self.failed = False

    def run_overlapped(
        self, first: Callable[[], First], second: Callable[[], Second]
    ) -> tuple[First, Second]:
        """The results of both, which begin with `first`. Raises what one of them raises."""
        assert Interleaver.current is None and torch.is_grad_enabled()
        self._begin()
        problem: BaseException | None = None
        coming = self.thread.submit(self._second, second)
        Interleaver.current = self
        try:
            found = first()
        except BaseException as error:
            problem, self.failed = error, True
        self.over[0], self.running = True, 1
        self.turn[1].release()
        wait([coming])
        Interleaver.current = None
        if problem is None or isinstance(problem, AbandonedError):
            other = coming.result()
        if problem is not None:
            raise problem
        return found, other

    def _second(self, second: Callable[[], Second]) -> Second:
        self.turn[1].acquire()
        try:
            self._go_on()
            return second()
        except BaseException:
            self.failed = True
            raise
        finally:
            self.over[1], self.running = True, 0
            self.turn[0].release()

    def _go_on(self) -> None:
        if self.failed:
            raise AbandonedError("the other of two passes has failed")

    def yield_turn(self) -> None:
        """Let the other one run until it gives way itself, or is over."""
        self._go_on()
        this = self.running
        other = 1 - this
        if self.over[other]:
            return
        self.running = other
        self.turn[other].release()
        self.turn[this].acquire()
        self._go_on()


def _begin_on(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def yield_turn() -> None:
    """An exchange has been started: where two computations run, the other one's turn."""
    if Interleaver.current is not None:
        Interleaver.current.yield_turn()
