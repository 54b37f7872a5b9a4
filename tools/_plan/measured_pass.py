"""One pass of a unit as it was measured (layer_run.py), and the pass with other sizes between those
of two runs: a search asks for the same layer with 1, 2, 4, 8 and 16 samples and with its experts
divided over 2, 4, ... ranks, and runs it with the fewest and with the most of either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from megatron.tools._plan.work import Core, Exchange, Product, Work


@dataclass(frozen=True)
class MeasuredPass:
    """Weights, the micro-batch and the gradient of the output are not counted in bytes."""

    begin: np.ndarray  # bytes of the storages that are alive when it begins
    changes: np.ndarray  # bytes of each storage that is made, or with a minus freed
    sent: tuple[int, ...]  # the number of changes before each all-to-all
    output: int  # bytes of the gradient of the output, which is among those at the beginning
    logits: int  # of what it leaves
    products: tuple[Product, ...]
    cores: tuple[Core, ...]
    streams: np.ndarray  # bytes of each tensor that a memory-bound kernel reads or writes
    hidden: np.ndarray  # likewise of kernels over the residual stream
    exchanges: tuple[Exchange, ...]
    launches: np.ndarray  # of each operator and collective
    calls: tuple[Any, ...]  # operators, in their order

    @cached_property
    def alive(self) -> np.ndarray:
        """Bytes alive at the beginning and after each change."""
        return int(self.begin.sum()) + np.concatenate(([0], self.changes.cumsum()))

    @property
    def left(self) -> int:
        """Bytes that are alive when it has ended."""
        return int(self.alive[-1])

    @property
    def peak(self) -> int:
        return int(self.alive.max()) - self.output

    @property
    def at_exchanges(self) -> tuple[int, ...]:
        """Bytes alive at each all-to-all."""
        return tuple(int(self.alive[at]) - self.output for at in self.sent)

    @cached_property
    def work(self) -> Work:
        """With products of one size as one."""
        counts: Counter[Product] = Counter()
        for each in self.products:
            counts[replace(each, count=1)] += each.count
        return Work(
            tuple(replace(each, count=count) for each, count in counts.items()),
            self.cores,
            (float(self.streams.sum()),),
            self.exchanges,
            int(self.launches.sum()),
            float(self.hidden.sum()),
        )


class _Differs(Exception):
    """The pass of the second run is not the same one with other sizes."""


class Between(NamedTuple):
    """A value between those that some setting had in two runs."""

    low: int
    high: int
    value: int

    def passed(self, low: MeasuredPass, high: MeasuredPass) -> MeasuredPass | None:
        """The pass with this value. None where it is not known: the two runs call other operators,
        or some size is neither the same in both nor proportional to the setting or its inverse, as
        one is that a kernel rounds or limits.
        """
        if low.calls != high.calls or low.sent != high.sent:
            return None
        try:
            return self._each(low, high)
        except _Differs:
            return None

    def _each(self, low: Any, high: Any) -> Any:
        """A dataclass whose fields are sizes, names or settings."""
        sizes = {
            each.name: self._size(getattr(low, each.name), getattr(high, each.name))
            for each in fields(low)
            if each.name not in ("calls", "sent")
        }
        return replace(low, **sizes)

    def _size(self, low: Any, high: Any) -> Any:
        if isinstance(low, np.ndarray):
            return self._sizes(low, high)
        if isinstance(low, tuple):
            if len(low) != len(high):
                raise _Differs
            return tuple(map(self._each, low, high))
        if low == high:
            return low
        if isinstance(low, str):
            raise _Differs
        grows, falls = low * self.high == high * self.low, low * self.low == high * self.high
        found, rest = divmod(low * self.value, self.low)
        if not grows:
            found, rest = divmod(low * self.low, self.value)
        if rest or not (grows or falls):
            raise _Differs
        return found

    def _sizes(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        if len(low) != len(high):
            raise _Differs
        is_same, grows = low == high, low * self.high == high * self.low
        falls = low * self.low == high * self.high
        grown, fallen = low * self.value, low * self.low
        is_whole = (grows & (grown % self.low == 0)) | (falls & (fallen % self.value == 0))
        if not (is_same | is_whole).all():
            raise _Differs
        return np.where(is_same, low, np.where(grows, grown // self.low, fallen // self.value))
