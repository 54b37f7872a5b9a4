"""Files of one JSON object a line, which a kill may tear, and small files, which it may not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_MODE = 0o640  # not readable by everybody; the umask may remove more


class JsonLines:
    """Appends rows to a file, each in one write, so that a kill tears at most the last line.
    `was_empty`: whether the file was new or empty.
    """

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
        size = os.fstat(self.fd).st_size
        self.was_empty = not size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            os.write(self.fd, b"\n")  # end a torn line; readers skip it

    def append(self, row: dict[str, Any]) -> None:
        """Write one row. Raises OSError."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        while line:
            line = line[os.write(self.fd, line) :]

    def close(self) -> None:
        os.close(self.fd)


def write_whole(path: Path, text: str) -> None:
    """Write a file of which readers see all of the old or all of the new text."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.touch(FILE_MODE)
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
