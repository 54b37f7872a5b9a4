"""Rows of tests as text: a line of flags or settings, and below it, indented, what it gives."""

from __future__ import annotations


def rows(text: str) -> list[tuple[str, str]]:
    """(flags, message) of each row; a long one continues in the next line, `#` begins a comment."""
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


def answers(text: str, *kinds: str) -> list[tuple[str, dict[str, list[str]]]]:
    """(line, what it gives) of each row, whose indented lines begin with one of `kinds`; others
    are `field = value`. A kind that no line of the row has is missing.
    """
    found: list[tuple[str, dict[str, list[str]]]] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith(" "):
            kind, _, rest = line.strip().partition(" ")
            kind, rest = (kind, rest) if kind in kinds else ("field", line.strip())
            found[-1][1].setdefault(kind, []).append(rest)
        elif not line.startswith("#"):
            found.append((line, {}))
    return found


def check_fields(config, wanted: list[str]) -> None:
    """Each `field = value` holds in a configuration."""
    groups = config.to_dict().values()
    values = {name: value for group in groups for name, value in group.items()}
    for field, value in (each.split(" = ") for each in wanted):
        assert str(values[field]) == value, (field, values[field])
