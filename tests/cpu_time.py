"""CPU time of this process and all its descendants, from /proc (Linux; elsewhere of this process
and its ended children).
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def _stat(entry: Path) -> tuple[int, float] | None:
    """(parent, seconds with those of ended children) of a process; None if it has ended."""
    try:
        # the name of the program, in parentheses, may hold spaces
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), sum(map(int, fields[11:15])) / TICKS


def cpu_seconds() -> float:
    """User and system time. A child's time counts while it lives and after it was waited for."""
    if not Path("/proc/self/stat").exists():
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(used.ru_utime + used.ru_stime for used in both)
    children, used = defaultdict(list), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(entry)) is not None:
            children[stat[0]].append(int(entry.name))
            used[int(entry.name)] = stat[1]
    found = [os.getpid()]
    for process in found:
        found.extend(children[process])
    return sum(used.get(process, 0.0) for process in found)
