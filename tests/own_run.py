"""Runs of pretrain_gpt.py in this process, whose process groups live on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from megatron.config.arguments import parse_arguments
from megatron.training import pretrain


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[io.StringIO]:
    """Inside, runs print into the yielded text, and each (target, name) is another value."""
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for change in ((pretrain, "disconnect", lambda: None), *changes):
            stack.enter_context(mock.patch.object(*change))
        yield printed


def exit_code(flags: Iterable[str], **options: Any) -> int:
    """Run pretrain_gpt.py with these flags on this rank; its exit code."""
    parsed = parse_arguments(list(flags))
    return pretrain.pretrain(parsed.config, parsed.notes, **options)
