"""Rows of tests as text: flags, and below them, indented, the message that they give."""

from __future__ import annotations


def rows(text: str) -> list[tuple[str, str]]:
    """(flags, message) of each row; a long one goes on in the next line, `#` begins a comment."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            found[-1][1].append(line.strip())
        elif found and not found[-1][1]:
            found[-1][0].append(line)
        else:
            found.append(([line], []))
    return [(" ".join(flags), " ".join(message)) for flags, message in found]
