"""What a run spends its time on: its timers, and events.jsonl over all its starts, which
tools/goodput.py adds up; docs/logging.md lists the events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.observe.json_lines import JsonLines
from megatron.observe.metrics import Metrics

logger = logging.getLogger(__name__)

NAME = "events.jsonl"
STEPS_EVERY_S = 10.0  # seconds between events of steps when nothing else happens
IMPORTED = time.perf_counter()


@dataclass(frozen=True)
class Step:
    """`count` steps that took `seconds`, of which `data` and `checkpoint` were spent waiting.
    `skipped` of them did not change the weights.
    """

    count: int
    seconds: float
    data: float = 0.0
    checkpoint: float = 0.0
    skipped: int = 0
    first: bool = False  # of a start

    @property
    def own(self) -> float:
        """Seconds of computation."""
        return self.seconds - self.data - self.checkpoint

    @property
    def productive(self) -> float:
        """Seconds of the steps that changed the weights."""
        return self.own * (1 - self.skipped / self.count)


def process_age() -> float:
    """Seconds since this process was started; since this import where /proc is missing."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - IMPORTED
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))


class Timers:
    """Named wall-clock timers: `with timers("data"): ...`, then `timers.take()` at each log step.

    They never synchronize the device: on a GPU a timer measures its code on the host, and queued
    work counts where the host waits next, at the latest at the end of a log interval.
    """

    def __init__(
        self, in_trace: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        """`in_trace`: makes the range of a timer's block in traces."""
        self._in_trace = in_trace
        self._seconds: Metrics = {}
        self._taken: Metrics = {}  # of all intervals before
        self._inside = 0.0  # seconds of the timers that ran inside the present one

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to timer `name`, without that of nested timers."""
        start = time.perf_counter()
        outer = self._inside
        self._inside = 0.0
        try:
            with self._in_trace(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds - self._inside
            self._inside = outer + seconds

    def take(self) -> Metrics:
        """Seconds of each timer since the last call, and reset."""
        seconds = self._seconds
        for name, value in seconds.items():
            self._taken[name] = self._taken.get(name, 0.0) + value
        self._seconds = {}
        return seconds

    def total(self, name: str) -> float:
        """Seconds of a timer since it was made."""
        return self._taken.get(name, 0.0) + self._seconds.get(name, 0.0)


class EventLog:
    """The events of one start of a run; without a folder nothing is written, and a disk that fails
    never stops training. Times of steps count from the event before and exclude `during`. Time
    stamps are that of the start plus elapsed time, so that setting the clock has no effect on them.
    """

    def __init__(
        self,
        folder: str | Path | None,
        iteration: int,
        timers: Timers,
        account: Callable[[Path], Metrics] = lambda folder: {},
    ):
        """`iteration`: that of the loaded checkpoint, or 0. `timers`: those of the run; `data` and
        `save-checkpoint` are not part of a step's compute time. `account`: of the starts in a
        folder (`Advisor.goodput`).
        """
        self.timers = timers
        self.file: JsonLines | None = None
        age = process_age()
        self.origin = time.perf_counter() - age
        self.started = time.time() - age  # Unix seconds
        self.wall_before = 0.0  # seconds from the first start to this one
        self.productive = self.before = 0.0
        self.restore = 0.0  # seconds
        self.iteration = iteration  # of the last steps event
        self.skipped = 0  # steps since then
        self.first_step_is_over = False
        if folder is None:
            return
        with self._guard():
            self.file = JsonLines(Path(folder) / NAME)
            start = {"event": "start", "time": round(self.started, 3), "iteration": iteration}
            self.file.append(start)
            earlier = account(Path(folder))
            self.wall_before = earlier.get("goodput/wall", 0.0)
            self.productive = self.before = earlier.get("goodput/productive", 0.0)
        self._mark()

    def write(self, event: str, iteration: int, **fields: Any) -> None:
        now = round(self.started + self._elapsed(), 3)
        row = {"event": event, "time": now, "iteration": iteration, **fields}
        if self.file is not None:
            with self._guard():
                self.file.append(row)

    def ready(self, iteration: int) -> None:
        """Training begins."""
        start_up = self._elapsed() - self.restore
        self.write("ready", iteration, seconds=round(start_up, 4))
        self._mark()

    @contextlib.contextmanager
    def restoring(self, iteration: int) -> Iterator[None]:
        """While a checkpoint is loaded."""
        begun = time.perf_counter()
        yield
        self.restore = time.perf_counter() - begun
        self.write("restore", iteration, seconds=round(self.restore, 4))

    @contextlib.contextmanager
    def during(self, event: str, iteration: int) -> Iterator[None]:
        """While steps wait for an evaluation or a checkpoint."""
        self.steps(iteration)
        begun = time.perf_counter()
        self.write(f"{event}-begin", iteration)
        yield
        self.write(event, iteration, seconds=round(time.perf_counter() - begun, 4))
        self._mark()

    def step(self, iteration: int) -> None:
        """A step has ended: the first one of a start is one event, later ones are combined."""
        if not self.first_step_is_over or time.perf_counter() - self.begun[0] > STEPS_EVERY_S:
            self.steps(iteration)

    def steps(self, iteration: int) -> None:
        """Write the steps since the last event, if any."""
        if iteration == self.iteration:
            return
        step = self._open(iteration)
        self.productive += step.productive if self.first_step_is_over else 0.0
        fields = {
            name: value if value is True else round(value, 4)
            for name, value in dataclasses.asdict(step).items()
            if value
        }
        self.write("steps", iteration, **fields)
        self.first_step_is_over = True
        self.iteration, self.skipped = iteration, self.skipped - step.skipped
        self._mark()

    def goodput(self, iteration: int) -> Metrics:
        """Productive share of the time since the first start and since this one. Without an account
        of earlier starts, which only the advisor of tools/ makes, both count from this one.
        """
        elapsed = max(self._elapsed(), 1e-9)
        productive = self.productive
        if self.first_step_is_over and iteration > self.iteration:
            productive += self._open(iteration).productive
        return {
            "goodput": productive / (self.wall_before + elapsed),
            "goodput-since-start": (productive - self.before) / elapsed,
        }

    def end(self, iteration: int, code: int, reason: str) -> None:
        self.steps(iteration)
        self.write("end", iteration, code=code, reason=reason)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _elapsed(self) -> float:
        """Seconds since this process was started."""
        return time.perf_counter() - self.origin

    def _open(self, iteration: int) -> Step:
        clocks = zip(self._clocks(), self.begun)
        seconds, data, checkpoint = (now - then for now, then in clocks)
        return Step(
            iteration - self.iteration,
            seconds,
            data,
            checkpoint,
            # on a GPU the last step may be skipped and not yet counted: it is in the next event
            skipped=min(self.skipped, iteration - self.iteration),
            first=not self.first_step_is_over,
        )

    def _mark(self) -> None:
        self.begun = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds of the clock, and those spent waiting for data and for checkpoints."""
        total = self.timers.total
        return time.perf_counter(), total("data"), total("save-checkpoint")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            logger.warning(
                f"{NAME} is off for the rest of this run; training continues. Cause: {error}. Fix: "
                "free space on the disk of --save and make it writable."
            )
