"""A training process that takes steps on request, so that several systems can be measured
in turn on one machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from live_bytes import LiveBytes


class Turns:
    """An iterator of the steps to take. Lines of standard input give how many come next; each such
    turn is answered by a line `TURN {...}`.

    `time N`: N steps, timed. `watch N`: N steps while live bytes are counted; the answer is about
    the last of them. `end` ends it. `finish` is called at the end of a turn, within its time: it
    completes what a system still has on its way.
    """

    def __init__(self, finish: Callable[[], None] = lambda: None):
        self.finish, self.left, self.step, self.begun = finish, 0, -1, False
        self.live: LiveBytes | None = None
        self.parts: dict[str, float] = {}
        self.out = sys.stdout  # a run may turn its own elsewhere

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> int:
        if self.left == 0:
            if self.begun:
                self._end()
            self._begin()
        self.left -= 1
        self.step += 1
        if self.live is not None:
            self.seen = {"resident": self.live.now}
            self.live.peak = 0
        return self.step

    def _begin(self) -> None:
        words = sys.stdin.readline().split()
        if words[:1] not in (["time"], ["watch"]):
            raise StopIteration
        self.begun, self.left, self.losses = True, int(words[1]), []
        self.parts = dict.fromkeys(self.parts, 0.0)
        if words[0] == "watch":
            self.live = LiveBytes()
            self.live.__enter__()
        self.clock = time.perf_counter(), time.process_time()

    def _end(self) -> None:
        if self.live is not None:
            self.mark("update", self.live.peak)
        self.finish()
        seconds, cpu = (
            now - then for now, then in zip((time.perf_counter(), time.process_time()), self.clock)
        )
        answer: dict[str, Any] = {"losses": self.losses, "seconds": seconds, "cpu": cpu}
        if self.parts:
            answer["parts"] = self.parts
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.mark("resident")
            self.mark("peak", max(self.live.peak, self.seen["passes"]))
            answer["bytes"], self.live = self.seen, None
        print("TURN " + json.dumps(answer), file=self.out, flush=True)

    def mark(self, name: str, size: int | None = None) -> None:
        """The live bytes at this point (or `size`) count for `name`; of several such points the
        largest.
        """
        if self.live is not None:
            self.seen[name] = max(self.seen.get(name, 0), self.live.now if size is None else size)

    def begin_micro_batch(self, index: int) -> None:
        """Before the forward pass of micro-batch 0, 1, ... of a step."""
        if index > 0:
            self.mark("between")

    def begin_backward(self) -> None:
        """Between a micro-batch's forward pass and its backward pass."""
        self.mark("forward")

    def begin_update(self) -> None:
        """After the last backward pass: from here on what is counted is that of the update."""
        if self.live is not None:
            self.mark("passes", self.live.peak)
            self.live.peak = self.live.now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose CPU seconds the answers add up under the name of a part."""
        self.parts[part] = 0.0

        def call(*arguments: Any, **settings: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*arguments, **settings)
            finally:
                self.parts[part] += time.process_time() - begun

        return call

    def note(self, loss: float) -> None:
        """The loss of the step just taken."""
        self.losses.append(loss)
