"""What passes do, in sizes: products, attention, bytes that are moved and sent.

plan/operation_log.py logs them as a layer runs, plan/hardware.py prices them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`count` products of an m x k by a k x n matrix; `wide`: in fp32 or wider."""

    m: float
    n: float
    k: float
    count: float = 1
    fp8: bool = False
    wide: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Core:
    """Fused attention of some heads over keys of that many positions; FLOPs of what is visible."""

    flops: float
    length: float
    heads: float
    head_dim: int
    backward: bool = False


@dataclass(frozen=True)
class Exchange:
    """A collective or message; `size`: bytes of the whole tensor. `hidden_by`: what may hide it,
    products, cores or the whole pass, or nothing.
    """

    operation: str
    axis: str
    size: float
    hidden_by: str = ""


@dataclass(frozen=True)
class Work:
    """What one pass does. `streams`: bytes that memory-bound kernels read and write; `hidden`:
    those of kernels over the residual stream (norms, residual sums, dropout).
    """

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    streams: tuple[float, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    launches: float = 0
    hidden: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.cores + other.cores,
            self.streams + other.streams,
            self.exchanges + other.exchanges,
            self.launches + other.launches,
            self.hidden + other.hidden,
        )

    @property
    def flops(self) -> float:
        """Of products and attention."""
        return sum(each.flops for each in self.products) + sum(each.flops for each in self.cores)


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit's passes of a micro-batch; a whole backward pass does the last two."""

    forward: Work
    backward_input: Work
    backward_weight: Work = Work()

    def changed(self, change: Callable[[Work], Work]) -> UnitWork:
        """The same with another work of each pass."""
        return UnitWork(
            change(self.forward), change(self.backward_input), change(self.backward_weight)
        )

    @property
    def backward(self) -> Work:
        """Of the whole backward pass."""
        return self.backward_input + self.backward_weight
