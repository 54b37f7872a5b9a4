"""--manual-gc: Python's garbage collector runs after the same iterations on all ranks, so that no
rank waits for the collection of another.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.config.groups import TrainingConfig


@contextmanager
def manual_collection(config: TrainingConfig) -> Iterator[None]:
    """Switches the automatic collector off under --manual-gc. Nothing is frozen: reports of live
    tensors find them among the collector's objects.
    """
    if not config.manual_gc:
        yield
        return
    # One collection now: what building the run has left is not carried along.
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_after(iteration: int, config: TrainingConfig) -> None:
    """Collects after every --manual-gc-interval iterations."""
    interval = config.manual_gc_interval
    if config.manual_gc and interval and iteration % interval == 0:
        gc.collect()


@contextmanager
def collected_evaluation(config: TrainingConfig) -> Iterator[None]:
    """Collects before an evaluation, and what the evaluation has made after it."""
    collects = config.manual_gc and config.manual_gc_eval
    if collects:
        gc.collect()
    yield
    if collects:
        # The youngest generation is enough for what one evaluation has made.
        gc.collect(generation=0)
