"""What the program logs, for tests to read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from megatron.distributed.logs import JobHandler


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that this process logs in the block."""
    lines: list[str] = []
    handler = JobHandler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def silently(function: Callable, *arguments: Any, **options: Any) -> Any:
    """What the function returns; it must not log anything."""
    with logged() as lines:
        result = function(*arguments, **options)
    assert not lines, lines
    return result
