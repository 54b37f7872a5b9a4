"""The one table of frozen configurations, configurations.json, and the function that looks a row
up. Nothing is tuned while a model runs.

A row belongs to an operator, an architecture and a key (of attention, head dimension and kind).
`numbers` are what is chosen: tile sizes, warps, stages and options of the compiler for a kernel of
fixed tiles; for one that follows its input's width, the most elements that a program takes,
elements or bytes a thread, programs in all, from which the operator's `configuration()` makes a
launch. `spills` and `shared` are the bytes that it may spill and what it needs of shared memory,
`serialised` is why its matrix products may wait for each other (kernels/tools/listing.py),
`measured` is by what it won and is absent where no GPU has measured it; a row `refused` holds why
there is none.

A GPU takes the row of its own architecture, or where there is none the newest row that is not newer
than it. kernels/tools/tune.py writes rows; kernels/tools/manifest.py compiles every one of them for
each of ARCHITECTURES.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.kernels.lang import next_power_of_2

ARCHITECTURES = (90, 80, 100)  # what is compiled without a GPU: major * 10 + minor, Hopper first
# bytes a block may have, from an architecture on
SHARED_MEMORY = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 120: 101376}
Index = dict[tuple[str, frozenset], dict[int, "Row"]]
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Row:
    """A configuration: docstring of the module."""

    operator: str
    arch: int
    key: Mapping[str, Any]
    numbers: Mapping[str, int]
    spills: int = 0
    shared: int = 0
    serialised: str = ""
    refused: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)

    def launch(self) -> dict[str, int]:
        """Warps, stages and compiler's options, as a kernel's call takes them."""
        names = ("num_warps", "num_stages", "maxnreg")
        return {name: value for name, value in self.numbers.items() if name in names}

    def unsupported_reason(self, capability: int) -> str | None:
        """Why a GPU cannot run it; None when it can."""
        key = ", ".join(f"{name} {value}" for name, value in self.key.items())
        what, where = f"{self.operator} ({key})", f"compute capability {capability / 10}"
        if self.refused:
            return f"{what} on {where}: {self.refused}"
        shared = shared_memory(capability)
        if self.shared > shared:
            return (
                f"{what} needs {self.shared >> 10} KiB of shared memory for a block of threads, "
                f"a GPU of {where} has {shared >> 10}"
            )
        return None


@dataclass(frozen=True)
class KernelLaunch:
    """How a kernel that follows its input's width is launched, by a row of the table.

    A program takes `rows` rows at once, `block` elements of each. Where sums go over rows,
    `programs` share all of them and have `prefetch` tiles on their way from memory at once.
    """

    row: Row | None
    block: int
    num_warps: int
    rows: int = 1
    programs: int = 0
    prefetch: int = 1

    def launch(self) -> dict[str, int]:
        """The warps, as a kernel's call takes them."""
        return {"num_warps": self.num_warps}


def shared_memory(capability: int) -> int:
    """Bytes that a block of threads may have."""
    return SHARED_MEMORY[max(arch for arch in SHARED_MEMORY if arch <= max(capability, 80))]


def read(text: str) -> list[Row]:
    return [Row(**each) for each in json.loads(text)]


def index(rows: Iterable[Row]) -> Index:
    """By operator and key, then by architecture. Raises ValueError for two rows of one place."""
    table: Index = {}
    for row in rows:
        place = table.setdefault((row.operator, frozenset(row.key.items())), {})
        if row.arch in place:
            raise ValueError(
                f"{FILE.name}: two rows of {row.operator}, {dict(row.key)}, architecture {row.arch}"
            )
        place[row.arch] = row
    return table


TABLE = index(read(FILE.read_text()))


def find(operator: str, capability: int, **key: Any) -> Row:
    """The row of an operator that serves a GPU of this capability (major * 10 + minor)."""
    place = TABLE[operator, frozenset(key.items())]
    return place[max(arch for arch in place if arch <= capability)]


def columns_launch(operator: str, width: int, capability: int, least: int = 128) -> KernelLaunch:
    """Launch parameters of an operator whose programs process a row in blocks of columns, from
    `least` up to the table's maximum.
    """
    row = find(operator, capability)
    block = min(max(next_power_of_2(width), least), row.numbers["block"])
    warps = max(block // (32 * row.numbers["per_thread"]), 1)
    return KernelLaunch(row, block, warps)
