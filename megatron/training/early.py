"""SIGTERM and SIGUSR1 before a run listens to them: there is nothing to save, and the process ends
with the same exit codes. No torch here.

Called from pretrain_gpt.py before anything else is imported; training/exit.py takes over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# 85 tells a launcher "saved, requeue me"; 143 is what a shell reports for SIGTERM.
SIGNAL_CODES = {signal.SIGUSR1: 85, signal.SIGTERM: 143}


class Early:
    """The handler of a signal until ExitConditions takes its place; `before` is the one that was
    there first. `speaks`: say why the process ends.
    """

    def __init__(self, number: signal.Signals, speaks: bool):
        self.speaks = speaks
        self.before = signal.signal(number, self)

    def __call__(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.speaks:
            print(
                f"received {name} before training began: nothing is lost, and nothing was saved",
                file=sys.stderr,
                flush=True,
            )
        sys.stdout.flush()
        os._exit(
            SIGNAL_CODES[signal.Signals(number)]
        )  # threads of torch's rendezvous would abort an ordinary end


@contextmanager
def early_signals(speaks: bool = True) -> Iterator[None]:
    """Inside, SIGTERM ends the process; SIGUSR1, too, unless a launcher has it ignored, which sends
    it again and again.

    `speaks`: this rank says so. One of a job is enough, and a launcher ends the others because the
    first one has failed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in SIGNAL_CODES
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    handlers = {number: Early(number, speaks) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handler.before)
