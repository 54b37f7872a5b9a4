"""The log of a job: Python's logging, with each warning once and its rank.

Rank 0 writes everything to stdout. Other ranks write warnings to stderr, after `rank 3:`, and only
those that no rank has entered in the job's store: a warning of all ranks appears twice when another
one is faster than rank 0. Python's warnings are logged as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from megatron.distributed.peers import own_connection

LOGGED = "megatron", "py.warnings"  # names of loggers


class JobHandler(logging.Handler):
    """The handler of a rank: rank 0 (without a store, a single process) writes everything to
    stdout, others new warnings alone to stderr.
    """

    def __init__(self, rank: int = 0, store: Store | None = None) -> None:
        super().__init__(logging.WARNING if rank > 0 else logging.NOTSET)
        self.rank = rank
        self.store = store

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record, with its level in front of warnings and errors."""
        text = super().format(record)
        if record.name == "py.warnings":
            text = text.partition("\n")[0]  # without the line of code
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return level + text

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and enter a warning in the store."""
        text = self.format(record)
        key = hashlib.sha256(text.encode()).hexdigest()
        try:
            if self.rank == 0:
                print(text, flush=True)
            elif self._is_new(key):
                print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        # a full disk; a signal in the middle of another line; a stream that is closed or cannot
        # encode the text
        except (OSError, RuntimeError, ValueError):
            self.handleError(record)
        if self.rank == 0 and self.store is not None and record.levelno >= logging.WARNING:
            # `set` does not wait for the store's answer, `add` does
            with contextlib.suppress(RuntimeError):  # the store is closed: the job is ending
                self.store.set(key, "1")

    def _is_new(self, key: str) -> bool:
        """Enter a text in the store; returns whether no other rank had entered it."""
        try:
            return self.store.add(key, 1) == 1
        except RuntimeError:  # the store is closed: better twice than never
            return True


@contextlib.contextmanager
def job_log() -> Iterator[None]:
    """Inside, this process logs as its rank in the job does."""
    handler = JobHandler()
    if dist.is_initialized() and dist.get_world_size() > 1:
        default = dist.distributed_c10d._get_default_store()
        own = own_connection(default, dist.get_world_size())
        handler = JobHandler(dist.get_rank(), PrefixStore("log", own))
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
