"""Who says what in a job of several ranks: rank 0 speaks for all, and the others are heard when
they have a warning of their own.

What a rank above 0 prints is dropped, but for lines that begin with `warning:`; these and Python's
warnings it holds back for a few seconds. Rank 0 enters the texts of its own warnings in the job's
store. What is not there when the time is over is written to stderr with the rank's name, by the
first rank that comes to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TextIO

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

PREFIX = "warning:"
PATIENCE = 5.0  # seconds that rank 0 has to say the same


class _Voice(io.TextIOBase):
    """A stdout that hands each whole line that is a warning to `said`."""

    def __init__(self) -> None:
        self._begun = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.startswith(PREFIX):
                self.said(line)
        return len(text)

    @abstractmethod
    def said(self, text: str) -> None:
        """Take in the text of a warning."""


class First(_Voice):
    """Rank 0's stdout: everything goes on to `out`, and warnings are entered in the store."""

    def __init__(self, store: Store, out: TextIO):
        super().__init__()
        self.store, self.out = store, out

    def write(self, text: str) -> int:
        self.out.write(text)
        return super().write(text)

    def flush(self) -> None:
        self.out.flush()

    def isatty(self) -> bool:
        return self.out.isatty()

    def said(self, text: str) -> None:
        """Enter a text that rank 0 has said."""
        with contextlib.suppress(RuntimeError):  # a store that has gone: the job is ending
            self.store.set(_key(text), "said")

    def close(self) -> None:
        """`out` stays open."""


class Other(_Voice):
    """The stdout of a rank above 0."""

    def __init__(self, rank: int, store: Store, out: TextIO, patience: float = PATIENCE):
        super().__init__()
        self.rank, self.store, self.out, self.patience = rank, store, out, patience
        self.held: list[tuple[float, str]] = []  # when each is due
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.over = False

    def said(self, text: str) -> None:
        """Hold a warning back."""
        with self.changed:
            self.held.append((time.monotonic() + self.patience, text))
            if self.thread is None:
                self.thread = threading.Thread(target=self._tell, daemon=True)
                self.thread.start()
            self.changed.notify()

    def _tell(self) -> None:
        while True:
            with self.changed:
                while not self.held and not self.over:
                    self.changed.wait()
                if not self.held:
                    return
                due, text = self.held[0]
                if not self.over and due > time.monotonic():
                    self.changed.wait(due - time.monotonic())
                    continue
                self.held.pop(0)
            if self._is_news(text):
                self.out.write(f"rank {self.rank}: {text}\n")
                self.out.flush()

    def _is_news(self, text: str) -> bool:
        """Whether neither rank 0 nor another rank has said it."""
        try:
            return (
                not self.store.check([_key(text)])
                and self.store.add(f"{_key(text)}/others", 1) == 1
            )
        except RuntimeError:  # a store that has gone: better twice than never
            return True

    def close(self) -> None:
        """Say what is held back, at once."""
        with self.changed:
            self.over = True
            self.changed.notify()
        if self.thread is not None:
            self.thread.join(timeout=self.patience)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """While open, this process speaks as its rank in the job does."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    rank = dist.get_rank()
    # with a connection of its own
    store = PrefixStore("speech", dist.distributed_c10d._get_default_store().clone())
    voice = First(store, sys.stdout) if rank == 0 else Other(rank, store, sys.stderr)
    show = warnings.showwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
    ) -> None:
        voice.said(f"{PREFIX} {category.__name__}: {message} ({filename}:{lineno})")
        if rank == 0:
            show(message, category, filename, lineno, *rest)

    warnings.showwarning = shown
    try:
        with contextlib.redirect_stdout(voice):
            yield
    finally:
        warnings.showwarning = show
        voice.close()
