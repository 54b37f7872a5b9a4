"""What the campaigns of odd input share: one case under a time limit, and what came of all of
them.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import UserError

LONGEST = 60  # seconds of one case, which takes some milliseconds
LONGEST_MESSAGE = 12_000  # characters: 20 faults of a file, each with its path


class Wrong(Exception):
    """A case that went as it must not, though nothing was raised."""


class Hang(BaseException):
    """A case ran out of time. No `except Exception` of the program may catch it."""


@contextmanager
def time_limit() -> Iterator[None]:
    def over(_signal: int, _frame: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, over)
    left, _ = signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class Verdicts:
    """How many cases had which outcome, and every wrong one."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def case(self, label: str, action: Callable[[], str], *, must_refuse: bool = False) -> None:
        """Run one case. `action` returns the outcome's name, raises UserError for a refusal and
        Wrong for a result that differs from the oracle's; any other exception is a bare
        traceback.
        """
        try:
            with time_limit():
                outcome = action()
            if must_refuse:
                raise Wrong("accepted")
        except UserError as error:
            outcome = "refused"
            if not 10 < len(str(error)) < LONGEST_MESSAGE:
                self.wrong.append(f"{label}: a message of {len(str(error))} characters")
        except Hang:
            outcome = "hung"
            self.wrong.append(f"{label}: hung")
        except Wrong as error:
            outcome = "wrong"
            self.wrong.append(f"{label}: {error}")
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # libraries in Rust panic with a class of their own below BaseException
            outcome = "traceback"
            self.wrong.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        self.outcomes[outcome] += 1


def damage(rng: random.Random, raw: bytes) -> tuple[str, bytes]:
    """Some bytes changed, cut off, added, doubled or taken out; never the same bytes."""
    for _ in range(100):
        at, kind = (
            rng.randrange(len(raw) + 1),
            rng.choice(["flip", "flip", "set", "cut", "add", "double", "take", "zero"]),
        )
        size = rng.choice([1, 1, 2, 4, 8, 30])
        changed = bytearray(raw)
        if kind == "flip" and at < len(raw):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "set":
            changed[at : at + size] = rng.randbytes(len(changed[at : at + size]))
        elif kind == "cut":
            del changed[at:]
        elif kind == "add":
            changed[at:at] = rng.randbytes(size)
        elif kind == "double":
            changed[at:at] = changed[at : at + size]
        elif kind == "take":
            del changed[at : at + size]
        elif kind == "zero":
            changed[at : at + size] = bytes(len(changed[at : at + size]))
        if bytes(changed) != raw:
            return f"{kind} {size} at {at}", bytes(changed)
    raise AssertionError("nothing to damage")


ODD: tuple[Any, ...] = (
    True,
    False,
    None,
    -1,
    0,
    1,
    1.5,
    -0.0,
    1e308,
    1e-300,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "0",
    "x",
    "true",
    "010",
    "1:30",
    "x" * 5000,
    "a/" * 3000,
    "\ud800",
    "\0",
    "../../etc",
    [],
    [[]],
    [True],
    [None],
    [1, 2],
    {},
    {"a": 1},
    [[[[[]]]]],
    ["x", 3],
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path to every value inside nested dictionaries and lists."""
    for key, each in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield (*path, key)
        yield from places(each, (*path, key))


def put(value: Any, path: tuple, new: Any) -> Any:
    """Replace the value at a path; returns the one that was there."""
    for key in path[:-1]:
        value = value[key]
    old, value[path[-1]] = value[path[-1]], new
    return old
