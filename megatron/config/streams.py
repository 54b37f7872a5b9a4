"""The streams that a program writes its log and messages to."""

from __future__ import annotations

import io
import sys


def escape_unencodable() -> None:
    """Make stdout and stderr escape characters that their encoding lacks (`\\xe9`) instead of
    raising: a prompt or a path must not end a run whose log is ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a program may have replaced it
            stream.reconfigure(errors="backslashreplace")
