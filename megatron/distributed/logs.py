"""The log of a job: Python's logging, with each warning once and its rank.

Rank 0 writes everything to stdout. Other ranks write warnings to stderr, after `rank 3:`, and only
those that no other rank has logged: they delay each warning for a few seconds, in which rank 0
enters its texts in the job's store. Python's warnings are logged as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from megatron.distributed.peers import own_connection

LOGGED = "megatron", "py.warnings"  # names of loggers
DEDUP_S = 5.0  # seconds that rank 0 has to log the same text


class LineFormatter(logging.Formatter):
    """Puts the level in front of warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
        text = super().format(record)
        if record.name == "py.warnings":
            text = text.partition("\n")[0]  # without the line of code
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return level + text


class JobHandler(logging.Handler):
    """The handler of a rank: rank 0 (without a store, a single process) writes everything to
    stdout, others warnings alone, each delayed by DEDUP_S.
    """

    def __init__(self, rank: int = 0, store: Store | None = None) -> None:
        super().__init__(logging.WARNING if rank > 0 else logging.NOTSET)
        self.rank = rank
        self.store = store
        self.held: deque[str] = deque()  # the oldest first

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or delay it."""
        text = self.format(record)
        if self.rank > 0:
            self.held.append(text)
            timer = threading.Timer(DEDUP_S, self._write_oldest)
            timer.daemon = True
            timer.start()
            return
        try:
            print(text, flush=True)
        # a full disk; a signal in the middle of another line; a stream that is closed or cannot
        # encode the text
        except (OSError, RuntimeError, ValueError):
            self.handleError(record)
        if self.store is not None and record.levelno >= logging.WARNING:
            # `set` does not wait for the store's answer, `add` does
            with contextlib.suppress(RuntimeError):  # the store is closed: the job is ending
                self.store.set(_key(text), "1")

    def _write_oldest(self) -> None:
        with self.lock:
            if self.held:
                text = self.held.popleft()
                if self._is_news(text):
                    print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _is_news(self, text: str) -> bool:
        """Enter a text in the store; returns whether no other rank had entered it."""
        with contextlib.suppress(RuntimeError):  # the store is closed: better twice than never
            return self.store is None or self.store.add(_key(text), 1) == 1
        return True

    def close(self) -> None:
        """Write delayed warnings at once."""
        while self.held:
            self._write_oldest()
        super().close()


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def job_log() -> Iterator[None]:
    """Inside, this process logs as its rank in the job does."""
    handler = JobHandler()
    if dist.is_initialized() and dist.get_world_size() > 1:
        default = dist.distributed_c10d._get_default_store()
        own = own_connection(default, dist.get_world_size())
        handler = JobHandler(dist.get_rank(), PrefixStore("log", own))
    handler.setFormatter(LineFormatter())
    loggers = [logging.getLogger(name) for name in LOGGED]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library that sets up logging would write it again
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()
