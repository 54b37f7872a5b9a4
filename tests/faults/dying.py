"""A process that is killed at one of its system calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable


def die_before(number: int, calls: Iterable[str], act: Callable[[], object]) -> int:
    """Fork a process that carries out `act` and is killed before its call `number` of these
    functions of `os`; its wait status.
    """
    child = os.fork()
    if child == 0:
        try:
            left = number
            for name in calls:

                def dying(*args, real=getattr(os, name), **kwargs):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                setattr(os, name, dying)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]
