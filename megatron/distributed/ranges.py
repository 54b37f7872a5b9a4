"""Named ranges in the traces of torch's profiler: passes of layers, collectives by operation and
axis, the parts of a step. tools/_report/step_parts.py reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

UNRECORDED: AbstractContextManager[Any] = contextlib.nullcontext()


def named(*words: object) -> AbstractContextManager[Any]:
    """A range of this name while torch's profiler records; else only one attribute is read."""
    if not profiler._is_profiler_enabled:
        return UNRECORDED
    return profiler.record_function(" ".join(map(str, words)))


def trace_range() -> Callable[[str], AbstractContextManager[Any]]:
    """What makes a range of a name while torch's profiler records, else does nothing. For many
    ranges in a row, such as the passes of a step: whether it records is read once.
    """
    return profiler.record_function if profiler._is_profiler_enabled else contextlib.nullcontext
