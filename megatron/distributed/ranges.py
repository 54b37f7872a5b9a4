"""Names of what a process does, in the traces of torch's profiler: passes of layers, collectives by
operation and axis, the parts of a step.

Whether anybody records is torch's own state. Where nobody does, a range is an attribute that is
read. Read by megatron/observe/step_parts.py.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

UNRECORDED: AbstractContextManager[Any] = contextlib.nullcontext()


def named(*words: object) -> AbstractContextManager[Any]:
    """A range of these words while torch's profiler records, else nothing."""
    if not profiler._is_profiler_enabled:
        return UNRECORDED
    return profiler.record_function(" ".join(map(str, words)))
